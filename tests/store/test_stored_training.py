"""Training from stores of teacher losses equals training with the teacher online."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from references import full_losses
from store_world import in_memory, random_store, scored_store, write_store
from tokenizer_stubs import tokens_between
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from world import (
    MAX_LENGTH,
    TEACHER_CONTEXT,
    assert_equal_weights,
    make_models,
    make_segments,
    make_trainer,
)

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import Segments, align_corpus
from vocagnolm.guidance import reduce_teachers
from vocagnolm.method import Method
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader

Tokenizers = dict[str, PreTrainedTokenizerFast]
LOSS_TOLERANCE = 1e-5


# The trainer, on tiny models in float64


@dataclass(frozen=True)
class World:
    """A pair of models, a corpus of which the longer documents are cut, and its segments."""

    texts: list[str]
    student: Any
    teacher: Any
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
    segments: Segments

    def rows(self, reader: StoredReader) -> datasets.Dataset:
        """The segments with the losses of stores."""
        student = student_reader(self.tokenizers[0], MAX_LENGTH)
        return align_corpus(in_memory(self.texts), student, reader).rows

    def trainer(self, out: Path, *stores: Store, options: Any = None, **training: Any) -> Any:
        """Make a trainer from stores, or online; by "first", a document needs only one store."""
        teacher = copy.deepcopy(self.teacher)
        if stores:
            teacher = StoredTeacher(len(stores))
        blocks = Blocks(self.segments.rows, MAX_LENGTH, TEACHER_CONTEXT)
        if stores:
            first = (options or {}).get("method", Method()).teacher_reduction == "first"
            reader = StoredReader(stores, first=first, plain=first)
            blocks = Blocks(self.rows(reader), MAX_LENGTH, reader.limits())
        student = copy.deepcopy(self.student)
        return make_trainer(out, blocks, student, teacher, options=options, **training)


@pytest.fixture(scope="module")
def world(
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    tiny_llama: Callable[..., Any],
) -> World:
    long = ["\n\n".join(training_texts[first : first + 3]) for first in range(40, 60, 3)]
    texts = [*training_texts[:40], *long]
    tokenizers = student_tokenizer, teacher_tokenizer
    pair = make_models(tiny_llama, *tokenizers)
    world = World(texts, *pair, tokenizers, make_segments(texts, *tokenizers))
    assert len(world.segments.rows) > len(texts), "no document is cut"
    return world


@pytest.fixture(scope="module")
def whole(world: World) -> World:
    """The same models, and the documents that both read whole."""
    cut = Counter(world.segments.rows["document"][:])
    texts = [text for number, text in enumerate(world.texts) if cut[number] == 1]
    return replace(world, texts=texts, segments=make_segments(texts, *world.tokenizers))


@pytest.fixture(scope="module")
def store(whole: World, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The online teacher's losses on every document."""
    directory = tmp_path_factory.mktemp("stores") / "float32"
    reader = teacher_reader(whole.tokenizers[1], TEACHER_CONTEXT)
    return scored_store(directory, whole.texts, reader, whole.teacher)


def reduced_by(reduction: Any, weights: Sequence[float] = ()) -> Method:
    """The paper's method, with the losses of several teachers reduced."""
    return Method(teacher_reduction=reduction, teacher_weights=list(weights) or None)


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "training"),
    [
        (Method(), {}),
        (
            Method("vocagnolm", 0.2, "mean", "mean"),
            {"optim": "adamw_torch", "max_grad_norm": 1.0},
        ),
        (
            Method("vocagnolm", 0.3, "sum", "exclude", "batch", "selected"),
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        (Method(selection="accept"), {}),
    ],
)
def test_stored_run_gives_online_parameters_for_whole_documents(
    whole: World, store: Store, tmp_path: Path, method: Method, training: Any
) -> None:
    options = {"method": method}
    online = whole.trainer(tmp_path / "online", options=options, **training)
    stored = whole.trainer(
        tmp_path / "stored", store, options=options, dataloader_num_workers=2, **training
    )
    before = {name: p.detach().clone() for name, p in stored.model.named_parameters()}
    ours, theirs = trained(stored), trained(online)
    assert_equal_weights(ours, theirs)
    assert not any(torch.equal(before[name], ours[name]) for name in ours)
    for ours_log, theirs_log in zip(
        stored.state.log_history, online.state.log_history, strict=True
    ):
        for name in ("teacher_loss_nats", "unmapped_fraction", "selected_loss_nats"):
            assert ours_log.get(name) == pytest.approx(theirs_log.get(name), abs=1e-6)


# Several stores


REDUCTIONS: list[tuple[Any, ...]] = [
    ("min",),
    ("mean",),
    ("max",),
    ("weighted", (1.0, 2.5, 0.1)),
    ("first",),
]


@pytest.mark.slow
def test_stores_of_some_documents_train_as_one_of_all(
    world: World, tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    ours, theirs = world.texts[::2], world.texts[1::2]
    math = random_store(tmp_path / "math", ours, tokenizers_by_family["nfc_digits"], seed=1)
    # Both stores have the first five texts, and the first store counts.
    code = random_store(
        tmp_path / "code", ours[:5] + theirs, tokenizers_by_family["byte_level"], seed=2
    )
    stored = [(text, math.document(text)) for text in ours]
    stored += [(text, code.document(text)) for text in theirs]
    documents = [(text, document) for text, document in stored if document]
    one = trained(world.trainer(tmp_path / "one", write_store(tmp_path / "both", documents)))
    options = {"method": reduced_by("first")}
    assert_equal_weights(trained(world.trainer(tmp_path / "two", math, code, options=options)), one)


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
        spans = tokens_between(world.tokenizers[0], text, start, end).spans + start
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


@pytest.mark.slow
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
        stores.append(random_store(tmp_path / f, texts, tokenizers_by_family[f], seed=n))
    weights = reduction[1] if len(reduction) > 1 else (1.0, 1.0, 1.0)
    combine = {"min": min, "max": max, "first": itemgetter(0)}.get(
        reduction[0], lambda x: sum(w * y for w, y in zip(weights, x, strict=True)) / sum(weights)
    )
    settings = {"top_k": 0.3, "aggregation": aggregation, "loss_divisor": "selected"}
    if accepts := aggregation == "accept":
        aggregation, settings = "share", {"selection": "accept"}
    method = replace(reduced_by(*reduction), **settings)
    trainer = world.trainer(tmp_path, *stores, options={"method": method})
    blocks = trainer.train_dataset
    rows = list(world.rows(StoredReader(stores, first=is_first, plain=is_first)))
    batch = trainer.data_collator([blocks[i] for i in range(3)])
    losses = full_losses(trainer.model, batch["input_ids"], batch["position_ids"], batch["labels"])
    chosen = torch.zeros(losses.shape)
    for row in range(3):
        guides = slow_teacher(world, rows, blocks.segments(row), stores, aggregation, combine)
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


@pytest.mark.parametrize("reduction", ["min", "mean", "max", "first"])
def test_token_is_unmapped_when_one_teacher_has_none(reduction: Any) -> None:
    losses = torch.tensor([[1.0, 2.0, 0.0, 4.0, 0.0, 0.0]])
    mapped = torch.tensor([[True, True, False, True, False, False]])
    reduced, is_mapped = reduce_teachers(losses, mapped, 2, reduction)
    assert is_mapped.tolist() == [[True, False, False]]
    expected = {"min": 1.0, "mean": 2.5, "max": 4.0, "first": 1.0}[reduction]
    assert reduced.tolist() == [[expected, 0.0, 0.0]]
