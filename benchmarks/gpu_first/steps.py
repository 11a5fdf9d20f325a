"""Training steps of the paper's models on one device: seconds, tokens per second, MFU, memory.

The ways are steps of plain continual pretraining (CPT), with a store's losses and with the teacher
co-resident in bfloat16, and the teacher's forward pass alone. They run through `VocAgnoTrainer`;
all models stay on the device. Documents have the lengths of OpenWebMath's, cut and packed as in
training; batches are made beforehand and moved within a step. MFU is that of
`vocagnolm.run.flops`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from benchmarks.generated import make_batches
from benchmarks.gpu_first.models import make_config, make_model, make_trainer, prepare, some_blocks
from benchmarks.gpu_first.report import Report, has_cuda
from benchmarks.harness import Skipped, Way, take_turns
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.models.layers import compile_layers
from vocagnolm.objective import Method, Objective
from vocagnolm.run.flops import model_work, peak_tflops
from vocagnolm.run.memory import Layout, sizes_of, student_memory, teacher_memory
from vocagnolm.teacher import ResidentTeacher, StoredTeacher
from vocagnolm.trainer import VocAgnoTrainer

CPT, STORED = "CPT step", "stored step"
ONLINE, TEACHER = "online step", "teacher forward"
_GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Models, batches and how both are computed.

    Attributes:
        scale: "full" is TinyLlama 1.1B and Qwen2.5-Math-7B, "tiny" their architectures.
        student_config: directory with another student's config.json.
        teacher_config: directory with another teacher's config.json.
        max_length: tokens of a block.
        batch_size: blocks of a micro-batch; 4 fit into 80 GB.
        accumulation: micro-batches of a step.
        top_k: 1 trains all tokens, as CPT does.
        compile: every layer of both models.
        peak_tflops: of the GPU in dense bfloat16; 0 looks it up by the GPU's name.
    """

    device: str = "cuda"
    scale: str = "full"
    student_config: str = ""
    teacher_config: str = ""
    max_length: int = 2048
    batch_size: int = 4
    accumulation: int = 4
    top_k: float = 0.4
    attn_implementation: str = "sdpa"
    compile: bool = False
    peak_tflops: float = 0.0
    repetitions: int = 10

    @staticmethod
    def tiny() -> Size:
        """The same code with nothing to learn from it."""
        device = "cuda" if has_cuda() else "cpu"
        return Size(device, "tiny", max_length=128, batch_size=2, accumulation=2, repetitions=2)

    @property
    def peak(self) -> float | None:
        """FLOP/s that the device could reach, if known."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        tflops = self.peak_tflops or peak_tflops(name)
        return tflops * 1e12 if tflops else None


@dataclass(frozen=True)
class Work:
    """What one run of a way computes and holds.

    Attributes:
        flops: as far as the losses need them.
        tokens: the student's, or the teacher's if it is alone; those with a loss.
        held_bytes: weights and optimizer state.
        planned_bytes: what `train.py --dry_run` plans for a device.
    """

    flops: float
    tokens: int
    held_bytes: int
    planned_bytes: float


class Steps:
    """Both models, their trainer, the batches of a step, and the ways to take one."""

    def __init__(self, size: Size, report: Report):
        self.size, device = size, torch.device(size.device)
        given = {"student": size.student_config, "teacher": size.teacher_config}
        configs = [
            AutoConfig.from_pretrained(path) if path else make_config(role, size.scale)
            for role, path in given.items()
        ]
        torch.manual_seed(0)
        attention = size.attn_implementation
        self.student = make_model(configs[0], device, torch.float32, attention)
        self.teacher = make_model(configs[1], device, torch.bfloat16, attention)
        if size.compile:
            compile_layers(self.student)
            compile_layers(self.teacher)
        method = Method(top_k=size.top_k)
        self.trainer = prepare(
            make_trainer(
                report,
                self.student,
                self.teacher,
                size.max_length,
                method=method,
                device=device,
                bf16=device.type == "cuda",
                per_device_train_batch_size=size.batch_size,
            )
        )
        count = size.batch_size * size.accumulation
        self.blocks = some_blocks(size.scale, size.max_length, count)
        self.batches, self.stored = (
            make_batches(self.blocks, size.max_length, size.batch_size, is_stored)
            for is_stored in (False, True)
        )
        self.first = self.batches[0]
        self.guided: Objective = self.trainer.objective
        self.cpt = Objective(Method("cpt"))
        assert isinstance(self.guided.teacher, ResidentTeacher)
        self.resident: ResidentTeacher = self.guided.teacher
        self.ways, self.work = self._make_ways()

    def _make_ways(self) -> tuple[dict[str, Way], dict[str, Work]]:
        stored = replace(self.guided, teacher=StoredTeacher())
        models = model_work(self.student), model_work(self.teacher)
        ours, theirs = count_tokens(self.batches), count_tokens(self.batches, "teacher_")
        forward = models[1].forward_flops(*theirs, theirs[0])
        # AdamW keeps two more of each weight.
        held, frozen = 3 * _bytes(self.student), _bytes(self.teacher)
        plan, their_plan = self._plan()

        def work(objective: Objective, teacher: bool) -> Work:
            used = sum(map(objective.weighted_tokens, self.batches))
            flops = models[0].training_flops(*ours, used) + forward * teacher
            return Work(flops, ours[0], held + frozen * teacher, plan + their_plan * teacher)

        # The lists are looked up in every turn, so that other batches can be put in their place.
        ways = {
            CPT: Way(lambda _: self.step(self.cpt, self.batches)),
            STORED: Way(lambda _: self.step(stored, self.stored)),
            TEACHER: Way(lambda _: self.forward()),
            ONLINE: Way(lambda _: self.step(self.guided, self.batches)),
        }
        return ways, {
            CPT: work(self.cpt, False),
            STORED: work(stored, False),
            TEACHER: Work(forward, theirs[0], frozen, their_plan),
            ONLINE: work(self.guided, True),
        }

    def _plan(self) -> tuple[float, float]:
        size = self.size
        precision = "mixed" if size.device == "cuda" else "float32"
        layout = Layout(precision=precision, accumulates=size.accumulation > 1)
        tokens = size.batch_size * size.max_length
        ours = student_memory(sizes_of(self.student), layout, tokens)
        return sum(ours.values()), sum(teacher_memory(sizes_of(self.teacher), 2).values())

    def step(self, objective: Objective, batches: Sequence[dict[str, Any]]) -> None:
        """Take one optimizer step of a method, as `Trainer` does."""
        trainer = self.trainer
        trainer.objective, trainer.teacher = objective, objective.teacher
        tokens = sum(map(objective.divisor_tokens, batches))
        count = torch.tensor(tokens, device=trainer.args.device)
        if trainer.overlap is not None:
            batches = list(trainer.overlap.ahead(iter(batches)))
        for batch in batches:
            trainer.training_step(trainer.model_wrapped, batch, count)
        trainer.phases.begin("update")
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.phases.begin("other")

    def forward(self) -> None:
        """Compute the teacher's losses of a step."""
        for batch in self.batches:
            self.resident.losses(self.trainer._prepare_inputs(batch))

    def measures(self, name: str) -> dict[str, float]:
        """Return what the turns of a way say: seconds, tokens/s, MFU and memory, where known."""
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
        """Return how long the ways take beside one another."""
        seconds = {name: way.median_s for name, way in self.ways.items()}
        return {
            "stored / CPT": seconds[STORED] / seconds[CPT],
            "teacher forward / CPT": seconds[TEACHER] / seconds[CPT],
            "online / (teacher forward + CPT)": seconds[ONLINE] / (seconds[TEACHER] + seconds[CPT]),
        }


