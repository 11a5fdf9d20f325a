"""Resume a Trainer's runs: checkpoints, signals, and a log without a gap.

The loop is transformers'. Overridden, without the public `train`, `evaluate` and `log`: the private
methods in which the loop saves and loads.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from vocagnolm.dist import decided_by_one
from vocagnolm.host.manifest import written_files
from vocagnolm.host.trackers import Tracking
from vocagnolm.run import checkpoints, relayout
from vocagnolm.run.config import check_arguments
from vocagnolm.run.metrics import GuidanceMetrics
from vocagnolm.run.mixture import MixedSampler, Mixture
from vocagnolm.run.preemption import Preemption
from vocagnolm.run.reporting import replace_reporters
from vocagnolm.run.throughput import Phases

_OVERRIDDEN = (
    "_save_checkpoint _determine_best_metric _load_from_checkpoint "
    "_load_optimizer_and_scheduler _load_best_model _get_train_sampler "
    "_prepare_inputs"
).split()


@dataclass(eq=False)
class StepSampler(Sampler[int]):
    """Draw the blocks of every step as another sampler does; of these, the widest come first.

    So rows of like width share a micro-batch, all processes read like widths at a time, and the
    most memory is needed at the beginning.
    """

    sampler: MixedSampler | SeedableRandomSampler
    per_step: int
    # Of all blocks; without them the order stays.
    widths: Sequence[int] | npt.NDArray[np.int64] | None
    # Returns the number of steps made, which tells the epoch.
    step: Callable[[], int]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        # Accelerate does not tell every sampler the epoch.
        self.sampler.set_epoch(self.step() // max(1, len(self) // self.per_step))
        # A step that lacks blocks is filled with its first ones.
        if self.widths is None or len(self) < self.per_step:
            return iter(self.sampler)
        drawn = BatchSampler(self.sampler, self.per_step, drop_last=True)
        widest_first = partial(sorted, key=self.widths.__getitem__, reverse=True)
        return chain.from_iterable(map(widest_first, drawn))


class ResumableTrainer(Trainer):
    """A Trainer whose runs end alike however often they are cut off and resumed.

    Checkpoints hold the sums of the log too, so that the log of a resumed run is that of an
    uninterrupted one, but for the entries `vocagnolm.run.throughput.TIMING_KEYS`.

    Attributes:
        orders_steps: begin steps of several micro-batches with their widest blocks, where the data
            say `teacher_tokens`.
        tracking: what `--report_to` shows of the run beside its logs; set it before `train`.
    """

    def __init__(self, **given: Any):
        given["args"] = given.get("args") or TrainingArguments("tmp_trainer")
        check_arguments(given["args"])
        super().__init__(**given)
        for name in _OVERRIDDEN:
            if name not in dir(Trainer):
                raise ImportError(
                    f"this transformers has no Trainer.{name}, within which checkpoints are made "
                    "complete or read: install transformers<6"
                )
        self.metrics = GuidanceMetrics(self.args.device)
        self.preemption = Preemption()
        self.add_callback(self.preemption)
        self.orders_steps, self.tracking = False, Tracking()
        self.reporters = replace_reporters(
            self, lambda: self.tracking, lambda: self.metrics.excess_histogram
        )
        self.phases = Phases(self.args.device)
        self._checkpoints_kept = self.args.save_total_limit
        _keep_outputs_float32(self.accelerator)

    @property
    def blocks_per_step(self) -> int:
        """Rows of a global batch."""
        args = self.args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """End an epoch where the last whole global batch ends, of a mixture as it says."""
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        args, per_step = self.args, self.blocks_per_step
        # Not PyTorch's seed: other trainers set it too, and processes may have one each.
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler: MixedSampler | SeedableRandomSampler
        if isinstance(data, Mixture):
            sampler, data = MixedSampler(data, per_step, seed), data.blocks
        else:
            # Accelerate would repeat the first blocks until every process has a batch, and an
            # epoch's last step would depend on how many processes there are. The blocks left out
            # are others in every epoch.
            if not isinstance(given := super()._get_train_sampler(train_dataset), RandomSampler):
                return given
            kept = len(data) // per_step * per_step or len(data)
            sampler = SeedableRandomSampler(data, num_samples=kept, data_seed=seed)
        # A step that is one micro-batch has nothing to gain.
        is_split = self.orders_steps and per_step > args.train_batch_size
        widths = getattr(data, "teacher_tokens", None) if is_split else None
        return StepSampler(sampler, per_step, widths, lambda: self.state.global_step)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train, from the beginning or from a checkpoint, of which True is the newest good one.

        After a signal it returns early, with everything saved and `preemption.is_agreed`.

        Raises:
            ValueError: there is no good checkpoint.
        """
        if resume_from_checkpoint is True:
            directory = str(self.args.output_dir)
            resume_from_checkpoint = decided_by_one(lambda: checkpoints.find_checkpoint(directory))
            if resume_from_checkpoint is None:
                raise ValueError(f"{directory} holds no good checkpoint to resume from")
        path = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self.metrics.restore(path, self.args.process_index, self.args.world_size)
        kept, evaluates = self.args.save_total_limit, self.args.eval_on_start
        self._checkpoints_kept = kept
        # transformers would rotate before the newest is complete; `_save_checkpoint` does it after.
        self.args.save_total_limit = None
        # The log of a resumed run has its first evaluation already.
        self.args.eval_on_start = evaluates and path is None
        try:
            with self.preemption.listening():
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.save_total_limit, self.args.eval_on_start = kept, evaluates
        return output._replace(training_loss=output.metrics["train_loss"])

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights of a checkpoint, whatever layout it was saved under."""
        if self._is_of_another_layout(resume_from_checkpoint):
            relayout.load_weights(
                Path(resume_from_checkpoint), self.student if model is None else model
            )
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's state, whatever layout it was saved under, and the schedule."""
        if checkpoint is None or not self._is_of_another_layout(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        relayout.load_optimizer(Path(checkpoint), self.optimizer)
        schedule = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights, perhaps of before a change of layout."""
        best = str(self.state.best_model_checkpoint)
        if self._is_of_another_layout(best):
            relayout.load_weights(Path(best), self.student)
        else:
            super()._load_best_model()

    @property
    def student(self) -> nn.Module:
        """The model, as it was given."""
        assert isinstance(self.model, nn.Module)
        return self.model

    def _is_of_another_layout(self, checkpoint: str) -> bool:
        # Before PyTorch reads it: a path may be given, or crafted, which nobody has checked.
        relayout.check_indices(Path(checkpoint))
        return relayout.is_of_another_layout(Path(checkpoint), self.is_fsdp_enabled)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Save a run that was asked to stop, where only the best is saved otherwise."""
        return super()._determine_best_metric(metrics, trial) or self.preemption.must_save

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a whole checkpoint, or none."""
        # All wait twice: until there is room, and until every process has written its files.
        # Only then does the first declare the checkpoint complete, and remove older ones.
        with self.phases.within("checkpoint"):
            step, world_size = self.state.global_step, self.args.world_size
            path = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
            if self.is_world_process_zero():
                checkpoints.make_room(path)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.metrics.save(path, self.args.process_index)
            self.accelerator.wait_for_everyone()
            # Every process sees its own files, even on a network file system. All of their names
            # from everyone would be a number of names that grows with the square of the processes.
            (known,) = broadcast_object_list([written_files(path)])
            seen = {*known}.union(*gather_object([{*written_files(path)} - {*known}]))
            if self.is_world_process_zero():
                checkpoints.finish(path, step, world_size, sorted(seen))
                checkpoints.rotate(path, self._checkpoints_kept, self.state.best_model_checkpoint)
            # A process that left now would take the first one with it.
            self.accelerator.wait_for_everyone()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, in a phase of its own."""
        with self.phases.within("evaluation"):
            return super().evaluate(*args, **kwargs)

    def save_progress(self) -> str | None:
        """Save a checkpoint of the last completed step, if it has none; None before the first."""
        if not self.state.global_step:
            return None
        path = Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # All processes save, or none.
        exists = torch.full((1,), int(checkpoints.is_complete(path)), device=self.args.device)
        if not self.accelerator.reduce(exists, "sum").item():
            self._save_checkpoint(self.student, trial=None)
        return str(path)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last log, and at the end the mean loss of the whole run."""
        # Trainer's own sums of the loss are lost with the process, and are NaN after a bad step.
        over = partial(self.accelerator.reduce, reduction="sum"), self.accelerator.num_processes
        if "loss" in logs:
            logs |= {"loss": math.nan} | self.metrics.read(*over)
            # Those of skipped steps.
            for name in ("loss", "grad_norm"):
                if not math.isfinite(logs.get(name, 0.0)):
                    del logs[name]
        elif "train_loss" in logs:
            logs["train_loss"] = self.metrics.mean_loss(self.state.log_history, *over)
        super().log(logs, start_time)

    def report_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int
    ) -> None:
        """Show a table in all trackers of `--report_to`."""
        for reporter in self.reporters:
            reporter.send_table(name, columns, rows, step)

    def finish_reports(self) -> None:
        """End the run in all trackers, as nothing more will be logged."""
        for reporter in self.reporters:
            reporter.finish()


def _keep_outputs_float32(accelerator: Accelerator) -> None:
    """Undo two defaults of Accelerate's FSDP2 under mixed precision."""
    # It casts the outputs of the model's forward, as losses that are to be ranked, and reduces
    # gradients in the parameters' bfloat16 or float16.
    if accelerator.is_fsdp2 and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy):
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=torch.float32
        )
