"""The loss of a trainer with several stores, some without a document, against slow loops."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from references import full_losses
from store_world import in_memory, random_store
from tokenizer_stubs import tokens_between
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from world import MAX_LENGTH, make_models, make_trainer

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import align_corpus
from vocagnolm.method import Method
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader

Tokenizers = dict[str, PreTrainedTokenizerFast]
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class World:
    """A student, a corpus of which the longer documents are cut, and the student's reader."""

    texts: list[str]
    student: Any
    tokenizer: PreTrainedTokenizerBase

    def rows(self, reader: StoredReader) -> datasets.Dataset:
        """The segments with the losses of stores."""
        student = student_reader(self.tokenizer, MAX_LENGTH)
        return align_corpus(in_memory(self.texts), student, reader).rows


@pytest.fixture(scope="module")
def world(training_texts: list[str], tokenizers: Any, tiny_llama: Callable[..., Any]) -> World:
    long = ["\n\n".join(training_texts[first : first + 3]) for first in range(40, 60, 3)]
    student, _ = make_models(tiny_llama, *tokenizers)
    return World([*training_texts[:40], *long], student, tokenizers[0])


REDUCTIONS: list[tuple[Any, ...]] = [
    ("min",),
    ("mean",),
    ("max",),
    ("weighted", (1.0, 2.5, 0.1)),
    ("first",),
]


def slow_teacher(
    world: World,
    rows: list[dict[str, Any]],
    segments: Sequence[int],
    stores: list[Store],
    aggregation: str,
    combine: Any,
) -> dict[int, float]:
    """The teachers' loss of the text tokens of a block, with loops over stores and tokens."""
    aggregate = {"max": max, "mean": lambda x: sum(x) / len(x)}.get(aggregation, sum)

    def share_of(first: int, last: int, a: int, b: int) -> float:
        if aggregation != "share":
            return 1.0
        shared = range(max(first, a), min(last, b))
        return sum(1 / sharing[c] for c in shared) / (last - first)

    guides, at = {}, 0
    for segment in segments:
        row = rows[int(segment)]
        text, start, end = world.texts[row["document"]], row["start"], row["end"]
        spans = tokens_between(world.tokenizer, text, start, end).spans + start
        sharing = Counter(c for span in spans.tolist() for c in range(*span))
        for position, (a, b) in enumerate(spans.tolist(), at + 1):
            losses = []
            for store in stores:
                document = store.document(text)
                tokens = zip(document.spans, document.losses, strict=True) if document else ()
                covering = [
                    float(loss) * share_of(max(first, start), min(last, end), a, b)
                    for (first, last), loss in tokens
                    if max(first, start) < b and min(last, end) > a
                ]
                losses += [aggregate(covering)] if covering else []
            if losses:
                guides[position] = combine(losses)
        at += len(row["student_ids"])
    return guides


@pytest.mark.parametrize(
    ("aggregation", "reduction"),
    [
        *(("max", reduction) for reduction in REDUCTIONS),
        *((how, ("first",)) for how in ("mean", "sum", "share")),
        *(("accept", reduction) for reduction in (("mean",), ("first",))),
    ],
    ids=str,
)
def test_loss_of_several_stores_equals_slow_reference(
    world: World,
    tokenizers_by_family: Tokenizers,
    tmp_path: Path,
    aggregation: str,
    reduction: tuple[Any, ...],
) -> None:
    is_first = reduction[0] == "first"
    stores = []
    for n, f in enumerate(("nfc_digits", "byte_level", "prepend")):
        # By "first", each store has more documents than the one before, and none has all.
        texts = [t for i, t in enumerate(world.texts) if i % 4 <= n or not is_first]
        family = tokenizers_by_family[f]
        stores.append(random_store(tmp_path / f, texts, family, seed=n, teacher=f))
    weights = reduction[1] if len(reduction) > 1 else (1.0, 1.0, 1.0)
    combine = {"min": min, "max": max, "first": itemgetter(0)}.get(
        reduction[0], lambda x: sum(w * y for w, y in zip(weights, x, strict=True)) / sum(weights)
    )
    settings = {"top_k": 0.3, "aggregation": aggregation, "loss_divisor": "selected"}
    if accepts := aggregation == "accept":
        aggregation, settings = "share", {"selection": "accept"}
    method = Method(
        teacher_reduction=reduction[0],
        teacher_weights=list(weights) if len(reduction) > 1 else None,
        **settings,
    )
    reader = StoredReader(stores, first=is_first, plain=is_first)
    rows = world.rows(reader)
    assert len(rows) > len(world.texts), "no document is cut"
    blocks = Blocks(rows, MAX_LENGTH, reader.limits())
    student, options = copy.deepcopy(world.student), {"method": method}
    trainer = make_trainer(tmp_path, blocks, student, StoredTeacher(len(stores)), options=options)
    batch = trainer.data_collator([blocks[i] for i in range(3)])
    losses = full_losses(trainer.model, batch["input_ids"], batch["position_ids"], batch["labels"])
    chosen = torch.zeros(losses.shape)
    for row in range(3):
        guides = slow_teacher(world, list(rows), blocks.segments(row), stores, aggregation, combine)
        labels = (batch["labels"][row] != IGNORED_LABEL).nonzero().flatten().tolist()
        unmapped = [t for t in labels if t not in guides]  # end tokens
        excess = {t: float(losses[row, t].detach()) - guides[t] for t in labels if t in guides}
        top = sorted(excess, key=lambda t: -excess[t])[: -(-3 * len(excess) // 10)]
        chosen[row, [*unmapped, *top]] = 1.0
        for t in excess if accepts else ():
            chosen[row, t] = min(1.0, math.exp(excess[t]))
        assert batch["mapped_tokens"][row] == len(excess)
        assert batch["unmapped_tokens"][row] == len(unmapped)
    if not accepts:
        assert trainer.token_objective.divisor_tokens(batch) == chosen.sum()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100))
    expected = (chosen * losses).sum() / 100
    assert abs((loss - expected).item()) < LOSS_TOLERANCE
    parameters = list(trainer.model.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters) for x in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= LOSS_TOLERANCE * float(b.norm())
    assert not batch["teacher_losses"].requires_grad
