"""A run in Weights & Biases, TensorBoard and trackio: Trainer's callbacks, with one set of names.

Trainer's own put every entry of a log under `train/`. These put each into the section that
`vocagnolm.host.trackers` chooses, add the histogram of the excess losses and tables, and tell what
the run is in its config.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from vocagnolm.cli import note
from vocagnolm.host.trackers import (
    EXCESS_HISTOGRAM,
    STEP,
    TRACKER_FILE,
    Tracking,
    begin_run,
    read_place,
    tracked_name,
    write_place,
)
from vocagnolm.io import JsonObject, markdown_table

# Values of which a tracker shows a histogram.
Histogram = Tensor
_Rows = Sequence[Sequence[object]]
_Student = PreTrainedModel | None


class Reporter(TrainerCallback):
    """Sends logs, histograms and tables to one tracker, from the first process.

    Args:
        tracking: returns place and config of the run; asked when training begins.
        histogram: returns the excess losses of the last log, if there were any.
    """

    _initialized: bool

    def __init__(self, tracking: Callable[[], Tracking], histogram: Callable[[], Histogram | None]):
        super().__init__()
        self._tracking, self._histogram = tracking, histogram

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send a log, and with one of the training the histogram."""
        if not state.is_world_process_zero:
            return
        if not self._initialized:
            self.setup(args, state, kwargs.get("model"))
        values = {tracked_name(entry): value for entry, value in (logs or {}).items()}
        histogram = self._histogram() if "student_loss_nats" in (logs or {}) else None
        self.send(values, histogram, state.global_step)

    def setup(self, args: TrainingArguments, state: TrainerState, model: _Student) -> None:
        """Begin the run in the tracker."""
        raise NotImplementedError

    def send(self, values: Mapping[str, object], histogram: Histogram | None, step: int) -> None:
        """Send values by their tracked names."""
        raise NotImplementedError

    def send_table(self, name: str, columns: Sequence[str], rows: _Rows, step: int) -> None:
        """Send a table."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the run in the tracker, so that a next one in this process is its own."""


class _WandbLike(Reporter):
    """Sends to a module that has `log`, `Table` and `Histogram` as Weights & Biases has them."""

    _module: Any

    def send(self, values: Mapping[str, object], histogram: Histogram | None, step: int) -> None:
        shown = {}
        if histogram is not None:
            shown[EXCESS_HISTOGRAM] = self._module.Histogram(histogram.tolist())
        # The tracker's own step counts its logs, and is never named.
        self._module.log({**values, **shown, STEP: step})

    def send_table(self, name: str, columns: Sequence[str], rows: _Rows, step: int) -> None:
        if self._initialized:
            table = self._module.Table(columns=list(columns), data=list(map(list, rows)))
            self._module.log({name: table, STEP: step})

    def _config(self, args: TrainingArguments, state: TrainerState, model: _Student) -> JsonObject:
        """Say what the run is, and add the arguments of its trainer and its model's config."""
        about = {"steps": state.max_steps, "trainer": args.to_dict()}  # type: ignore[no-untyped-call]
        if model is not None:
            about["student_config"] = model.config.to_dict()
        # As JSON has it: W&B would write the names of Enum members, not their values.
        config: JsonObject = json.loads(
            json.dumps({**self._tracking().config, **about}, default=str)
        )
        return config


class _Wandb(_WandbLike, WandbCallback):  # type: ignore[misc]
    """As transformers' with WANDB_WATCH and WANDB_LOG_MODEL, and offline where it has to be."""

    def setup(
        self, args: TrainingArguments, state: TrainerState, model: _Student, **_: object
    ) -> None:
        self._initialized, self._module = True, self._wandb
        if not state.is_world_process_zero:
            return
        place, directory = self._tracking().place(), Path(str(args.output_dir))
        place["project"] = place["project"] or os.environ.get("WANDB_PROJECT", args.project)
        place["name"] = place["name"] or args.run_name
        place["config"] = self._config(args, state, model)
        if self._wandb.run is None:
            # What was cut off is one run with what goes on.
            known = read_place(directory) if state.global_step else {}
            try:
                note(begin_run(self._wandb, {**place, **known, "config": place["config"]}))
            except self._wandb.Error as error:
                remedy = f"change --project or --run_name, or delete {TRACKER_FILE}"
                raise ValueError(f"--report_to wandb: {error}: {remedy}") from error
        else:
            self._wandb.config.update(place["config"], allow_val_change=True)
        write_place(directory, self._wandb, place)
        self._wandb.define_metric(STEP)
        self._wandb.define_metric("*", step_metric=STEP, step_sync=True)
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients"):
            self._wandb.watch(model, log=watched, log_freq=max(100, state.logging_steps))

    def finish(self) -> None:
        if self._initialized and self._wandb.run is not None:
            self._wandb.finish()
        self._initialized = False


class _Trackio(_WandbLike, TrackioCallback):  # type: ignore[misc]
    def setup(
        self, args: TrainingArguments, state: TrainerState, model: _Student, **_: object
    ) -> None:
        args.project = self._tracking().project or args.project
        args.run_name = args.run_name or self._tracking().name
        TrackioCallback.setup(self, args, state, None)  # type: ignore[no-untyped-call]
        self._module = self._trackio
        if state.is_world_process_zero:
            self._trackio.config.update(self._config(args, state, model), allow_val_change=True)


class _TensorBoard(Reporter, TensorBoardCallback):
    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        super().on_train_begin(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.tb_writer:
            config = json.dumps(dict(self._tracking().config), indent=2, default=str)
            self.tb_writer.add_text("config", f"```json\n{config}\n```")

    @property
    def _initialized(self) -> bool:  # type: ignore[override]
        return self.tb_writer is not None

    def setup(self, args: TrainingArguments, state: TrainerState, model: _Student) -> None:
        # Closed at the end of the training, before its last evaluation.
        self._init_summary_writer(args)  # type: ignore[no-untyped-call]

    def send(self, values: Mapping[str, object], histogram: Histogram | None, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.tb_writer.add_scalar(name, value, step)
        if histogram is not None:
            self.tb_writer.add_histogram(EXCESS_HISTOGRAM, histogram, step)
        self.tb_writer.flush()

    def send_table(self, name: str, columns: Sequence[str], rows: _Rows, step: int) -> None:
        if self.tb_writer:
            shown = [[str(cell) for cell in row] for row in (columns, *rows)]
            self.tb_writer.add_text(name, markdown_table(shown), step)


_REPORTERS: dict[type[TrainerCallback], type[Reporter]] = {
    WandbCallback: _Wandb,
    TrackioCallback: _Trackio,
    TensorBoardCallback: _TensorBoard,
}


def replace_reporters(
    trainer: Trainer, tracking: Callable[[], Tracking], histogram: Callable[[], Histogram | None]
) -> list[Reporter]:
    """Put reporters in the place of Trainer's own callbacks, and return them."""
    found = []
    for callback in list(trainer.callback_handler.callbacks):
        # A user's own subclass stays.
        if ours := _REPORTERS.get(type(callback)):
            trainer.remove_callback(callback)
            found.append(ours(tracking, histogram))
            trainer.add_callback(found[-1])
    return found
