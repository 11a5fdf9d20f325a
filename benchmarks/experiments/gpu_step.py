"""Training steps of the paper's models on one device: tokens per second, MFU, memory, a profile.

    python -m benchmarks.experiments.gpu_step           # TinyLlama 1.1B, Qwen2.5-Math-7B
    python -m benchmarks.experiments.gpu_step --attn_implementation torch_varlen --compile
    python -m benchmarks.experiments.gpu_step --scale tiny --device cpu

Two targets: 45 % MFU for the student's step (forward, backward, clipping, AdamW) and 60 % for the
teacher's forward pass; MFU as in `vocagnolm.training.flops`, FP8's too of the bfloat16 peak. The
ways are steps of plain continual pretraining (CPT), with a store's losses, and with the teacher
co-resident in bfloat16 and in FP8, and each teacher's forward pass alone. They take turns in one
process. All models stay on the GPU: on one of 80 GB give --batch_size 4. Steps run through
`VocAgnoTrainer`. Weights and ids are random; documents have the lengths of OpenWebMath's, cut and
packed as in training. Batches are made beforehand and moved within a step. A profile of a CPT step
and of a forward pass of the teacher shows where the time goes that is missing to the targets. The
last lines say what could not be measured, and why.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
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

from benchmarks.generated import make_batches, make_blocks
from benchmarks.harness import Skipped, Way, take_turns
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.models.layers import compile_layers
from vocagnolm.models.quantization import fp8_products
from vocagnolm.objective import Method, Objective
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
PARTS = {  # of a profile: words in the names of PyTorch's operators, the first part that has one
    "attention": ("attention", "flash", "varlen"),
    "matrix products": ("::mm", "addmm", "bmm", "scaled_mm", "linear"),
    "optimizer": ("adam", "_foreach"),
    "copies and casts": ("copy", "cat", "fill", "zero", "index", "gather", "scatter"),
    "the rest": ("",),
}


@dataclass(frozen=True)
class Size:
    """Models, batches and how both are computed; each is an option of the command.

    Attributes:
        scale: "full" is TinyLlama 1.1B and Qwen2.5-Math-7B, "tiny" their architectures.
        student_config: directory with another student's config.json.
        teacher_config: directory with another teacher's config.json.
        max_length: tokens of a block.
        batch_size: blocks of a micro-batch.
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
    batch_size: int = 8
    accumulation: int = 4
    top_k: float = 0.4
    attn_implementation: str = "sdpa"
    compile: bool = False
    peak_tflops: float = 0.0
    repetitions: int = 10

    @staticmethod
    def tiny() -> Size:
        """The same code with nothing to learn from it."""
        return Size(scale="tiny", max_length=128, batch_size=2, accumulation=2, repetitions=2)

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
    """

    flops: float
    tokens: int
    held_bytes: int


def make_config(role: str, scale: str) -> PreTrainedConfig:
    """TinyLlama 1.1B or Qwen2.5-Math-7B, or a tiny model of its architecture."""
    sizes = dict(zip(SIZE_NAMES, SIZES[role, scale], strict=True))
    if role == "student":
        return LlamaConfig(**sizes, max_position_embeddings=2048)
    return Qwen2Config(**sizes, max_position_embeddings=4096)


def make_model(config: PreTrainedConfig, dtype: torch.dtype, size: Size) -> PreTrainedModel:
    """A model with random weights on the device; its layers compiled one by one, if asked for."""
    with torch.device(size.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=size.attn_implementation
        )
    if size.compile:
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


def make_trainer(size: Size, directory: Path, student: Any, teacher: Any) -> VocAgnoTrainer:
    """A trainer with its optimizer, prepared as for a run on one device."""
    trainer = VocAgnoTrainer(
        model=student,
        teacher=teacher,
        method=Method(top_k=size.top_k),
        args=TrainingArguments(
            output_dir=str(directory),
            use_cpu=size.device == "cpu",
            bf16=size.device == "cuda",
            per_device_train_batch_size=size.batch_size,
            report_to="none",
        ),
        data_collator=PackedCollator(size.max_length),
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


def make_ways(size: Size, directory: Path) -> tuple[dict[str, Way], dict[str, Work], list[str]]:
    """The ways, what each computes, and what cannot be measured."""
    given = {"student": size.student_config, "teacher": size.teacher_config}
    configs = [
        AutoConfig.from_pretrained(path) if path else make_config(role, size.scale)
        for role, path in given.items()
    ]
    torch.manual_seed(0)
    student = make_model(configs[0], torch.float32, size)
    teacher = make_model(configs[1], torch.bfloat16, size)
    teachers, missing = {"": (teacher, _bytes(teacher))}, []
    try:
        if size.device != "cuda":
            raise ValueError(f"--device {size.device} computes in no float8")
        teachers[FP8] = in_fp8(teacher)
    except (ValueError, RuntimeError) as error:  # or out of memory
        missing.append(f"the teacher in FP8: {error}")
    models = model_work(student), model_work(teacher)
    trainer = make_trainer(size, directory, student, teacher)
    vocabularies = (configs[0].vocab_size, configs[1].vocab_size)
    blocks = make_blocks(size.batch_size * size.accumulation, size.max_length, vocabularies)
    online, stored = (
        make_batches(blocks, size.max_length, size.batch_size, is_stored)
        for is_stored in (False, True)
    )
    guided, ours, theirs = trainer.objective, count(online), count(online, "teacher_")
    held = 3 * _bytes(student)  # AdamW keeps two more of each weight
    ways: dict[str, Way] = {}
    work: dict[str, Work] = {}

    def add_step(name: str, objective: Any, batches: Any, flops: float, teacher_bytes: int) -> None:
        flops += models[0].training_flops(*ours, sum(map(objective.weighted_tokens, batches)))
        ways[name] = Way(lambda _: step(trainer, objective, batches))
        work[name] = Work(flops, ours[0], held + teacher_bytes)

    def add_forward(name: str, resident: ResidentTeacher, flops: float, bytes_: int) -> None:
        ways[name] = Way(lambda _: forward(trainer, resident, online))
        work[name] = Work(flops, theirs[0], bytes_)

    add_step(CPT, Objective(Method("cpt")), online, 0.0, 0)
    add_step(STORED, replace(guided, teacher=StoredTeacher()), stored, 0.0, 0)
    flops = models[1].forward_flops(*theirs, theirs[0])
    for suffix, (model, bytes_) in teachers.items():
        resident = ResidentTeacher([model], trainer.args.device)
        add_step(ONLINE + suffix, replace(guided, teacher=resident), online, flops, bytes_)
        add_forward(TEACHER + suffix, resident, flops, bytes_)
    return ways, work, missing


@cache
def measured(size: Size) -> tuple[dict[str, Way], dict[str, Work], list[str]]:
    """Measure all ways; once for each size."""
    with tempfile.TemporaryDirectory() as directory:
        ways, work, missing = make_ways(size, Path(directory))
        take_turns(ways, size.repetitions, size.device, memory=size.device == "cuda")
    return ways, work, missing


def mfu(size: Size, name: str) -> tuple[float, tuple[str, ...]]:
    """Return a way's share of the peak, and the table of all ways.

    Raises:
        Skipped: the GPU's peak is not known.
    """
    ways, work, _ = measured(size)
    if size.peak is None:
        raise Skipped("no known peak: give it with --set peak_tflops=TFLOPS")
    share = work[name].flops / ways[name].median_s / size.peak
    return share, tuple(table(ways, work, size.peak))


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def table(ways: dict[str, Way], work: dict[str, Work], peak: float | None) -> list[str]:
    """Times, rates and memory of the ways, and their ratios."""
    median = {name: way.median_s for name, way in ways.items()}
    columns = (("median", 10), ("quartiles", 22), ("tokens/s", 12), ("MFU", 8), ("memory", 12))
    lines = [" " * 22 + "".join(name.rjust(width) for name, width in columns)]
    for name, way in ways.items():
        does = work[name]
        share = f"{does.flops / median[name] / peak:8.1%}" if peak else f"{'-':>8}"
        bytes_ = does.held_bytes + max(way.added_bytes, default=0)
        memory = f"{bytes_ / 2**30:8.1f} GiB" if way.added_bytes else f"{'-':>12}"
        rate = does.tokens / median[name]
        lines.append(f"{name:22}{way.spread}{rate:12,.0f}{share}{memory}")
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
        way.run(None)
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


def missing_time(name: str, way: Way, flops: float, device: str, peak: float | None) -> list[str]:
    """Where a way's time goes, and how much is too much for its target."""
    seconds, operators = profiled(way, device)
    took = way.median_s
    lines = ["", f"Profile of one {name}, {took:.3f} s without the profiler:"]
    if device == "cuda":
        seconds["idle"] = max(took - sum(seconds.values()), 0.0)
    total = sum(seconds.values())
    lines += [f"  {part:18}{s:9.4f} s{s / total:8.1%}" for part, s in seconds.items()]
    if peak:
        products = seconds["matrix products"] + seconds["attention"]
        allowed, at = flops / (TARGETS[name] * peak), flops / peak / products
        lines += [
            f"  {TARGETS[name]:.0%} MFU allows {allowed:.3f} s: "
            + (f"{took - allowed:.3f} s too many" if took > allowed else "the target holds"),
            f"  matrix products and attention alone reach {at:.1%} of the peak",
        ]
    return [*lines, *operators]


