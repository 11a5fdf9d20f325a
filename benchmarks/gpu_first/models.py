"""Random models, blocks and trainers: what a run has, but for files and tokenizers."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import DistributedType, PartialState
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    TrainingArguments,
)

from benchmarks.generated import make_blocks
from benchmarks.gpu_first.report import Report, has_cuda
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import UNMAPPED
from vocagnolm.objective import Method
from vocagnolm.run import overlap
from vocagnolm.run.log import RunLog
from vocagnolm.trainer import VocAgnoTrainer

ModelRole = Literal["student", "teacher"]
SIZE_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
# In the order of the names. "full": TinyLlama 1.1B and Qwen2.5-Math-7B.
SIZES: dict[tuple[ModelRole, str], tuple[int, ...]] = {
    ("student", "full"): (2048, 5632, 22, 32, 4, 32000),
    ("student", "small"): (256, 704, 4, 8, 2, 4000),
    ("student", "tiny"): (64, 176, 2, 4, 2, 320),
    ("teacher", "full"): (3584, 18944, 28, 28, 4, 152064),
    ("teacher", "small"): (256, 704, 4, 8, 2, 8000),
    ("teacher", "tiny"): (128, 256, 2, 4, 2, 1024),
}


def make_config(role: ModelRole, scale: str, **options: object) -> PreTrainedConfig:
    """Make the configuration of one of the paper's models, or of a smaller one of its kind."""
    sizes: dict[str, Any] = dict(zip(SIZE_NAMES, SIZES[role, scale], strict=True))
    sizes |= {"tie_word_embeddings": False, **options}
    if role == "student":
        return LlamaConfig(**sizes, max_position_embeddings=2048)
    return Qwen2Config(**sizes, max_position_embeddings=4096)


def make_model(
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Make a model with random weights where it will run."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model


def some_blocks(
    scale: str, length: int, count: int, unmapped: float = 0.02
) -> list[dict[str, Any]]:
    """Make blocks cut and packed as in training; a share of the tokens has no teacher range."""
    vocabularies = SIZES["student", scale][-1], SIZES["teacher", scale][-1]
    blocks = make_blocks(count, length, vocabularies)
    for rng, block in zip(map(random.Random, range(count)), blocks, strict=True):
        for (ranges,) in block["ranges"]:
            ranges[rng.sample(range(len(ranges)), int(unmapped * len(ranges)))] = UNMAPPED
    return blocks


def make_trainer(
    report: Report,
    student: PreTrainedModel,
    teacher: Any,
    length: int,
    *,
    device: torch.device | None = None,
    method: Method | None = None,
    blocks: Sequence[dict[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> VocAgnoTrainer:
    """Make a trainer as train.py does, with `more` of its arguments and TrainingArguments."""
    options = {"bf16": True, "report_to": "none", "disable_tqdm": True, **options}
    options.setdefault("output_dir", tempfile.mkdtemp(dir=report.temporary))
    if report.fsdp:
        sharding = {"version": 2, "reshard_after_forward": False}
        sharding["state_dict_type"] = "SHARDED_STATE_DICT"
        options |= {"fsdp": True, "fsdp_config": sharding}
        _allow_fsdp_on_cpu()
    on_cpu = (device or report.device).type == "cpu"
    with streams_on_cpu():
        trainer = VocAgnoTrainer(
            model=student,
            teacher=teacher,
            method=method or Method(),
            args=TrainingArguments(use_cpu=on_cpu and not report.fsdp, **options),
            train_dataset=blocks,
            data_collator=PackedCollator(length, teacher_max_length=length),
            **(more or {}),
        )
    trainer.remove_callback(RunLog)
    return trainer


@contextmanager
def streams_on_cpu() -> Iterator[None]:
    """Let a CPU overlap models too, with torch's streams that do nothing, so that the code runs."""
    before, overlap.WITH_STREAMS = overlap.WITH_STREAMS, ("cuda", "cpu")
    yield
    overlap.WITH_STREAMS = before


def _allow_fsdp_on_cpu() -> None:
    """Let Accelerate shard where there is no GPU; it would fall back to DDP."""
    if has_cuda():
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def prepare(trainer: VocAgnoTrainer) -> VocAgnoTrainer:
    """Bring a trainer into the state that it has as its first step begins."""
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    return trainer


def backward(trainer: VocAgnoTrainer, batches: Sequence[dict[str, Any]]) -> float | torch.Tensor:
    """Run forward and backward of the micro-batches of a step; return the loss."""
    tokens = sum(map(trainer.objective.divisor_tokens, batches))
    count = torch.tensor(tokens, device=trainer.args.device)
    return sum(trainer.training_step(trainer.model_wrapped, batch, count) for batch in batches)


def temporary_directory(report: Report) -> str:
    """Make a directory that goes with the run."""
    return tempfile.mkdtemp(dir=Path(report.temporary))
