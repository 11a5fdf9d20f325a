"""Time and disk that a run is going to take, before it has made a step."""

import json
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers.trainer_utils import SaveStrategy

from vocagnolm.data import Segments
from vocagnolm.dist import cores
from vocagnolm.io import duration
from vocagnolm.run.callbacks import LOG_FILE
from vocagnolm.run.config import RunArguments
from vocagnolm.run.documents import Documents, processes_of
from vocagnolm.run.job import Job
from vocagnolm.run.memory import student_layout
from vocagnolm.run.pair import Pair
from vocagnolm.run.throughput import model_work

_GB = 1e9
# Student tokens that one core prepares in a second (docs/running.md).
_PREPARED_TOKENS_PER_S = 360_000
# Training beside a single product of its matrices: there are smaller ones, losses, and the update.
_SHARE_OF_PRODUCT = 0.5
_TIMED_S = 0.2
# A parameter in a file, and AdamW's moments of one.
_WEIGHT, _MOMENTS = 4, 8
# Bytes of a store for a teacher token (PlanetMath).
_STORED = 3.05


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run is going to write below a directory, and those that are there for it."""

    what: str
    directory: Path
    needed: float
    free: float

    def __str__(self) -> str:
        return (
            f"{self.needed / _GB:.3g} GB for {self.what} in {self.directory} "
            f"({self.free / _GB:.3g} GB free)"
        )

    @property
    def fault(self) -> str | None:
        """The message that it does not fit, if it does not."""
        if self.needed <= self.free:
            return None
        return f"not enough disk: {self}: free some, or give another directory"


def steps_of(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of a run; None if nobody knows how large its corpus is."""
    run, per_step = job.run, job.run.global_batch_tokens // job.pack.max_length
    if run.max_steps > 0:
        return run.max_steps
    if documents.total is None:
        return None
    # Of a corpus that was read in part, the rest is taken to be like it.
    return int(np.ceil(run.num_train_epochs * documents.steps(per_step)))


