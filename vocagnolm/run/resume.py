"""Resume runs: whole checkpoints, one order of the data, signals, and a log without a gap.

The loop is transformers'. Overridden beside the public `train` and `log`: the private methods in
which it draws the order of the data and saves checkpoints. However a run is killed, the order of
writes leaves no half checkpoint under its name:

    transformers        .saving/checkpoint-8: weights, optimizer, schedule, random states, state
    metrics             .saving/checkpoint-8/metrics_<process>.safetensors
    finish_checkpoint   the manifest of sizes, when all processes have written; then the rename
    rotate              the oldest go
"""

import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import RandomSampler, Sampler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.dist import rank0
from vocagnolm.doors import how_to_go_on
from vocagnolm.extras import check_transformers, unsupported
from vocagnolm.io import (
    MANIFEST_FILE,
    RUN_FILE,
    check_writable,
    differences,
    json_or_empty,
    size_fault,
    told_of_full_disk,
    write_json,
)
from vocagnolm.run.config import VocAgnoConfig
from vocagnolm.run.metrics import NO_BLOCK, GuidanceMetrics

logger = logging.getLogger(__name__)

_SAVING, _REPLACED = ".saving", "-replaced"
# A network file system may list another machine's files, and drop a dead one's lock, so late.
_VISIBLE_S, _LOCK_S = 60, 120
_OVERRIDDEN = "_get_output_dir _save_checkpoint _determine_best_metric _get_train_sampler".split()
Settings = Mapping[str, object]


# -- The directory of a run --------------------------------------------------------------------


def check_settings(directory: Path, settings: Settings, checkpoint: str | None = None) -> None:
    """Check that a directory, and a checkpoint that may be of another, are of a run like this one.

    Raises:
        ValueError: settings differ, or nothing can be written there.
    """
    check_writable(directory)
    before = json_or_empty(directory / RUN_FILE)
    # Settings alone bind nobody: a run that was stopped before it saved may be given others.
    progress = chain(directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), directory.glob("*.safetensors"))
    if before and any(progress) and (changed := differences(before, settings, prefix="--")):
        raise ValueError(
            f"{directory} holds a run with other settings ({'; '.join(changed)}): give another "
            "--output_dir"
        )
    if checkpoint and (fault := checkpoint_fault(checkpoint, settings)):
        raise ValueError(f"{checkpoint}: {fault}")


_held: dict[Path, FileLock] = {}


def claim(directory: Path, settings: Settings) -> None:
    """Lock the directory of a run until `release` or the end of this process; write its settings.

    Raises:
        ValueError: another process keeps the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = _held.setdefault(directory.resolve(), FileLock(directory / ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another run that writes to %s", directory)
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise ValueError(
                f"--output_dir {directory} is written to by another run: stop it, or give another"
            ) from None
    write_json(directory / RUN_FILE, settings)


def release(directory: Path) -> None:
    """Unlock a directory that `claim` has locked."""
    if lock := _held.pop(directory.resolve(), None):
        lock.release(force=True)


def finish_run(directory: Path, names: Collection[str]) -> None:
    """Write the manifest of a final model, which has files of these names."""
    files = {name: (directory / name).stat().st_size for name in (*names, TRAINER_STATE_NAME)}
    write_json(directory / MANIFEST_FILE, {"files": files})


def is_finished(directory: Path) -> bool:
    """Test whether a run has saved its model; the card is written last.

    Raises:
        ValueError: a file is damaged, and there is no checkpoint to write it again from.
    """
    files = json_or_empty(directory / MANIFEST_FILE).get("files")
    if not files or not (directory / "README.md").exists():
        return False
    if not (fault := size_fault(directory, files)):
        return True
    fault = f"{directory} holds a finished run, but {fault}"
    if newest_checkpoint(directory) is None:
        raise ValueError(f"{fault}, and no checkpoint: give another --output_dir")
    logger.warning("%s: writing it again from the newest checkpoint", fault)
    return False


# -- Checkpoints -------------------------------------------------------------------------------


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, whole or not."""
    found = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?", path.name):
            found[path] = int(match[1]), match[2] is None
    return sorted(found, key=found.__getitem__, reverse=True)


def step_of(checkpoint: str | Path) -> int:
    """Read the step of a checkpoint, whatever its name; 0 if it has none."""
    return int(json_or_empty(Path(checkpoint) / TRAINER_STATE_NAME).get("global_step", 0))


