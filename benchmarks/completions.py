"""Few-shot completions by the evaluator's engine, and by what one would use instead.

A random Llama completes few-shot prompts with 64 new tokens each, in batches of the same size: by
the engine of `evaluate_math.py`; by `generate` in left-padded batches, longest first, with stop
strings; by the continuous batching of transformers, which shares whole blocks of 256 tokens; and by
lm-evaluation-harness, where it is installed. Processor time of one thread.

The prompts are GSM8K's behind the package's examples where a directory of benchmarks is given
(`--set data=DIR`), and of the same lengths otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks.harness import one_thread
from vocagnolm.demo.models import STUDENT_TOKENIZER
from vocagnolm.evaluation.engines.generation import Decoding, end_of_text_ids
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.io import ASSETS
from vocagnolm.models.source import NO_LIMIT

STOPS = ("</s>", "\n\nQuestion:", "\n\nProblem:")
OURS, THEIRS = "the engine", "left-padded batches"


@dataclass(frozen=True)
class Size:
    """Prompts and the model; the demo's tokenizer, grown to a vocabulary, where none is named."""

    prompts: int = 64
    new_tokens: int = 64
    batch: int = 64
    vocabulary: int = 32_000
    layers: int = 6
    hidden: int = 256
    tokenizer: str = ""
    data: str = ""


FULL = Size()
SMALL = Size(new_tokens=32)
TINY = Size(prompts=2, new_tokens=4, vocabulary=1024, layers=1, hidden=64)


@dataclass
class Turn:
    """Completions of one way: text by prompt, seconds, and tokens read before the new ones."""

    texts: dict[int, str]
    seconds: float
    tokens: int


@lru_cache(maxsize=1)
def turns(size: Size) -> dict[str, Turn]:
    """Complete the same prompts in every way there is here."""
    one_thread()
    tokenizer: Any = grown_tokenizer(size.vocabulary)
    if size.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(size.tokenizer)
    model, prompts = random_llama(len(tokenizer), size), make_prompts(tokenizer, size)
    ways: dict[str, Callable[..., dict[int, str]]] = {
        **{THEIRS: left_padded, OURS: shared_prefix, "continuous batching": continuous}
    }
    if importlib.util.find_spec("lm_eval"):
        ways["lm-evaluation-harness"] = harness
    read: list[int] = []
    body: Any = model.model
    body.register_forward_pre_hook(
        lambda module, given, named: read.append(named["input_ids"].numel()), with_kwargs=True
    )
    found = {}
    for name, way in ways.items():
        way(model, tokenizer, prompts[:1], replace(size, new_tokens=1))  # warm up
        read.clear()
        start_s = time.process_time()
        texts = way(model, tokenizer, prompts, size)
        # A step reads the token that the one before has written.
        written = size.prompts * (size.new_tokens - 1)
        found[name] = Turn(texts, time.process_time() - start_s, sum(read) - written)
    return found


def details(size: Size) -> tuple[str, ...]:
    """Lines of what each way took, and how many of its completions are the engine's."""
    ours = turns(size)[OURS].texts
    return tuple(
        f"{name:22} {turn.seconds:7.1f} s, {turn.tokens:7,} tokens of prompts read, "
        f"{sum(turn.texts[index] == ours[index] for index in ours)} of {len(ours)} the same"
        for name, turn in turns(size).items()
    )


def broken(size: Size) -> str:
    """Say that the engine has written something else than left-padded batches."""
    ours, theirs = (turns(size)[name].texts for name in (OURS, THEIRS))
    differ = sum(ours[index] != theirs[index] for index in theirs)
    return f"({differ} completions differ)" if differ else ""


