"""Where teacher losses come from: a frozen model beside the student, or a store of its losses.

The teacher is never handed to Accelerate: under FSDP2 `prepare_model` would neither move nor shard
it and would round its outputs, and a second model in `prepare` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.token_loss import IGNORED_LABEL, add_token_losses


class ResidentTeacher:
    """A frozen causal LM that scores the teacher's rows of a batch.

    It is not a `torch.nn.Module`, so that no trainer registers, optimises or saves it.

    Args:
        model: the teacher, any Hugging Face causal LM. It is put into eval mode, frozen and moved.
        device: where it runs.

    Raises:
        ValueError: its losses cannot be computed without its logits (see `add_token_losses`).
        NonFiniteLoss: its losses are not finite on a probe.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        model.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
        self.model = add_token_losses(model.train(False).requires_grad_(False))

    @torch.no_grad()
    def losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Losses of the teacher's tokens.

        Args:
            batch: `teacher_input_ids`, `teacher_labels`, `teacher_position_ids`, all [B, T].

        Returns:
            loss_BT: float32, nats, -log P(token | the tokens before it in its segment).
            valid_BT: bool, where a token has a loss. No gradient flows.
        """
        labels = batch["teacher_labels"]
        loss_BT = self.model(
            input_ids=batch["teacher_input_ids"],
            position_ids=batch["teacher_position_ids"],
            labels=labels,
            token_losses=True,
        )
        return loss_BT, labels != IGNORED_LABEL

    def reduce(self, loss_BS: Tensor, mapped_BS: Tensor) -> tuple[Tensor, Tensor]:
        """One teacher's losses on student tokens, as they are (see `StoredTeacher.reduce`)."""
        return loss_BS, mapped_BS


Reduction = Literal["min", "mean", "max", "weighted"]


@dataclass(frozen=True)
class StoredTeacher:
    """Teachers whose losses come with the batch, from one store or several.

    Attributes:
        teachers: how many stores.
        reduction: how the losses of several teachers on a student token become one.
        weights: of the teachers, for "weighted" only; any positive numbers.
    """

    teachers: int = 1
    reduction: Reduction = "mean"
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = self.teachers if self.reduction == "weighted" else 0
        if len(self.weights) != expected:
            raise ValueError(
                f"--teacher_reduction {self.reduction} takes {expected or 'no'} --teacher_weights, "
                f"found {len(self.weights)}: "
                + ("give one for each store" if expected else "leave them out")
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(
                f"--teacher_weights must be positive and finite, got {list(self.weights)}"
            )

    def losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Losses [B, T] of the tokens of all teachers, one after the other, and which have one."""
        loss_BT = batch["teacher_losses"]
        valid_BT = ~loss_BT.isnan()
        return loss_BT.masked_fill(~valid_BT, 0.0), valid_BT

    def reduce(self, loss_BS: Tensor, mapped_BS: Tensor) -> tuple[Tensor, Tensor]:
        """One loss per student token of the several teachers'.

        Args:
            loss_BS: [B, K S] in nats, the tokens of a row by one teacher after those by another.
            mapped_BS: bool [B, K S], which of them have a teacher token.

        Returns:
            float32 [B, S], 0.0 where a teacher has no token; and bool [B, S].
        """
        shape = loss_BS.shape[0], self.teachers, -1
        loss_BKS, mapped_BS = loss_BS.reshape(shape), mapped_BS.reshape(shape).all(1)
        if self.reduction == "min":
            reduced_BS = loss_BKS.amin(1)
        elif self.reduction == "max":
            reduced_BS = loss_BKS.amax(1)
        else:
            # In float64, equal losses have exactly their mean; MPS has none. No tensor of weights:
            # copying it to a device would wait for the device.
            wide = torch.float32 if loss_BS.device.type == "mps" else torch.float64
            weights = self.weights or (1.0,) * self.teachers
            pairs = zip(weights, loss_BKS.to(wide).unbind(1), strict=True)
            total_BS = torch.stack([weight * loss for weight, loss in pairs]).sum(0)
            reduced_BS = (total_BS / sum(weights)).float()
        return reduced_BS * mapped_BS, mapped_BS
