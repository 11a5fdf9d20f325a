"""The guidance view of fixed packed sequences, again and again while a student is trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.guidance import TokenGuidance
from vocagnolm.io import write_text
from vocagnolm.packing import Batch
from vocagnolm.report.render import label, render_html, token_label
from vocagnolm.report.view import GuidanceView, Sample, view_texts

_COLUMNS = ("token", "status", "student_nats", "teacher_nats", "excess_nats", "teacher_pieces")
# Takes columns, rows and the step.
Report = Callable[[Sequence[str], Sequence[Sequence[object]], int], None]


class GuidanceTable(TrainerCallback):
    """Write `guidance/step-000100.html`, and report a table of the tokens.

    It looks only: a run has the same weights with and without it. All processes compute, as
    `VocAgnoTrainer.token_guidance`, and rank 0 writes.
    """

    def __init__(
        self,
        guide: Callable[[Batch], TokenGuidance],
        sample: Sample,
        steps: int,
        view: GuidanceView,
        output_dir: str | Path,
        report: Report | None = None,
    ):
        self._guide, self._sample, self._steps, self._report = guide, sample, steps, report
        # Without texts, which are another's at every step.
        self._directory, self._view = Path(output_dir) / "guidance", view

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Show the student as it comes; a resumed run has done so."""
        if state.global_step == 0:
            self._show(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Show it after every so many steps, and after the last one."""
        if state.global_step % self._steps == 0 or state.global_step >= state.max_steps:
            self._show(state)

    def _show(self, state: TrainerState) -> None:
        guidance, step = self._guide(self._sample.batch), state.global_step
        if not state.is_world_process_zero:
            return
        view = replace(self._view, step=step, texts=view_texts(self._sample, guidance))
        write_text(self._directory / f"step-{step:06}.html", render_html(view))
        if self._report is None:
            return
        rows = []
        for token in view.tokens:
            losses = (token.student_loss_nats, token.teacher_loss_nats, token.excess_nats)
            pieces = " · ".join(f"{label(text)} {loss:.2f}" for text, loss in token.pieces)
            rows.append([token_label(token), token.status, *losses, pieces])
        self._report(_COLUMNS, rows, step)
