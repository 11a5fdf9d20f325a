"""Compare few-shot completions by the evaluator's engine with the usual alternatives.

A random Llama completes few-shot prompts in batches of the same size, with the engine of
`evaluate_math.py`; with `generate` in left-padded batches, longest first, with stop strings; and
with lm-evaluation-harness, if it is installed. Time is processor time of one thread. As in GSM8K,
every prompt has the same eight solved questions, about 800 tokens, and 66 tokens of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.generated import tokenizer
from benchmarks.harness import Claim, Measured, one_thread
from benchmarks.models import llama
from vocagnolm.evaluation.engines.generation import Engine, cut
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.models.load import NO_LIMIT

CLAIMS = (
    Claim("time", "evaluation takes a third of the time of left-padded batches", at_most=1 / 3),
    Claim("prefill", "and reads a tenth of their prompts' tokens", at_most=0.1),
)
STOPS = ("</s>", "\n\nQuestion:", "\n\nProblem:")
OURS, PADDED = "the engine", "left-padded batches"


@dataclass(frozen=True)
class Size:
    """Prompts and model; the tokenizer is a directory or a kind."""

    prompts: int = 64
    new_tokens: int = 32
    batch: int = 64
    tokenizer: str = "llama"
    layers: int = 6
    hidden: int = 256


FULL, TINY = Size(), Size(prompts=2, new_tokens=4, tokenizer="tiny-llama", layers=1, hidden=64)


def measure(size: Size) -> Measured:
    """Return time and prompt tokens of the engine, as shares of those of left-padded batches."""
    one_thread()
    reader = tokenizer(size.tokenizer)
    prompts = make_prompts(reader, size)
    torch.manual_seed(0)
    # The weights are large, so that completions differ.
    options = {"num_key_value_heads": max(1, size.hidden // 256), "initializer_range": 0.1}
    heads = size.hidden // 32
    model = llama(len(reader), size.hidden, size.layers, heads, **options).eval()
    ways: dict[str, Callable[..., dict[int, str]]] = {PADDED: left_padded, OURS: shared_prefix}
    if importlib.util.find_spec("lm_eval"):
        ways["lm-evaluation-harness"] = harness
    read: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, given, named: read.append(named["input_ids"].numel()), with_kwargs=True
    )
    turns: dict[str, tuple[dict[int, str], float, int]] = {}
    for name, way in ways.items():
        way(model, reader, prompts[:1], replace(size, new_tokens=1))  # warm up
        read.clear()
        start_s = time.process_time()
        texts = way(model, reader, prompts, size)
        # Each step after the first reads a written token, not a token of the prompt.
        written = size.prompts * (size.new_tokens - 1)
        turns[name] = (texts, time.process_time() - start_s, sum(read) - written)
    details = []
    for name, (texts, seconds, tokens) in turns.items():
        same = sum(texts[index] == text for index, text in turns[OURS][0].items())
        details.append(
            f"{name:22}{seconds:7.1f} s, {tokens:7,} tokens of prompts read, "
            f"{same} of {len(prompts)} completions the same"
        )
    (texts, seconds, tokens), padded = turns[OURS], turns[PADDED]
    values = {"time": seconds / padded[1], "prefill": tokens / padded[2]}
    differ = sum(padded[0][index] != text for index, text in texts.items())
    return Measured(values, details, f"({differ} completions differ)" if differ else "")


def make_prompts(reader: Any, size: Size) -> list[str]:
    """Make questions that follow eight solved ones."""
    rng = random.Random(0)

    def grow(tokens: int) -> str:
        text = ""
        while len(reader(text)["input_ids"]) < tokens:
            text += f"Anna has {rng.randint(2, 99)} apples and buys {rng.randint(2, 99)} more. "
        return text

    shots = "\n\n\n".join(f"Question: {grow(73)}\nAnswer: The answer is 7." for _ in range(8))
    lengths = (rng.randint(20, 100) for _ in range(size.prompts))
    return [f"{shots}\n\n\nQuestion: {grow(length)}\nAnswer:" for length in lengths]


@torch.inference_mode()
def left_padded(model: Any, reader: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use `generate` with its stop strings on whole, left-padded prompts, longest first."""
    eos_ids = Engine(reader, NO_LIMIT, model.generation_config, None).eos_ids
    ids = reader(prompts)["input_ids"]
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    texts: dict[int, str] = {}
    for first in range(0, len(order), size.batch):
        batch = order[first : first + size.batch]
        width = max(len(ids[index]) for index in batch)
        padding = [width - len(ids[index]) for index in batch]
        rows = model.generate(
            torch.tensor([[0] * pad + ids[i] for pad, i in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=size.new_tokens,
            do_sample=False,
            eos_token_id=sorted(eos_ids),
            pad_token_id=0,
            stop_strings=list(STOPS),
            tokenizer=reader,
        )[:, width:].tolist()
        for index, row in zip(batch, rows, strict=True):
            # Cut at the end token and at the stop strings.
            ends = (n for n, token in enumerate(row, 1) if token in eos_ids)
            written = row[: next(ends, len(row))]
            texts[index] = cut(reader.decode(written, skip_special_tokens=True), STOPS)
    return texts


def shared_prefix(model: Any, reader: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use the engine of `evaluate_math.py`."""
    engine = HFEngine(model, reader, size.batch)
    groups = engine.generate(prompts, STOPS, size.new_tokens)
    return {done.index: done.text for group in groups for done in group}


def harness(model: Any, reader: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use lm-evaluation-harness's class for transformers models."""
    # Optional dependencies without types.
    peers: Any = importlib.import_module("lm_eval.models.huggingface")
    instance: Any = importlib.import_module("lm_eval.api.instance")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    settings = {"until": list(STOPS), "max_gen_toks": size.new_tokens, "do_sample": False}
    peer = peers.HFLM(pretrained=model, tokenizer=reader, batch_size=size.batch)
    asked = [
        instance.Instance("generate_until", {}, (prompt, settings), index)
        for index, prompt in enumerate(prompts)
    ]
    written = peer.generate_until(asked, disable_tqdm=True)
    return {index: text.strip() for index, text in enumerate(written)}
