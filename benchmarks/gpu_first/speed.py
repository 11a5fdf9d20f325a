"""Measure the paper's models at full size, computed in several ways: speed, memory, numbers."""

from __future__ import annotations

import importlib.util
import random
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers.integrations.liger import apply_liger_kernel

from benchmarks.gpu_first.report import Report, free_memory, timed
from benchmarks.harness import WARM_UP_TURNS, Skipped, take_turns
from benchmarks.models import backward, has_cuda, make_config, make_model
from benchmarks.steps import CPT, ONLINE, TEACHER, Size, Steps
from vocagnolm.models.compiled import compile_model
from vocagnolm.models.cost import model_work, sizes_of
from vocagnolm.models.load import fp8_products
from vocagnolm.run.plan import device_bytes, fill_device
from vocagnolm.store.windows import HFScorer, Window
from vocagnolm.training.config import VocAgnoConfig

SCORE, SHAPE = "score", "shape"
_TURNS, _SHOWN = 4, 12
_FILLED_SEQUENCES = 32  # of a step
_SCORED_TOKENS = 16384  # of a batch: the default of `vocagnolm score`
_FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
# Words in the names of kernels and operators. A name belongs to the first part with a match.
_PARTS = {
    "attention": ("attention", "flash", "varlen", "fmha"),
    "matrix products": ("::mm", "addmm", "bmm", "scaled_mm", "linear", "gemm", "cutlass", "nvjet"),
    "optimizer": ("adam", "_foreach", "multi_tensor"),
    "copies and casts": ("copy", "cat", "fill", "zero", "index", "gather", "scatter"),
    "the rest": ("",),
}
GOALS = {CPT: 0.42, ONLINE: 0.5, TEACHER: 0.62, SCORE: 0.58}


@dataclass(frozen=True)
class Variant:
    """How models are computed. `filled` has the largest micro-batches of a step that fit."""

    compiled: bool = False
    liger: bool = False
    fp8: bool = False
    filled: bool = False
    checkpointing: bool = False
    attention: str | None = None

    def measure(self, report: Report) -> None:
        """Print numbers, speed, MFU and memory of all ways, and profiles of two of them.

        Raises:
            Skipped: a package or a GPU is missing.
        """
        package = _FLASH.get(self.attention or "", "torch")
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not installed")
        if (self.fp8 or package != "torch") and not has_cuda():
            raise Skipped("no CUDA")
        size = Size.tiny() if report.is_tiny else Size()
        size = replace(size, attn_implementation=self.attention)
        if self.filled:
            size = _fill(size, report)
        made: list[Steps] = []
        seconds, _ = timed(lambda: made.append(Steps(size, str(report.temporary))))
        (steps,) = made
        report.say("models made, s", seconds)
        shape = f"{size.accumulation} x {size.batch_size} sequences of {size.max_length}"
        tokens = {name: work.tokens for name, work in steps.work.items()}
        report.say(SHAPE, shape, student_tokens=tokens[CPT], teacher_tokens=tokens[TEACHER])
        self._apply(steps)
        _say_numbers(report, steps)
        _measure_steps(report, steps)
        if self.compiled:
            broken, stats = sum(counters["graph_break"].values()), counters["stats"]
            report.say("compilations", stats["unique_graphs"], graph_breaks=broken)
        steps.trainer.model.zero_grad()
        free_memory()
        _score(report, steps)
        for name in (ONLINE, TEACHER):
            _profile(report, steps, name)

    def _apply(self, steps: Steps) -> None:
        args: Any = steps.trainer.args
        models: tuple[Any, Any] = (steps.student, steps.teacher)
        if self.checkpointing:
            steps.student.gradient_checkpointing_enable({"use_reentrant": False})
        if self.liger:
            # As with --use_liger_kernel.
            for model in models:
                apply_liger_kernel(model, args.liger_kernel_config)  # type: ignore[no-untyped-call]
        if self.fp8:
            from torchao.quantization import quantize_

            head = steps.teacher.get_output_embeddings()
            quantize_(
                steps.teacher,
                fp8_products(),
                filter_fn=lambda part, _: isinstance(part, nn.Linear) and part is not head,
            )
        if self.compiled:
            # As with --torch_compile, except on a CPU, where Inductor takes minutes.
            args.torch_compile_backend = "inductor" if has_cuda() else "aot_eager"
            for model in models:
                compile_model(model, args.torch_compile_backend)


def _fill(size: Size, report: Report) -> Size:
    """Split a larger step as a run does that is given only the tokens of a step."""
    tokens = _FILLED_SEQUENCES * size.max_length
    args = VocAgnoConfig(
        output_dir=str(report.temporary),
        max_length=size.max_length,
        global_batch_tokens=tokens,
        bf16=size.device == "cuda",
        use_cpu=size.device == "cpu",
    )
    meta = torch.device("meta")
    student, teacher = (
        SimpleNamespace(
            sizes=sizes_of(make_model(make_config(role, size.scale), meta)),
            source=SimpleNamespace(attn_implementation=size.attention),
        )
        for role in ("student", "teacher")
    )
    models = SimpleNamespace(student=student, teachers=[teacher], teacher_dtype="bfloat16")
    capacity = device_bytes(torch.device(size.device)) or 2**30
    fill_device(cast(Any, SimpleNamespace(args=args)), cast(Any, models), capacity)
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return replace(size, batch_size=rows, accumulation=accumulation)


