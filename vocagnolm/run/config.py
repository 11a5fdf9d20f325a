"""`transformers.TrainingArguments` with the paper's training set-up; some options are rejected."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from vocagnolm.cli import json_settings
from vocagnolm.dist import is_on_cpu, launched_processes
from vocagnolm.host.options import raise_first
from vocagnolm.host.trackers import import_wandb
from vocagnolm.models.layers import liger_settings
from vocagnolm.run.options import RunOptions
from vocagnolm.run.rejected import argument_faults, unsupported_options

_TOKENS_SEEN = ("no", "all", "non_padding")

# Of the paper's optimizer step (Section 4.3).
_PAPER_TOKENS = 2**21
# Sequences per device; with a 7B teacher in bf16 this fits 80 GB.
_MAX_DERIVED_BATCH = 8


@dataclass
class RunArguments(RunOptions, TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` with the paper's training set-up (Section 4.3) as defaults.

    AdamW's beta2 and weight decay are LitGPT's, which the paper trains with; it does not name them.
    """

    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    per_device_eval_batch_size: int | None = None  # type: ignore[assignment]
    # A command line could not set the parent's non_padding.
    include_num_input_tokens_seen: str = field(
        default="no", metadata={"nargs": "?", "const": "all"}
    )
    eval_strategy: IntervalStrategy | str | None = field(  # type: ignore[assignment]
        default=None, metadata={"choices": [strategy.value for strategy in IntervalStrategy]}
    )
    # Pushes along the way would show all files of the output directory.
    hub_strategy: str = "end"
    logging_first_step: bool = True
    # It hides NaNs, at a wait per micro-batch.
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False
    liger_kernel_config: dict[str, Any] | str | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        # Truth values of options that also have others, and are text on the command line.
        seen, fsdp = (
            str(value).lower() for value in (self.include_num_input_tokens_seen, self.fsdp)
        )
        self.include_num_input_tokens_seen = {"true": "all", "false": "no"}.get(seen, seen)
        self.fsdp = {"true": True, "false": None}.get(fsdp, self.fsdp)  # type: ignore[assignment]
        raise_first(unsupported_options(self))
        raise_first(self._faults())
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == "cosine_with_min_lr":
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        if isinstance(self.lr_scheduler_kwargs, str):
            given = json_settings("--lr_scheduler_kwargs", self.lr_scheduler_kwargs, empty=True)
            self.lr_scheduler_kwargs = given
        if self.use_liger_kernel:
            self.liger_kernel_config = liger_settings(self.liger_kernel_config)
        if self.disable_tqdm is None:
            # A log file wants no progress bar.
            self.disable_tqdm = not sys.stderr.isatty()
        if self.bf16 is None:
            self.bf16 = (
                torch.cuda.is_available()
                and torch.cuda.is_bf16_supported()
                and not (self.use_cpu or self.fp16)
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        self.eval_strategy = self.eval_strategy or IntervalStrategy.NO
        if self.save_strategy == SaveStrategy.BEST:
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        self.report_to = self.report_to or "none"  # type: ignore[assignment]
        # Placeholders that the parent class can work with, until the block length is known.
        self._given = (self.per_device_train_batch_size, self.gradient_accumulation_steps)
        self._given_eval = self.per_device_eval_batch_size
        self.per_device_train_batch_size = self.gradient_accumulation_steps = 1
        self.per_device_eval_batch_size = 1
        # The parent class takes processes without a GPU for separate runs, unless it is told.
        alone = launched_processes() == 1 or self.is_sharded
        self.use_cpu = self.use_cpu or (is_on_cpu() and not alone)
        # On a CPU it would drop the time-out.
        if self.use_cpu:
            timeout = timedelta(seconds=self.ddp_timeout)
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timeout)
        TrainingArguments.__post_init__(self)  # type: ignore[no-untyped-call]
        raise_first(argument_faults(self))
        self._check_trackers()

    def _faults(self) -> Iterator[str]:
        if (seen := self.include_num_input_tokens_seen) not in _TOKENS_SEEN:
            expected = ", ".join(_TOKENS_SEEN)
            yield f"--include_num_input_tokens_seen must be one of {expected}, got {seen}"
        if self.remove_unused_columns:
            yield "--remove_unused_columns true has no effect: leave it out"
        for name in ("hub_model_id", "hub_private_repo", "hub_revision", "hub_always_push"):
            if vars(self)[name] and not self.push_to_hub:
                yield f"--{name} has no effect without --push_to_hub: leave it out"

    def _check_trackers(self) -> None:
        """Reject a tracker whose package is missing, which Trainer would say much later."""
        for name in self.report_to or ():
            if name == "wandb":
                import_wandb()
            # A callback made without its package may leave a traceback when it is deleted.
            elif not vars(integration_utils).get(f"is_{name}_available", lambda: True)():
                raise ValueError(f"--report_to {name} needs its package: pip install {name}")
        try:
            for make in integration_utils.get_reporting_integration_callbacks(self.report_to):  # type: ignore[no-untyped-call]
                make()
        except (ImportError, RuntimeError) as error:
            raise ValueError(f"--report_to {' '.join(self.report_to or ())}: {error}") from error

    @property
    def is_sharded(self) -> bool:
        """True if FSDP spreads the student, as the options or `accelerate launch` say."""
        return bool(self.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")

    @property
    def is_mixed(self) -> bool:
        """True if the student computes in 16 bits, as the options or `accelerate launch` say."""
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION") in ("bf16", "fp16")
        return bool(self.bf16 or self.fp16 or launched)

    def set_batch(self, max_length: int) -> None:
        """Derive batch size and accumulation from the global batch, or this one from them."""
        self._is_decided_by_parts = self.global_batch_tokens is None
        rows, steps = split_global_batch(
            self.global_batch_tokens, max_length, self.world_size, *self._given
        )
        self.per_device_train_batch_size, self.gradient_accumulation_steps = rows, steps
        self.global_batch_tokens = rows * steps * self.world_size * max_length
        self._is_decided_by_parts &= None not in self._given
        self.per_device_eval_batch_size = self._given_eval or rows

    def batch_arithmetic(self, max_length: int) -> str:
        """Spell out the global batch."""
        shown = (
            f"{self.global_batch_tokens:,} tokens = {self.world_size} processes x "
            f"{self.per_device_train_batch_size} sequences x {self.gradient_accumulation_steps} "
            f"accumulation steps x {max_length} tokens"
        )
        if self._is_decided_by_parts:
            shown += ", as --per_device_train_batch_size and --gradient_accumulation_steps decide"
        return shown


def split_global_batch(
    global_batch_tokens: int | None,
    max_length: int,
    world_size: int,
    batch_size: int | None = None,
    accumulation: int | None = None,
) -> tuple[int, int]:
    """Return sequences per device and accumulation steps that make exactly the global batch.

    By default it is the paper's, unless both are given; the batch size is the largest one up to 8
    that divides.

    Raises:
        ValueError: they cannot make it; the message is the arithmetic.

    >>> split_global_batch(2**21, 2048, world_size=32)
    (8, 4)
    >>> split_global_batch(2**21, 2048, world_size=1, batch_size=16)
    (16, 64)
    >>> split_global_batch(None, 2048, world_size=1, batch_size=3, accumulation=2)
    (3, 2)
    """
    if global_batch_tokens is None and batch_size and accumulation:
        return batch_size, accumulation
    global_batch_tokens = global_batch_tokens or _PAPER_TOKENS
    sequences, rest = divmod(global_batch_tokens, max_length)
    if rest:
        raise ValueError(
            f"--global_batch_tokens {global_batch_tokens} is not a multiple of --max_length "
            f"{max_length}: {global_batch_tokens} / {max_length} = "
            f"{global_batch_tokens / max_length:.2f} sequences"
        )
    per_device, rest = divmod(sequences, world_size)
    if batch_size is None and accumulation is None and not rest:
        batch_size = max(n for n in range(1, _MAX_DERIVED_BATCH + 1) if per_device % n == 0)
    if batch_size is None:
        batch_size = max(sequences // (world_size * (accumulation or 1)), 1)
    if accumulation is None:
        accumulation = max(sequences // (world_size * batch_size), 1)
    if world_size * batch_size * accumulation != sequences:
        raise ValueError(
            f"{world_size} processes x {batch_size} sequences x {accumulation} accumulation steps "
            f"x {max_length} tokens = {world_size * batch_size * accumulation * max_length:,} "
            f"tokens, not --global_batch_tokens {global_batch_tokens:,} ({sequences} sequences): "
            "change --global_batch_tokens, --per_device_train_batch_size or the number of processes"
            ", or give --per_device_train_batch_size with --gradient_accumulation_steps alone"
        )
    return batch_size, accumulation
