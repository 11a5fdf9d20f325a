"""Options of training, each with its default, help and check.

No torch: a wrong name, choice or range is an error before torch is imported, which takes seconds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vocagnolm.doors import DTYPE_OPTIONS, python_door
from vocagnolm.fields import check_types, in_range, json_settings, one_for_each, option
from vocagnolm.method import Method
from vocagnolm.shell.extras import require, require_trackers

# The paper's optimizer step has this many tokens (Section 4.3).
PAPER_TOKENS = 2**21
# argparse gets these words for a switch that may also be None. Its bare name means true.
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True}
# These arguments of from_pretrained are options here. If both were given, one would silently win.
_RESERVED_ARGUMENTS = {
    "dtype": DTYPE_OPTIONS,
    "torch_dtype": DTYPE_OPTIONS,
    "quantization_config": "--teacher_quantization",
    "device_map": "--teacher_quantization",
    "revision": "--student_revision or --teacher_revision",
    "attn_implementation": "--attn_implementation",
    "trust_remote_code": "--trust_remote_code",
}


@dataclass
class ModelOptions:
    """The student, its trained parameters, and its teacher."""

    student: str = option(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "Model to train: a hub name, a directory or a GGUF file.",
        first=True,
        aliases=["--model", "--model_name_or_path"],
    )
    teacher: list[str] | None = option(
        None,
        "One or more causal LMs that guide the student; any vocabulary.",
        first=True,
        aliases=["--teacher_model", "--teacher_model_name_or_path"],
    )
    teacher_losses: list[str] | None = option(
        None, "Read the teacher's losses from these stores (vocagnolm score).", first=True
    )
    use_peft: bool = option(
        False,
        "Train LoRA adapters instead of the student's weights.",
        first=True,
        aliases=["--use_lora"],
    )
    lora_r: int = option(16, "Rank of the adapters.")
    lora_alpha: int = option(32, "Adapters are scaled by lora_alpha / lora_r.")
    lora_dropout: float = option(0.0, "Dropout on the adapters' inputs, in [0, 1).")
    lora_target_modules: list[str] | None = option(
        None, "Layers that get an adapter. Default: all linear layers but the head."
    )
    lora_modules_to_save: list[str] | None = option(None, "Other layers to train in full.")

    _argument_group_name = "models"

    def __post_init__(self) -> None:
        check_types(self)
        in_range(self, "[1, inf)", "lora_r", "lora_alpha")
        in_range(self, "[0, 1)", "lora_dropout")
        if self.teacher and self.teacher_losses:
            raise ValueError("--teacher and --teacher_losses cannot be combined: give one")
        # This package is loaded hours later, with the weights, so check it now.
        if self.use_peft:
            require("peft", "--use_peft")

    @property
    def teachers(self) -> int:
        """Number of teachers, in memory or as stores."""
        return len(self.teacher or self.teacher_losses or ())

    def lora_arguments(self) -> dict[str, Any]:
        """Return the adapters' settings under the names of `models.adapters.lora_config`."""
        return {
            "r": self.lora_r,
            "alpha": self.lora_alpha,
            "dropout": self.lora_dropout,
            "target_modules": self.lora_target_modules,
            "modules_to_save": self.lora_modules_to_save,
        }

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
        return os.path.join("runs", "__".join(Path(name).name for name in names))


