"""Scoring a corpus with windows sorted by length, beside corpus order and packed rows.

    python -m benchmarks.experiments.scoring --tokenizer DIR --dataset data.jsonl

`HFScorer` is given all windows at once and sorts them; or batch after batch as the corpus has them,
each of as many windows as fit `--batch_tokens` when padded to their longest. The model is the same,
a small Llama with random weights whose ids are folded into a small vocabulary, so that its head
takes no more of the time than a large model's. Packed rows hold several windows, kept apart by
their position ids, as in training. The ways take turns, in an order that is drawn
anew for each turn; processor time of one thread, medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Way, one_thread, take_turns
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.packing import pack
from vocagnolm.spans import encode_batch
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import HFScorer, Window, windows
from vocagnolm.texts.tokenizers import load_tokenizer

SORTED, CORPUS_ORDER, PACKED = "sorted by length", "corpus order", "packed rows"
TOLERANCE = 1e-5  # nats
START = 0


def read_windows(args: argparse.Namespace) -> list[Window]:
    """The windows of the first documents, their ids folded into the model's vocabulary."""
    tokenizer = load_tokenizer(str(args.tokenizer), "teacher")
    with args.dataset.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, args.documents)]
    found: list[Window] = []
    for document, encoding in enumerate(encode_batch(tokenizer, texts)):
        ids = [token % args.vocabulary for token in encoding.ids]
        found += windows(document, ids, START, args.context, args.context // 4)
    return found


def corpus_batches(windows: Sequence[Window], batch_tokens: int) -> list[list[Window]]:
    """Batches of neighbours, each as many as fit `batch_tokens` when padded to their longest."""
    batches: list[list[Window]] = []
    longest = 0
    for window in windows:
        longest = max(longest, len(window.ids))
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = len(window.ids)
        batches[-1].append(window)
    return batches


@torch.no_grad()
def packed_losses(model: Any, windows: Sequence[Window], args: argparse.Namespace) -> list[Any]:
    """Losses of windows that share rows of `--context` tokens, as in training."""
    lengths = [len(window.ids) for window in windows]
    rows = pack(lengths, lengths, args.context, args.context)
    step = max(1, args.batch_tokens // args.context)
    losses: list[Any] = [None] * len(windows)
    for first in range(0, len(rows), step):
        batch = rows[first : first + step]
        ids_BT = torch.zeros((len(batch), args.context), dtype=torch.long)
        labels_BT, positions_BT = torch.full_like(ids_BT, IGNORED_LABEL), torch.zeros_like(ids_BT)
        places = []
        for row, numbers in enumerate(batch):
            at = 0
            for number in numbers:
                window, end = windows[number], at + lengths[number]
                ids_BT[row, at:end] = torch.tensor(window.ids)
                labels_BT[row, end - window.scored : end] = ids_BT[row, end - window.scored : end]
                positions_BT[row, at:end] = torch.arange(end - at)
                places.append((number, row, end - window.scored, end))
                at = end
            positions_BT[row, at:] = torch.arange(args.context - at)
        loss_BT = model(
            input_ids=ids_BT, position_ids=positions_BT, labels=labels_BT, token_losses=True
        )
        for number, row, start, end in places:
            losses[number] = loss_BT[row, start:end].numpy()
    return losses


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A small model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 32,
        max_position_embeddings=args.context,
    )
    return LlamaForCausalLM(config)


def measure_padding(
    model: LlamaForCausalLM, tokens: int, score: Callable[[], list[LossArray]]
) -> tuple[float, list[LossArray]]:
    """Score once: the share of the positions computed that are padding, and the losses."""
    positions = 0

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal positions
        positions += inputs[0].numel()

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    losses = score()
    hook.remove()
    return 1 - tokens / positions, losses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory")
    parser.add_argument("--dataset", type=Path, required=True, help=".jsonl with a field text")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--context", type=int, default=1024, help="the most tokens of a window")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="padding counted")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    one_thread()

    found = read_windows(args)
    tokens = sum(len(window.ids) for window in found)
    model = make_model(args)
    scorer = HFScorer(model, args.batch_tokens)
    batches = corpus_batches(found, args.batch_tokens)
    ways: dict[str, Callable[[], list[LossArray]]] = {
        SORTED: lambda: scorer.losses(found),
        CORPUS_ORDER: lambda: [loss for batch in batches for loss in scorer.losses(batch)],
        PACKED: lambda: packed_losses(model, found, args),
    }
    measured = {name: measure_padding(model, tokens, way) for name, way in ways.items()}  # warms up
    turns = {name: Way(lambda _, way=way: way()) for name, way in ways.items()}
    take_turns(turns, args.repetitions, warm_up=0)
    medians = {name: way.median_s for name, way in turns.items()}
    flat = [np.concatenate(losses) for _, losses in measured.values()]
    difference = max(float(np.abs(flat[0] - other).max()) for other in flat[1:])
    out = sys.stdout
    out.write(f"{args.documents} documents, {len(found)} windows, {tokens:,} tokens\n")
    for name, (padding, _) in measured.items():
        out.write(
            f"{name:17}{turns[name].spread}, "
            f"{tokens / medians[name]:,.0f} tokens/s, {padding:.2%} padding\n"
        )
    for name in (CORPUS_ORDER, PACKED):
        out.write(f"{name} / {SORTED}: {medians[name] / medians[SORTED]:.3f}\n")
    verdict = "equal" if difference <= TOLERANCE else "NOT EQUAL"
    out.write(f"largest difference of a loss: {difference:.1e} nats ({verdict} to {TOLERANCE})\n")


if __name__ == "__main__":
    main()
