"""What a user can set: the argument dataclasses, their checks, and the batch arithmetic.

Read by the scripts only; everything below them takes plain arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from transformers import HfArgumentParser, SchedulerType, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import OptimizerNames

from vocagnolm.checkpoints import AUTO
from vocagnolm.global_batch import split_global_batch
from vocagnolm.guidance import Guidance
from vocagnolm.recipe import read_recipe

_WITHOUT_EFFECT = {  # what a method does not look at
    "vocagnolm": (),
    "random": ("aggregation", "unmapped"),
    "cpt": ("top_k", "aggregation", "unmapped", "selection_scope", "loss_divisor"),
}
_MANY_DOCUMENTS = 10_000  # below this, starting processes takes longer than they save
_DAYS_S = 24 * 3600
_CHECK_STEPS = 1000  # of a run that is never made, to see whether its schedule can be
_REFUSED = {  # options of TrainingArguments: why they cannot be
    "save_only_model": "leaves nothing to resume from",
    "label_smoothing_factor": "has no effect here",
    "auto_find_batch_size": "has no effect here",
    "batch_eval_metrics": "is not supported (evaluation needs the losses of all batches)",
    "use_liger_kernel": "is not supported (its loss would replace the weighted one)",
}


@dataclass
class ModelArguments:
    """The student and its teacher."""

    student: str = field(
        default="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        metadata={"help": "Model to train: a hub name or a directory."},
    )
    teacher: str | None = field(
        default=None, metadata={"help": "Causal LM that guides it, with any vocabulary."}
    )
    student_revision: str | None = field(default=None, metadata={"help": "Hub revision."})
    teacher_revision: str | None = field(default=None, metadata={"help": "Hub revision."})
    student_tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer of the student, if it is not with its weights."}
    )
    teacher_tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer of the teacher, if it is not with its weights."}
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={"help": "Precision of the teacher; auto is bfloat16 on a GPU, float32 on a CPU."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of both models, as in from_pretrained."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model code from the hub."}
    )


@dataclass
class DataArguments:
    """The corpus and how it is cut."""

    dataset: str = field(
        default="open-web-math/open-web-math",
        metadata={"help": "A .jsonl, .json, .parquet or .txt file, a directory, or a hub name."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Hub configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    max_length: int = field(default=2048, metadata={"help": "Student tokens of a block."})
    eval_fraction: float = field(
        default=0.0, metadata={"help": "Share of the documents held out for evaluation, [0, 1)."}
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Evaluate on these documents instead of a held-out share."}
    )
    attend_across_documents: bool = field(
        default=False, metadata={"help": "Let attention cross the documents of a block."}
    )
    num_proc: int | None = field(
        default=None,
        metadata={"help": "Processes that tokenize and align; by default one for each core."},
    )

    def __post_init__(self) -> None:
        if self.max_length < 4:
            raise ValueError(f"--max_length must be at least 4, got {self.max_length}")
        if not 0.0 <= self.eval_fraction < 1.0:
            raise ValueError(f"--eval_fraction must be in [0, 1), got {self.eval_fraction}")
        if self.eval_dataset and self.eval_fraction:
            raise ValueError("--eval_dataset and --eval_fraction exclude each other: give one")
        if self.num_proc is not None and self.num_proc < 1:
            raise ValueError(f"--num_proc must be at least 1, got {self.num_proc}")

    def processes(self, documents: int) -> int | None:
        """How many processes should share the work on a corpus; None: this one does it."""
        if documents < _MANY_DOCUMENTS:
            return None
        count = self.num_proc or _cores()
        return count if count > 1 else None


def _cores() -> int:
    """Cores that this process may use, which on a shared machine are not all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class GuidanceArguments:
    """Which tokens are trained. Defaults are the paper's."""

    method: Literal["vocagnolm", "cpt", "random"] = field(
        default="vocagnolm",
        metadata={"help": "vocagnolm, plain continual pretraining, or a random top_k of tokens."},
    )
    top_k: float = field(default=0.4, metadata={"help": "Share of the tokens trained, Eq. 4."})
    aggregation: Literal["max", "mean", "sum"] = field(
        default="max", metadata={"help": "How several teacher losses become one, Eq. 2."}
    )
    unmapped: Literal["include", "exclude", "mean"] = field(
        default="include", metadata={"help": "Tokens without a teacher token, Section 6.2."}
    )
    selection_scope: Literal["sequence", "batch"] = field(
        default="sequence", metadata={"help": "What the share is taken of."}
    )
    loss_divisor: Literal["all", "selected"] = field(
        default="all", metadata={"help": "Divide by all label tokens (Eq. 3) or the selected ones."}
    )

    def __post_init__(self) -> None:
        self.guidance()  # validates
        defaults = {f.name: f.default for f in fields(self)}
        for name in _WITHOUT_EFFECT[self.method]:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"--{name} has no effect with --method {self.method}: leave it out"
                )

    def in_effect(self) -> dict[str, Any]:
        """The options that the method looks at."""
        idle = _WITHOUT_EFFECT[self.method]
        return {name: value for name, value in vars(self).items() if name not in idle}

    def guidance(self) -> Guidance:
        """The settings as the trainer takes them."""
        return Guidance(self.top_k, self.aggregation, self.unmapped, self.selection_scope)