def grown_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the demo student's tokenizer, grown by words that nothing is cut into."""
    path = ASSETS / STUDENT_TOKENIZER
    state = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    words = state["model"]["vocab"]
    words |= {f"\u2581word{index}": index for index in range(len(words), vocabulary)}
    grown = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=grown, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def random_llama(vocab_size: int, size: Size) -> Any:
    """Make a model whose completions differ: its weights are far from zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=11 * size.hidden // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=max(1, size.hidden // 256),
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def make_prompts(tokenizer: Any, size: Size) -> list[str]:
    """Questions behind the same eight solved ones: about 800 shared and 66 own tokens."""
    if size.data:
        (task,) = load_tasks(["gsm8k"], Path(size.data), None, size.prompts)
        return list(task.prompts.values())
    rng = random.Random(0)

    def sentence() -> str:
        return f"Anna has {rng.randint(2, 99)} apples and buys {rng.randint(2, 99)} more. "

    def grow(tokens: int) -> str:
        text = sentence()
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += sentence()
        return text

    shots = "\n\n\n".join(f"Question: {grow(73)}\nAnswer: The answer is 7." for _ in range(8))
    lengths = (rng.randint(20, 100) for _ in range(size.prompts))
    return [f"{shots}\n\n\nQuestion: {grow(length)}\nAnswer:" for length in lengths]


def decoding_of(model: Any, tokenizer: Any, new_tokens: int) -> Decoding:
    """Return the rules by which every way's tokens are cut."""
    eos_ids = end_of_text_ids(model.generation_config, tokenizer)
    return Decoding(tokenizer, STOPS, new_tokens, NO_LIMIT, eos_ids)


@torch.inference_mode()
def left_padded(model: Any, tokenizer: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use `generate`: longest first, padded in front, whole prompts, its stop strings."""
    decoding = decoding_of(model, tokenizer, size.new_tokens)
    ids = decoding.encode(prompts)
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    texts: dict[int, str] = {}
    for first in range(0, len(order), size.batch):
        batch = order[first : first + size.batch]
        width = max(len(ids[index]) for index in batch)
        padding = [width - len(ids[index]) for index in batch]
        written = model.generate(
            torch.tensor([[0] * pad + ids[i] for pad, i in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=size.new_tokens,
            do_sample=False,
            eos_token_id=sorted(decoding.eos_ids),
            pad_token_id=0,
            stop_strings=list(STOPS),
            tokenizer=tokenizer,
        )[:, width:].tolist()
        texts |= {i: text_of(decoding, row) for i, row in zip(batch, written, strict=True)}
    return texts


def text_of(decoding: Decoding, ids: list[int]) -> str:
    """Cut generated tokens at the end of the text and at the stop strings."""
    ends = (n for n, token in enumerate(ids, 1) if token in decoding.eos_ids)
    return decoding.completion(0, 1, ids[: next(ends, len(ids))]).text


def shared_prefix(model: Any, tokenizer: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use the engine of `evaluate_math.py`."""
    engine = HFEngine(model, tokenizer, size.batch)
    groups = engine.generate(prompts, STOPS, size.new_tokens)
    return {done.index: done.text for group in groups for done in group}


def continuous(model: Any, tokenizer: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use `generate_batch`, whose cache is given room for all; it knows no stop strings."""
    decoding = decoding_of(model, tokenizer, size.new_tokens)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=size.new_tokens,
        do_sample=False,
        eos_token_id=sorted(decoding.eos_ids),
        pad_token_id=0,
    )
    found = model.generate_batch(
        decoding.encode(prompts),
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=8 * len(prompts),
            max_batch_tokens=1024,
            max_requests_per_batch=size.batch,
            use_cuda_graph=False,
        ),
    )
    rows = (row.generated_tokens for row in found.values())
    return {index: text_of(decoding, row) for index, row in enumerate(rows)}


def harness(model: Any, tokenizer: Any, prompts: list[str], size: Size) -> dict[int, str]:
    """Use lm-evaluation-harness's model of transformers."""
    # Optional, and without types.
    peers: Any = importlib.import_module("lm_eval.models.huggingface")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    settings = {"until": list(STOPS), "max_gen_toks": size.new_tokens, "do_sample": False}
    peer = peers.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size.batch)
    instance: Any = importlib.import_module("lm_eval.api.instance")
    asked = [
        instance.Instance("generate_until", {}, (prompt, settings), index)
        for index, prompt in enumerate(prompts)
    ]
    written = peer.generate_until(asked, disable_tqdm=True)
    return {index: text.strip() for index, text in enumerate(written)}
