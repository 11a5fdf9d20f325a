"""`VocAgnoConfig`: `TrainingArguments` with the paper's setup, and the arguments it rejects."""

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType

from vocagnolm.fields import OptionError, json_settings, named, option
from vocagnolm.models.load import choose_dtype
from vocagnolm.record import Record
from vocagnolm.shell.dist import check_connected, is_on_cpu, launched_processes
from vocagnolm.training.options import PAPER_TOKENS, GuidanceOptions, RunOptions
from vocagnolm.training.run_directory import begun_settings

# What `accelerate launch --mixed_precision` asks for, by its value in the environment.
_LAUNCHED = {"bf16": "bfloat16", "fp16": "float16"}
# The precision of a run by its settings bf16 and fp16.
_PRECISIONS: dict[Any, str] = {
    (True, False): "bfloat16",
    (False, True): "float16",
    (False, False): "float32",
}
# A derived batch has at most this many sequences per device. With a 7B teacher in bf16, they fit
# into 80 GB.
_MAX_DERIVED_BATCH = 8
# With fewer steps, the default step is lowered: warm-up and schedule need some.
MIN_STEPS = 20
# Trainer's own default, for users who come from it and ask for nothing.
_TRAINER_BATCH = 8
# A run can have only one value of each of these fields. The text says what any other does.
_ONE_VALUE: dict[str, tuple[object, str]] = {
    "ignore_data_skip": (False, "trains on the same data again after every resume"),
    "auto_find_batch_size": (False, "shrinks the global batch where memory runs out"),
    "train_sampling_strategy": ("random", "makes other batches than a resumed run"),
    "bf16_full_eval": (False, "casts the student that is saved"),
    "fp16_full_eval": (False, "casts the student that is saved"),
    "label_smoothing_factor": (0.0, "does nothing to the losses of tokens"),
}
# Trainer's options of `torch.compile`.
_COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
# These Liger kernels replace the computation of the loss, which a guided run needs per token.
_LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


