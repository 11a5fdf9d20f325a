"""What reading the shared few-shot prefix once saves, beside plain batches.

    python benchmarks/shared_prefix.py --tokenizer TinyLlama/TinyLlama_v1.1

The claim: at batch size 16 the engine of `evaluate_math.py` takes at most half the time of
`generate` in left-padded batches with stop strings, and writes the same. A random Llama (6 layers,
256 wide) completes prompts of about 800 shared and 20 to 160 own tokens with 64 new ones, which is
the shape of few-shot evaluation. CPU seconds of one process with one thread.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vocagnolm.evaluation.engines.generation import Completion, Decoding, end_of_text_ids
from vocagnolm.evaluation.engines.hf_engine import HFEngine

BATCH_SIZE = 16
NEW_TOKENS = 64
STOPS = ("</s>", "\n\nQuestion:", "\n\nProblem:")


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
def left_padded(model: Any, tokenizer: Any, prompts: list[str]) -> list[Completion]:
    """What `generate` offers: longest first, padded in front, whole prompts, its stop strings."""
    eos_ids = end_of_text_ids(model.generation_config, tokenizer)
    decoding = Decoding(tokenizer, STOPS, NEW_TOKENS, None, eos_ids)
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
            max_new_tokens=NEW_TOKENS,
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


def shared_prefix(model: Any, tokenizer: Any, prompts: list[str]) -> list[Completion]:
    """The engine of `evaluate_math.py`."""
    engine = HFEngine(model, tokenizer, BATCH_SIZE)
    return [c for group in engine.generate(prompts, STOPS, NEW_TOKENS) for c in group]


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizer", required=True, help="directory or hub name")
    parser.add_argument("--prompts", type=int, default=64)
    args = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    model, prompts = random_llama(len(tokenizer)), make_prompts(tokenizer, args.prompts)
    found, seconds = [], []
    for method in (left_padded, shared_prefix):
        method(model, tokenizer, prompts[:1])  # warm up
        start = time.process_time()
        completions = method(model, tokenizer, prompts)
        seconds.append(time.process_time() - start)
        found.append({c.index: (c.text, c.n_prompt_tokens) for c in completions})
        sys.stdout.write(f"{method.__name__:14} {seconds[-1]:7.1f} s\n")
    equal = sum(found[0][index] == found[1][index] for index in found[0])
    sys.stdout.write(
        f"shared_prefix is {seconds[0] / seconds[1]:.2f} times faster; {equal} of {len(prompts)} "
        "completions are the same\n"
    )


if __name__ == "__main__":
    main()