@dataclass
class RunArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the paper's training set-up (Section 4.3) as defaults.

    AdamW's beta2 and weight decay are LitGPT's, which the paper trains with; it does not name them.
    """

    output_dir: str = field(default="", metadata={"help": "runs/STUDENT__TEACHER if not given."})
    global_batch_tokens: int = field(
        default=2**21, metadata={"help": "Tokens of an optimizer step, over all devices."}
    )
    per_device_train_batch_size: int | None = field(  # type: ignore[assignment]  # None: derived
        default=None, metadata={"help": "Sequences per device; derived from the world size."}
    )
    per_device_eval_batch_size: int | None = field(  # type: ignore[assignment]  # None: derived
        default=None, metadata={"help": "Sequences per device; as in training if not given."}
    )
    gradient_accumulation_steps: int | None = field(  # type: ignore[assignment]  # None: derived
        default=None, metadata={"help": "Micro-batches of a step; derived from the world size."}
    )
    learning_rate: float = 8e-5
    lr_scheduler_type: str = "cosine_with_min_lr"
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "JSON; cosine_with_min_lr decays to a tenth by default: 8e-5 to 8e-6."},
    )
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    num_train_epochs: float = 1.0
    bf16: bool | None = field(  # type: ignore[assignment]  # None: wherever there is a GPU for it
        default=None, metadata={"help": "bfloat16 compute; by default on GPUs that have it."}
    )
    eval_strategy: IntervalStrategy | str | None = field(  # type: ignore[assignment]  # None: derived
        default=None,
        metadata={
            "help": "By default steps if there are documents to evaluate on, and no if not.",
            "choices": [strategy.value for strategy in IntervalStrategy],
        },
    )
    save_steps: float = 250
    save_total_limit: int | None = 2
    logging_steps: float = 10
    logging_first_step: bool = True
    logging_nan_inf_filter: bool = False  # it hides NaNs, at a wait per micro-batch
    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False
    ddp_timeout: int = 7 * _DAYS_S  # the other processes wait while the first aligns the corpus
    resume_from_checkpoint: str | None = field(
        default=AUTO,
        metadata={"help": "auto (the newest good checkpoint of --output_dir) or a path."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and exit."})

    def __post_init__(self) -> None:
        self._refuse()
        if self.lr_scheduler_kwargs is None and self.lr_scheduler_type == "cosine_with_min_lr":
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        _check_json("lr_scheduler_kwargs", self.lr_scheduler_kwargs)
        if isinstance(self.lr_scheduler_kwargs, str):
            self.lr_scheduler_kwargs = self.lr_scheduler_kwargs.strip()
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()  # a log file wants no progress bar
        if self.bf16 is None:
            self.bf16 = (
                torch.cuda.is_available()
                and torch.cuda.is_bf16_supported()
                and not (self.use_cpu or self.fp16)
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        if self.eval_strategy is None:
            self.eval_strategy = IntervalStrategy.NO
        # Placeholders that the parent class can work with, until the block length is known.
        self._given = (self.per_device_train_batch_size, self.gradient_accumulation_steps)
        self._given_eval = self.per_device_eval_batch_size
        self.per_device_train_batch_size = self.gradient_accumulation_steps = 1
        self.per_device_eval_batch_size = 1
        super().__post_init__()  # type: ignore[no-untyped-call]
        if not getattr(self.accelerator_config, "use_seedable_sampler", True):
            raise ValueError("use_seedable_sampler false makes resuming inexact: leave it out")
        self._check_schedule()
        self._check_optimizer()

    def _refuse(self) -> None:
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"--{name} {reason}: leave it out")
        if not self.eval_do_concat_batches:
            raise ValueError("--eval_do_concat_batches false is not supported: leave it out")
        sampling = getattr(self, "train_sampling_strategy", "random")  # newer transformers have it
        if sampling != "random":
            raise ValueError(
                f"--train_sampling_strategy {sampling} is not supported (blocks are equally long, "
                "and packing has put similar ones side by side): leave it out"
            )
        if self.per_device_eval_batch_size is not None and self.per_device_eval_batch_size < 1:
            raise ValueError(
                "--per_device_eval_batch_size must be at least 1, got "
                f"{self.per_device_eval_batch_size}"
            )
        if self.deepspeed:
            raise ValueError("--deepspeed is not supported: shard with FSDP2 (accelerate_configs)")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} must not be negative, got {getattr(self, name)}")
        if not self.num_train_epochs > 0:
            raise ValueError(f"--num_train_epochs must be positive, got {self.num_train_epochs}")

    def _check_schedule(self) -> None:
        """Make the learning rate's schedule once, as long as an error costs nothing."""
        kwargs = self.lr_scheduler_kwargs or {}
        assert isinstance(kwargs, dict)  # the parent class has read the JSON
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.learning_rate)
        try:  # the first step, of warm-up, is made with the schedule
            schedule = get_scheduler(self.lr_scheduler_type, optimizer, 1, _CHECK_STEPS, kwargs)
            for factor in getattr(schedule, "lr_lambdas", ()):
                factor(_CHECK_STEPS - 1)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"--lr_scheduler_kwargs {json.dumps(kwargs)} does not suit "
                f"--lr_scheduler_type {SchedulerType(self.lr_scheduler_type).value}: {error}"
            ) from error

    def _check_optimizer(self) -> None:
        """Refuse an optimizer whose package is missing; some are checked later, with the model."""
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)
        except (ImportError, ValueError) as error:
            if isinstance(error, ImportError) or "install" in str(error) or "import" in str(error):
                name = OptimizerNames(self.optim).value
                raise ValueError(f"--optim {name} cannot be used: {error}") from error

    def set_batch(self, max_length: int) -> None:
        """Derive batch size and accumulation from the global batch and the world size."""
        self.per_device_train_batch_size, self.gradient_accumulation_steps = split_global_batch(
            self.global_batch_tokens, max_length, self.world_size, *self._given
        )
        self.per_device_eval_batch_size = self._given_eval or self.per_device_train_batch_size

    def batch_arithmetic(self, max_length: int) -> str:
        """The global batch, spelled out."""
        return (
            f"{self.global_batch_tokens:,} tokens = {self.world_size} processes x "
            f"{self.per_device_train_batch_size} sequences x {self.gradient_accumulation_steps} "
            f"accumulation steps x {max_length} tokens"
        )


