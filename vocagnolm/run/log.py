"""A run's log: a line of the terminal for each entry, and all entries whole in `log.jsonl`."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from vocagnolm.io import duration, in_short, write_text
from vocagnolm.run.throughput import TIMING_KEYS

LOG_FILE = "log.jsonl"
_WIDTHS = {"step": 7, "tokens": 7, "loss": 8, "student": 8, "teacher": 8, "kept": 6, "tok/s": 7}
_LEFT = 10
_LOSSES = ("loss", "student_loss_nats", "teacher_loss_nats")
_UNTOLD = {*TIMING_KEYS, "epoch", "total_flos", "step", "num_input_tokens_seen"}


class RunLog(TrainerCallback):
    """Tells every entry of a log in one line, with the time that is left, and keeps all of it.

    The file always holds the run's history, also after a run was cut off and resumed.
    """

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        # A step and the time at which it was done, to count the rest from.
        self._since = 0, 0.0
        self._logs = 0
        # An evaluation alone has no run to keep, and may have no directory.
        self._is_kept = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *rest: object, **kwargs: object
    ) -> None:
        """Write the history of the checkpoint that is resumed from, and the head of the table."""
        self._since, self._logs = (state.global_step, time.monotonic()), 0
        if not state.is_world_process_zero:
            return
        self._is_kept = True
        # What was logged behind the checkpoint is going to be logged again.
        write_text(Path(str(args.output_dir), LOG_FILE), "".join(map(_line, state.log_history)))
        head = "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())
        _tell(f"{head}{'left':>{_LEFT}}")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *rest: object, **kwargs: object
    ) -> None:
        """Tell the newest entry."""
        if not state.is_world_process_zero:
            return
        entry = state.log_history[-1]
        if self._is_kept:
            with Path(str(args.output_dir), LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        step = state.global_step
        tokens = in_short(step * self._tokens_per_step)
        if "selected_fraction" not in entry:
            others = (
                f"{key} {_rounded(value)}" for key, value in entry.items() if key not in _UNTOLD
            )
            _tell(f"{step:>{_WIDTHS['step']}}{tokens:>{_WIDTHS['tokens']}}   {', '.join(others)}")
            return
        cells = [f"{step}", tokens]
        cells += [f"{entry[name]:.4f}" if name in entry else "-" for name in _LOSSES]
        cells += [f"{entry['selected_fraction']:.1%}", in_short(entry.get("tokens_per_s", 0.0))]
        row = "".join(
            f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=True)
        )
        skipped = entry.get("skipped_steps")
        more = f"   {skipped:g} steps skipped" if skipped else ""
        _tell(f"{row}{self._left(state):>{_LEFT}}{more}")

    def _left(self, state: TrainerState) -> str:
        """Extrapolate the time of the remaining steps from those since the first log."""
        before, at = self._since
        now, self._logs = time.monotonic(), self._logs + 1
        # The first steps warm up, and count only while there are no others.
        if self._logs == 1:
            self._since = state.global_step, now
        done = max(state.global_step - before, 1)
        return duration((now - at) / done * (state.max_steps - state.global_step))


class _Bar(ProgressCallback):
    """Progress bar that leaves the log to `RunLog`."""

    def on_log(self, *args: object, **kwargs: object) -> None:
        """Print nothing."""


def tell_in_lines(trainer: Trainer, tokens_per_step: int) -> None:
    """Have a trainer tell its log in lines, in place of dictionaries."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(_Bar)
    trainer.add_callback(RunLog(tokens_per_step))


def read_log(path: Path) -> list[dict[str, float]]:
    """Read a log file, but for lines that are damaged or cut off; [] where there is none."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


def _line(entry: Mapping[str, object]) -> str:
    return json.dumps(entry) + "\n"


def _rounded(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _tell(line: str) -> None:
    # Above a bar, if there is one.
    tqdm.write(line)
    sys.stdout.flush()
