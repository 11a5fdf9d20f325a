"""Training steps on one device: seconds, tokens per second, MFU, memory.

The ways are a step of plain continual pretraining (CPT), a step with stored losses, a step with the
teacher in memory, and the teacher's forward pass alone. They run through `VocAgnoTrainer`, and all
models stay on the device. Models and losses are random. Documents have OpenWebMath's average length
and are packed as in training. Batches are made in advance and moved to the device within a step.
`vocagnolm.models.cost` defines MFU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.generated import make_batches
from benchmarks.harness import Way
from benchmarks.models import (
    backward,
    count_tokens,
    has_cuda,
    make_config,
    make_model,
    make_trainer,
    prepare,
    some_blocks,
)
from vocagnolm import Method
from vocagnolm.attention import takes_segments
from vocagnolm.models.cost import (
    Layout,
    model_work,
    sizes_of,
    student_memory,
    teacher_memory,
)
from vocagnolm.objective import Objective, OnlineTeacher, StoredTeacher
from vocagnolm.training.throughput import peak_tflops

CPT, STORED = "CPT step", "stored step"
ONLINE, TEACHER = "online step", "teacher forward"
_GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Models and batches, and how they are computed.

    Attributes:
        scale: a scale of `benchmarks.models.SIZES`.
        max_length: tokens per packed sequence.
        batch_size: sequences per micro-batch; 4 fit into 80 GB.
        accumulation: micro-batches per step.
        attn_implementation: by default that of runs: torch_varlen on a GPU, sdpa on a CPU.
        top_k: 1 trains all tokens, as CPT does.
        peak_tflops: the GPU's dense bfloat16 peak; 0 looks it up by the GPU's name.
    """

    device: str = "cuda"
    scale: str = "full"
    max_length: int = 2048
    batch_size: int = 4
    accumulation: int = 4
    top_k: float = 0.4
    attn_implementation: str | None = None
    peak_tflops: float = 0.0
    repetitions: int = 10

    @staticmethod
    def tiny() -> Size:
        """Return a size that only shows that the code runs."""
        device = "cuda" if has_cuda() else "cpu"
        return Size(device, "tiny", max_length=128, batch_size=2, accumulation=2, repetitions=2)

    @property
    def attention(self) -> str:
        """The attention implementation of both models."""
        return self.attn_implementation or ("torch_varlen" if self.device == "cuda" else "sdpa")

    @property
    def peak(self) -> float | None:
        """The device's peak in FLOP/s, or None if it is unknown."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        tflops = self.peak_tflops or peak_tflops(name)
        return tflops * 1e12 if tflops else None


@dataclass(frozen=True)
class Work:
    """What one run of a way computes and holds.

    Attributes:
        flops: those that the losses need.
        tokens: with a loss; the student's, or the teacher's if it runs alone.
        held_bytes: weights and optimizer state.
        planned_bytes: what `train.py --dry_run` plans for a device.
    """

    flops: float
    tokens: int
    held_bytes: int
    planned_bytes: float


class Steps:
    """Both models, their trainer, the batches of a step, and the ways to take one."""

    def __init__(self, size: Size, output_dir: str):
        self.size, device = size, torch.device(size.device)
        is_gpu = device.type == "cuda"
        torch.manual_seed(0)
        attention, teacher_dtype = size.attention, torch.bfloat16
        if not is_gpu:
            teacher_dtype = torch.float32
        self.student = make_model(
            make_config("student", size.scale), device, torch.float32, attention
        )
        self.teacher = make_model(
            make_config("teacher", size.scale), device, teacher_dtype, attention
        )
        trainer = make_trainer(
            self.student,
            self.teacher,
            size.max_length,
            output_dir,
            on_cpu=not is_gpu,
            method=Method(top_k=size.top_k),
            bf16=is_gpu,
            per_device_train_batch_size=size.batch_size,
        )
        self.trainer = prepare(trainer)
        count = size.batch_size * size.accumulation
        self.blocks = some_blocks(size.scale, size.max_length, count)
        self.batches, self.stored = (
            make_batches(self.blocks, size.max_length, size.batch_size, is_stored)
            for is_stored in (False, True)
        )
        self.first = self.batches[0]
        self.guided: Objective = self.trainer.token_objective
        self.cpt = Objective(Method("cpt"))
        assert isinstance(self.guided.teacher, OnlineTeacher)
        self.online_teachers: OnlineTeacher = self.guided.teacher
        from_store = replace(self.guided, teacher=StoredTeacher())
        # The batches are looked up in every turn, so that others can replace them.
        self.ways = {
            CPT: Way(lambda _: self.step(self.cpt, self.batches)),
            STORED: Way(lambda _: self.step(from_store, self.stored)),
            TEACHER: Way(lambda _: self.forward()),
            ONLINE: Way(lambda _: self.step(self.guided, self.batches)),
        }
        self.work = self._count_work()

    def _count_work(self) -> dict[str, Work]:
        student, teacher = model_work(self.student), model_work(self.teacher)
        ours, theirs = count_tokens(self.batches), count_tokens(self.batches, "teacher_")
        forward = teacher.forward_flops(*theirs, theirs[0])
        # AdamW keeps two more numbers per weight.
        held, frozen = 3 * _bytes(self.student), _bytes(self.teacher)
        plan, their_plan = self._plan()

        def work(objective: Objective, teachers: int) -> Work:
            used = sum(map(objective.weighted_tokens, self.batches))
            flops = student.training_flops(*ours, used) + forward * teachers
            planned = plan + their_plan * teachers
            return Work(flops, ours[0], held + frozen * teachers, planned)

        return {
            CPT: work(self.cpt, 0),
            STORED: work(self.guided, 0),
            TEACHER: Work(forward, theirs[0], frozen, their_plan),
            ONLINE: work(self.guided, 1),
        }

    def _plan(self) -> tuple[float, float]:
        size = self.size
        precision = "mixed" if size.device == "cuda" else "float32"
        is_masked = size.device == "cuda" and not takes_segments(self.student)
        mask = size.max_length if is_masked else 0
        layout = Layout(precision=precision, accumulates=size.accumulation > 1, mask=mask)
        tokens = size.batch_size * size.max_length
        ours = student_memory(sizes_of(self.student), layout, tokens)
        return sum(ours.values()), sum(teacher_memory(sizes_of(self.teacher), 2).values())

    def step(self, objective: Objective, batches: Sequence[Any]) -> None:
        """Take one optimizer step of a method, as `Trainer` does."""
        trainer = self.trainer
        trainer.token_objective = objective
        # Only an objective with a teacher online has batches with the teacher's rows.
        is_online = isinstance(objective.teacher, OnlineTeacher)
        trainer.online_teachers = [self.teacher] if is_online else []
        backward(trainer, batches)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    def forward(self) -> None:
        """Compute the teacher's losses for a step."""
        for batch in self.batches:
            self.online_teachers.losses(self.trainer._prepare_inputs(batch))

    def measures(self, name: str) -> dict[str, float]:
        """Return seconds, tokens/s and planned memory of a way and, if known, MFU and memory."""
        way, work, peak = self.ways[name], self.work[name], self.size.peak
        found = {"median_s": way.median_s, "least_s": min(way.seconds), "most_s": max(way.seconds)}
        found["tokens_per_s"] = work.tokens / way.median_s
        if peak:
            found["mfu"] = work.flops / way.median_s / peak
        found["planned_gib"] = work.planned_bytes / _GIB
        if way.added_bytes:
            found["memory_gib"] = (work.held_bytes + max(way.added_bytes)) / _GIB
        return found

    def ratios(self) -> dict[str, float]:
        """Return the ratios of the ways' median times."""
        seconds = {name: way.median_s for name, way in self.ways.items()}
        return {
            "stored / CPT": seconds[STORED] / seconds[CPT],
            "teacher forward / CPT": seconds[TEACHER] / seconds[CPT],
            "online / (teacher forward + CPT)": seconds[ONLINE] / (seconds[TEACHER] + seconds[CPT]),
        }

    def table(self) -> list[str]:
        """Return a line for each way and each ratio."""
        lines = [
            ", ".join(f"{key} {value:.4g}" for key, value in self.measures(way).items())
            for way in self.ways
        ]
        lines = [f"{way}: {line}" for way, line in zip(self.ways, lines, strict=True)]
        return lines + [f"time, {name}: {value:.3f}" for name, value in self.ratios().items()]


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