def count_tokens(batches: Sequence[Mapping[str, Any]], prefix: str = "") -> tuple[int, int]:
    """Count the tokens with a loss, and the keys that they are predicted from."""
    valid = [batch[f"{prefix}labels"] != IGNORED_LABEL for batch in batches]
    places = [batch[f"{prefix}position_ids"] for batch in batches]
    keys = sum(int((place * mask).sum()) for place, mask in zip(places, valid, strict=True))
    return sum(int(mask.sum()) for mask in valid), keys


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@cache
def measured(size: Size) -> Steps:
    """Measure all ways; once for each size, whatever claims ask."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        steps = Steps(size, Report(place, size.scale == "tiny", 60, False, place))
        take_turns(steps.ways, size.repetitions, size.device, memory=size.device == "cuda")
    return steps


def mfu(size: Size, name: str) -> tuple[float, tuple[str, ...]]:
    """Return a way's share of the peak, and what all ways took.

    Raises:
        Skipped: the GPU's peak is not known.
    """
    steps = measured(size)
    if size.peak is None:
        raise Skipped("no known peak: give it with --set peak_tflops=TFLOPS")
    lines = [
        f"{way}: " + ", ".join(f"{key} {value:.4g}" for key, value in steps.measures(way).items())
        for way in steps.ways
    ]
    lines += [f"time, {ratio}: {value:.3f}" for ratio, value in steps.ratios().items()]
    return steps.measures(name)["mfu"], tuple(lines)


def trainer_of(steps: Steps) -> VocAgnoTrainer:
    """Return the trainer as it is for plain pretraining."""
    steps.trainer.objective, steps.trainer.teacher = steps.cpt, None
    return steps.trainer
