"""Training steps of the paper's models on one device: tokens per second, MFU, memory, a profile.

    python benchmarks/gpu_step.py                               # TinyLlama 1.1B, Qwen2.5-Math-7B
    python benchmarks/gpu_step.py --attn_implementation torch_varlen --compile
    python benchmarks/gpu_step.py --scale tiny --device cpu     # the same code, nothing to learn

Two targets: 45 % MFU for the student's step (forward, backward, clipping, AdamW) and 60 % for the
teacher's forward pass; MFU as in `vocagnolm.training.flops`, FP8's too of the bfloat16 peak. The
ways are steps of plain continual pretraining (CPT), with a store's losses, and with the teacher
co-resident in bfloat16 and in FP8, and each teacher's forward pass alone. They take turns in one
process, in an order that is drawn anew for each turn, so ratios hold better than times.
All models stay on the
GPU: on one of 80 GB give --batch_size 4. Steps run through `VocAgnoTrainer`. Weights and ids are
random; documents have the lengths of OpenWebMath's, cut and packed as in training. Batches are made
beforehand and moved within a step. A profile of a CPT step and of a forward pass of the teacher
shows where the time goes that is missing to the targets. What could not be measured, and why,
stands at the end.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_blocks import make_batches, make_blocks
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    TrainingArguments,
)

from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import Guidance
from vocagnolm.models.speed import compile_layers, fp8_products
from vocagnolm.teacher import ResidentTeacher, StoredTeacher
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.flops import model_work, peak_tflops

CPT, STORED = "CPT step", "stored step"
ONLINE, TEACHER = "online step", "teacher forward"
FP8 = ", FP8"
TARGETS = {CPT: 0.45, TEACHER: 0.60}
SIZE_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
SIZES = {
    ("student", "full"): (2048, 5632, 22, 32, 4, 32000),
    ("student", "tiny"): (64, 176, 2, 4, 2, 320),
    ("teacher", "full"): (3584, 18944, 28, 28, 4, 152064),
    ("teacher", "tiny"): (128, 512, 2, 4, 2, 1024),
}
SHAPES = {"max_length": (2048, 128), "batch_size": (8, 2), "accumulation": (4, 2)}
WARM_UP_TURNS = 2
PARTS = {  # of a profile: words in the names of PyTorch's operators, the first part that has one
    "attention": ("attention", "flash", "varlen"),
    "matrix products": ("::mm", "addmm", "bmm", "scaled_mm", "linear"),
    "optimizer": ("adam", "_foreach"),
    "copies and casts": ("copy", "cat", "fill", "zero", "index", "gather", "scatter"),
    "the rest": ("",),
}


@dataclass
class Way:
    """One of the ways.

    Attributes:
        run: what is measured.
        flops: of one run, as far as the losses need them.
        tokens: of the student in one run, or of the teacher if it is alone; those with a loss.
        held_bytes: weights and optimizer state.
        seconds, added_bytes: of every turn.
    """

    run: Callable[[], None]
    flops: float
    tokens: int
    held_bytes: int
    seconds: list[float] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)


def make_config(role: str, scale: str) -> PreTrainedConfig:
    """TinyLlama 1.1B or Qwen2.5-Math-7B, or a tiny model of its architecture."""
    sizes = dict(zip(SIZE_NAMES, SIZES[role, scale], strict=True))
    if role == "student":
        return LlamaConfig(**sizes, max_position_embeddings=2048)
    return Qwen2Config(**sizes, max_position_embeddings=4096)


def make_model(
    config: PreTrainedConfig, dtype: torch.dtype, args: argparse.Namespace
) -> PreTrainedModel:
    """A model with random weights on the device; its layers compiled one by one, if asked for."""
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=args.attn_implementation
        )
    if args.compile:
        compile_layers(model)
    return model


def in_fp8(teacher: Any) -> tuple[Any, int]:
    """A copy of the teacher on the GPU with `--teacher_quantization fp8`, and its bytes.

    Raises:
        ValueError: it cannot be made here.
    """
    products = fp8_products()
    from torchao.quantization import quantize_

    before = torch.cuda.memory_allocated()
    model = copy.deepcopy(teacher)
    head = model.get_output_embeddings()
    quantize_(
        model,
        products,
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and module is not head,
    )
    compile_layers(model)  # without it FP8 is slower than bfloat16
    return model, torch.cuda.memory_allocated() - before  # such weights do not tell their size


def make_trainer(
    args: argparse.Namespace, directory: Path, student: Any, teacher: Any
) -> VocAgnoTrainer:
    """A trainer with its optimizer, prepared as for a run on one device."""
    trainer = VocAgnoTrainer(
        model=student,
        teacher=teacher,
        guidance=Guidance(args.top_k),
        args=TrainingArguments(
            output_dir=str(directory),
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            per_device_train_batch_size=args.batch_size,
            report_to="none",
        ),
        data_collator=PackedCollator(args.max_length),
    )
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    return trainer


def step(trainer: VocAgnoTrainer, objective: Any, batches: Sequence[dict[str, Any]]) -> None:
    """One optimizer step of a method, as `Trainer` takes it."""
    trainer.objective, trainer.teacher = objective, objective.teacher
    count = torch.tensor(sum(map(objective.divisor_tokens, batches)), device=trainer.args.device)
    for batch in batches:
        trainer.training_step(trainer.model_wrapped, batch, count)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    assert trainer.optimizer is not None
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def forward(
    trainer: VocAgnoTrainer, teacher: ResidentTeacher, batches: Sequence[dict[str, Any]]
) -> None:
    """The teacher's losses of a step."""
    for batch in batches:
        teacher.losses(trainer._prepare_inputs(batch))


