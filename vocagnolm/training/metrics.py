"""Losses and shares of a run's tokens, summed over its steps and processes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save
from torch import Tensor

# One tensor has all sums, so a log costs one reduction over the processes.
_SUMS = (
    "loss label_tokens student_loss selected_tokens selected_loss teacher_tokens teacher_loss "
    "mapped_tokens distances distance ahead_tokens"
).split()
# Stands for no packed sequence, because indices are never negative.
NO_BLOCK = -1
# The sums of each process are in its own file, with its number in the name.
_METRICS_FILE = "metrics_{}.safetensors"
# A training log has the mean weight of its tokens under one of these names, by method. No other log
# has either.
WEIGHT_ENTRIES = ("selected_fraction", "mean_weight")


class GuidanceMetrics:
    """Sums over the steps since the last `read`. Adding makes no host-device sync.

    Additions belong to the current step until it is kept or dropped.

    Attributes:
        bad_blocks: int64 [2], on the device: a packed sequence of this step on which the student's,
            and the teacher's, losses were not finite; -1 while there is none.
        bad_steps: how many of the last steps were dropped in a row.
        weight_name: of the mean weight in the report.
    """

    weight_name = "selected_fraction"

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self._device = accelerator, accelerator.device
        # MPS has no float64.
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self.restore(None)

    def restore(self, directory: Path | None) -> None:
        """Start from a checkpoint's sums, if it has any, or from zero."""
        self._kept = torch.zeros(len(_SUMS), dtype=self._dtype, device=self._device)
        # The current step's sums wait here, so that a skipped step leaves no trace.
        self._added = torch.zeros_like(self._kept)
        self._kept_steps = 0
        self._dropped_steps = 0
        self.bad_steps = 0
        self.bad_blocks = torch.full((2,), NO_BLOCK, device=self._device)
        if directory is None:
            return
        # A checkpoint of another Trainer has none.
        count = len(list(directory.glob(_METRICS_FILE.format("*"))))
        if not count:
            return
        # If the number of processes has changed, a process may take the sums of several, or of
        # none.
        states = [load_file(directory / _METRICS_FILE.format(i)) for i in range(count)]
        self._kept_steps, self._dropped_steps, self.bad_steps = states[0]["steps"].tolist()
        world_size = self.accelerator.num_processes
        # Each process begins at its own number and takes every world_size-th file, so every file is
        # counted once.
        for state in states[self.accelerator.process_index :: world_size]:
            sums = state["sums"].to(self._kept)
            # A checkpoint of an older version has fewer sums.
            self._kept[: len(sums)] += sums
        # A micro-batch's loss is multiplied by the number of processes, over which gradients are
        # averaged.
        self._kept[_SUMS.index("loss")] *= world_size / count

    def keep_step(self) -> None:
        """Count all additions since the last step."""
        self._kept += self._added
        self._added.zero_()
        self._kept_steps += 1
        self.bad_steps = 0

    def drop_step(self) -> None:
        """Forget all additions since the last step, which made no update."""
        self._added.zero_()
        # The reduction has changed only a copy, and the next step must not inherit the fault.
        self.bad_blocks.fill_(NO_BLOCK)
        self._dropped_steps += 1
        self.bad_steps += 1

    def add_loss(self, loss: Tensor) -> None:
        """Count a micro-batch's part of the training loss."""
        self._add(loss=loss.detach())

    def add_student(
        self, loss_BS: Tensor, valid_BS: Tensor, weight_BS: Tensor, block_B: Tensor
    ) -> None:
        """Count the student's losses [B, S], which tokens have one, and their weights."""
        loss_BS = loss_BS.detach()
        self._mark_bad(0, loss_BS, block_B)
        self._add(label_tokens=valid_BS, student_loss=loss_BS * valid_BS)
        self._add(selected_tokens=weight_BS, selected_loss=loss_BS * weight_BS)

    def add_teacher(self, loss_BT: Tensor, valid_BT: Tensor, block_B: Tensor) -> None:
        """Count the teacher's own losses [B, T]."""
        self._mark_bad(1, loss_BT, block_B)
        self._add(teacher_tokens=valid_BT, teacher_loss=loss_BT * valid_BT)

    def add_distances(self, distance_R: Tensor, loss_BS: Tensor, block_B: Tensor) -> None:
        """Count the distances between the student's and the teacher's distributions.

        If a distance is not finite, it is the teacher's fault if the student's losses [B, S] are
        finite.
        """
        distance_R = distance_R.detach()
        is_blameless = loss_BS.detach().isfinite().all()
        # Distances do not know their sequence, so name the first one of the micro-batch.
        self._mark_bad(1, distance_R.where(is_blameless, 0.0)[None], block_B[:1])
        self._add(distances=torch.ones_like(distance_R), distance=distance_R)

    def add_excess(self, excess_BS: Tensor, mapped_BS: Tensor) -> None:
        """Count the label tokens that have a teacher loss, and those with a lower one."""
        self._add(mapped_tokens=mapped_BS, ahead_tokens=mapped_BS & (excess_BS.detach() > 0))

    def _mark_bad(self, model: int, loss: Tensor, block_B: Tensor) -> None:
        is_bad_B = ~loss.isfinite().all(-1)
        # Any bad sequence would do. Take the largest index, because a maximum needs no branch on
        # the host, and so no sync.
        worst_block = block_B.where(is_bad_B, NO_BLOCK).max()
        self.bad_blocks[model] = self.bad_blocks[model].maximum(worst_block)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            # Sum in float64 if the device has it, because float32 would lose digits.
            self._added[_SUMS.index(name)] += value.sum(dtype=self._dtype)

    def read(self) -> dict[str, float]:
        """Average over all processes, and reset. Every process must call this.

        Returns losses in nats per token, shares in [0, 1], and the mean distance. `loss` is the
        mean over the steps that made an update. If none did, losses are absent.
        """
        totals = self.accelerator.reduce(self._kept, "sum").tolist()
        sums = dict(zip(_SUMS, totals, strict=True))
        report = {}
        if self._kept_steps:
            processes = self.accelerator.num_processes
            # A micro-batch's loss is multiplied by the number of processes, over which gradients
            # are averaged.
            report["loss"] = sums["loss"] / processes / self._kept_steps
        if self._dropped_steps:
            report["skipped_steps"] = float(self._dropped_steps)
        self._kept.zero_()
        self._kept_steps = 0
        self._dropped_steps = 0
        tokens = max(sums["label_tokens"], 1.0)
        if sums["label_tokens"]:
            report["student_loss_nats"] = sums["student_loss"] / tokens
            report["selected_loss_nats"] = sums["selected_loss"] / max(sums["selected_tokens"], 1.0)
        report[self.weight_name] = sums["selected_tokens"] / tokens
        if sums["distances"]:
            report["distance_from_teacher"] = sums["distance"] / sums["distances"]
            report["unmapped_fraction"] = 1.0 - sums["distances"] / tokens
        if sums["teacher_tokens"]:
            report["teacher_loss_nats"] = sums["teacher_loss"] / sums["teacher_tokens"]
            report["teacher_tokens_per_student_token"] = sums["teacher_tokens"] / tokens
            report["unmapped_fraction"] = 1.0 - sums["mapped_tokens"] / tokens
        if sums["mapped_tokens"]:
            report["teacher_ahead_fraction"] = sums["ahead_tokens"] / sums["mapped_tokens"]
        return report

    def mean_loss(self, history: Sequence[Mapping[str, float]]) -> float:
        """Average the loss of all steps of a run, logged or not. NaN if there are none."""
        process_loss = self._kept[_SUMS.index("loss")]
        total = self.accelerator.reduce(process_loss, "sum").item()
        total /= self.accelerator.num_processes
        # The steps since the last log are not in the history yet.
        steps = float(self._kept_steps)
        previous_step = 0.0
        for entry in history:
            # A training entry's `loss` is the mean since the entry before. It is absent if all of
            # these steps were skipped.
            if any(name in entry for name in WEIGHT_ENTRIES):
                updates = entry["step"] - previous_step - entry.get("skipped_steps", 0.0)
                total += entry.get("loss", 0.0) * updates
                steps += updates
                previous_step = entry["step"]
        return total / steps if steps else float("nan")

    def save(self, directory: Path) -> None:
        """Write the sums of this process, all of whose steps have been kept or dropped."""
        steps = torch.tensor([self._kept_steps, self._dropped_steps, self.bad_steps])
        state = {"sums": self._kept, "steps": steps}
        path = directory / _METRICS_FILE.format(self.accelerator.process_index)
        # safetensors' own writer would hide the file from all others.
        path.write_bytes(save(state))