def not_measured(size: Size, peak: float | None) -> list[str]:
    """What the device and the packages at hand leave open."""
    found = []
    if size.device == "cpu":
        found.append("memory and everything else about GPUs: there is none, or --device cpu")
    if size.scale == "tiny":
        found.append("the paper's models: --scale tiny")
    if peak is None:
        found.append("MFU, and whether its targets hold: no known peak; give it with --peak_tflops")
    if importlib.util.find_spec("flash_attn") is None:
        found.append("--attn_implementation flash_attention_2: flash_attn is not installed")
    return found


def parse_arguments() -> Size:
    """The options; blocks and batches are those of `--scale` if not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--compile", action="store_true", help="every layer of both models")
    for option in fields(Size):
        if option.name not in ("scale", "device", "compile"):
            parser.add_argument(f"--{option.name}", type=type(option.default))
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    if given["device"] == "cpu" and given["scale"] == "full":
        parser.error("--scale full is for a GPU: add --scale tiny")
    return replace(Size.tiny() if given["scale"] == "tiny" else Size(), **given)


def main() -> None:
    """Measure and print."""
    size = parse_arguments()
    name = torch.cuda.get_device_name() if size.device == "cuda" else "CPU"
    peak = size.peak
    ways, work, missing = measured(size)
    shape = f"{size.accumulation} x {size.batch_size} blocks of {size.max_length}"
    how = f"{size.attn_implementation}, compiled" if size.compile else size.attn_implementation
    shown = f"{peak / 1e12:g} TFLOP/s" if peak else "unknown"
    lines = [
        f"{name}, torch {torch.__version__}, {size.scale}, {shape}, {how}, peak {shown}",
        "",
        *table(ways, work, peak),
    ]
    for target in TARGETS:
        lines += missing_time(target, ways[target], work[target].flops, size.device, peak)
    lines += ["", *(f"Not measured: {what}" for what in missing + not_measured(size, peak))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