@dataclass
class VocAgnoConfig(GuidanceOptions, RunOptions, TrainingArguments):  # type: ignore[misc]
    """`TrainingArguments` with settings for guidance, packing and batches, named like the options.

    Defaults are the paper's (Section 4.3), except for the batch, which is Trainer's: 8 sequences
    per device, or `per_device_train_batch_size`, without accumulation. `global_batch_tokens=2**21`
    is the paper's step, with any number of processes. AdamW's beta2 and weight decay are
    LitGPT's. The paper trains with LitGPT, but does not name them.

    Raises:
        ValueError: a value is wrong.
    """

    # These fields of Trainer define a run, too. Outside the intervals, it would silently train
    # otherwise: with a norm below 0, for example, it does not clip.
    optim: str = option(TrainingArguments.optim, "Optimizer.")
    optim_args: str | None = option(None, "More arguments of the optimizer.")
    adam_beta1: float = option(0.9, "Beta1 of AdamW.", interval="[0, 1)")
    adam_beta2: float = option(0.95, "Beta2 of AdamW.", interval="[0, 1)")
    adam_epsilon: float = option(1e-8, "Epsilon of AdamW.", interval="[0, inf)")
    weight_decay: float = option(0.1, "Weight decay of AdamW.", interval="[0, inf)")
    max_grad_norm: float = option(1.0, "Clip gradients to this norm.", interval="[0, inf]")
    neftune_noise_alpha: float | None = option(None, "Noise of NEFTune.", interval="[0, inf)")
    data_seed: int | None = option(None, "Seed of the data order alone.")
    fp16: bool = option(False, "Compute in float16.", excludes=["bf16"])
    # None stands for the batch size of training, which `_set_batch` fills in.
    per_device_eval_batch_size: int = option(  # type: ignore[assignment]
        None, "Packed sequences per device in evaluations.", role="words", interval="[1, inf)"
    )
    # A push on the way would upload files that are being written.
    hub_strategy: str = "end"
    logging_first_step: bool = True
    # Trainer would drop the keys of a packed sequence that the model's own forward does not take.
    remove_unused_columns: bool = False
    # Trainer's default lets DDP search every pass's graph for parameters without a gradient.
    ddp_find_unused_parameters: bool | None = False
    # In Python, the column of all documents. A command has an option with a column for each corpus.
    text_column: str | None = None
    liger_kernel_config: dict[str, Any] | str | None = None  # type: ignore[assignment]
    if "warmup_ratio" in TrainingArguments.__dataclass_fields__:
        # Older versions of transformers still have it. Here it is an alias of `warmup_steps`, so it
        # is not an option.
        warmup_ratio: float | None = field(default=None, init=False)

    _argument_group_name = "run, with all fields of transformers.TrainingArguments"
    _is_step_lowered = False
    # The parent class parses these fields from JSON, since a command line gives them as text.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "liger_kernel_config",
    ]

    def __post_init__(self) -> None:
        # Check the options first, because the parent class connects the processes of a job, and a
        # wrong option should be reported without waiting for the others.
        GuidanceOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        for name in self._VALID_DICT_FIELDS:
            text = getattr(self, name, None)
            # A command line gives JSON, or the name of a file.
            if isinstance(text, str) and text.startswith("{"):
                setattr(self, name, json_settings(name, text))
        self._check_sharding()
        # transformers requires the lowest rate for this schedule. The paper ends at a tenth of the
        # peak.
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == "cosine_with_min_lr":
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        # Older versions of transformers call it gradient_checkpointing.
        is_old = not hasattr(TrainingArguments, "activation_checkpointing")
        if self.activation_checkpointing and is_old:
            self.gradient_checkpointing = True
        # Progress bars would fill a log file.
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        # An epoch ends with its last whole step anyway, and an evaluation is of all texts.
        self.dataloader_drop_last = False
        # Decide the precision before the parent class compares it with the device.
        self._set_precision()
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        # Trainer's own default is the steps between logs.
        if self.eval_strategy == IntervalStrategy.STEPS:
            self.eval_steps = self.eval_steps or self.save_steps
        # Trainer requires a metric for this strategy, and every evaluation has the loss.
        if self.save_strategy == SaveStrategy.BEST:
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        # FSDP shards the student according to the options or `accelerate launch`.
        self.is_sharded = bool(self.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")
        # The parent class treats processes on a CPU as separate runs, and drops their timeout.
        runs_ddp = launched_processes() > 1 and not self.is_sharded
        self.use_cpu = self.use_cpu or (is_on_cpu() and runs_ddp)
        if self.use_cpu:
            timeout = timedelta(seconds=self.ddp_timeout)
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timeout)
        # Trainer does not see these fields: it would let float32 products, such as those of rotary
        # positions, be rounded to TF32.
        compiling = {name: getattr(self, name) for name in _COMPILING}
        vars(self).update(dict.fromkeys(_COMPILING))
        TrainingArguments.__post_init__(self)  # type: ignore[no-untyped-call]
        vars(self).update(compiling)
        # As in Trainer, each of the three asks for it.
        asked = self.torch_compile, self.torch_compile_backend, self.torch_compile_mode
        self.compiles_layers = any(asked) and self.torch_compile is not False
        # The parent class lets the launcher override a request for float32.
        if not self.is_mixed:
            self.mixed_precision = "no"
        _check_schedule(self)
        kernels: Any = self.liger_kernel_config or {}
        self.liger_kernel_config = kernels | dict.fromkeys(_LIGER_LOSSES, False)
        check_arguments(self)
        self._asked = self.per_device_train_batch_size, self.gradient_accumulation_steps
        self._set_batch(self.global_batch_tokens)

    def _check_sharding(self) -> None:
        if self.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            raise OptionError("deepspeed", "is not supported: shard with FSDP2")
        # Trainer says so later, when Accelerate has set variables that change what the next configs
        # of a notebook mean.
        if self.fsdp and launched_processes() < 2 and not self.dry_run:
            raise OptionError("fsdp", "shards over several processes: start them with a launcher")

    def _set_precision(self) -> None:
        """Compute in bfloat16 if the device multiplies in it, unless something else was requested.

        Options come first, then the precision in which the run began, on whatever machine it
        resumes, and then the launcher.
        """
        choice = "auto"
        if self.fp16:
            choice = "float16"
        elif self.bf16 is not None:
            choice = "bfloat16" if self.bf16 else "float32"
        has_cuda = torch.cuda.is_available()
        on_cpu = self.use_cpu or not (has_cuda or torch.accelerator.is_available())
        # On other kinds of GPU, Trainer may reject bfloat16, so it must be requested.
        has_products = on_cpu or (has_cuda and torch.cuda.is_bf16_supported())
        dtype, self.why_precision = "float32", "the GPU has no products in bfloat16"
        settings = settings_in(self.output_dir)
        begun = _PRECISIONS.get((settings.get("bf16"), settings.get("fp16", False)))
        launched = _LAUNCHED.get(os.environ.get("ACCELERATE_MIXED_PRECISION", ""))
        follows_launcher = choice == "auto" and begun is None and launched is not None
        if follows_launcher:
            dtype, self.why_precision = str(launched), "as the launcher says"
        elif choice != "auto" or has_products:
            device = torch.device("cpu" if on_cpu else "cuda")
            dtype, self.why_precision = choose_dtype(choice, device, begun)
        # A plan for a GPU may be made on a CPU, unless its precision is the CPU's.
        self.is_precision_of_cpu = on_cpu and choice == "auto" and not follows_launcher
        is_planned = self.dry_run and not self.is_precision_of_cpu
        self.is_for_gpu = is_planned or (has_cuda and not on_cpu)
        self.bf16, self.fp16 = dtype == "bfloat16", dtype == "float16"
        self.is_mixed = self.bf16 or self.fp16
        if self.bf16 and not torch.accelerator.is_available():
            # Trainer accepts bfloat16 on a CPU only if a CPU is requested.
            self.use_cpu = True

    def _set_batch(self, global_batch_tokens: int | None) -> None:
        """Derive batch size and accumulation from the global batch, or the other way round."""
        self.is_batch_derived = global_batch_tokens is None
        # Only the tokens of a step were given, so they may be split by what a device holds.
        self.is_split_derived = not (self.is_batch_derived or any(self._asked))
        rows, steps = split_global_batch(
            global_batch_tokens, self.max_length, self.world_size, *self._asked
        )
        self.per_device_train_batch_size = rows
        self.gradient_accumulation_steps = steps
        # If the global batch was given, this changes nothing, because the split is exact.
        self.global_batch_tokens = rows * steps * self.world_size * self.max_length
        self.per_device_eval_batch_size = self.per_device_eval_batch_size or rows

    def step_for(self, sequences: int) -> int:
        """Return the tokens of the largest step of which an epoch has at least 20, if one does.

        It is a power of two of sequences, unless processes or a batch size that was asked for
        demand another multiple.
        """
        rows, steps = self._asked
        step = int(self.world_size) * (rows or 1) * (steps or 1)
        while 2 * step * MIN_STEPS <= sequences:
            step *= 2
        return step * self.max_length

    def lower_step(self, sequences: int) -> None:
        """Fit the step to an epoch that is too short for it."""
        self._set_batch(min(self.step_for(sequences), self.global_batch_tokens))
        self._is_step_lowered = True

    def batch_arithmetic(self) -> str:
        """Write out the global batch as a product, and say where it comes from."""
        processes, rows = self.world_size, self.per_device_train_batch_size
        steps = self.gradient_accumulation_steps
        factors = [
            "1 process" if processes == 1 else f"{processes:,} processes",
            "1 sequence" if rows == 1 else f"{rows:,} sequences",
            "1 accumulation step" if steps == 1 else f"{steps:,} accumulation steps",
            f"{self.max_length} tokens",
        ]
        whose = "as asked for"
        if settings_in(self.output_dir).get("global_batch_tokens") == self.global_batch_tokens:
            whose = "as the run began"
        elif self._is_step_lowered:
            whose = f"for a short epoch; the paper's is {named('global_batch_tokens')} 2097152"
        elif self.global_batch_tokens == PAPER_TOKENS:
            whose = "the paper's step"
        elif self.is_batch_derived:
            whose = f"Trainer's step; the paper's is {named('global_batch_tokens')} 2097152"
        return f"{self.global_batch_tokens:,} tokens = {' x '.join(factors)} ({whose})"


