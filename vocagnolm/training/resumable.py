"""A Trainer whose runs resume: complete checkpoints, one order of the data, a log without gaps.

The loop is transformers'. This class overrides the public `log`, and the private methods in which
Trainer orders the data and saves checkpoints. Because of the order of writes, a kill at any point
leaves no incomplete checkpoint under a checkpoint's name:

    transformers        .saving/checkpoint-8: weights, optimizer, schedule, random states, state
    metrics             .saving/checkpoint-8/metrics_<process>.safetensors
    finish_checkpoint   the manifest of sizes, when all processes have written; then the rename
    rotate              the oldest go
"""

import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import TorchDynamoPlugin, gather_object
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import RandomSampler, Sampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.fields import at_shell
from vocagnolm.record import Record
from vocagnolm.shell.dist import rank0
from vocagnolm.shell.extras import unsupported
from vocagnolm.shell.io import MANIFEST_FILE, explain_full_disk
from vocagnolm.training import run_directory
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.guard import Preemption, StepGuard
from vocagnolm.training.log import RunLog, SilentBar
from vocagnolm.training.metrics import GuidanceMetrics
from vocagnolm.training.sampler import StepSampler
from vocagnolm.training.throughput import Throughput

logger = logging.getLogger(__name__)

# Checkpoints are written in this directory of the run, and then moved by a rename.
_SAVING = ".saving"
# These private methods of Trainer are overridden. If another version lacks one, it would never be
# called, and the run would silently lose what it does.
_OVERRIDDEN = "_get_output_dir _save_checkpoint _determine_best_metric _get_train_sampler".split()


