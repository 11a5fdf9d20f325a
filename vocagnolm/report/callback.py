"""The guidance view of fixed packed sequences, again and again while a student is trained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from vocagnolm.io import write_text
from vocagnolm.report.render import label, render_html, token_label
from vocagnolm.report.view import GuidanceView, TextView

_COLUMNS = ("token", "status", "student_nats", "teacher_nats", "excess_nats", "teacher_pieces")


@dataclass(eq=False)
class GuidanceTable(TrainerCallback):
    """Write `step-000100.html`, and report a table of the tokens.

    It looks only: a run has the same weights with and without it. All processes look, and rank 0
    writes.
    """

    # Computes the texts as the student is now.
    look: Callable[[], tuple[TextView, ...]]
    steps: int
    # Of one page, but for the step and the texts.
    view: GuidanceView
    directory: Path
    # Takes columns, rows and the step.
    report: Callable[[Sequence[str], Sequence[Sequence[object]], int], None] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: object) -> None:
        """Show the student as it comes; a resumed run has done so."""
        if state.global_step == 0:
            self._show(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: object) -> None:
        """Show it after every so many steps, and after the last one."""
        if state.global_step % self.steps == 0 or state.global_step >= state.max_steps:
            self._show(state)

    def _show(self, state: TrainerState) -> None:
        texts, step = self.look(), state.global_step
        if not state.is_world_process_zero:
            return
        view = replace(self.view, step=step, texts=texts)
        write_text(self.directory / f"step-{step:06}.html", render_html(view))
        if self.report is None:
            return
        rows = []
        for token in view.tokens:
            losses = (token.student_loss_nats, token.teacher_loss_nats, token.excess_nats)
            pieces = " · ".join(
                f"{label(text)} {'not scored' if math.isnan(loss) else f'{loss:.2f}'}"
                for text, loss in token.pieces
            )
            rows.append([token_label(token), token.status, *losses, pieces])
        self.report(_COLUMNS, rows, step)
