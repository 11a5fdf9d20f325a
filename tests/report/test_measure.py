"""Measuring a text: the trainer's choice, for every method that inspects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_world import World
from transformers import PreTrainedTokenizerBase
from world import make_models

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.objective import Objective
from vocagnolm.report.inspect import measure


@pytest.fixture
def world(
    training_texts: list[str],
    tiny_llama: Callable[..., Any],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> World:
    tokenizers = student_tokenizer, teacher_tokenizer
    reference = make_models(tiny_llama, teacher_tokenizer, student_tokenizer)[1]
    models = (*make_models(tiny_llama, *tokenizers), reference)
    return World(training_texts[:20], tokenizers, models)


@pytest.mark.parametrize("method", ["rho1 entropy", "several mean", "several min"])
def test_measure_chooses_what_the_trainer_chooses(
    world: World, tmp_path: Path, method: str
) -> None:
    trainer = world.trainer(tmp_path, method)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(4)])
    expected = trainer.token_guidance(batch)
    found = measure(trainer.model.train(False), trainer.objective, batch)
    assert all(map(torch.equal, found, expected))
    assert 0 < found.weight_BS.sum() < found.valid_BS.sum()


def test_losses_that_are_not_finite_are_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = world.trainer(tmp_path, "vocagnolm")
    batch = trainer.data_collator([trainer.train_dataset[0]])
    found = trainer.objective.teacher_losses(batch)
    found.loss_BT[0, 1] = torch.nan
    monkeypatch.setattr(Objective, "teacher_losses", lambda self, batch: found)
    with pytest.raises(NonFiniteLoss, match="the teacher's losses are NaN"):
        measure(trainer.model, trainer.objective, batch)
