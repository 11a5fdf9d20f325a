"""Options of training, each with its default, help and check.

No torch: a wrong name, choice or range is an error before torch is imported, which takes seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vocagnolm.fields import (
    OptionError,
    check_options,
    declare,
    json_settings,
    named,
    one_for_each,
    option,
)
from vocagnolm.method import Method
from vocagnolm.shell.extras import require

# The paper's optimizer step has this many tokens (Section 4.3).
PAPER_TOKENS = 2**21
# These arguments of from_pretrained are options here. If both were given, one would silently win.
_RESERVED_ARGUMENTS = (
    "dtype torch_dtype quantization_config device_map revision attn_implementation "
    "trust_remote_code"
).split()


@dataclass
class ModelOptions:
    """The student, its trained parameters, and its teacher."""

    student: str = option(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "Model to train: a hub name, a directory or a GGUF file.",
        role="place",
        hub="model",
        python="model",
        first=True,
        aliases=["model", "model_name_or_path"],
    )
    teacher: list[str] | None = option(
        None,
        "One or more causal LMs that guide the student; any vocabulary.",
        role="place",
        hub="model",
        excludes=["teacher_losses"],
        first=True,
        aliases=["teacher_model", "teacher_model_name_or_path"],
    )
    teacher_losses: list[str] | None = option(
        None,
        "Read the teacher's losses from these stores (vocagnolm score). Stores of one teacher are "
        "read as one.",
        excludes=["teacher"],
        python="teacher",
        first=True,
    )
    use_peft: bool = option(
        False,
        "Train LoRA adapters instead of the student's weights.",
        python="peft_config",
        first=True,
        aliases=["use_lora"],
    )
    lora_r: int = option(
        16,
        "Rank of the adapters.",
        interval="[1, inf)",
        needs=["use_peft"],
    )
    lora_alpha: int = option(
        32,
        "Adapters are scaled by lora_alpha / lora_r.",
        interval="[1, inf)",
        needs=["use_peft"],
    )
    lora_dropout: float = option(
        0.0,
        "Dropout on the adapters' inputs, in [0, 1).",
        interval="[0, 1)",
        needs=["use_peft"],
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Layers that get an adapter. Default: all linear layers but the head.",
        needs=["use_peft"],
    )
    lora_modules_to_save: list[str] | None = option(
        None,
        "Other layers to train in full.",
        needs=["use_peft"],
    )

    _argument_group_name = "models"

    def __post_init__(self) -> None:
        check_options(self)
        # This package is loaded hours later, with the weights, so check it now.
        if self.use_peft:
            require("peft", named("use_peft"))

    @property
    def teachers(self) -> int:
        """Number of teachers, in memory or as stores, of which a teacher may have several."""
        if len(self.teacher_losses or ()) < 2:
            return len(self.teacher or self.teacher_losses or ())
        # It imports Arrow, which a plain run does not need here.
        from vocagnolm.store.format import by_teacher, read_manifest

        manifests = []
        for path in self.teacher_losses or ():
            # A store that is missing is reported when it is opened.
            manifests.append(read_manifest(Path(path)) or {"teacher": path})
        return len(by_teacher(manifests))

    def output_dir(self, method: str) -> str:
        """Name a directory after the models, and after the method if they do not imply it."""
        names = [self.student]
        names += self.teacher or self.teacher_losses or []
        # A teacher implies the paper's method. Without a teacher, all runs of a student would share
        # its name.
        if method != "vocagnolm" or len(names) == 1:
            names.append(method.rpartition(":")[2])
        # In Python, a model may already be loaded, and knows its own name.
        names = [getattr(name, "name_or_path", name) for name in names]
        return os.path.join("runs", "__".join(Path(name).name for name in names if name))


@dataclass
class LoadOptions:
    """How models are loaded."""

    student_revision: str | None = option(
        None,
        "Hub revision of the student.",
        may_be_empty=True,
        aliases=["model_revision"],
    )
    teacher_revision: list[str] | None = option(
        None,
        "Hub revision of each teacher ('' for a directory).",
        needs=["teacher"],
        may_be_empty=True,
        aliases=["teacher_model_revision"],
    )
    student_tokenizer: str | None = option(
        None,
        "The student's tokenizer, if it is not stored with the weights.",
        role="place",
        hub="model",
        python="processing_class",
        aliases=["tokenizer", "tokenizer_name_or_path"],
    )
    teacher_tokenizer: list[str] | None = option(
        None,
        "Each teacher's tokenizer, if it is not stored with the weights.",
        role="place",
        hub="model",
        needs=["teacher"],
        aliases=["teacher_tokenizer_name_or_path"],
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "The teacher's precision. auto: bfloat16 on a GPU; on a CPU, the student's.",
        needs=["teacher"],
    )
    teacher_quantization: str | None = option(
        None,
        "fp8, nf4, int8, or a transformers quantization config as JSON.",
        needs=["teacher"],
    )
    teacher_sharding: Literal["none", "node"] = option(
        "none",
        "node: shard the teacher's weights over the devices of each machine.",
        role="words",
        needs=["teacher"],
    )
    attn_implementation: str | None = option(
        None,
        "As in from_pretrained, for all models. Default on a GPU in 16 bits: torch_varlen.",
        first=True,
    )
    trust_remote_code: bool = option(
        False, "Allow models to run their own code from the hub.", role="words"
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "More from_pretrained arguments for the student, as JSON."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = option(
        None, "The same for every teacher.", needs=["teacher"]
    )

    _argument_group_name = "loading of models"

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
            arguments = getattr(self, name)
            # A run's settings compare values, so the text of a command line becomes one.
            if isinstance(arguments, str):
                arguments = json_settings(name, arguments)
                setattr(self, name, arguments)
            for argument in _RESERVED_ARGUMENTS:
                if argument in (arguments or ()):
                    raise OptionError(name, f"cannot have {argument}, for which there is an option")


@dataclass
class DataOptions:
    """The documents for training and evaluation."""

    dataset: list[str] = option(
        ["open-web-math/open-web-math"],
        "One or more corpora: a file, a directory or a hub name.",
        role="place",
        hub="dataset",
        python="train_dataset",
        first=True,
        aliases=["dataset_name", "train_file"],
    )
    dataset_weights: list[float] | None = option(
        None,
        "Mixing weight of each corpus. Smaller corpora are repeated.",
        interval="(0, inf)",
    )
    dataset_config: list[str] | None = option(
        None,
        "Hub configuration, one for all corpora or one for each ('' for files).",
        may_be_empty=True,
        aliases=["dataset_config_name"],
    )
    dataset_split: list[str] = option(
        ["train"],
        "Split to read, one for all corpora or one for each.",
        aliases=["dataset_train_split"],
    )
    text_column: list[str] | None = option(
        None,
        "Column to read, one for all corpora or one for each. Default: text or conversations.",
        may_be_empty=True,
        aliases=["dataset_text_field"],
    )
    eval_fraction: float = option(
        0.0,
        "Share of the documents to hold out for evaluation, in [0, 1).",
        interval="[0, 1)",
        excludes=["eval_dataset"],
        python="eval_dataset",
        first=True,
    )
    eval_dataset: str | None = option(
        None,
        "Evaluate on these documents instead of a held-out share.",
        role="words",
        hub="dataset",
        excludes=["eval_fraction"],
        first=True,
        aliases=["validation_file"],
    )

    _argument_group_name = "data"

    def __post_init__(self) -> None:
        check_options(self)
        count = len(self.dataset)
        # A corpus that is named twice would silently count twice. Weights say so openly.
        if len({Path(name).resolve() for name in self.dataset}) < count:
            weights_option = named("dataset_weights")
            raise OptionError(
                "dataset", f"names a corpus twice: name it once, and give {weights_option}"
            )
        weights = self.dataset_weights
        if weights and (count == 1 or len(weights) != count):
            raise OptionError("dataset_weights", "needs several corpora, and a weight for each")
        for name in ("dataset_config", "dataset_split", "text_column"):
            one_for_each(name, vars(self)[name], count, "corpora")
        if self.eval_dataset and len(self.text_column or ()) > 1:
            raise OptionError(
                "eval_dataset", "needs one --text_column: hold out an --eval_fraction instead"
            )


@dataclass
class PackOptions:
    """How documents become packed sequences."""

    max_length: int = option(
        2048,
        "Student tokens per packed sequence.",
        interval="[4, 16777216]",
        first=True,
        aliases=["max_seq_length", "max_seq_len", "block_size"],
    )
    train_on: Literal["completions", "all"] | None = option(
        None, "In conversations, train on completions (the answers; the default) or all tokens."
    )
    attend_across_documents: bool = option(
        False, "Let tokens attend to earlier documents in their packed sequence."
    )
    dataset_num_proc: int | None = option(
        None,
        "Processes that tokenize and align. Default: one per core.",
        role="words",
        interval="[1, inf)",
        aliases=["preprocessing_num_workers"],
    )
    missing_losses: Literal["error", "skip", "plain"] = option(
        "error",
        "What to do with documents that have no losses in --teacher_losses. plain: train on them "
        "without a teacher.",
        needs=["teacher_losses"],
    )
    student_chat_template: str | None = option(
        None, "plain, chatml or a file. Default: the tokenizer's own.", role="place"
    )
    teacher_chat_template: list[str] | None = option(
        None,
        "The same for the teachers, one for all or one for each.",
        role="place",
        needs=["teacher"],
    )

    _argument_group_name = "packing"

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class GuidanceOptions(Method, PackOptions, LoadOptions):
    """How models are loaded, documents packed, and tokens chosen.

    Attributes:
        guidance: the settings of the method alone. Whatever computes reads them from there.
    """

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(Method)}
        self.guidance = Method(**settings)
        # A user's class or function has become its name.
        self.method, self.aggregation = self.guidance.method, self.guidance.aggregation
        self.asks_teacher = self.guidance.needs_teacher
        LoadOptions.__post_init__(self)
        # A document without losses is treated as one whose tokens are all unmapped.
        includes = self.unmapped == "include" or self.guidance.accepts
        if self.missing_losses == "plain" and (self.method == "chunk" or not includes):
            raise OptionError(
                "missing_losses",
                "plain trains on every token of documents without losses, which "
                f"{named('method')} {self.method} {named('unmapped')} {self.unmapped} does not: "
                "use skip",
            )

    def check_teachers(self, count: int, *, is_stored: bool) -> None:
        """Check the method, and the options that have one value for each teacher, with teachers."""
        self.guidance.check_teacher(count, is_stored=is_stored)
        for name in ("teacher_tokenizer", "teacher_revision"):
            # A tokenizer or a revision belongs to one model, and cannot serve all teachers.
            values = getattr(self, name)
            if values and len(values) != count:
                raise OptionError(
                    name, f"needs one value for each of {count} teachers, got {len(values)}"
                )


@dataclass
class RunOptions:
    """The run: mostly fields of `transformers.TrainingArguments`, with the paper's defaults."""

    dry_run: bool = option(False, "Print the plan of the run and exit.", role="words", first=True)
    output_dir: str = option("", "Default: runs/STUDENT__TEACHER.", role="words", first=True)
    # Where the type has no None, `VocAgnoConfig` derives the value.
    global_batch_tokens: int = option(  # type: ignore[assignment]
        None,
        "Tokens per optimizer step, over all devices. Default: the paper's 2,097,152, or fewer for "
        "20 steps, unless both the batch size and the accumulation steps are given.",
        interval="[1, inf)",
        first=True,
    )
    per_device_train_batch_size: int = option(  # type: ignore[assignment]
        None,
        "Packed sequences per device. Default: derived from the global batch.",
        role="words",
        interval="[1, inf)",
        first=True,
        aliases=["batch_size", "per_device_batch_size"],
    )
    gradient_accumulation_steps: int = option(  # type: ignore[assignment]
        None,
        "Micro-batches per step. Default: derived from the global batch.",
        role="words",
        interval="[1, inf)",
    )
    num_train_epochs: float = option(
        1.0, "Passes over the corpus.", interval="(0, inf)", aliases=["epochs", "num_epochs"]
    )
    max_steps: int = option(
        -1,
        "Optimizer steps. -1: set by --num_train_epochs.",
        interval="[-1, inf)",
        first=True,
    )
    # Not False, because the records of earlier runs lack it, and are compared with later ones.
    extend: bool | None = option(
        None, "Train a run for longer even if its learning rates would have been others."
    )
    learning_rate: float = option(
        8e-5, "Peak learning rate.", interval="[0, inf)", first=True, aliases=["lr"]
    )
    lr_scheduler_type: str = option("cosine_with_min_lr", "Learning rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, "JSON. By default, cosine_with_min_lr decays to a tenth: 8e-5 to 8e-6."
    )
    # Trainer would take NaN for no warm-up.
    warmup_steps: float = option(
        0,
        "Warm-up steps; below 1, their share of the run.",
        interval="[0, inf)",
        aliases=["warmup_ratio"],
    )
    seed: int = option(
        42,
        "Seed of the data order, adapters and dropout.",
        interval="[0, 4294967295]",
        first=True,
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16. Default: yes where the GPU or CPU supports it in hardware.",
        first=True,
    )
    activation_checkpointing: bool | None = option(
        None, "Keep only the layers' inputs and recompute the rest.", role="words", first=True
    )
    torch_compile: bool | None = option(
        None,
        "Compile the layers of all models, on a GPU or a CPU.",
        first=True,
    )
    max_bad_steps: int = option(
        0,
        "Steps in a row that may be skipped because of a NaN loss or gradient.",
        role="words",
        interval="[0, inf)",
    )
    save_steps: float = option(
        250, "Steps between checkpoints.", role="words", interval="[0, inf)", first=True
    )
    save_total_limit: int | None = option(2, "Checkpoints to keep. 0: all.", role="words")
    resume_from_checkpoint: str | None = option(
        "auto", "auto (the newest good checkpoint in --output_dir) or a path.", role="words"
    )
    eval_steps: float | None = option(
        None,
        "Steps between evaluations. Default: --save_steps.",
        role="words",
        interval="[0, inf)",
        needs=["eval_fraction", "eval_dataset"],
    )
    logging_steps: float = option(10, "Steps between logs.", role="words", interval="[0, inf)")
    report_to: list[str] = option(
        ["none"], "Trackers: wandb, tensorboard, trackio, ...", role="words", first=True
    )
    run_name: str | None = option(
        None,
        "Name of the run in trackers. Default: the path of --config, or --output_dir.",
        role="words",
    )
    project: str = option(
        "vocagnolm", "Project in trackers: PROJECT or ENTITY/PROJECT.", role="words"
    )
    device_peak_tflops: float | None = option(
        None,
        "Peak TFLOP/s of a device, for the MFU in the logs. Default: by its name.",
        role="words",
        interval="(0, inf)",
    )
    push_to_hub: bool = option(False, "Push the model and its card to the hub.", role="words")
    hub_model_id: str | None = option(
        None,
        "The model's name on the hub. Default: the name of --output_dir.",
        role="words",
        needs=["push_to_hub"],
    )

    _argument_group_name = "run"

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_steps == 0:
            raise OptionError(
                "max_steps", f"0 makes no update: use {named('dry_run')} to see the plan"
            )


declare(ModelOptions, DataOptions, GuidanceOptions, RunOptions)