class _BestCheckpoint(TrainerCallback):
    """Finds the best checkpoint of a run whose directory was moved since it was saved."""

    def on_train_begin(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:
        """Point to where it is now."""
        # Without a checkpoint at the path that it has recorded, Trainer would end with the last
        # model.
        here = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if here.is_dir():
            state.best_model_checkpoint = str(here)


class ResumableTrainer(Trainer):
    """A Trainer whose runs end the same, however often they are interrupted and resumed.

    Train inside `resuming`. Checkpoints also have the sums of the log. So the log of a resumed run
    equals that of an uninterrupted one, except for speed, memory and time.

    Attributes:
        settings: of the run, kept in its directory and its checkpoints, which resume under the
            same only.
        skipped: documents that were left out, with the reasons, by the file that lists them.
        orders_steps: begin steps of several micro-batches with their widest packed sequences.
        throughput: measures the steps; set by a subclass, which knows its models.
    """

    throughput: Throughput

    def __init__(self, args: VocAgnoConfig, **kwargs: Any):
        for name in _OVERRIDDEN:
            if not hasattr(Trainer, name):
                raise unsupported(f"has no Trainer.{name}")
        # On a GPU, copy pinned batches while the device works.
        if args.dataloader_pin_memory and args.device.type == "cuda":
            accelerator: Any = args.accelerator_config
            accelerator.non_blocking = True
        super().__init__(args=args, **kwargs)
        # Accelerate would compile the whole model with its head, and not layers in place.
        self.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        if self.args.load_best_model_at_end and self.args.save_total_limit == 1:
            # With a limit of 1, Trainer removes all checkpoints but the best when it returns. Then
            # a run that a signal has stopped could not resume from its last step.
            self.args.save_total_limit = 2
        self.settings: Record = {}
        self.skipped: Mapping[str, Sequence[tuple[int, str]]] = {}
        self.orders_steps = False
        # True only inside `_save_checkpoint`, where it redirects files to the staging directory.
        self._is_saving = False
        self.metrics = GuidanceMetrics(self.accelerator)
        self.preemption = Preemption()
        self.add_callback(self.preemption)
        self.add_callback(_BestCheckpoint())
        self.add_callback(StepGuard(self.metrics, self.preemption, self.save_progress))
        # Trainer has a printer if progress bars are off, and a bar otherwise.
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback):
            self.add_callback(SilentBar)
        self.add_callback(RunLog())
        # Under mixed precision, Accelerate's FSDP2 would cast the outputs of the forward pass to 16
        # bits, although these are losses that will be ranked, and would reduce gradients in 16
        # bits. This policy computes in 16 bits, but does neither.
        if self.accelerator.is_fsdp2:
            plugin: Any = self.accelerator.state.fsdp_plugin
            policy = plugin.mixed_precision_policy
            if policy:
                policy = MixedPrecisionPolicy(policy.param_dtype, torch.float32)
                plugin.mixed_precision_policy = policy

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """End an epoch with its last whole global batch."""
        sampler = super()._get_train_sampler(train_dataset)
        # Trainer has no sampler for a dataset without a length, which has no order to draw.
        if not isinstance(sampler, RandomSampler):
            return sampler
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        args = self.args
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        weights = getattr(data, "weights", None)
        # Without weights, corpora need not be distinguished, because all of their sequences are
        # read once.
        sizes = list(data.parts.values()) if weights else [len(data)]
        # Take the seed from the arguments and not from PyTorch's state, which other code sets, too,
        # and which may differ between processes. All of them must draw the same order.
        seed = args.seed if args.data_seed is None else args.data_seed
        # The widths order the sequences within a step. If a step is one micro-batch of one process,
        # order does not matter.
        is_split = self.orders_steps and per_step > args.train_batch_size
        widths = getattr(data, "teacher_tokens", None) if is_split else None
        return StepSampler(sizes, weights, seed, per_step, widths, lambda: self.state.global_step)

    @contextmanager
    def resuming(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Own the run's directory, and yield the checkpoint to train from, or None.

        True is the newest good one. After a signal, training returns early, with everything saved
        and `preemption.is_agreed`.

        Raises:
            ValueError: there is no good checkpoint, it was saved with another sharding, or the
                directory has files that no run wrote.
        """
        directory = Path(str(self.args.output_dir))
        evaluates_at_start = self.args.eval_on_start
        # Own the directory first, so that no other run writes between this look and the first
        # checkpoint.
        with (
            self.owning_directory(is_new=not resume_from_checkpoint),
            explain_full_disk(directory, self.discard_partial_save),
        ):
            # Only rank 0 decides where to start. If a process saw another listing of the
            # directory, it would resume from another step.
            start = rank0(lambda: self._begin(resume_from_checkpoint))
            self.metrics.restore(Path(start) if start else None)
            # The log of a resumed run has the evaluation at the start from its first process.
            self.args.eval_on_start = evaluates_at_start and start is None
            try:
                # Signals only set a flag inside, so no step is cut off in the middle.
                with self.preemption.listening():
                    yield start
            finally:
                self.args.eval_on_start = evaluates_at_start

    def _begin(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, or None, and write whose directory this is."""
        directory = Path(str(self.args.output_dir))
        checkpoint = None
        if resume_from_checkpoint:
            checkpoint = str(resume_from_checkpoint)
            if resume_from_checkpoint is True:
                checkpoint = run_directory.newest_checkpoint(directory)
            if checkpoint is None:
                raise ValueError(f"{directory} holds no good checkpoint to resume from")
            # A path from Python has not been checked yet, and even the newest good checkpoint may
            # have other settings.
            run_directory.check_settings(directory, self.settings)
            fault = run_directory.checkpoint_fault(checkpoint, self.settings)
            # Accelerate's names of what FSDP has sharded begin like this. A run without FSDP cannot
            # read it, and one with FSDP reads nothing else.
            is_sharded = any(Path(checkpoint).glob("pytorch_model_fsdp*"))
            if is_sharded != self.is_fsdp_enabled:
                preposition = "with" if is_sharded else "without"
                fault = fault or (
                    f"it was saved {preposition} FSDP: resume {preposition} it, or begin a new run "
                    "with the student that `vocagnolm export` writes"
                )
            if fault:
                raise ValueError(f"{checkpoint}: {fault}")
            run_directory.reopen(directory, self.settings)
        # A save that was killed has left files here. The next save lists everything that it finds,
        # and would take the files of other processes for its own.
        shutil.rmtree(directory / _SAVING, ignore_errors=True)
        run_directory.describe_run(directory, self.settings, self.skipped)
        return checkpoint

    @contextmanager
    def owning_directory(self, *, is_new: bool = False) -> Iterator[None]:
        """Keep other runs out of this one's directory. A new run moves an earlier one aside."""
        owned, directory = run_directory.owned, Path(str(self.args.output_dir))
        with ExitStack() as stack:
            rank0(lambda: stack.enter_context(owned(directory, self.settings, is_new=is_new)))
            yield

    def discard_partial_save(self) -> str:
        """Remove a checkpoint that is unfinished, and say where the run can resume."""
        directory = Path(str(self.args.output_dir))
        shutil.rmtree(directory / _SAVING, ignore_errors=True)
        again = "the same command" if at_shell.get() else "train(resume_from_checkpoint=True)"
        newest = run_directory.newest_checkpoint(directory)
        if newest:
            return f"{Path(newest).name} is whole: free some room, and {again} goes on from there"
        return f"Nothing was saved yet: free some room, and {again} begins again"

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Save a run that was asked to stop, even if only the best is saved otherwise."""
        # With --save_strategy best, Trainer saves after an evaluation if and only if this is True.
        return super()._determine_best_metric(metrics, trial) or self.preemption.is_agreed

    def _get_output_dir(self, trial: Any) -> str:
        """Return the run's directory, or the one in it where a checkpoint is being written."""
        directory = str(super()._get_output_dir(trial))
        return os.path.join(directory, _SAVING) if self._is_saving else directory

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a whole checkpoint or none: stage it, and rename it when all have written."""
        state = self.state
        # Make the paths while `_get_output_dir` still returns the run's directory.
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        directory = Path(self._get_output_dir(trial))
        final = directory / name
        staged = directory / _SAVING / name
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        self.metrics.save(staged)
        # transformers finds the best checkpoint in the staging directory, if it is this one.
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(final)
        if self.is_world_process_zero():
            # The copy that transformers wrote names the staging directory.
            state.save_to_json(str(staged / TRAINER_STATE_NAME))
        self.accelerator.wait_for_everyone()
        # On a network file system, a machine sees its own files whole, and others' late. So the
        # first process of each machine lists the files, and the largest size that any of them saw
        # counts. Listing a file also flushes it to the disk.
        listing = run_directory.sizes(staged) if self.is_local_process_zero() else {}
        files: dict[str, int] = {}
        for machine_files in gather_object([listing]):
            for file, size in machine_files.items():
                files[file] = max(size, files.get(file, 0))
        if self.is_world_process_zero():
            manifest = {"world_size": self.args.world_size, "run": self.settings}
            # Remove older checkpoints after the new one has its name, so that one is complete at
            # any time.
            run_directory.finish_checkpoint(staged, final, manifest, files)
            run_directory.rotate(final, self.args.save_total_limit, state.best_model_checkpoint)
        self.preemption.saved_step = state.global_step
        # A process that returned now might end, and its launcher would then kill rank 0 in the
        # middle of the rename.
        self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of weights that a checkpoint lacks, but not of the second name of a tied head."""
        model: Any = self.model
        # These have each weight under one name.
        weights = dict(model.named_parameters()) | dict(model.named_buffers())
        missing = [name for name in load_result.missing_keys if name in weights]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def save_progress(self) -> str | None:
        """Save a checkpoint of the last completed step if it has none. None before the first."""
        if not self.state.global_step:
            return None
        path = Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # Saving is collective, so all processes save or none does. Rank 0 decides, because others
        # may see an outdated listing.
        if not rank0((path / MANIFEST_FILE).exists):
            self._save_checkpoint(cast(nn.Module, self.model), trial=None)
        return str(path)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was measured since the last log, and at the end the whole run's mean loss."""
        # Trainer keeps its sum of losses in memory, where a kill loses it, and a skipped step makes
        # it NaN. The metrics' sums are in every checkpoint.
        if "loss" in logs:
            logs |= {"loss": math.nan} | self.metrics.read() | self.throughput.read()
            # If all steps were skipped, there is no mean loss. A skipped step's gradient norm is
            # not finite, which JSON cannot express.
            for name in ("loss", "grad_norm"):
                if not math.isfinite(logs.get(name, 0.0)):
                    del logs[name]
        elif "train_loss" in logs:
            logs["train_loss"] = self.metrics.mean_loss(self.state.log_history)
        super().log(logs, start_time)

    def store_flos(self) -> None:
        """Add the FLOPs of student and teachers since the last call, if they can be counted."""
        flops = self.throughput.new_flops()
        # Otherwise, Trainer has made an estimate of the student's.
        if flops is not None:
            self.current_flos = flops
        super().store_flos()
