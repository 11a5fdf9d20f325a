"""Teacher losses, from a frozen model beside the student or from a store.

The teacher is never handed to Accelerate: under FSDP2 `prepare_model` would neither move nor shard
it and would round its outputs, and a second model in `prepare` is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.collator import Batch, teacher_segments
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.distillation import HeadStates, losses_and_entropies
from vocagnolm.output_head import is_quantized, last_hidden_state, read_head
from vocagnolm.row_segments import RowSegments
from vocagnolm.token_loss import add_token_losses


class TeacherLosses(NamedTuple):
    """Losses of the teachers' own tokens, one teacher's columns after another's; no gradient."""

    loss_BT: Tensor  # float32, -log P(token | the tokens before it in its segment)
    valid_BT: Tensor  # bool, tokens that have a loss
    entropy_BT: Tensor | None = None  # of the distribution that each token has its loss from


@dataclass(frozen=True)
class StoredTeacher:
    """Teachers whose losses come with the batch, from one store or several."""

    teachers: int = 1

    def losses(self, batch: Batch, *, with_entropies: bool = False) -> TeacherLosses:
        """Read the losses of all teachers' tokens."""
        assert not with_entropies, "a store holds losses alone"
        loss_BT = batch["teacher_losses"]
        valid_BT = ~loss_BT.isnan()
        return TeacherLosses(loss_BT.masked_fill(~valid_BT, 0.0), valid_BT)


class OnlineTeacher:
    """Causal LMs, frozen and in eval mode, that score the teachers' rows of a batch.

    It is not a `torch.nn.Module`, so that no trainer registers, optimises or saves it. A ValueError
    or `NonFiniteLoss` where `add_token_losses` rejects a model.
    """

    def __init__(self, models: Sequence[PreTrainedModel], device: torch.device):
        for model in models:
            # Quantized models were placed as they were loaded.
            if not is_quantized(model):
                model.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
        self.models = [add_token_losses(m.train(False).requires_grad_(False)) for m in models]

    @torch.no_grad()
    def losses(self, batch: Batch, *, with_entropies: bool = False) -> TeacherLosses:
        """Score the teachers' tokens, and on request their entropies."""
        # Columns of two teachers, split by `teacher_widths` and joined again:
        #     [ first teacher's T1 | second teacher's T2 ]
        rows = (batch["teacher_input_ids"], batch["teacher_labels"], batch["teacher_position_ids"])
        split = (torch.split(rows_BT, batch["teacher_widths"], -1) for rows_BT in rows)
        counts = (batch["teacher_label_tokens"], teacher_segments(batch))
        found: list[tuple[Tensor, ...]] = []
        for model, tokens, segments, *own in zip(self.models, *counts, *split, strict=True):
            inputs = dict(zip(("input_ids", "labels", "position_ids"), own, strict=True))
            ask = partial(model, **inputs, segments=segments, token_losses=True)
            if with_entropies:
                found.append(ask(instead=partial(losses_and_entropies, label_tokens=tokens)))
            else:
                found.append((ask(label_tokens=tokens),))
        loss_BT, *entropies_BT = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return TeacherLosses(loss_BT, batch["teacher_labels"] != IGNORED_LABEL, *entropies_BT)

    @torch.no_grad()
    def states(
        self, input_ids: Tensor, position_ids: Tensor, segments: RowSegments | None
    ) -> HeadStates:
        """Compute the makings of one teacher's distributions at all [B * T] positions."""
        (model,) = self.models
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        hidden_BTD = last_hidden_state(model, **rows, segments=segments)
        return HeadStates(hidden_BTD.flatten(0, 1), *read_head(model, hidden_BTD))
