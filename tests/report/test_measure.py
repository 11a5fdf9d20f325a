"""Measuring a text selects the tokens that the trainer selects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_world import World, make_world
from world import Tokenizers

from vocagnolm.report.inspect import measure


@pytest.fixture(scope="module")
def world(
    training_texts: list[str], tokenizers: Tokenizers, tiny_llama: Callable[..., Any]
) -> World:
    return make_world(tiny_llama, tokenizers, training_texts[:20])


@pytest.mark.parametrize("method", ["rho1 entropy", "several mean"])
def test_measure_chooses_what_the_trainer_chooses(
    world: World, tmp_path: Path, method: str
) -> None:
    trainer = world.trainer(tmp_path, method)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(4)])
    expected = trainer.token_guidance(batch)
    found = measure(trainer.model.train(False), trainer.token_objective, batch)
    assert all(map(torch.equal, found, expected))
    assert 0 < found.weight_BS.sum() < found.valid_BS.sum()
