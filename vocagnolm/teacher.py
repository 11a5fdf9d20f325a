"""Where teacher losses come from: a frozen model that lives beside the student.

The teacher is never handed to Accelerate: under FSDP2 `prepare_model` would neither move nor shard
it and would round its outputs, and a second model in `prepare` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
