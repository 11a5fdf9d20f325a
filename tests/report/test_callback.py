"""The guidance view during training: it looks, and changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from samples import Sample, sample_blocks
from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState
from world import MAX_LENGTH, TEACHER_CONTEXT, make_models, make_segments, make_trainer

from vocagnolm.method import Method
from vocagnolm.packing import Blocks
from vocagnolm.report.callback import GuidanceTable
from vocagnolm.report.render import render_html
from vocagnolm.report.view import GuidanceView

VIEW = GuidanceView("s", "t", Method(), "each block")


@pytest.fixture(scope="module")
def world(
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> tuple[Blocks, Sample]:
    """Blocks to train on, and a sample of two of them."""
    texts = [*training_texts[:40], "Q.E.D.", "x = 1", "12"]  # short ones share a block
    segments = make_segments(texts, student_tokenizer, teacher_tokenizer).rows
    blocks = Blocks(segments, MAX_LENGTH, TEACHER_CONTEXT)
    corpus = datasets.Dataset.from_dict({"text": texts})
    numbers = sorted(range(len(blocks)), key=lambda block: -len(blocks.segments(block)))[:2]
    return blocks, sample_blocks(blocks, numbers, segments, corpus, student_tokenizer)


@pytest.fixture
def pair(
    tiny_llama: Callable[..., Any],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> tuple[Any, Any]:
    def with_dropout(*args: Any, **kwargs: Any) -> Any:
        return tiny_llama(*args, attention_dropout=0.2, **kwargs)

    return make_models(with_dropout, student_tokenizer, teacher_tokenizer)


def make_table(
    trainer: Any, sample: Sample, steps: int, directory: Path, *report: Any
) -> GuidanceTable:
    def look() -> Any:
        return sample.views(trainer.token_guidance(sample.batch))

    return GuidanceTable(look, steps, VIEW, directory / "guidance", *report)


def facts_of(directory: Path, step: int) -> list[list[Any]]:
    """The tokens of a page: label, status, both losses and pieces."""
    html = (directory / "guidance" / f"step-{step:06}.html").read_text()
    found = html.split('<script id="facts" type="application/json">')[1].split("</script>")[0]
    return json.loads(found)["tokens"]


@pytest.mark.slow
def test_run_has_the_same_weights(
    world: tuple[Blocks, Sample], pair: tuple[Any, Any], tmp_path: Path
) -> None:
    blocks, sample = world
    logs, weights = [], []
    for steps in (None, 1):
        student, teacher = map(copy.deepcopy, pair)
        trainer = make_trainer(tmp_path, blocks, student, teacher)
        if steps:
            trainer.add_callback(make_table(trainer, sample, steps, tmp_path))
        trainer.train()
        weights.append(student.state_dict())
        logs.append(
            [{k: v for k, v in row.items() if "_loss" in k} for row in trainer.state.log_history]
        )
        assert student.training
    assert logs[0] == logs[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(("steps", "expected"), [(2, [0, 2, 4, 5]), (100, [0, 5])])
def test_views_are_written_and_reported_at_the_steps(
    steps: int,
    expected: list[int],
    world: tuple[Blocks, Sample],
    pair: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    reported: list[tuple[Any, ...]] = []
    trainer = make_trainer(tmp_path, world[0], *pair, max_steps=5)
    shown = trainer, world[1], steps, tmp_path
    trainer.add_callback(make_table(*shown, lambda *table: reported.append(table)))
    trainer.train()
    names = [f"step-{step:06}.html" for step in expected]
    assert sorted(path.name for path in (tmp_path / "guidance").iterdir()) == names
    assert [step for *_, step in reported] == expected
    for columns, rows, step in reported:
        tokens = facts_of(tmp_path, step)
        assert [cells[:2] for cells in rows] == [token[:2] for token in tokens]
        losses = [cells[2] if cells[2] is None else round(cells[2], 4) for cells in rows]
        assert losses == [token[2] for token in tokens]
        assert {len(cells) for cells in rows} == {len(columns)}


def test_view_is_the_trainers_when_training_has_ended(
    world: tuple[Blocks, Sample], pair: tuple[Any, Any], tmp_path: Path
) -> None:
    blocks, sample = world
    trainer = make_trainer(tmp_path, blocks, *pair)
    trainer.add_callback(make_table(trainer, sample, 100, tmp_path))
    trainer.train()
    guidance = trainer.token_guidance(sample.batch)
    view = replace(VIEW, texts=sample.views(guidance))
    (tmp_path / "guidance" / "step-000009.html").write_text(render_html(view))
    before, after, expected = (facts_of(tmp_path, step) for step in (0, 3, 9))
    assert after == expected != before
    assert len(view.texts) > 2, "no sequence has several texts"
    assert {text.block for text in view.texts} == set(sample.batch["block"].tolist())
    student = [t.student_loss_nats for t in view.tokens if t.student_loss_nats is not None]
    assert sum(student) == pytest.approx(guidance.student_loss_BS.sum().item(), rel=1e-5)
    trained = sum(token.weight > 0 for token in view.tokens)
    assert trained == guidance.weight_BS.sum().item()


def test_other_processes_compute_and_write_nothing(tmp_path: Path) -> None:
    calls = []

    def look() -> Any:
        calls.append(1)

    table = GuidanceTable(look, 1, VIEW, tmp_path)
    state = TrainerState(is_world_process_zero=False, max_steps=9)
    arguments: Any = None
    table.on_train_begin(arguments, state, TrainerControl())
    state.global_step = 1
    table.on_step_end(arguments, state, TrainerControl())
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())
    # A resumed run has shown its first view.
    table.on_train_begin(arguments, state, TrainerControl())
    assert len(calls) == 2