def count(batches: Sequence[dict[str, Any]], prefix: str = "") -> tuple[int, int]:
    """Tokens with a loss, and the keys that they are predicted from."""
    valid = [batch[f"{prefix}labels"] != IGNORED_LABEL for batch in batches]
    places = [batch[f"{prefix}position_ids"] for batch in batches]
    keys = sum(int((place * mask).sum()) for place, mask in zip(places, valid, strict=True))
    return sum(int(mask.sum()) for mask in valid), keys


def make_ways(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Way], list[str]]:
    """The ways, and what cannot be measured."""
    given = {"student": args.student_config, "teacher": args.teacher_config}
    configs = [
        AutoConfig.from_pretrained(path) if path else make_config(role, args.scale)
        for role, path in given.items()
    ]
    torch.manual_seed(0)
    student = make_model(configs[0], torch.float32, args)
    teacher = make_model(configs[1], torch.bfloat16, args)
    teachers, missing = {"": (teacher, _bytes(teacher))}, []
    try:
        if args.device != "cuda":
            raise ValueError(f"--device {args.device} computes in no float8")
        teachers[FP8] = in_fp8(teacher)
    except (ValueError, RuntimeError) as error:  # or out of memory
        missing.append(f"the teacher in FP8: {error}")
    work = model_work(student), model_work(teacher)
    trainer = make_trainer(args, directory, student, teacher)
    vocabularies = (configs[0].vocab_size, configs[1].vocab_size)
    blocks = make_blocks(args.batch_size * args.accumulation, args.max_length, vocabularies)
    online, stored = (
        make_batches(blocks, args.max_length, args.batch_size, is_stored)
        for is_stored in (False, True)
    )
    guided, ours, theirs = trainer.objective, count(online), count(online, "teacher_")
    held = 3 * _bytes(student)  # AdamW keeps two more of each weight

    def add_step(name: str, objective: Any, batches: Any, flops: float, teacher_bytes: int) -> None:
        flops += work[0].training_flops(*ours, sum(map(objective.weighted_tokens, batches)))
        run = partial(step, trainer, objective, batches)
        ways[name] = Way(run, flops, ours[0], held + teacher_bytes)

    ways: dict[str, Way] = {}
    add_step(CPT, replace(guided, method="cpt", teacher=None), online, 0.0, 0)
    add_step(STORED, replace(guided, teacher=StoredTeacher()), stored, 0.0, 0)
    teacher_flops = work[1].forward_flops(*theirs, theirs[0])
    for suffix, (model, size) in teachers.items():
        resident = ResidentTeacher([model], trainer.args.device)
        add_step(ONLINE + suffix, replace(guided, teacher=resident), online, teacher_flops, size)
        run = partial(forward, trainer, resident, online)
        ways[TEACHER + suffix] = Way(run, teacher_flops, theirs[0], size)
    return ways, missing


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def measure(way: Way, device: str) -> None:
    """Run a way once."""
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    way.run()
    if device == "cuda":
        torch.cuda.synchronize()
    way.seconds.append(time.perf_counter() - start)
    if device == "cuda":
        way.added_bytes.append(torch.cuda.max_memory_allocated() - before)


def table(ways: dict[str, Way], peak: float | None) -> list[str]:
    """Times, rates and memory of the ways, and their ratios."""
    median = {name: statistics.median(way.seconds) for name, way in ways.items()}
    columns = (("median", 10), ("quartiles", 22), ("tokens/s", 12), ("MFU", 8), ("memory", 12))
    lines = [" " * 22 + "".join(name.rjust(width) for name, width in columns)]
    for name, way in ways.items():
        low, _, high = statistics.quantiles(way.seconds, n=4)
        mfu = f"{way.flops / median[name] / peak:8.1%}" if peak else f"{'-':>8}"
        size = way.held_bytes + max(way.added_bytes, default=0)
        memory = f"{size / 2**30:8.1f} GiB" if way.added_bytes else f"{'-':>12}"
        lines.append(
            f"{name:22}{median[name]:8.3f} s{f'{low:.3f} to {high:.3f} s':>22}"
            f"{way.tokens / median[name]:12,.0f}{mfu}{memory}"
        )
    ratios = {"stored step / CPT step": median[STORED] / median[CPT]}
    for suffix in ("", FP8):
        if TEACHER + suffix in ways:
            parts = median[TEACHER + suffix] + median[CPT]
            name = f"{ONLINE}{suffix} / ({TEACHER}{suffix} + {CPT})"
            ratios[name] = median[ONLINE + suffix] / parts
    if TEACHER + FP8 in ways:
        ratios[f"{TEACHER}{FP8} / {TEACHER}"] = median[TEACHER + FP8] / median[TEACHER]
    return [*lines, *(f"time, {name}: {ratio:.3f}" for name, ratio in ratios.items())]


