"""Training steps of any method on the device of `fake_cuda`, by all of the real `trainer.train()`.

Only the probe of the output head, before a run begins, is left out, as it compares numbers.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from fake_cuda import Seen, Watch, outside
from peft import LoraConfig
from torch.utils.data._utils import fetch
from transformers import TrainerCallback, masking_utils
from transformers.utils import import_utils

from benchmarks.models import make_config, make_model, some_blocks
from vocagnolm import collator, output_head, token_loss
from vocagnolm.collator import PackedCollator
from vocagnolm.method import Method
from vocagnolm.models.adapters import adapt
from vocagnolm.models.cost import sizes_of
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.objective import StoredTeacher
from vocagnolm.run.plan import device_memory
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.metrics import NO_BLOCK
from vocagnolm.training.sampler import StepSampler

CUDA = torch.device("cuda", 0)
# Tokens per packed sequence, and differences from `benchmarks.models.SIZES`.
SCALES: dict[str, tuple[int, dict[str, int]]] = {
    "tiny": (64, {"num_hidden_layers": 1}),
    "full": (2048, {}),
}


class Step(NamedTuple):
    """What `Watch` saw of a step: `fetch` brings batches to the device, `update` is all else."""

    waits: Mapping[Seen, int]
    copies: Mapping[Seen, int]
    mixed: Mapping[Seen, int]
    cpu: Mapping[Seen, int]
    peaks: Mapping[str, int]  # bytes, by phase

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def take_out_probes() -> None:
    """Remove what needs numbers, or let it compute with real ones."""
    token_loss._check_head = lambda *_: None
    # The original checks the type of the weight, which is that of fakes.
    for module in (output_head, token_loss):
        module.output_embeddings = lambda model: model.get_output_embeddings()
    # transformers takes fakes for a sign of tracing.
    masking_utils.is_tracing = lambda *_: False
    # transformers has already looked for a GPU.
    import_utils.is_torch_cuda_available.cache_clear()
    # The host computes these from characters, which random tokens lack.
    collator.segment_shares = lambda _, ranges: np.ones((*ranges.shape[:2], 3), np.float32)
    # Fake weights cannot be swapped for others; they are on the device already.
    torch.nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign]
    sampler: Any = StepSampler
    sampler.__iter__ = outside(sampler.__iter__)
    own = outside(fetch._MapDatasetFetcher.fetch)

    def fetched(self: Any, index: Any) -> Any:
        return Watch.active.fakes(own(self, index))

    fetch._MapDatasetFetcher.fetch = fetched  # type: ignore[method-assign]


def make_run(
    method: Method | None = None,
    attention: str = "torch_varlen",
    scale: str = "tiny",
    rows: int = 2,
    micro_batches: int = 2,
    *,
    teachers: int = 1,
    stored: bool = False,
    conversations: bool = False,
    lora: bool = False,
    **options: Any,
) -> VocAgnoTrainer:
    """Make a trainer of one step of micro-batches of `rows` sequences, inside of `with Watch()`.

    `scale` is one of `SCALES`, the teachers are online or their losses `stored`, `conversations`
    have labels on answers only, and the other options are those of `VocAgnoConfig`.
    """
    method, (length, sizes) = method or Method(), SCALES[scale]
    reads_rows = method.method == "kld"  # the student's own
    teachers = teachers if method.needs_teacher else 0
    blocks = some_blocks(scale, length, rows * micro_batches)
    without = "teacher_ids" if stored else "teacher_losses"
    for block in blocks:
        _set_teachers(block, 0 if reads_rows else teachers, conversations)
        if without in block:
            block[without] = [[] for _ in block[without]]
    blocks *= int(os.environ.get("WORLD_SIZE", 1))
    own = make_config("student", scale, **sizes)
    role = own if reads_rows else make_config("teacher", scale, **sizes)
    student: Any = make_model(own, CUDA, torch.float32, attention)
    teacher: Any = StoredTeacher(teachers)
    if not stored:
        models = [make_model(role, CUDA, torch.bfloat16, attention) for _ in range(teachers)]
        if options.get("teacher_sharding") == "node":
            models = [shard_inside_machine(model, CUDA) for model in models]
        teacher = models or None
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "bf16": True,
        "max_length": length,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": 1,
        "logging_strategy": "no",
        "logging_first_step": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if lora:
        with CUDA:
            config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
            student = adapt(student, config, 0)
    return VocAgnoTrainer(
        model=student,
        teacher=teacher,
        method=method,
        args=VocAgnoConfig(**settings | options),
        train_dataset=blocks,
        data_collator=PackedCollator(
            length,
            teacher_max_length=[length] * max(teachers, 1),
            chunks=method.chunks if method.method == "chunk" else None,
            shares=method.aggregation_in_effect == "share",
        ),
    )


def _set_teachers(block: dict[str, Any], teachers: int, conversations: bool) -> None:
    """Repeat the one teacher of a packed sequence, or remove it."""
    if conversations:
        for name in ("student", "teacher"):
            lengths = [len(ids) for ids in block[f"{name}_ids"]]
            block[f"{name}_labelled"] = [np.array([n // 2, n]) for n in lengths]
    for name in ("teacher_ids", "teacher_losses", "ranges", "shares"):
        block[name] = [np.concatenate([values] * max(teachers, 1)) for values in block[name]]
    block["teacher_counts"] = [list(counts) * teachers for counts in block["teacher_counts"]]
    if not teachers:
        for name in [name for name in block if name.startswith("teacher_")]:
            del block[name]


class _AtStep(TrainerCallback):
    """Makes AdamW's state before the step, as fake weights are never updated; clears the watch."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        for parameter in given["model"].parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        given["optimizer"].step()
        given["optimizer"].zero_grad()
        del parameter
        gc.collect()
        self.watch.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        watch = self.watch
        seen = (watch.waits, watch.copies, watch.mixed, watch.cpu)
        self.step = Step(*map(dict, seen), dict(watch.peaks))


