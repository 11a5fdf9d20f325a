"""Training on conversations: packed and alone, with a teacher and from a store, and shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods_world import World, make_world
from references import both_losses, largest_difference, slow_weights
from world import Tokenizers

from vocagnolm.alignment import align_segment
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.data import align_corpus
from vocagnolm.method import Method
from vocagnolm.objective import Objective, OnlineTeacher
from vocagnolm.report.inspect import view_documents
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.store.read import StoredReader
from vocagnolm.token_loss import add_token_losses

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def world(
    training_texts: list[str], tokenizers: Tokenizers, tiny_llama: Callable[..., Any]
) -> World:
    return make_world(tiny_llama, tokenizers, training_texts[:40])


def test_packed_conversations_are_guided_as_alone(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path, "turns")
    packed, labels, blocks = 0, 0, trainer.train_dataset
    for number in range(len(blocks)):
        batch = trainer.data_collator([blocks[number]])
        found = trainer.token_guidance(batch)
        ours, theirs = both_losses(batch, trainer.model, *trainer.token_objective.teacher.models)
        assert torch.allclose(found.student_loss_BS.double(), ours, atol=TOLERANCE)
        assert torch.allclose(found.teacher_loss_BT.double(), theirs, atol=TOLERANCE)
        expected = slow_weights(batch, ours.detach(), theirs, trainer.token_objective.method)
        assert torch.equal(found.weight_BS, expected)
        is_label = batch["labels"] != IGNORED_LABEL
        assert not found.weight_BS[~is_label].any()
        assert sum(batch["mapped_tokens"]) == int((found.mapped_BS & found.valid_BS).sum())
        labels += int(is_label.sum())
        packed += len(blocks.segments(number)) > 1
    assert packed > 3
    # Only answers have labels, so there are fewer than tokens.
    assert 0 < labels < 0.8 * blocks.student_tokens


@pytest.fixture(scope="module")
def store(world: World, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return world.store(tmp_path_factory.mktemp("store"))


def test_stored_conversations_train_as_the_teacher_does(
    world: World, store: Store, tmp_path: Path
) -> None:
    corpus, student, teacher = world.conversations()
    rows = align_corpus(corpus, student, StoredReader([store])).rows
    beside = align_corpus(corpus, student, teacher).rows
    names = ("student_ids", "student_labelled", "teacher_labelled", "teacher_codes")
    assert all(rows[name][:] == beside[name][:] for name in names)
    trainers = [world.trainer(tmp_path / name, name) for name in ("turns", "stored turns")]
    for trainer in trainers:
        trainer.train()
    logs = [[e["teacher_loss_nats"] for e in t.state.log_history if "loss" in e] for t in trainers]
    assert logs[0] == pytest.approx(logs[1], abs=TOLERANCE)
    both = [dict(trainer.model.named_parameters()) for trainer in trainers]
    assert largest_difference(*both) < TOLERANCE


class Nothing(Store):
    """A store without documents, or without their losses."""

    unscored = False

    def document(self, text: str) -> StoredDocument | None:
        """Find no losses."""
        nothing = StoredDocument(len(text), np.empty((0, 2), np.int64), np.empty(0, np.float32))
        return nothing if self.unscored else None


@pytest.mark.parametrize("unscored", [False, True])
def test_store_without_a_conversation_leaves_it_to_others(
    world: World, store: Store, unscored: bool
) -> None:
    corpus, student, _ = world.conversations()
    nothing = Nothing(store.directory)
    nothing.unscored = unscored
    nothing.manifest["teacher"] = f"another {unscored}"
    alone, both, plain = (
        align_corpus(corpus, student, reader).rows
        for reader in (
            StoredReader([store]),
            StoredReader([nothing, store], first=True),
            StoredReader([nothing, store], plain=True),
        )
    )
    assert not len(align_corpus(corpus, student, StoredReader([nothing, store])).rows)
    assert str(list(both)) == str(list(alone))
    for name in ("student_ids", "student_labelled", "document"):
        assert plain[name][:] == alone[name][:]
    for row in plain:
        assert row["teacher_counts"] == [1, 1]
        assert (align_segment(row) == UNMAPPED).all()


def test_store_of_documents_is_told_apart(world: World, store: Store, tmp_path: Path) -> None:
    corpus, student, _ = world.conversations()
    manifest = {k: v for k, v in store.manifest.items() if k != "chat_template"}
    documents = Store(store.directory)
    documents.manifest = manifest  # type: ignore[assignment]
    with pytest.raises(ValueError, match="losses of documents"):
        align_corpus(corpus, student, StoredReader([documents]))


@pytest.mark.parametrize("method", [Method(aggregation="share"), Method(selection="accept")])
def test_view_of_conversations_conserves_nats(world: World, method: Method) -> None:
    corpus, student, teacher = world.conversations()
    readers, model = (student, teacher), add_token_losses(world.student)
    objective = Objective(method, OnlineTeacher([world.teacher], torch.device("cpu")))
    first_five = corpus.select(range(5))
    for view in view_documents(first_five, readers, model, objective, range(5), "all"):
        shown = "".join(token.text for token in view.tokens if not token.is_special)
        assert shown == view.text.replace("\n", "", 1)
        assert [token.text for token in view.tokens if token.is_special] == ["<s>", "</s>", "</s>"]
        pieces = {id(p): p[1] for token in view.tokens for p in token.pieces}
        nats = [token.teacher_loss_nats for token in view.tokens if token.teacher_loss_nats]
        assert sum(nats) == pytest.approx(np.sum([*pieces.values()]), abs=1e-3)
        for token in view.tokens if method.accepts else ():
            expected = 1.0 if token.excess_nats is None else math.exp(min(0.0, token.excess_nats))
            is_labelled = token.student_loss_nats is not None
            assert token.weight == pytest.approx(expected if is_labelled else 0.0)
            if token.excess_nats is not None:
                assert token.status == ("kept" if token.weight >= 0.5 else "dropped")
    view = view_documents(corpus.select([0]), readers, model, objective, [0])[0]
    first = next(n for n, token in enumerate(view.tokens) if token.status != "unlabelled")
    assert view.tokens[first].start > view.text.index("\n")
    assert view.tokens[-1].status == "unmapped"


def test_student_without_a_start_token_begins_with_the_template(world: World) -> None:
    corpus, student, _ = world.conversations()
    assert student.template
    template = replace(student.template, source=student.template.source.replace("bos_token", "''"))
    (row, *_) = align_corpus(corpus.select([0]), replace(student, template=template), None).rows
    assert row["student_ids"][0] != student.start