def profiled(way: Way, device: str) -> tuple[dict[str, float], list[str]]:
    """Seconds of one run by part, and a table of the operators that take most."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        way.run()
        if on_gpu:
            torch.cuda.synchronize()
    averages: Any = profiler.key_averages()
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in averages:
        if event.device_type == DeviceType.CPU:  # a kernel's time is also its operator's
            name = event.key.lower()
            part = next(p for p, words in PARTS.items() if any(word in name for word in words))
            seconds[part] += getattr(event, kind) / 1e6
    return seconds, averages.table(sort_by=kind, row_limit=12).splitlines()


def missing_time(name: str, way: Way, device: str, peak: float | None) -> list[str]:
    """Where a way's time goes, and how much is too much for its target."""
    seconds, operators = profiled(way, device)
    took = statistics.median(way.seconds)
    lines = ["", f"Profile of one {name}, {took:.3f} s without the profiler:"]
    if device == "cuda":
        seconds["idle"] = max(took - sum(seconds.values()), 0.0)
    total = sum(seconds.values())
    lines += [f"  {part:18}{s:9.4f} s{s / total:8.1%}" for part, s in seconds.items()]
    if peak:
        products = seconds["matrix products"] + seconds["attention"]
        allowed, at = way.flops / (TARGETS[name] * peak), way.flops / peak / products
        lines += [
            f"  {TARGETS[name]:.0%} MFU allows {allowed:.3f} s: "
            + (f"{took - allowed:.3f} s too many" if took > allowed else "the target holds"),
            f"  matrix products and attention alone reach {at:.1%} of the peak",
        ]
    return [*lines, *operators]


def not_measured(args: argparse.Namespace, peak: float | None) -> list[str]:
    """What the device and the packages at hand leave open."""
    found = []
    if args.device == "cpu":
        found.append("memory and everything else about GPUs: there is none, or --device cpu")
    if args.scale == "tiny":
        found.append("the paper's models: --scale tiny")
    if peak is None:
        found.append("MFU, and whether its targets hold: no known peak; give it with --peak_tflops")
    if importlib.util.find_spec("flash_attn") is None:
        found.append("--attn_implementation flash_attention_2: flash_attn is not installed")
    return found


def parse_arguments() -> argparse.Namespace:
    """The options; blocks, batches and attention are those of `--scale` if not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    has_gpu = torch.cuda.is_available()
    add("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--student_config", type=Path, help="directory with another student's config.json")
    add("--teacher_config", type=Path, help="directory with another teacher's config.json")
    add("--max_length", type=int, help="tokens of a block; 2048, or 128 of a tiny one")
    add("--batch_size", type=int, help="blocks of a micro-batch; 8, or 2 tiny ones")
    add("--accumulation", type=int, help="micro-batches of a step; 4, or 2 tiny ones")
    add("--top_k", type=float, default=0.4, help="1 trains all tokens, as CPT does")
    add("--attn_implementation", default="sdpa", help="of both models")
    add("--compile", action="store_true", help="every layer of both models")
    add("--peak_tflops", type=float, help="of the GPU in dense bfloat16, if it is not known")
    add("--repetitions", type=int, default=10)
    args = parser.parse_args()
    if args.device == "cpu" and args.scale == "full":
        parser.error("--scale full is for a GPU: add --scale tiny")
    for name, (full, tiny) in SHAPES.items():
        if getattr(args, name) is None:
            setattr(args, name, full if args.scale == "full" else tiny)
    return args


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    tflops = args.peak_tflops or peak_tflops(name)
    peak = tflops and tflops * 1e12
    with tempfile.TemporaryDirectory() as directory:
        ways, missing = make_ways(args, Path(directory))
        rng = random.Random(0)
        for _ in range(args.repetitions + WARM_UP_TURNS):
            for way in rng.sample(list(ways.values()), len(ways)):
                measure(way, args.device)
    for way in ways.values():  # the first turns allocate what stays, and compile
        del way.seconds[:WARM_UP_TURNS], way.added_bytes[:WARM_UP_TURNS]
    shape = f"{args.accumulation} x {args.batch_size} blocks of {args.max_length}"
    lines = [
        f"{name}, torch {torch.__version__}, {args.scale}, {shape}, {args.attn_implementation}"
        f"{', compiled' if args.compile else ''}, peak {tflops or 'unknown'} TFLOP/s",
        "",
        *table(ways, peak),
    ]
    for profiled_name in TARGETS:
        lines += missing_time(profiled_name, ways[profiled_name], args.device, peak)
    lines += ["", *(f"Not measured: {what}" for what in missing + not_measured(args, peak))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