def disk_uses(job: Job, pair: Pair, documents: Documents) -> list[DiskUse]:
    """Estimate all that a run writes, directory by directory."""
    run, sizes, output_dir = job.run, pair.student_sizes, Path(job.run.output_dir)
    saved = sizes.trained if job.model.use_peft else sizes.parameters
    checkpoint = _WEIGHT * saved + _MOMENTS * sizes.trained
    count, every = run.save_total_limit or 0, run.save_steps
    # All are kept; below 1 a step is a share of all steps, and 0 saves none.
    if count <= 0 < every:
        count = int((steps_of(job, documents) or 0) // every if every >= 1 else 1 / every)
    # The newest is whole before the oldest goes.
    kept = 0 if run.save_strategy == SaveStrategy.NO else count + 1
    uses = [_use("checkpoints and the model", output_dir, checkpoint * kept + _WEIGHT * saved)]
    if job.model.save_store:
        tokens = documents.segments.total("teacher_tokens") * documents.scale
        uses.append(_use("the store", Path(job.model.save_store), _STORED * tokens))
    return uses if documents.is_whole else [*uses, aligned_use(documents)]


def aligned_use(documents: Documents) -> DiskUse:
    """Estimate what the aligned corpus takes where it is kept."""
    aligned = documents.segments.rows.data.nbytes * documents.scale
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    if files := documents.corpora[0].texts.cache_files:
        cache = Path(files[0]["filename"]).parent
    # The corpus itself lies there too.
    return _use("the aligned corpus", cache, aligned, written="cache-*")


def _use(what: str, directory: Path, needed: float, written: str = "*") -> DiskUse:
    place = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    # What an earlier start has written there is part of what is needed.
    there = sum(path.stat().st_size for path in directory.rglob(written) if path.is_file())
    return DiskUse(what, directory, needed, shutil.disk_usage(place).free + there)


def describe_time(job: Job, pair: Pair, documents: Documents, done: int) -> list[str]:
    """Tell how long preparation and training may take, how that is known, and when it ends."""
    lines, seconds, steps = [], 0.0, steps_of(job, documents)
    if not documents.is_whole and documents.total:
        seconds = _preparation_s(job, documents)
        lines.append(describe_preparation(job, documents))
    rate, known = _rate(job, pair, documents)
    if steps is None or rate is None:
        why = known if steps else "the hub does not say how many documents there are"
        return [*lines, f"duration   not known: {why}"]
    training = max(steps - done, 0) * job.run.global_batch_tokens / rate
    left = f" for the {steps - done:,} steps that are left" if done else ""
    lines.append(
        f"duration   about {duration(training)}{left} at {rate:,.0f} tokens per second, {known}"
    )
    # A calendar ends; a plan that is made on a slow machine may not.
    with suppress(OverflowError):
        end = datetime.now().astimezone() + timedelta(seconds=seconds + training)
        lines.append(f"end        about {end:%a %d %b %Y %H:%M %Z}, without evaluations")
    return lines


def describe_preparation(job: Job, documents: Documents) -> str:
    """Tell how long the alignment of the whole corpus may take."""
    return (
        f"prepare    about {duration(_preparation_s(job, documents))} on {_workers(job, documents)}"
        f" of {cores()} cores, at the {_PREPARED_TOKENS_PER_S:,} student tokens per second and core"
        " of docs/running.md"
    )


def _preparation_s(job: Job, documents: Documents) -> float:
    tokens = documents.segments.total("student_tokens") * documents.scale
    return tokens / (_workers(job, documents) * _PREPARED_TOKENS_PER_S)


def _workers(job: Job, documents: Documents) -> int:
    return processes_of(job, documents.total or len(documents.corpora[0].texts)) or 1


def _rate(job: Job, pair: Pair, documents: Documents) -> tuple[float | None, str]:
    """Return student tokens per second over all devices, and how they are known."""
    run = job.run
    log = Path(run.output_dir, LOG_FILE)
    if rates := [rate for entry in read_log(log) if (rate := entry.get("tokens_per_s"))]:
        return float(np.median(rates)), f"the median of {log}"
    try:
        work = _flops_per_token(job, pair, documents.segments)
    except ValueError as error:
        return None, str(error)
    product = _timed_product(run, pair.student_sizes.hidden, pair.student_sizes.inner)
    known = f"{_SHARE_OF_PRODUCT:.0%} of a matrix product here ({product / 1e12:.3g} TFLOP/s)"
    return run.world_size * _SHARE_OF_PRODUCT * product / work, known


def _flops_per_token(job: Job, pair: Pair, segments: Segments) -> float:
    """Count the FLOPs of training on a student token; a ValueError says why nobody can."""

    def keys(column: str) -> float:
        if job.pack.attend_across_documents:
            return job.pack.max_length / 2
        lengths = np.asarray(segments.rows.with_format("numpy")[column][:], np.float64)
        return float((lengths**2).sum() / (2 * lengths.sum()))

    method = job.method
    used = 1.0 if method.choice == "all" or method.unselected_weight else method.top_k
    student = model_work(pair.student_skeleton)
    total = student.training_flops(1, keys("student_tokens"), used)
    if student_layout(job.run).recomputes:
        total += student.forward_flops(1, keys("student_tokens"), 0)
    per_token = segments.total("teacher_tokens") / segments.total("student_tokens")
    # With KLD the teacher reads the student's own tokens, and nothing is mapped.
    theirs = keys("teacher_tokens") if per_token else keys("student_tokens")
    for skeleton in pair.teacher_skeletons:
        total += model_work(skeleton).forward_flops(1, theirs, 1) * (per_token or 1)
    return total


def _timed_product(run: RunArguments, hidden: int, inner: int) -> float:
    """Multiply matrices as large as a micro-batch's in the student's MLP; FLOP per second."""
    blocks = run.world_size * (run.gradient_accumulation_steps or 1)
    rows = max(run.global_batch_tokens // blocks, 1)
    dtype = torch.bfloat16 if run.is_mixed else torch.float32
    left = torch.ones(rows, hidden, device=run.device, dtype=dtype)
    right = torch.ones(hidden, inner, device=run.device, dtype=dtype)

    def finish() -> float:
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        return time.perf_counter()

    # The first one sets up the library.
    torch.mm(left, right)
    began, count = finish(), 0
    while (now := finish()) - began < _TIMED_S:
        torch.mm(left, right)
        count += 1
    return float(2 * rows * hidden * inner * count) / (now - began)


def read_log(path: Path) -> list[dict[str, float]]:
    """Read a log file; [] where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