@dataclass
class LoadOptions:
    """How models are loaded."""

    student_revision: str | None = option(
        None, "Hub revision of the student.", aliases=["--model_revision"]
    )
    teacher_revision: list[str] | None = option(
        None,
        "Hub revision of each teacher ('' for a directory).",
        aliases=["--teacher_model_revision"],
    )
    student_tokenizer: str | None = option(
        None,
        "The student's tokenizer, if it is not stored with the weights.",
        aliases=["--tokenizer", "--tokenizer_name_or_path"],
    )
    teacher_tokenizer: list[str] | None = option(
        None,
        "Each teacher's tokenizer, if it is not stored with the weights.",
        aliases=["--teacher_tokenizer_name_or_path"],
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "The teacher's precision. auto: bfloat16 on a GPU; on a CPU, the student's."
    )
    teacher_quantization: str | None = option(
        None, "fp8, nf4, int8, or a transformers quantization config as JSON."
    )
    teacher_sharding: Literal["none", "node"] = option(
        "none", "node: shard the teacher's weights over the devices of each machine."
    )
    attn_implementation: str | None = option(
        None,
        "As in from_pretrained, for all models. Default on a GPU in 16 bits: torch_varlen.",
        first=True,
    )
    trust_remote_code: bool = option(False, "Allow models to run their own code from the hub.")
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "More from_pretrained arguments for the student, as JSON."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = option(
        None, "The same for every teacher."
    )

    _argument_group_name = "loading of models"

    def __post_init__(self) -> None:
        # Python may give a torch.dtype, whose text begins with "torch.".
        dtype: Any = str(self.teacher_dtype).removeprefix("torch.")
        self.teacher_dtype = dtype
        # It may also give one value instead of a list, whose letters would count as values.
        for name in ("teacher_tokenizer", "teacher_revision"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        check_types(self)
        for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
            arguments = getattr(self, name)
            # A command line or a recipe gives text, and Python gives a dictionary.
            if isinstance(arguments, str):
                arguments = json_settings(f"--{name}", arguments)
            for argument in sorted(arguments or ()):
                if argument in _RESERVED_ARGUMENTS:
                    option = _RESERVED_ARGUMENTS[argument]
                    raise ValueError(f"--{name}: give {argument} as {option}")
                try:
                    json.dumps(arguments[argument])
                except TypeError as error:
                    # They are kept in the run's directory, to be compared when it resumes.
                    kind = type(arguments[argument]).__name__
                    raise ValueError(
                        f"--{name}: {argument} must be a value of JSON, got {kind}"
                    ) from error
            # Replace the text by the parsed value, because a run's settings compare values.
            setattr(self, name, arguments)


@dataclass
class DataOptions:
    """The documents for training and evaluation."""

    dataset: list[str] = option(
        ["open-web-math/open-web-math"],
        "One or more corpora: a file, a directory or a hub name.",
        first=True,
        aliases=["--dataset_name", "--train_file"],
    )
    dataset_weights: list[float] | None = option(
        None, "Mixing weight of each corpus. Smaller corpora are repeated."
    )
    dataset_config: list[str] | None = option(
        None,
        "Hub configuration, one for all corpora or one for each ('' for files).",
        aliases=["--dataset_config_name"],
    )
    dataset_split: list[str] = option(
        ["train"],
        "Split to read, one for all corpora or one for each.",
        aliases=["--dataset_train_split"],
    )
    text_column: list[str] | None = option(
        None,
        "Column to read, one for all corpora or one for each. Default: text or conversations.",
        aliases=["--dataset_text_field"],
    )
    eval_fraction: float = option(
        0.0, "Share of the documents to hold out for evaluation, in [0, 1).", first=True
    )
    eval_dataset: str | None = option(
        None,
        "Evaluate on these documents instead of a held-out share.",
        first=True,
        aliases=["--validation_file"],
    )

    _argument_group_name = "data"

    def __post_init__(self) -> None:
        check_types(self)
        in_range(self, "(0, inf)", "dataset_weights")
        in_range(self, "[0, 1)", "eval_fraction")
        count = len(self.dataset)
        # A corpus that is named twice would silently count twice. Weights say so openly.
        if len({_one_spelling(name) for name in self.dataset}) < count:
            raise ValueError(
                "--dataset names a corpus twice: name it once, and give --dataset_weights"
            )
        weights = self.dataset_weights
        if weights and (count == 1 or len(weights) != count):
            raise ValueError("--dataset_weights needs several corpora, and a weight for each")
        for name in ("dataset_config", "dataset_split", "text_column"):
            one_for_each(name, vars(self)[name], count, "corpora")
        if self.eval_dataset and len(self.text_column or ()) > 1:
            raise ValueError(
                "--eval_dataset needs one --text_column: hold out an --eval_fraction instead"
            )
        if self.eval_dataset and self.eval_fraction:
            raise ValueError("--eval_dataset and --eval_fraction cannot be combined: give one")


def _one_spelling(name: str) -> str:
    """Return the path of a corpus in one of its spellings. Names on the hub have only one."""
    return str(Path(name).resolve()) if Path(name).exists() else name


@dataclass
class PackOptions:
    """How documents become packed sequences."""

    max_length: int = option(
        2048,
        "Student tokens per packed sequence.",
        first=True,
        aliases=["--max_seq_length", "--max_seq_len", "--block_size"],
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
        aliases=["--preprocessing_num_workers"],
    )
    missing_losses: Literal["error", "skip", "plain"] = option(
        "error",
        "What to do with documents that have no losses in --teacher_losses. plain: train on them "
        "without a teacher.",
    )
    student_chat_template: str | None = option(
        None, "plain, chatml or a file. Default: the tokenizer's own."
    )
    teacher_chat_template: list[str] | None = option(
        None, "The same for the teachers, one for all or one for each."
    )

    _argument_group_name = "packing"

    def __post_init__(self) -> None:
        check_types(self)
        in_range(self, "[4, 16777216]", "max_length")
        in_range(self, "[1, inf)", "dataset_num_proc")


@dataclass
class GuidanceOptions(Method, PackOptions, LoadOptions):
    """How models are loaded, documents packed, and tokens chosen."""

    @python_door
    def __post_init__(self) -> None:
        # Call the checks by name, because `super()` would find another class in a subclass.
        LoadOptions.__post_init__(self)
        PackOptions.__post_init__(self)
        Method.__post_init__(self)
        self.check_chunks(self.max_length)
        # A document without losses is treated as one whose tokens are all unmapped.
        includes = self.unmapped == "include" or self.accepts
        if self.missing_losses == "plain" and (self.method == "chunk" or not includes):
            raise ValueError(
                "--missing_losses plain trains on every token of documents without losses, which "
                f"--method {self.method} --unmapped {self.unmapped} does not: use skip"
            )

    def check_teacher(self, count: int, *, is_stored: bool = False) -> None:
        """Also check the options that have one value for each teacher."""
        super().check_teacher(count, is_stored=is_stored)
        for name in ("teacher_tokenizer", "teacher_revision"):
            # A tokenizer or a revision belongs to one model, and cannot serve all teachers.
            values = getattr(self, name)
            if values and len(values) != count:
                raise ValueError(
                    f"--{name} needs one value for each of {count} teachers, got {len(values)}"
                )

    def as_method(self) -> Method:
        """Return only the settings of the method."""
        return Method(**{field.name: getattr(self, field.name) for field in fields(Method)})


@dataclass
class RunOptions:
    """The run: mostly fields of `transformers.TrainingArguments`, with the paper's defaults."""

    dry_run: bool = option(False, "Print the plan of the run and exit.", first=True)
    output_dir: str = option("", "Default: runs/STUDENT__TEACHER.", first=True)
    # Where None is no kind of the option, `VocAgnoConfig` derives it.
    global_batch_tokens: int = option(  # type: ignore[assignment]
        None,
        "Tokens per optimizer step, over all devices. Default: the paper's 2,097,152, unless both "
        "the batch size and the accumulation steps are given.",
        first=True,
    )
    per_device_train_batch_size: int = option(  # type: ignore[assignment]
        None,
        "Packed sequences per device. Default: derived from the global batch.",
        first=True,
        aliases=["--batch_size", "--per_device_batch_size"],
    )
    gradient_accumulation_steps: int = option(  # type: ignore[assignment]
        None, "Micro-batches per step. Default: derived from the global batch."
    )
    num_train_epochs: float = option(
        1.0, "Passes over the corpus.", aliases=["--epochs", "--num_epochs"]
    )
    max_steps: int = option(-1, "Optimizer steps. -1: set by --num_train_epochs.", first=True)
    learning_rate: float = option(8e-5, "Peak learning rate.", first=True, aliases=["--lr"])
    lr_scheduler_type: str = option("cosine_with_min_lr", "Learning rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(
        None, "JSON. By default, cosine_with_min_lr decays to a tenth: 8e-5 to 8e-6."
    )
    warmup_steps: float = option(
        0, "Warm-up steps; below 1, their share of the run.", aliases=["--warmup_ratio"]
    )
    seed: int = option(42, "Seed of the data order, adapters and dropout.", first=True)
    bf16: bool | None = option(
        None,
        "Compute in bfloat16. Default: yes where the GPU or CPU supports it in hardware.",
        first=True,
        **_SWITCH,
    )
    activation_checkpointing: bool | None = option(
        None, "Keep only the layers' inputs and recompute the rest.", first=True, **_SWITCH
    )
    max_bad_steps: int = option(
        0, "Steps in a row that may be skipped because of a NaN loss or gradient."
    )
    save_steps: float = option(250, "Steps between checkpoints.", first=True)
    save_total_limit: int | None = option(2, "Checkpoints to keep. 0: all.")
    resume_from_checkpoint: str | None = option(
        "auto", "auto (the newest good checkpoint in --output_dir) or a path."
    )
    eval_steps: float | None = option(None, "Steps between evaluations. Default: --save_steps.")
    logging_steps: float = option(10, "Steps between logs.")
    report_to: list[str] = option(
        ["none"], "Trackers: wandb, tensorboard, trackio, ...", first=True
    )
    run_name: str | None = option(
        None, "Name of the run in trackers. Default: the path of --config, or --output_dir."
    )
    project: str = option("vocagnolm", "Project in trackers: PROJECT or ENTITY/PROJECT.")
    device_peak_tflops: float | None = option(
        None, "Peak TFLOP/s of a device, for the MFU in the logs. Default: by its name."
    )
    push_to_hub: bool = option(False, "Push the model and its card to the hub.")
    hub_model_id: str | None = option(
        None, "The model's name on the hub. Default: the name of --output_dir."
    )

    _argument_group_name = "run"

    def __post_init__(self) -> None:
        in_range(self, "[1, inf)", "global_batch_tokens", "per_device_train_batch_size")
        in_range(self, "[1, inf)", "gradient_accumulation_steps")
        in_range(self, "(0, inf)", "num_train_epochs", "device_peak_tflops")
        in_range(self, "[0, inf)", "learning_rate", "save_steps", "eval_steps", "logging_steps")
        # Trainer takes a warm-up of NaN for none, and any negative number of steps for -1.
        in_range(self, "[0, inf)", "max_bad_steps", "warmup_steps")
        in_range(self, "[-1, inf)", "max_steps")
        in_range(self, "[0, 4294967295]", "seed")
        require_trackers(self.report_to)
        if self.max_steps == 0:
            raise ValueError("--max_steps 0 makes no update: use --dry_run to see the plan")
