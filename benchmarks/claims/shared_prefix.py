"""Compare the evaluator's engine, which reads the few-shot prefix once, with plain batches.

A random Llama (6 layers, 256 wide, 32,000 words) completes prompts of about 800 shared and 20 to
160 own tokens with 64 new ones, which is the shape of few-shot evaluation: by the engine of
`evaluate_math.py` at batch size 16, and by `generate` in left-padded batches with stop strings.
Processor time of one thread. Both must write the same.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import Claim, Measured, one_thread
from vocagnolm.demo.models import ASSETS, STUDENT_TOKENIZER
from vocagnolm.evaluation.engines.generation import Completion, Decoding, end_of_text_ids
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.models.source import NO_LIMIT

CLAIM = Claim(
    "reading the shared prefix once takes at most half the time of plain batches",
    at_most=0.5,
    unit="x",
)
BATCH_SIZE = 16
STOPS = ("</s>", "\n\nQuestion:", "\n\nProblem:")


@dataclass(frozen=True)
class Size:
    """Prompts; the demo's tokenizer is used, grown to a vocabulary, where none is named."""

    prompts: int = 64
    new_tokens: int = 64
    vocabulary: int = 32_000
    tokenizer: str = ""


FULL, TINY = Size(), Size(prompts=2, new_tokens=4, vocabulary=1024)


def measure(size: Size) -> Measured:
    """Return the time of the engine, as a share of that of plain batches."""
    one_thread()
    tokenizer: Any = grown_tokenizer(size.vocabulary)
    if size.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(size.tokenizer)
    model, prompts = random_llama(len(tokenizer)), make_prompts(tokenizer, size.prompts)
    found, seconds, details = [], [], []
    for way in (left_padded, shared_prefix):
        way(model, tokenizer, prompts[:1], size.new_tokens)  # warm up
        start_s = time.process_time()
        completions = way(model, tokenizer, prompts, size.new_tokens)
        seconds.append(time.process_time() - start_s)
        found.append({c.index: (c.text, c.n_prompt_tokens) for c in completions})
        details.append(f"{way.__name__:14} {seconds[-1]:7.1f} s")
    differ = sum(found[0][index] != found[1][index] for index in found[0])
    details.append(f"{size.prompts - differ} of {size.prompts} completions are the same")
    broken = f"({differ} completions differ)" if differ else ""
    return Measured(seconds[1] / seconds[0], tuple(details), broken)


def grown_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The demo student's tokenizer, with words that nothing is cut into up to a vocabulary."""
    path = ASSETS / STUDENT_TOKENIZER
    state = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    words = state["model"]["vocab"]
    words |= {f"\u2581word{index}": index for index in range(len(words), vocabulary)}
    grown = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=grown, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def random_llama(vocab_size: int) -> Any:
    """A model whose completions differ: its weights are far from zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def make_prompts(tokenizer: Any, count: int) -> list[str]:
    """Word problems behind the same solved ones."""
    rng = random.Random(0)

    def sentence() -> str:
        return f"Anna has {rng.randint(2, 99)} apples and buys {rng.randint(2, 99)} more. "

    def grow(tokens: int) -> str:
        text = sentence()
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += sentence()
        return text

    shots = "\n\n\n".join(f"Question: {grow(85)}\nAnswer: The answer is 7." for _ in range(8))
    return [f"{shots}\n\n\nQuestion: {grow(rng.randint(20, 160))}\nAnswer:" for _ in range(count)]


@torch.inference_mode()
def left_padded(
    model: Any, tokenizer: Any, prompts: list[str], new_tokens: int
) -> list[Completion]:
    """Use `generate`: longest first, padded in front, whole prompts, its stop strings."""
    eos_ids = end_of_text_ids(model.generation_config, tokenizer)
    decoding = Decoding(tokenizer, STOPS, new_tokens, NO_LIMIT, eos_ids)
    ids = decoding.encode(prompts)
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    completions = []
    for first in range(0, len(order), BATCH_SIZE):
        batch = order[first : first + BATCH_SIZE]
        width = max(len(ids[index]) for index in batch)
        padding = [width - len(ids[index]) for index in batch]
        written = model.generate(
            torch.tensor([[0] * pad + ids[i] for pad, i in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=sorted(eos_ids),
            pad_token_id=0,
            stop_strings=list(STOPS),
            tokenizer=tokenizer,
        )[:, width:].tolist()
        for index, row in zip(batch, written, strict=True):
            ends = (n for n, token in enumerate(row, 1) if token in eos_ids)
            completions.append(
                decoding.completion(index, len(ids[index]), row[: next(ends, len(row))])
            )
    return completions


def shared_prefix(
    model: Any, tokenizer: Any, prompts: list[str], new_tokens: int
) -> list[Completion]:
    """Use the engine of `evaluate_math.py`."""
    engine = HFEngine(model, tokenizer, BATCH_SIZE)
    return [c for group in engine.generate(prompts, STOPS, new_tokens) for c in group]
