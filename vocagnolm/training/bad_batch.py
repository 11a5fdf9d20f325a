"""The batch of an optimizer step whose numbers went bad, written aside for whoever looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vocagnolm.host.files import write_file, write_json

DIRECTORY = "bad_steps"


class StepBatches:
    """The micro-batches of the optimizer step that is being made, and the losses found in them."""

    def __init__(self) -> None:
        self._batches: Sequence[Mapping[str, Any]] = ()
        self._losses: list[Mapping[str, Tensor]] = []

    def begin(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Forget the last step's, and keep those of the next one."""
        self._batches, self._losses = batches, []

    def add_losses(self, student_loss: Tensor, teacher_loss: Tensor | None = None) -> None:
        """Keep the losses of the next micro-batch; no gradient is kept with them."""
        found = {"student_loss": student_loss.detach()}
        self._losses.append(
            found if teacher_loss is None else {**found, "teacher_loss": teacher_loss}
        )

    def teacher_losses(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks [B] and the teacher's losses [B, T] of every micro-batch, if there are any."""
        for batch, found in zip(self._batches, self._losses, strict=True):
            if "teacher_loss" in found:
                yield batch["block"], found["teacher_loss"]

    def write(self, path: Path, description: Mapping[str, Any]) -> None:
        """Write `path`.safetensors, all tensors of all micro-batches, and `path`.json.

        A tensor's name is the number of its micro-batch, a dot and its key in the batch, or
        `student_loss` and `teacher_loss` for the losses, in nats.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        losses = [*self._losses, *({} for _ in self._batches[len(self._losses) :])]
        tensors = {
            f"{number}.{name}": value.cpu().contiguous()
            for number, (batch, found) in enumerate(zip(self._batches, losses, strict=False))
            for name, value in {**batch, **found}.items()
            if isinstance(value, Tensor)
        }
        content = save(tensors)
        blocks = [batch["block"].tolist() for batch in self._batches]
        write_file(path.with_suffix(".safetensors"), lambda file: file.write(content))
        write_json(path.with_suffix(".json"), {**description, "blocks": blocks})