def _check_json(option: str, value: object) -> None:
    try:
        mapping = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"--{option} {value} is not JSON: {error}") from error
    if value is not None and not isinstance(mapping, dict):
        raise ValueError(f"--{option} {value} must be a JSON object")


Arguments = tuple[ModelArguments, DataArguments, GuidanceArguments, RunArguments]


class _OneLineErrors(argparse.ArgumentParser):
    """Argparse whose errors are one line: the usage of TrainingArguments fills screens."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Parser(_OneLineErrors, HfArgumentParser):
    pass


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line; `--config FILE.yaml` gives values that flags override.

    Raises:
        ValueError: anything is wrong with an argument, in one line.
    """
    types: list[Any] = [ModelArguments, DataArguments, GuidanceArguments, RunArguments]
    parser = _Parser(
        types,
        prog="train.py",
        allow_abbrev=False,
        description="Train a student with the token losses of a teacher (arXiv 2503.19123).",
    )
    parser.add_argument("--config", help="YAML file of options; flags override it.")
    first = _OneLineErrors(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    config = first.parse_known_args(argv)[0].config
    values = vars(parser.parse_args([*(read_recipe(config) if config else ()), *argv]))
    del values["config"]
    if not values["output_dir"]:
        values["output_dir"] = _default_output_dir(values)
    _set_evaluation(values)
    try:
        model, data, guidance, run = parser.parse_dict(values)
    except (OSError, ImportError, ValueError) as error:  # a file or package may be missing
        raise ValueError(" ".join(str(error).split())) from error
    _check_together(model, data, guidance)
    run.set_batch(data.max_length)
    return model, data, guidance, run


def _default_output_dir(values: dict[str, Any]) -> str:
    names = [values["student"]]
    if values["method"] == "vocagnolm" and values["teacher"]:
        names.append(values["teacher"])
    else:
        names.append(values["method"])
    return os.path.join("runs", "__".join(Path(name).name for name in names))


def _set_evaluation(values: dict[str, Any]) -> None:
    """Evaluate where there is something to evaluate on, as often as checkpoints are saved."""
    evaluates = bool(values["eval_fraction"] or values["eval_dataset"])
    strategy = values["eval_strategy"]
    if strategy not in (None, "no") and not evaluates:
        raise ValueError("--eval_strategy needs --eval_fraction or --eval_dataset")
    if strategy is None and evaluates:
        values["eval_strategy"] = strategy = "steps"
    if strategy == "steps":
        values["eval_steps"] = values["eval_steps"] or values["save_steps"]


def _check_together(
    model: ModelArguments, data: DataArguments, guidance: GuidanceArguments
) -> None:
    if guidance.method == "vocagnolm" and not model.teacher:
        raise ValueError("--teacher is required: name the causal LM that guides the student")
    if guidance.method != "vocagnolm":
        for name in ("teacher", "teacher_tokenizer", "teacher_revision"):
            if getattr(model, name) is not None:
                raise ValueError(
                    f"--{name} has no effect with --method {guidance.method}: leave it out"
                )