def one_step(watch: Watch, trainer: VocAgnoTrainer) -> Step:
    """Train; return what the step did."""
    # What the guard reads if all is well: no bad sequence or gradient, no signal.
    watch.values[torch.int64, (4,)] = [NO_BLOCK] * 3 + [0]
    phases = {"get_batch_samples": "fetch", "training_step": "micro-batch"}
    for name, phase in phases.items():
        setattr(trainer, name, watch.during(phase)(getattr(trainer, name)))
    at_step = _AtStep(watch)
    trainer.add_callback(at_step)
    with watch.during("update"):
        trainer.train()
    return at_step.step


def planned(trainer: VocAgnoTrainer) -> float:
    """Return the bytes that `--dry_run` plans for a device."""
    source = SimpleNamespace(attn_implementation=trainer.model.config._attn_implementation)
    models = SimpleNamespace(
        student=SimpleNamespace(sizes=sizes_of(trainer.model), source=source),
        teachers=[SimpleNamespace(sizes=sizes_of(each)) for each in trainer.online_teachers],
        teacher_dtype="bfloat16",
    )
    job: Any = SimpleNamespace(args=trainer.args)
    return sum(device_memory(job, cast(Any, models)).values())


def check_step(step: Step, attention: str) -> None:
    """Check that a step mixes no devices and waits once."""
    assert not step.mixed, step.mixed
    assert not [seen for seen in step.cpu if seen.phase == "micro-batch"], step.cpu
    waits = {
        seen: count
        for seen, count in step.waits.items()
        # With sdpa, transformers asks in each forward pass whether rows are packed.
        if attention != "sdpa" or "find_packed_sequence_indices" not in seen.where
    }
    assert [(seen.phase, seen.what, count) for seen, count in waits.items()] == [
        ("update", "tolist", 1)  # the guard's
    ], waits
    assert not [seen for seen in step.copies if seen.phase == "micro-batch"], step.copies
