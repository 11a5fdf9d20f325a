"""Where teacher losses come from: a frozen model beside the student, or a store of its losses.

The teacher is never handed to Accelerate: under FSDP2 `prepare_model` would neither move nor shard
it and would round its outputs, and a second model in `prepare` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.collator import teacher_segments
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.distillation import HeadStates, entropies
from vocagnolm.guidance import Reduction, reduce_teachers
from vocagnolm.output_head import last_hidden_state, read_head
from vocagnolm.row_segments import RowSegments
from vocagnolm.token_loss import add_token_losses, by_predicted_token


@dataclass(frozen=True)
class TeacherReduction:
    """How the losses of several teachers on a student token become one (beyond the paper).

    Attributes:
        teachers: how many.
        reduction: of their losses.
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
                + ("give one for each teacher" if expected else "leave them out")
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(
                f"--teacher_weights must be positive and finite, got {list(self.weights)}"
            )

    def reduce(self, loss_BS: Tensor, mapped_BS: Tensor) -> tuple[Tensor, Tensor]:
        """One loss per student token of the several teachers' (see `guidance.reduce_teachers`)."""
        return reduce_teachers(loss_BS, mapped_BS, self.teachers, self.reduction, self.weights)


class StoredTeacher(TeacherReduction):
    """Teachers whose losses come with the batch, from one store or several."""

    def losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Losses [B, T] of the tokens of all teachers, one after the other, and which have one."""
        loss_BT = batch["teacher_losses"]
        valid_BT = ~loss_BT.isnan()
        return loss_BT.masked_fill(~valid_BT, 0.0), valid_BT


class ResidentTeacher:
    """Frozen causal LMs that score the teachers' rows of a batch.

    It is not a `torch.nn.Module`, so that no trainer registers, optimises or saves it.

    Args:
        models: the teachers, any Hugging Face causal LMs. They are put into eval mode, frozen and
            moved, unless they are quantized.
        device: where they run.
        reduction: of the losses of several.

    Raises:
        ValueError: the losses of one cannot be computed without its logits (see
            `add_token_losses`), or the reduction is not for so many.
        NonFiniteLoss: the losses of one are not finite on a probe.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        device: torch.device,
        reduction: TeacherReduction | None = None,
    ):
        for model in models:
            if not getattr(model, "is_quantized", False):  # those were placed as they were loaded
                model.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
        self.models = [add_token_losses(m.train(False).requires_grad_(False)) for m in models]
        reduction = reduction or TeacherReduction(len(models))
        if reduction.teachers != len(models):
            raise ValueError(
                f"expected a reduction of {len(models)} teachers, got one of {reduction.teachers}"
            )
        self.reduce = reduction.reduce

    @torch.no_grad()
    def losses(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Losses of the teachers' tokens.

        Args:
            batch: `teacher_input_ids`, `teacher_labels`, `teacher_position_ids`, all [B, T], how
                many columns each teacher has, `teacher_widths`, and for attention that asks for
                them the segments (`vocagnolm.collator.PackedCollator`).

        Returns:
            loss_BT: float32, nats, -log P(token | the tokens before it in its segment).
            valid_BT: bool, where a token has a loss. No gradient flows.
        """
        names = ("input_ids", "labels", "position_ids")
        rows = (batch[f"teacher_{name}"].split(batch["teacher_widths"], -1) for name in names)
        losses = [
            model(**dict(zip(names, own, strict=True)), segments=segments, token_losses=True)
            for model, segments, *own in zip(
                self.models, teacher_segments(batch), *rows, strict=True
            )
        ]
        return torch.cat(losses, -1), batch["teacher_labels"] != IGNORED_LABEL

    @torch.no_grad()
    def losses_and_entropies(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """As `losses`, with the entropy of the distribution that each token has its loss from.

        For one teacher. Returns `loss_BT`, `entropy_BT` in nats and `valid_BT`.
        """
        (model,), (segments,) = self.models, teacher_segments(batch)

        def entropy(hidden_BTD: Tensor, *head: Any) -> Tensor:
            states = HeadStates(hidden_BTD.flatten(0, 1), *head)
            return by_predicted_token(entropies(states).view(hidden_BTD.shape[:2]))

        loss_BT, entropy_BT = model(
            input_ids=batch["teacher_input_ids"],
            labels=batch["teacher_labels"],
            position_ids=batch["teacher_position_ids"],
            segments=segments,
            token_losses=True,
            also=entropy,
        )
        return loss_BT, entropy_BT, batch["teacher_labels"] != IGNORED_LABEL

    @torch.no_grad()
    def states(
        self, input_ids: Tensor, position_ids: Tensor, segments: RowSegments | None
    ) -> HeadStates:
        """What the distributions of one teacher are made of, at all [B * T] positions."""
        (model,) = self.models
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        hidden_BTD = last_hidden_state(model, **rows, segments=segments)
        return HeadStates(hidden_BTD.flatten(0, 1), *read_head(model, hidden_BTD))
