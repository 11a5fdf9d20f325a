"""Measure evaluation: how fast a student of the paper's size completes prompts."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import generated
from benchmarks.gpu_first.report import Report, timed
from benchmarks.harness import Skipped
from benchmarks.models import make_config, make_model
from vocagnolm.evaluation.engines.generation import Engine
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine
from vocagnolm.models.load import ModelSource

WRITTEN = "new tokens per s"
_CONTEXT = 2048


def _student(report: Report, device: torch.device) -> tuple[Any, Any]:
    tokenizer = generated.tokenizer("tiny-llama" if report.is_tiny else "llama")
    scale = "tiny" if report.is_tiny else "full"
    config = make_config("student", scale, vocab_size=len(tokenizer))
    model: Any = make_model(config, device, torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model, tokenizer


def _complete(report: Report, engine: Engine, rows: int, note: str = "") -> None:
    """Complete prompts that begin with the same few-shot examples."""
    count, shared, new = (8, 200, 16) if report.is_tiny else (2 * rows, 2500, 128)
    rng = random.Random(0)
    (prefix,) = generated.make_texts(1, 10 * shared)
    words = generated.make_texts(count, shared // 4, seed="questions")
    texts = [f"{prefix[:shared]} {text[: rng.randint(8, shared // 4)]}" for text in words]

    def write(tokens: int) -> int:
        groups = engine.generate(texts, ["Question:"], tokens)
        return sum(one.n_new_tokens for group in groups for one in group)

    write(8)  # warms up
    written: list[int] = []
    seconds, gib = timed(lambda: written.append(write(new)))
    what = f"{WRITTEN}{note}"
    report.say(what, written[0] / seconds, s=seconds, gib=gib, prompts=count, tokens=new, rows=rows)


def complete_with_transformers(report: Report) -> None:
    """Measure the engine of transformers, with cuDNN's attention and without.

    cuDNN may plan attention again for each number of keys, which grows with every token.
    """
    model, tokenizer = _student(report, report.device)
    rows = 4 if report.is_tiny else 64
    engine = HFEngine(model, tokenizer, rows)
    for note, is_on in (("", True), (", without cuDNN's attention", False)):
        torch.backends.cuda.enable_cudnn_sdp(is_on)  # type: ignore[no-untyped-call]
        _complete(report, engine, rows, note)


def complete_with_vllm(report: Report) -> None:
    """Measure the engine of vLLM, which chooses its own batches.

    Raises:
        Skipped: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed")
    # Nothing is on the GPU yet, so vLLM may fork this process.
    model, tokenizer = _student(report, torch.device("cpu"))
    home = str(report.temporary)
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    del model
    source = ModelSource(home, "model")
    engine = VLLMEngine(source, AutoTokenizer.from_pretrained(home), "bfloat16", _CONTEXT, None)
    _complete(report, engine, 64)