def _say_numbers(report: Report, steps: Steps) -> None:
    """Print numbers that no way of computing should change by more than rounding."""
    trainer = steps.trainer
    trainer.token_objective = steps.cpt
    start_s = time.perf_counter()
    batch: Any = trainer._prepare_inputs(steps.first)
    loss = float(backward(trainer, [batch]))
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    trainer.model.zero_grad()
    losses_BT = steps.online_teachers.losses(batch).loss_BT
    mean = float(losses_BT.sum() / losses_BT.count_nonzero())
    seconds = time.perf_counter() - start_s
    report.say("numbers", loss=loss, grad_norm=norm, teacher_loss=mean, first_use_s=seconds)


def _measure_steps(report: Report, steps: Steps) -> None:
    ways, device = steps.ways, report.device.type
    for turn in range(WARM_UP_TURNS + _TURNS):
        is_warm = turn >= WARM_UP_TURNS
        start_s = time.perf_counter()
        # Run one turn at a time, so that each is printed at once.
        take_turns(ways, int(is_warm), device, int(not is_warm), has_cuda(), seed=turn)
        seconds = time.perf_counter() - start_s
        last = {name: round(way.seconds[-1], 4) for name, way in ways.items() if way.seconds}
        report.say(f"turn {turn}, s" if is_warm else f"warm-up {turn}, s", seconds, **last)
    for name in ways:
        goal = f"goal: MFU {GOALS[name]:.0%}" if name in GOALS else ""
        report.say(name, goal, **steps.measures(name))
    for name, ratio in steps.ratios().items():
        report.say(f"time: {name}", ratio)


def _score(report: Report, steps: Steps) -> None:
    """Measure the scoring of windows of a corpus with the teacher, as in `vocagnolm score`."""
    count, context = (16, 128) if report.is_tiny else (64, 4095)
    rng, words = random.Random(0), range(steps.teacher.config.vocab_size)
    lengths = [min(context, 2 + int(rng.lognormvariate(0, 1) * context / 4)) for _ in range(count)]
    windows = [Window(n, rng.choices(words, k=size), size - 1) for n, size in enumerate(lengths)]
    scorer = HFScorer(steps.teacher, _SCORED_TOKENS, steps.trainer.args.torch_compile_backend)
    scorer.losses(windows)  # compiles, and warms up
    taken = [timed(lambda: scorer.losses(windows)) for _ in range(3)]
    seconds, gib = sorted(taken)[1]
    scored = sum(window.scored for window in windows)
    keys = sum(size * (size - 1) // 2 for size in lengths)
    flops = model_work(steps.teacher).forward_flops(scored, keys, scored)
    mfu = {"mfu": flops / seconds / steps.size.peak} if steps.size.peak else {}
    goal = f"goal: MFU {GOALS[SCORE]:.0%}"
    report.say(SCORE, goal, median_s=seconds, tokens_per_s=scored / seconds, gib=gib, **mfu)


def _profile(report: Report, steps: Steps, name: str) -> None:
    """Print the kernels that take the most time, and how long the device is idle."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda() else [])]
    with profile(activities=activities) as profiler:
        took, _ = timed(lambda: steps.ways[name].run(0))
    kind = "self_device_time_total" if has_cuda() else "self_cpu_time_total"
    device = DeviceType.CUDA if has_cuda() else DeviceType.CPU
    kernels = [
        (getattr(event, kind) / 1e6, event)
        for event in profiler.key_averages()
        # An annotated range would count the time of its operators again.
        if event.device_type == device and not getattr(event, "is_user_annotation", False)
    ]
    busy = sum(seconds for seconds, _ in kernels)
    parts = dict.fromkeys(_PARTS, 0.0)
    for seconds, event in kernels:
        key = event.key.lower()
        parts[next(p for p, words in _PARTS.items() if any(x in key for x in words))] += seconds
    report.say(f"profile of one {name}, s", took, idle_s=max(took - busy, 0.0), **parts)
    products = parts["matrix products"] + parts["attention"]
    if steps.size.peak and products:
        reached = steps.work[name].flops / steps.size.peak / products
        report.say(f"{name}: matrix products and attention alone reach, MFU", reached)
    for rank, (seconds, event) in enumerate(sorted(kernels, key=lambda pair: -pair[0])[:_SHOWN]):
        what = f"{name}: kernel {rank}"
        report.say(what, event.key[:90], s=seconds, share=seconds / busy, calls=event.count)