def checkpoint_fault(checkpoint: str | Path, settings: Settings | None = None) -> str | None:
    """Describe why a run with these settings cannot resume from a checkpoint; None if it can."""
    path = Path(checkpoint)
    if not path.is_dir():
        return "no such directory"
    manifest = json_or_empty(path / MANIFEST_FILE)
    if not (files := manifest.get("files")):
        return f"it has no {MANIFEST_FILE}: it was not finished, or another tool wrote it"
    if fault := size_fault(path, files):
        return fault
    before = manifest.get("run")
    if before and settings and (changed := differences(before, settings, prefix="--")):
        return f"it is of a run with other settings ({'; '.join(changed)})"
    return None


def check_same_run(checkpoint: Path, settings: Settings) -> None:
    """Raise a ValueError for a checkpoint of a run with other settings."""
    before = json_or_empty(checkpoint / MANIFEST_FILE).get("run")
    if before and settings and (changed := differences(before, settings, prefix="--")):
        raise ValueError(
            f"{checkpoint} is of a run with other settings ({'; '.join(changed)}): give another "
            "--output_dir, and begin anew"
        )


def newest_checkpoint(directory: Path, settings: Settings | None = None) -> str | None:
    """Return the newest checkpoint that a run can resume from; warn of newer ones."""
    for path in checkpoints(directory):
        if (fault := checkpoint_fault(path, settings)) is None:
            return str(path)
        logger.warning("not resuming from %s: %s", path, fault)
    return None


def resolve(given: str | None, directory: Path, settings: Settings | None = None) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, None to begin anew.

    "auto" is the newest good one, if any. A path is where the run begins; once it has saved a later
    step it resumes from there, so that a scheduler may start the same command again.

    Raises:
        ValueError: a path was given and the run cannot resume from there.
    """
    newest = newest_checkpoint(directory, settings)
    if given is None or given == "auto":
        return newest
    if newest is not None and step_of(newest) > step_of(given):
        return newest
    if fault := checkpoint_fault(given, settings):
        raise ValueError(f"--resume_from_checkpoint {given}: {fault}")
    return given


def sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory by their names, once they are on the disk."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found


def finish_checkpoint(staged: Path, final: Path, about: Settings, files: Mapping[str, int]) -> None:
    """Write the manifest of a staged checkpoint, and give it its name.

    Raises:
        OSError: a file that another machine has written does not appear here.
    """
    for _ in range(_VISIBLE_S):
        missing = [name for name in files if not (staged / name).exists()]
        if not missing:
            break
        time.sleep(1)
    else:
        raise OSError(
            f"{staged} lacks {missing[0]}, which another process has written: --output_dir must be "
            "a directory that all machines share"
        )
    write_json(staged / MANIFEST_FILE, {**about, "files": files})
    _flush(staged)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    staged.parent.rmdir()


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk; flushing a file does not flush its name."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond a limit, if there is one; the newest and best stay."""
    kept = {newest.name, Path(best or newest).name}
    others = [path for path in checkpoints(newest.parent) if path.name not in kept]
    if limit:
        for path in others[max(limit - len(kept), 0) :]:
            shutil.rmtree(path, ignore_errors=True)


# -- The order of the data ----------------------------------------------------------------------


