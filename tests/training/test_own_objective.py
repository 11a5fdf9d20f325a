"""An objective, a collator or a model of the user's own, in the trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from world import make_trainer

from benchmarks.models import backward, prepare
from vocagnolm.objective import Objective


class Weighted(Objective):
    """Weights made of the losses that `select` gets, and of those that it returns."""

    uses_argument = True

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        guidance = super().select(student_loss_BS, batch, teacher)
        loss_BS = student_loss_BS if self.uses_argument else guidance.student_loss_BS
        return guidance._replace(weight_BS=loss_BS.exp().neg().exp() * guidance.valid_BS)


class WeightedByReturned(Weighted):
    uses_argument = False


class Counting(Objective):
    """An objective that counts its calls."""

    calls = 0

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        self.__dict__["calls"] = self.calls + 1
        return super().select(student_loss_BS, batch, teacher)


class Everywhere(Objective):
    """A weight of 1 for every position, also without a label."""

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        guidance = super().select(student_loss_BS, batch, teacher)
        return guidance._replace(weight_BS=torch.ones_like(guidance.weight_BS))


def test_weights_of_an_own_objective_have_no_gradient(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    found = []
    for kind in (Weighted, WeightedByReturned):
        trainer = make_trainer(tmp_path, blocks, *copy.deepcopy(pair), options={"objective": kind})
        batch = trainer.data_collator([blocks[index] for index in range(8)])
        backward(prepare(trainer), [batch])
        found.append([weight.grad for weight in trainer.model.parameters()])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("warmup", [0, 3])
def test_own_objective_keeps_what_it_has_counted(
    warmup: int, blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    options = {"objective": Counting}
    trainer = make_trainer(tmp_path, blocks, *pair, top_k_warmup_steps=warmup, options=options)
    # A hyperparameter search sets Trainer's attribute of this name.
    trainer.objective = None
    trainer.train()
    assert trainer.token_objective.calls == 3 * trainer.args.gradient_accumulation_steps


def test_weights_without_a_label_are_not_logged(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, blocks, *pair, max_steps=1, logging_steps=1, options={"objective": Everywhere}
    )
    trainer.train()
    assert trainer.state.log_history[0]["selected_fraction"] == 1


def test_settings_of_the_method_stay_when_the_trainer_is_made(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair)
    trainer.args.top_k = 0.9
    with pytest.raises(ValueError, match="changed after the trainer was made"):
        trainer.train()


def test_log_is_saved_with_the_model(blocks: Any, pair: tuple[Any, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert not (tmp_path / "trainer_state.json").exists()
    trainer.save_model()
    assert (tmp_path / "trainer_state.json").exists()
    assert not (tmp_path / "elsewhere" / "trainer_state.json").exists()
