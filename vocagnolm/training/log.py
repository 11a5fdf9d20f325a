"""The log of a run: one line per entry on the screen, and everything in `log.jsonl`."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy

from vocagnolm.fields import named
from vocagnolm.shell.io import LOG_FILE
from vocagnolm.training.metrics import WEIGHT_ENTRIES

logger = logging.getLogger(__name__)

# A run of fewer steps shows each of them, unless it logs more often.
_FEW_STEPS = 10
# If a teacher is ahead of the student on a smaller share of the tokens, it has little to teach.
_FEW_AHEAD = 0.25


class RunLog(TrainerCallback):
    """Print every entry of a log in one line, and keep everything in `log.jsonl`."""

    # The step and time at which training began. They give the time left, because steps before a
    # resume took their time in another process.
    _begin = 0, 0.0
    _warned = False
    # An evaluation alone has no run to keep, and may have no directory.
    _path: Path | None = None

    def on_train_begin(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:
        """Write the history of the checkpoint to resume from, and the table's header."""
        self._begin = state.global_step, time.monotonic()
        if state.is_world_process_zero:
            self._path = Path(str(args.output_dir), LOG_FILE)
            # What was logged after the checkpoint will be logged again, so write the file again
            # from the checkpoint's history. If a kill cuts it off, the resumed run does so, too.
            history = "".join(json.dumps(entry) + "\n" for entry in state.log_history)
            self._path.write_text(history, encoding="utf-8")
            _print_row("step tokens loss student teacher kept lr grad tok/s left".split())

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: object) -> None:
        """Log the last step, too, and every step of a run that has few."""
        is_logged = state.global_step >= state.max_steps
        is_logged |= state.max_steps < min(state.logging_steps, _FEW_STEPS)
        if is_logged and args.logging_strategy == IntervalStrategy.STEPS:
            control.should_log = True

    def on_log(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:
        """Print the newest entry."""
        if not state.is_world_process_zero:
            return
        entry, step = state.log_history[-1], state.global_step
        if self._path:
            # Close the file after each entry, so that a kill loses nothing that was printed.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        cells = [str(step), tqdm.format_sizeof(step * args.global_batch_tokens)]
        weights = [entry[name] for name in WEIGHT_ENTRIES if name in entry]
        # The rows of the steps have said how a run went.
        if "train_loss" in entry:
            return
        if not weights:
            # An evaluation has losses, but no entries for the other columns.
            losses = [f"{name} {entry[name]:.4f}" for name in entry if name.endswith("loss")]
            _print_row(cells, ", ".join(losses))
            return
        for name in ("loss", "student_loss_nats", "teacher_loss_nats"):
            cells.append(f"{entry[name]:.4f}" if name in entry else "-")
        cells.append(f"{weights[0]:.1%}")
        for name, form in (("learning_rate", ".1e"), ("grad_norm", ".3g")):
            cells.append(f"{entry[name]:{form}}" if name in entry else "-")
        cells.append(tqdm.format_sizeof(entry.get("tokens_per_s", 0.0)))
        first_step, began_s = self._begin
        step_s = (time.monotonic() - began_s) / max(step - first_step, 1)
        cells.append(tqdm.format_interval(step_s * (state.max_steps - step)))
        skipped = entry.get("skipped_steps")
        _print_row(cells, f"{skipped:g} steps skipped" if skipped else "")
        # A method without a teacher logs no share.
        ahead = entry.get("teacher_ahead_fraction", 1.0)
        if ahead < _FEW_AHEAD and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: the teacher's loss is below the student's on only %.0f %% of the tokens "
                "it covers, so it has little to teach: compare with %s cpt",
                step,
                100 * ahead,
                named("method"),
            )


def _print_row(cells: Sequence[str], note: str = "") -> None:
    widths = (7, 6, 7, 7, 7, 6, 7, 6, 5, 8)
    row = " ".join(map(str.rjust, cells, widths))
    # tqdm writes above a progress bar, if there is one.
    tqdm.write(f"{row}   {note}".rstrip())
    # Python buffers what goes to a file, but a scheduler's log should show a line at once.
    sys.stdout.flush()


class SilentBar(ProgressCallback):
    """A progress bar that leaves the log to `RunLog`."""

    def on_log(self, *args: object, **kwargs: object) -> None:
        """Print nothing."""