def mixed_counts(sizes: Sequence[float], weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Count what an epoch reads of each corpus, whose packed sequences have these numbers.

    Every corpus is read at least once, and in shares of the weights.
    """
    shares = np.asarray(weights) / np.sum(weights)
    # Rounded first, as 700 / 0.7 is a little more than 1000.
    total = np.ceil((np.asarray(sizes) / shares).max().round(6))
    counts: npt.NDArray[np.int64] = np.round(shares * total).astype(np.int64)
    return counts


def mixed_order(
    sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Draw the indices of an epoch's packed sequences; those of each corpus come in passes."""
    rng = np.random.default_rng([seed, epoch])
    counts = mixed_counts(sizes, weights)
    corpus = rng.permutation(np.repeat(np.arange(len(sizes)), counts))
    order, first = np.empty(len(corpus), np.int64), 0
    for i, size in enumerate(sizes):
        passes = [rng.permutation(size) for _ in range(-(-counts[i] // size))]
        order[corpus == i] = first + np.concatenate(passes)[: counts[i]]
        first += size
    return order


@dataclass(eq=False)
class StepSampler(Sampler[int]):
    """Draw an epoch of whole steps, each with its widest packed sequences first.

    So rows of like width share a micro-batch, all processes read like widths at a time, and the
    most memory is needed at the beginning.

    Attributes:
        sizes: packed sequences of each corpus.
        weights: shares of the corpora; without them all sequences are read once.
        widths: of all packed sequences; without them the order stays.
        step: returns the number of steps made, and so the epoch.
    """

    sizes: Sequence[int]
    weights: Sequence[float] | None
    seed: int
    per_step: int
    widths: npt.NDArray[np.int64] | None
    step: Callable[[], int]

    def __len__(self) -> int:
        mixed = self.weights and mixed_counts(self.sizes, self.weights).sum()
        count = int(mixed or sum(self.sizes))
        # Accelerate would repeat the first sequences until every process has a batch, and an
        # epoch's last step would depend on how many processes there are. Those left out are others
        # in every epoch.
        return count // self.per_step * self.per_step or count

    def __iter__(self) -> Iterator[int]:
        epoch = self.step() // max(1, len(self) // self.per_step)
        if self.weights:
            drawn = mixed_order(self.sizes, self.weights, self.seed, epoch)
        else:
            # As Accelerate draws them.
            generator = torch.Generator().manual_seed(self.seed + epoch)
            drawn = torch.randperm(sum(self.sizes), generator=generator).numpy()
        drawn = drawn[: len(self)]
        # A step that lacks sequences is filled with its first ones.
        if self.widths is not None and len(drawn) >= self.per_step:
            steps = drawn.reshape(-1, self.per_step)
            widest_first = np.argsort(-self.widths[steps], axis=1, kind="stable")
            drawn = np.take_along_axis(steps, widest_first, axis=1).ravel()
        return iter(drawn.tolist())


# -- Signals -----------------------------------------------------------------------------------


class Preemption(TrainerCallback):
    """Stop after the step in which SIGTERM, SIGUSR1 or a first Ctrl-C came to any process.

    All processes learn of it in the reduction that `StepGuard` makes before every update.

    Attributes:
        is_asked: this process was asked to stop.
        is_agreed: all processes stop after this step, or have stopped with everything saved.
        saved_step: the step of the newest checkpoint of this process; -1 while there is none.
    """

    def __init__(self) -> None:
        self.is_asked, self.is_agreed, self.saved_step = False, False, -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside; only the main thread can."""
        self.is_asked = self.is_agreed = False
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if is_main else ()
        before = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _ask(self, number: int, frame: object) -> None:
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Launchers pass a signal on to all processes of a machine.
        if not self.is_asked and os.environ.get("LOCAL_RANK", "0") == "0":
            # Safe inside a signal handler, where a buffered stream is not.
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())
        self.is_asked = True

    def on_epoch_end(self, args: object, state: TrainerState, control: Any, **_: object) -> None:
        """Ask for a checkpoint, if there is none of this state; this event follows every stop."""
        if not self.is_agreed:
            return
        # A stop inside an epoch leaves its end's log and evaluation to the run that resumes.
        if state.epoch is None or not float(state.epoch).is_integer():
            control.should_log = control.should_evaluate = False
        is_saved = self.saved_step == state.global_step
        control.should_save = control.should_log or control.should_evaluate or not is_saved


# -- The guard of the updates ------------------------------------------------------------------


class StepGuard(TrainerCallback):
    """Let no update be made that rests on a NaN; stop after this step if a signal asks.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. One in the gradient would be saved with the student.
    The check makes one host-device sync per optimizer step, none per micro-batch.

    Args:
        trainer: its metrics have the losses of the step.
        max_bad_steps: steps in a row that may be skipped; one more stops the run, after the
            student's last good state is saved.
    """

    def __init__(self, trainer: "ResumableTrainer", max_bad_steps: int):
        self._trainer, self._max_bad_steps = trainer, max_bad_steps

    def on_pre_optimizer_step(self, args: object, state: Any, control: Any, **given: Any) -> None:
        """Skip the update, or stop, if a loss or a gradient is not finite on any process."""
        model: nn.Module = given["model"]
        metrics, preemption = self._trainer.metrics, self._trainer.preemption
        # One maximum over processes of four numbers, each -1 or 0 where all is well:
        #     bad sequence of the student | of the teacher | gradient is bad | asked to stop
        gradient = self._gradient_fault(model)
        asked = torch.full_like(gradient, preemption.is_asked)
        worst = torch.cat([metrics.bad_blocks, torch.stack([gradient, asked])])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst, op=ReduceOp.MAX)
        *faults, is_asked = worst.tolist()
        if is_asked:
            preemption.is_agreed = control.should_training_stop = True
        if max(faults) == NO_BLOCK:
            metrics.keep_step()
        else:
            self._skip_or_stop(model, state.global_step + 1, *faults)

    def _gradient_fault(self, model: nn.Module) -> Tensor:
        """0 if this process's gradients are not finite, else -1; without a host-device sync."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if not gradients or self._trainer.accelerator.scaler is not None:
            # float16's scaler meets infinities as a matter of course, and skips the step itself.
            return torch.full((), NO_BLOCK, device=self._trainer.args.device)
        # Offloaded gradients are on another device than the losses.
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        return is_finite.long().neg().to(self._trainer.args.device)

    def _skip_or_stop(
        self, model: nn.Module, step: int, student: int, teacher: int, gradient: int
    ) -> None:
        """Make no update, on all processes alike."""
        trainer, metrics = self._trainer, self._trainer.metrics
        if teacher != NO_BLOCK:
            fault = f"the teacher's losses are NaN or infinite in packed sequence {teacher}"
            advice = "load it in another precision (--teacher_dtype float32) or use another one"
        elif student != NO_BLOCK:
            fault = f"the student's losses are NaN or infinite in packed sequence {student}"
            advice = "lower --learning_rate, or look at the text of this sequence"
        else:
            fault = "the student's gradient is NaN or infinite, though all losses are finite"
            advice = "lower --learning_rate, or train without bf16 and fp16 to see its source"
        if metrics.bad_steps >= self._max_bad_steps:
            saved = trainer.save_progress()
            before = f"the state before it is in {saved}" if saved else "and none before"
            raise NonFiniteLoss(f"step {step}: {fault}; no update was made, {before}; {advice}")
        metrics.drop_step()
        # An optimizer passes over parameters without a gradient, and leaves their state alone.
        model.zero_grad(set_to_none=True)
        if trainer.is_world_process_zero():
            logger.warning(
                "step %d: %s; no update was made (%d in a row, --max_bad_steps %d)",
                *(step, fault, metrics.bad_steps, self._max_bad_steps),
            )


# -- The trainer -------------------------------------------------------------------------------


class ResumableTrainer(Trainer):
    """A Trainer whose runs end alike however often they are cut off and resumed.

    Checkpoints hold the sums of the log too, so the log of a resumed run is that of an
    uninterrupted one, without its entries of speed, memory and time.

    Attributes:
        settings: of the run, kept in its checkpoints, which resume under the same only.
        orders_steps: begin steps of several micro-batches with their widest packed sequences.
    """

    def __init__(self, args: VocAgnoConfig, **given: Any):
        check_transformers()
        for name in _OVERRIDDEN:
            if not hasattr(Trainer, name):
                raise unsupported(f"has no Trainer.{name}")
        super().__init__(args=args, **given)
        if self.args.load_best_model_at_end and self.args.save_total_limit == 1:
            # Trainer would end a stopped run with the best checkpoint alone.
            self.args.save_total_limit = 2
        self.settings: Settings = {}
        self.orders_steps = self._is_saving = False
        self.metrics, self.preemption = GuidanceMetrics(self.accelerator), Preemption()
        self.add_callback(self.preemption)
        self.add_callback(StepGuard(self, args.max_bad_steps))
        # Under mixed precision Accelerate's FSDP2 casts the outputs of the forward, as losses that
        # are to be ranked, and reduces gradients in 16 bits.
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is not None and (policy := plugin.mixed_precision_policy):
            plugin.mixed_precision_policy = MixedPrecisionPolicy(policy.param_dtype, torch.float32)

    @property
    def blocks_per_step(self) -> int:
        """Packed sequences of a global batch."""
        args = self.args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """End an epoch where the last whole global batch ends."""
        if not isinstance(given := super()._get_train_sampler(train_dataset), RandomSampler):
            return given
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        args, per_step = self.args, self.blocks_per_step
        weights = getattr(data, "weights", None)
        sizes = list(data.parts.values()) if weights else [len(data)]
        # Not PyTorch's seed: other trainers set it too, and processes may have one each.
        seed = args.seed if args.data_seed is None else args.data_seed
        # A step that is one micro-batch has nothing to gain.
        is_split = self.orders_steps and per_step > args.train_batch_size
        widths = getattr(data, "teacher_tokens", None) if is_split else None
        return StepSampler(sizes, weights, seed, per_step, widths, lambda: self.state.global_step)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train, from the beginning or from a checkpoint, of which True is the newest good one.

        After a signal it returns early, with everything saved and `preemption.is_agreed`.

        Raises:
            ValueError: there is no good checkpoint, or it was saved with another sharding.
        """
        directory = Path(str(self.args.output_dir))
        if resume_from_checkpoint is True:
            resume_from_checkpoint = rank0(lambda: newest_checkpoint(directory))
            if resume_from_checkpoint is None:
                raise ValueError(f"{directory} holds no good checkpoint to resume from")
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if checkpoint:
            rank0(lambda: check_same_run(checkpoint, self.settings))
            self._check_layout(checkpoint)
        elif self.is_world_process_zero() and (before := checkpoints(directory)):
            logger.warning(
                "%s holds a run, whose log and checkpoints this one overwrites: "
                "train(resume_from_checkpoint=True) goes on from %s, and another output_dir keeps "
                "both",
                *(directory, before[0].name),
            )
        self.metrics.restore(checkpoint)
        if self.is_world_process_zero():
            # What a killed save has left: files of other processes would pass for new ones.
            shutil.rmtree(directory / _SAVING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        # The log of a resumed run has its first evaluation already.
        evaluates = self.args.eval_on_start
        self.args.eval_on_start = evaluates and checkpoint is None
        try:
            with self.preemption.listening(), told_of_full_disk(directory, self.what_is_safe):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = evaluates
        return output._replace(training_loss=output.metrics["train_loss"])

    def what_is_safe(self) -> str:
        """Make room of what was not finished, and say from where the run goes on."""
        directory = Path(str(self.args.output_dir))
        shutil.rmtree(directory / _SAVING, ignore_errors=True)
        whole = next((x.name for x in checkpoints(directory) if not checkpoint_fault(x)), None)
        if whole is None:
            return f"Nothing was saved yet: free some room, and {how_to_go_on()} begins again"
        return f"{whole} is whole: free some room, and {how_to_go_on()} goes on from there"

    def _check_layout(self, checkpoint: Path) -> None:
        """Reject a checkpoint of another sharding; warn of another number of processes."""
        is_sharded = any(checkpoint.glob("pytorch_model_fsdp*"))
        if is_sharded != self.is_fsdp_enabled:
            how = "with" if is_sharded else "without"
            raise ValueError(
                f"{checkpoint} was saved {how} FSDP: resume {how} it, or begin a new run with the "
                "student that `vocagnolm export` writes"
            )
        before = json_or_empty(checkpoint / MANIFEST_FILE).get("world_size", self.args.world_size)
        if before != self.args.world_size and self.is_world_process_zero():
            logger.warning(
                "%s was saved by %d processes, and %d resume: the global batches stay the same, "
                "dropout does not",
                *(checkpoint, before, self.args.world_size),
            )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Save a run that was asked to stop, where only the best is saved otherwise."""
        return super()._determine_best_metric(metrics, trial) or self.preemption.is_agreed

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory of the run, or the one in it where a checkpoint is being written."""
        directory = str(super()._get_output_dir(trial))
        return os.path.join(directory, _SAVING) if self._is_saving else directory

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a whole checkpoint or none: stage it, and rename it when all have written."""
        state, name = self.state, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        directory = Path(self._get_output_dir(trial))
        staged, final = directory / _SAVING / name, directory / name
        known_best = state.best_model_checkpoint
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        self.metrics.save(staged)
        # transformers has looked for the best one among those that are being written.
        best = directory / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        is_there = best == final or best.exists()
        state.best_model_checkpoint = str(best) if is_there else known_best
        if self.is_world_process_zero():
            state.save_to_json(str(staged / TRAINER_STATE_NAME))
        self.accelerator.wait_for_everyone()
        # On a network file system a machine sees its own files whole, and those of others late.
        is_first = self.is_local_process_zero()
        files: dict[str, int] = {}
        for seen in gather_object([sizes(staged) if is_first else {}]):
            files |= {file: max(size, files.get(file, 0)) for file, size in seen.items()}
        if self.is_world_process_zero():
            about = {"world_size": self.args.world_size, "run": self.settings}
            finish_checkpoint(staged, final, about, files)
            rotate(final, self.args.save_total_limit, state.best_model_checkpoint)
        self.preemption.saved_step = state.global_step
        # A process that left now would take the first one with it.
        self.accelerator.wait_for_everyone()

    def save_progress(self) -> str | None:
        """Save a checkpoint of the last completed step, if it has none; None before the first."""
        if not self.state.global_step:
            return None
        path = Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # All processes save, or none.
        if not rank0((path / MANIFEST_FILE).exists):
            self._save_checkpoint(cast(nn.Module, self.model), trial=None)
        return str(path)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics since the last log, and at the end the mean loss of the whole run."""
        # Trainer's own sums of the loss are lost with the process, and are NaN after a bad step.
        if "loss" in logs:
            logs |= {"loss": math.nan} | self.metrics.read()
            # Those of skipped steps.
            for name in ("loss", "grad_norm"):
                if not math.isfinite(logs.get(name, 0.0)):
                    del logs[name]
        elif "train_loss" in logs:
            logs["train_loss"] = self.metrics.mean_loss(self.state.log_history)
        super().log(logs, start_time)
