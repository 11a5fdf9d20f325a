"""Measure the paper's models at full size: speed, planned and real memory, and where time goes."""

from __future__ import annotations

import time

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_first.report import Report, timed
from benchmarks.harness import WARM_UP_TURNS, take_turns
from benchmarks.models import has_cuda
from benchmarks.steps import CPT, ONLINE, TEACHER, Size, Steps

_TURNS, _SHOWN = 4, 12
# Words in the names of kernels and operators. A name belongs to the first part with a match.
_PARTS = {
    "attention": ("attention", "flash", "varlen", "fmha"),
    "matrix products": ("::mm", "addmm", "bmm", "scaled_mm", "linear", "gemm", "cutlass", "nvjet"),
    "optimizer": ("adam", "_foreach", "multi_tensor"),
    "copies and casts": ("copy", "cat", "fill", "zero", "index", "gather", "scatter"),
    "the rest": ("",),
}
GOALS = {CPT: 0.5, TEACHER: 0.65, "online / (teacher forward + CPT)": 1.05}


def make_steps(report: Report) -> Steps:
    """Make both models and the batches of a step."""
    size = Size.tiny() if report.is_tiny else Size()
    made: list[Steps] = []
    seconds, _ = timed(lambda: made.append(Steps(size, report.scratch())))
    report.say("models made, s", seconds)
    shape = f"{size.accumulation} x {size.batch_size} sequences of {size.max_length}"
    tokens = {name: work.tokens for name, work in made[0].work.items()}
    report.say("shape", shape, student_tokens=tokens[CPT], teacher_tokens=tokens[TEACHER])
    return made[0]


def measure_steps(report: Report, steps: Steps) -> None:
    """Print speed, MFU, memory and ratios of all ways, and profiles of two of them."""
    ways, device = steps.ways, report.device.type
    for turn in range(WARM_UP_TURNS + _TURNS):
        is_warm = turn >= WARM_UP_TURNS
        start_s = time.perf_counter()
        # Run one turn at a time, so that each is printed at once.
        take_turns(ways, int(is_warm), device, int(not is_warm), has_cuda(), seed=turn)
        seconds = time.perf_counter() - start_s
        last = {name: round(way.seconds[-1], 4) for name, way in ways.items() if way.seconds}
        report.say("turn, s" if is_warm else "warm-up, s", seconds, **last)
    for name in ways:
        report.say(
            name, f"goal: MFU {GOALS[name]:.0%}" if name in GOALS else "", **steps.measures(name)
        )
    for name, ratio in steps.ratios().items():
        goal = {"goal": GOALS[name]} if name in GOALS else {}
        report.say(f"time: {name}", ratio, **goal)
    for name in (ONLINE, TEACHER):
        with report.trial(f"profile of one {name}"):
            _profile(report, steps, name)


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
        report.say("matrix products and attention alone reach, MFU", reached)
    for seconds, event in sorted(kernels, key=lambda pair: -pair[0])[:_SHOWN]:
        share = seconds / busy
        report.say("kernel", event.key[:90], s=seconds, share=share, calls=event.count)
