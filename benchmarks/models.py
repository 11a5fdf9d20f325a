"""Random models, packed sequences and trainers, which need no files and no tokenizers."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import transformers
from accelerate import DistributedType, PartialState
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks.generated import make_blocks
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.config import VocAgnoConfig

ModelRole = Literal["student", "teacher"]
SIZE_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
# In the order of SIZE_NAMES. "full": TinyLlama 1.1B and Qwen2.5-Math-7B.
SIZES: dict[tuple[ModelRole, str], tuple[int, ...]] = {
    ("student", "full"): (2048, 5632, 22, 32, 4, 32000),
    ("student", "medium"): (1024, 2816, 12, 16, 4, 32000),
    ("student", "small"): (256, 704, 4, 8, 2, 4000),
    ("student", "claim"): (128, 384, 2, 2, 2, 8192),
    ("student", "tiny"): (64, 176, 2, 4, 2, 320),
    ("teacher", "full"): (3584, 18944, 28, 28, 4, 152064),
    ("teacher", "medium"): (1536, 8960, 12, 12, 2, 152064),
    ("teacher", "small"): (256, 704, 4, 8, 2, 8000),
    ("teacher", "claim"): (256, 768, 2, 4, 4, 16384),
    ("teacher", "tiny"): (128, 256, 2, 4, 2, 1024),
}


def has_cuda() -> bool:
    """Return whether there is a GPU."""
    return torch.cuda.is_available()


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
    """Make a model with random weights on its device."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model


def llama(vocabulary: int, hidden: int, layers: int, heads: int, **options: Any) -> Any:
    """Make a random Llama; its MLP is three times as wide, unless `options` say otherwise."""
    options = {"intermediate_size": 3 * hidden, "num_key_value_heads": heads, **options}
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **{"max_position_embeddings": 4096, **options},
    )
    return LlamaForCausalLM(config)


def some_blocks(
    scale: str, length: int, count: int, unmapped: float = 0.02
) -> list[dict[str, Any]]:
    """Make packed sequences as in training; a share of the tokens has no teacher range."""
    vocabularies = SIZES["student", scale][-1], SIZES["teacher", scale][-1]
    blocks = make_blocks(count, length, vocabularies)
    for index, block in enumerate(blocks):
        rng = random.Random(index)
        for (ranges,) in block["ranges"]:
            ranges[rng.sample(range(len(ranges)), int(unmapped * len(ranges)))] = UNMAPPED
    return blocks


def make_trainer(
    student: PreTrainedModel,
    teacher: Any,
    length: int,
    output_dir: str,
    *,
    on_cpu: bool = False,
    fsdp: bool = False,
    method: Any = "vocagnolm",
    blocks: Sequence[Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> VocAgnoTrainer:
    """Make a trainer as train.py does; `options` change its configuration, `more` its arguments."""
    given = {"max_length": length, "bf16": True, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    options = {**given, **options}
    if fsdp:
        sharding = {"version": 2, "reshard_after_forward": False}
        sharding["state_dict_type"] = "SHARDED_STATE_DICT"
        options |= {"fsdp": True, "fsdp_config": sharding}
        allow_fsdp_on_cpu()
    return VocAgnoTrainer(
        model=student,
        teacher=teacher,
        method=method,
        args=VocAgnoConfig(output_dir=output_dir, use_cpu=on_cpu and not fsdp, **options),
        train_dataset=blocks,
        data_collator=PackedCollator(length, teacher_max_length=length),
        **(more or {}),
    )


def allow_fsdp_on_cpu() -> None:
    """Let Accelerate shard without a GPU. It would otherwise fall back to DDP."""
    if has_cuda():
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    arguments: Any = transformers.training_args
    arguments.is_torch_bf16_gpu_available = lambda: True
    state: Any = PartialState
    state._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def prepare(trainer: VocAgnoTrainer) -> VocAgnoTrainer:
    """Bring a trainer into its state at the beginning of its first step."""
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    return trainer


def backward(trainer: VocAgnoTrainer, batches: Sequence[Any]) -> Any:
    """Run the forward and backward passes of a step's micro-batches, and return the loss."""
    tokens = sum(map(trainer.token_objective.divisor_tokens, batches))
    count = torch.full((), tokens, device=trainer.args.device)  # a copy would synchronize
    return sum(trainer.training_step(trainer.model_wrapped, batch, count) for batch in batches)


def count_tokens(batches: Sequence[Mapping[str, Any]], prefix: str = "") -> tuple[int, int]:
    """Count the tokens with a loss, and the keys from which they are predicted."""
    tokens = keys = 0
    for batch in batches:
        is_valid = batch[f"{prefix}labels"] != IGNORED_LABEL
        tokens += int(is_valid.sum())
        keys += int((batch[f"{prefix}position_ids"] * is_valid).sum())
    return tokens, keys