def _check_schedule(args: VocAgnoConfig) -> None:
    """Reject a schedule that Trainer cannot make, after the alignment."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    schedule = SchedulerType(args.lr_scheduler_type)
    settings: Any = args.lr_scheduler_kwargs
    try:
        get_scheduler(schedule, optimizer, 0, 10, settings)
    # The schedules do not check their settings, and raise whatever these cause.
    except Exception as error:
        raise OptionError(
            "lr_scheduler_type",
            f"{schedule.value} does not work with {named('lr_scheduler_kwargs')} {settings!r} "
            f"({type(error).__name__}: {error})",
        ) from error


def settings_in(output_dir: str | None) -> Record:
    """Return the settings of the run in a directory, or {} as long as it has saved nothing."""
    # Without a name, the directory is chosen later, from the models.
    return begun_settings(Path(output_dir)) if output_dir else {}


def check_arguments(args: TrainingArguments) -> None:
    """Reject arguments that would change what a run computes or keeps."""
    for name, (allowed, reason) in _ONE_VALUE.items():
        # Another version of transformers may lack one of these.
        value = getattr(args, name, allowed)
        if value != allowed:
            raise OptionError(name, f"{value} {reason}: leave it out")
    if getattr(args.accelerator_config, "split_batches", False):
        raise OptionError("accelerator_config", "split_batches makes other batches: leave it out")
    # Only DDP and FSDP2 are supported. A launcher's file without a version means FSDP1, as in
    # Accelerate. Python's arguments mean FSDP2, as in Trainer.
    is_launched = parse_flag_from_env("ACCELERATE_USE_FSDP")
    version = os.environ.get("FSDP_VERSION", "1") if is_launched else 2
    plugin = (args.fsdp and vars(args).get("fsdp_plugin_args")) or {}
    if int(plugin.get("fsdp_version", version)) != 2:
        raise ValueError("FSDP1 is not supported: set fsdp_version: 2, as in accelerate_configs")
    # A launcher passes the sizes by the environment, and Python by the config. Only 1 is allowed.
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(args.parallelism_config, name, None)
        if int(size or os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) > 1:
            raise ValueError(f"parallelism_config_{name} is not supported: shard with FSDP2 alone")
    # With several GPUs in one process, Trainer falls back on DataParallel, which would split a
    # packed batch.
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs: start one for each, with accelerate launch"
        )
    check_connected(args.world_size)
    _check_best_model(args)
    # A push during training would upload checkpoints that are still in the staging directory.
    strategy = HubStrategy(args.hub_strategy)
    if args.push_to_hub and strategy != HubStrategy.END:
        raise OptionError("hub_strategy", f"{strategy.value} uploads files that are being written")


def _check_best_model(args: TrainingArguments) -> None:
    """Reject settings with which no evaluation can choose the best model."""
    if args.save_strategy == SaveStrategy.BEST and args.eval_strategy == IntervalStrategy.NO:
        raise OptionError(
            "save_strategy", f"best needs an evaluation: set {named('eval_strategy')}"
        )
    # Trainer would look for another one after the first evaluation, and find none.
    if not (args.metric_for_best_model or "loss").endswith("loss"):
        raise OptionError(
            "metric_for_best_model",
            f"must be loss or CORPUS_loss, got {args.metric_for_best_model}",
        )
    # Trainer would keep the checkpoint with the highest loss.
    if args.greater_is_better:
        raise OptionError("greater_is_better", "True keeps the worst model: a lower loss is better")


def split_global_batch(
    global_batch_tokens: int | None,
    max_length: int,
    world_size: int,
    batch_size: int | None = None,
    accumulation: int | None = None,
) -> tuple[int, int]:
    """Return sequences per device and accumulation steps that make exactly the global batch.

    Without a global batch, both are as in Trainer: 8 and 1. With one, the batch size is the largest
    divisor up to 8, unless it is given.

    Raises:
        ValueError: they cannot make the global batch. The message shows the arithmetic.

    >>> split_global_batch(2**21, 2048, world_size=32)
    (8, 4)
    >>> split_global_batch(2**21, 2048, world_size=1, batch_size=16)
    (16, 64)
    >>> split_global_batch(None, 2048, world_size=1, batch_size=3)
    (3, 1)
    """
    if global_batch_tokens is None:
        return batch_size or _TRAINER_BATCH, accumulation or 1
    # Each process gets this many sequences of a step. A remainder is lost here, and found below by
    # comparing the product.
    per_device = global_batch_tokens // (world_size * max_length)
    if batch_size is None and accumulation:
        batch_size = per_device // accumulation
    elif batch_size is None:
        divisors = [n for n in range(1, _MAX_DERIVED_BATCH + 1) if per_device % n == 0]
        batch_size = max(divisors)
    accumulation = accumulation or per_device // batch_size
    tokens = world_size * batch_size * accumulation * max_length
    # With a rounded batch, the run would depend on the number of processes.
    if tokens != global_batch_tokens:
        raise ValueError(
            f"{world_size} processes x {batch_size} sequences x {accumulation} steps x "
            f"{max_length} tokens = {tokens:,} tokens, not {named('global_batch_tokens')} "
            f"{global_batch_tokens:,}: change one of them"
        )
    return batch_size, accumulation
