"""Report a run's loss and guidance: sums on the device, read once per log."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# One tensor holds all sums, so that a log costs one reduction over the processes and one wait:
#     [ loss | label_tokens | ... | distance | 4,001 bins of the excess, from -20 to 20 nats ]
# Excess losses beyond count in the outermost bins.
_SUMS = (
    "loss label_tokens student_loss selected_tokens selected_loss teacher_tokens teacher_loss "
    "mapped_tokens distances distance"
).split()
_BIN_NATS = 0.01
_BINS = 4001
_QUANTILES = (0.1, 0.5, 0.9)
# Bins that are one of the histogram that trackers show, which is 0.25 nats wide.
_SHOWN_BINS = 25
_NONE = -1
_FILE = "metrics_{}.safetensors"  # of one process


class GuidanceMetrics:
    """Sums over the steps since the last `read`. Adding waits for nothing.

    Additions belong to the step in progress until it is kept or dropped.

    Attributes:
        bad_blocks: int64 [2], on the device: a block of this step on which the student's, and the
            teacher's, losses were not finite; -1 while there is none.
        bad_steps: how many of the last steps were dropped in a row.
        excess_histogram: counts of excess losses that were read last, and their edges in nats; None
            without a teacher.
    """

    def __init__(self, device: torch.device):
        # MPS has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._forget()

    def _forget(self) -> None:
        self.bad_blocks = torch.full((2,), _NONE, device=self._device)
        self.bad_steps = 0
        self.excess_histogram: tuple[list[float], list[float]] | None = None
        self._clear()

    def _clear(self) -> None:
        self._kept = torch.zeros(len(_SUMS) + _BINS, dtype=self._dtype, device=self._device)
        self._added = torch.zeros_like(self._kept)
        self._kept_steps = self._dropped_steps = 0
        self._since: float | None = None
        self._elapsed_before_s = 0.0

    def start(self) -> None:
        """Mark the beginning of an optimizer step; the first one after a log starts the clock."""
        # So evaluation and saving count between two logs, and not right after one.
        if self._since is None:
            self._since = time.perf_counter()

    def keep_step(self) -> None:
        """Count all additions since the last step."""
        self._kept += self._added
        self._added.zero_()
        self._kept_steps += 1
        self.bad_steps = 0

    def drop_step(self) -> None:
        """Forget all additions since the last step, which made no update."""
        self._added.zero_()
        self.bad_blocks.fill_(_NONE)
        self._dropped_steps += 1
        self.bad_steps += 1

    def add_loss(self, loss: Tensor) -> None:
        """Count a micro-batch's part of the loss that is trained on."""
        self._add(loss=loss.detach())

    def add_student(
        self, loss_BS: Tensor, valid_BS: Tensor, weight_BS: Tensor, block_B: Tensor
    ) -> None:
        """Count the student's losses [B, S], which tokens have one, and their weights."""
        loss_BS = loss_BS.detach()
        self._note_bad(0, loss_BS, block_B)
        self._add(label_tokens=valid_BS, student_loss=loss_BS * valid_BS)
        self._add(selected_tokens=weight_BS, selected_loss=loss_BS * weight_BS)

    def add_teacher(self, loss_BT: Tensor, valid_BT: Tensor, block_B: Tensor) -> None:
        """Count the teacher's own losses [B, T]."""
        self._note_bad(1, loss_BT, block_B)
        self._add(teacher_tokens=valid_BT, teacher_loss=loss_BT * valid_BT)

    def add_distances(self, distance_R: Tensor, loss_BS: Tensor, block_B: Tensor) -> None:
        """Count the distances of the student's distributions from the teacher's.

        One that is not finite is the teacher's fault where the student's losses [B, S] are finite.
        """
        distance_R = distance_R.detach()
        is_blameless = loss_BS.detach().isfinite().all()
        self._note_bad(1, distance_R.where(is_blameless, 0.0)[None], block_B[:1])
        self._add(distances=torch.ones_like(distance_R), distance=distance_R)

    def add_excess(self, excess_BS: Tensor, mapped_BS: Tensor) -> None:
        """Count the excess losses [B, S] of the label tokens that have a teacher loss."""
        self._add(mapped_tokens=mapped_BS)
        bins = (excess_BS.detach() / _BIN_NATS).round().nan_to_num() + _BINS // 2
        bins = bins.clamp(0, _BINS - 1).long().flatten()
        self._added[len(_SUMS) :].index_add_(0, bins, mapped_BS.flatten().to(self._dtype))

    def _note_bad(self, model: int, loss: Tensor, block_B: Tensor) -> None:
        is_bad_B = ~loss.isfinite().all(-1)
        worst = block_B.where(is_bad_B, _NONE).max()
        self.bad_blocks[model] = self.bad_blocks[model].maximum(worst)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._added[_SUMS.index(name)] += value.sum(dtype=self._dtype)

    def read(self, reduce: Callable[[Tensor], Tensor], world_size: int) -> dict[str, float]:
        """Average over all processes and forget; every process must call it.

        `reduce` sums a tensor over the processes. Returns losses in nats per token, shares in
        [0, 1], quantiles to within 0.005 nats, the mean distance in nats for KL; teacher entries
        only where a teacher was counted, several together. `loss` is the mean over the steps that
        made an update; losses are absent if none did.
        """
        elapsed_s = self._elapsed_s()
        both = reduce(self._kept + self._added).cpu()
        sums = dict(zip(_SUMS, both[: len(_SUMS)].tolist(), strict=True))
        report = {}
        if self._kept_steps:
            report["loss"] = sums["loss"] / world_size / self._kept_steps
        if self._dropped_steps:
            report["skipped_steps"] = float(self._dropped_steps)
        self._clear()
        tokens = max(sums["label_tokens"], 1.0)
        if sums["label_tokens"]:
            report["student_loss_nats"] = sums["student_loss"] / tokens
            report["selected_loss_nats"] = sums["selected_loss"] / max(sums["selected_tokens"], 1.0)
        report["selected_fraction"] = sums["selected_tokens"] / tokens
        if elapsed_s:
            report["tokens_per_s"] = sums["label_tokens"] / elapsed_s
        if sums["distances"]:
            report["distance_from_teacher"] = sums["distance"] / sums["distances"]
            report["unmapped_fraction"] = 1.0 - sums["distances"] / tokens
        if sums["teacher_tokens"]:
            report["teacher_loss_nats"] = sums["teacher_loss"] / sums["teacher_tokens"]
            report["teacher_tokens_per_student_token"] = sums["teacher_tokens"] / tokens
            report["unmapped_fraction"] = 1.0 - sums["mapped_tokens"] / tokens
            report |= _quantiles(both[len(_SUMS) :])
            self.excess_histogram = _histogram(both[len(_SUMS) :])
        return report

    def _elapsed_s(self) -> float:
        now = time.perf_counter()
        return self._elapsed_before_s + (now - self._since if self._since is not None else 0.0)

    def mean_loss(
        self,
        history: Sequence[Mapping[str, float]],
        reduce: Callable[[Tensor], Tensor],
        world_size: int,
    ) -> float:
        """Average the loss of all steps of a run, those in its log and those since; NaN of none."""
        total = reduce(self._kept[_SUMS.index("loss")]).item() / world_size
        steps, before = float(self._kept_steps), 0.0
        for entry in history:
            # An entry of the training: its `loss` is the mean since the entry before, and absent
            # where all of these steps were skipped.
            if "selected_fraction" in entry:
                since = entry["step"] - before - entry.get("skipped_steps", 0.0)
                total, steps = total + entry.get("loss", 0.0) * since, steps + since
                before = entry["step"]
        return total / steps if steps else float("nan")

    def save(self, directory: Path, process: int) -> None:
        """Write the sums of this process; its steps have all been kept or dropped."""
        totals = self._kept.cpu()
        state = {
            **{name: totals[i].clone() for i, name in enumerate(_SUMS)},
            "histogram": totals[len(_SUMS) :].clone(),
            "steps": torch.tensor([self._kept_steps, self._dropped_steps, self.bad_steps]),
            "elapsed_s": torch.tensor(self._elapsed_s(), dtype=torch.float64),
        }
        save_file(state, directory / _FILE.format(process))

    def restore(self, directory: Path | None, process: int, world_size: int) -> None:
        """Start from a checkpoint's sums, if it has any, or from none."""
        self._forget()
        saved = sorted(directory.glob(_FILE.format("*"))) if directory is not None else []
        if directory is None or not saved:
            return
        # After a change of the number of processes, the first one takes up the sums of all.
        is_same = len(saved) == world_size
        states = map(load_file, [directory / _FILE.format(process)] if is_same else saved)
        for state in states:
            if is_same or process == 0:
                sums = torch.stack([state[name] for name in _SUMS])
                self._kept += torch.cat([sums, state["histogram"]]).to(self._kept)
            self._kept_steps, self._dropped_steps, self.bad_steps = state["steps"].tolist()
            self._elapsed_before_s = state["elapsed_s"].item()
        # A micro-batch's loss is times the processes, which gradients are averaged over.
        self._kept[_SUMS.index("loss")] *= world_size / len(saved)


def _quantiles(histogram: Tensor) -> dict[str, float]:
    cumulative = histogram.cumsum(0)
    if not cumulative[-1]:
        return {}
    at = torch.tensor(_QUANTILES, dtype=cumulative.dtype) * cumulative[-1]
    values = (torch.searchsorted(cumulative, at) - _BINS // 2) * _BIN_NATS
    pairs = zip(_QUANTILES, values.tolist(), strict=True)
    return {f"excess_loss_p{round(100 * quantile)}_nats": value for quantile, value in pairs}


def _histogram(bins: Tensor) -> tuple[list[float], list[float]]:
    """Merge bins into those that are shown; the last one has the odd bin at 20 nats too."""
    counts = bins[:-1].reshape(-1, _SHOWN_BINS).sum(-1)
    counts[-1] += bins[-1]
    # Edges to within half of a bin.
    edges = (torch.arange(len(counts) + 1) * _SHOWN_BINS - _BINS // 2) * _BIN_NATS
    return counts.tolist(), [round(edge, 2) for edge in edges.tolist()]
