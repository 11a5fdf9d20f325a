"""What a user can set: the argument dataclasses, their checks, and the batch arithmetic.

Read by the scripts only; everything below them takes plain arguments.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser

from vocagnolm.distillation import Distance, Distillation
from vocagnolm.guidance import Guidance
from vocagnolm.recipe import read_recipe
from vocagnolm.run_arguments import RunArguments as RunArguments  # a part of this module

_SELECTION = ("top_k", "unmapped", "selection_scope", "loss_divisor")
_LOOKED_AT = {  # the options of guidance that a method looks at
    "vocagnolm": (*_SELECTION, "aggregation"),
    "cpt": (),
    "random": ("top_k", "selection_scope", "loss_divisor"),
    "kld": ("kld_direction",),
    "uld": ("uld_weight", "uld_pairing"),
    "rho1": (*_SELECTION, "rho1_score"),
    "chunk": (*_SELECTION, "aggregation", "chunks", "chunk_guidance"),
}
_MANY_DOCUMENTS = 10_000  # below this, starting processes takes longer than they save


@dataclass
class ModelArguments:
    """The student and its teacher."""

    student: str = field(
        default="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        metadata={"help": "Model to train: a hub name or a directory."},
    )
    teacher: list[str] | None = field(
        default=None,
        metadata={"help": "Causal LM that guides it, with any vocabulary, or several."},
    )
    student_revision: str | None = field(default=None, metadata={"help": "Hub revision."})
    teacher_revision: list[str] | None = field(
        default=None, metadata={"help": "Hub revision, one for each teacher."}
    )
    student_tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer of the student, if it is not with its weights."}
    )
    teacher_tokenizer: list[str] | None = field(
        default=None,
        metadata={"help": "Tokenizer of each teacher, if they are not with their weights."},
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={"help": "Precision of the teacher; auto is bfloat16 on a GPU, float32 on a CPU."},
    )
    teacher_losses: list[str] | None = field(
        default=None,
        metadata={"help": "Stores of teacher losses (vocagnolm score) instead of a teacher."},
    )
    teacher_reduction: Literal["min", "mean", "max", "weighted"] = field(
        default="mean", metadata={"help": "How the losses of several teachers become one."}
    )
    teacher_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weights of the teachers, for --teacher_reduction weighted."},
    )
    save_store: str | None = field(
        default=None, metadata={"help": "Keep the teacher's losses as a store in this directory."}
    )
    store_dtype: Literal["float16", "float32"] = field(
        default="float16", metadata={"help": "Precision of the losses in --save_store."}
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
    missing_losses: Literal["error", "skip"] = field(
        default="error",
        metadata={"help": "What to do about documents that --teacher_losses does not have."},
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

    method: Literal["vocagnolm", "cpt", "random", "kld", "uld", "rho1", "chunk"] = field(
        default="vocagnolm",
        metadata={
            "help": "vocagnolm; cpt: plain continual pretraining; random: a random top_k of "
            "tokens; or a baseline of the paper (Section 4.2)."
        },
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

    kld_direction: Literal["reverse", "forward"] = field(
        default="reverse", metadata={"help": "KL(student || teacher), Eq. 5, or the other way."}
    )
    uld_weight: float = field(default=0.5, metadata={"help": "Lambda of Eq. 6."})
    uld_pairing: Literal["last", "position"] = field(
        default="last",
        metadata={
            "help": "The teacher token that a student token is compared with: the last one that "
            "covers it, or the one of the same number in its document."
        },
    )
    rho1_score: Literal["loss", "loss_and_entropy"] = field(
        default="loss",
        metadata={"help": "Rank tokens by excess loss, or also by the reference's entropy."},
    )
    chunks: int = field(default=32, metadata={"help": "Chunks of a sequence (Section 6.1)."})
    chunk_guidance: Literal["teacher", "random"] = field(
        default="teacher", metadata={"help": "Guide by the teacher's chunks, or pick at random."}
    )
    guidance_table_steps: int = field(
        default=0,
        metadata={"help": "Show the guidance of a sample every so many steps; 0: never."},
    )

    def __post_init__(self) -> None:
        self.guidance()  # validates
        if not (0 < self.uld_weight < math.inf):
            raise ValueError(f"--uld_weight must be positive, got {self.uld_weight}")
        if self.chunks < 1:
            raise ValueError(f"--chunks must be at least 1, got {self.chunks}")
        if self.guidance_table_steps < 0:
            raise ValueError(
                f"--guidance_table_steps must not be negative, got {self.guidance_table_steps}"
            )
        for option in fields(self):
            idle = option.name not in self._looked_at()
            if idle and getattr(self, option.name) != option.default:
                raise ValueError(
                    f"--{option.name} has no effect with {self._description()}: leave it out"
                )

    def _looked_at(self) -> tuple[str, ...]:
        options: tuple[str, ...] = _LOOKED_AT[self.method]
        if self.is_unguided:
            options = tuple(name for name in options if name not in ("aggregation", "unmapped"))
        elif "top_k" in options:
            options += ("guidance_table_steps",)
        return ("method", *options)

    def _description(self) -> str:
        random_chunks = self.method == "chunk" and self.is_unguided
        return f"--method {self.method}" + " --chunk_guidance random" * random_chunks

    @property
    def is_unguided(self) -> bool:
        """Whether the method needs no teacher."""
        random_chunks = self.method == "chunk" and self.chunk_guidance == "random"
        return self.method in ("cpt", "random") or random_chunks

    @property
    def compares_distributions(self) -> bool:
        """Whether the method needs more of a teacher than the losses of its tokens."""
        return self.method in ("kld", "uld") or self.rho1_score == "loss_and_entropy"

    def in_effect(self) -> dict[str, Any]:
        """The options that the method looks at."""
        return {name: getattr(self, name) for name in self._looked_at()}

    def guidance(self) -> Guidance:
        """The settings of the selection, as the trainer takes them."""
        return Guidance(
            self.top_k, self.aggregation, self.unmapped, self.selection_scope, self.rho1_score
        )

    def distillation(self) -> Distillation | None:
        """What is added to the cross-entropy, as the trainer takes it."""
        if self.method == "uld":
            return Distillation("sorted_l1", self.uld_weight)
        distance: Distance = "reverse_kl" if self.kld_direction == "reverse" else "forward_kl"
        return Distillation(distance) if self.method == "kld" else None


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
    names = [values["student"], *(values["teacher"] or values["teacher_losses"] or ())]
    if values["method"] != "vocagnolm" or len(names) == 1:
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
    if guidance.is_unguided:
        why = f"with {guidance._description()}"
        _refuse(model, why, "teacher", "teacher_tokenizer", "teacher_revision", "teacher_losses")
    elif model.teacher_losses:
        why = "with --teacher_losses, which no teacher is loaded for"
        _refuse(model, why, "teacher", "teacher_tokenizer", "teacher_revision", "teacher_dtype")
    elif not model.teacher:
        raise ValueError(
            "--teacher is required: name the causal LM that guides the student, or a store of its "
            "losses with --teacher_losses"
        )
    _check_teachers(model, guidance)
    if not model.teacher:
        _refuse(model, "without --teacher", "save_store")
    elif model.save_store and data.attend_across_documents:
        raise ValueError(
            "--save_store keeps losses of documents alone: leave --attend_across_documents out"
        )
    if not model.save_store:
        _refuse(model, "without --save_store", "store_dtype")
    if not model.teacher_losses:
        _refuse(data, "without --teacher_losses", "missing_losses")


def _check_teachers(model: ModelArguments, guidance: GuidanceArguments) -> None:
    """How many teachers there may be, and of what kind."""
    teachers = model.teacher or model.teacher_losses or []
    if len(teachers) < 2:
        _refuse(model, "without several teachers", "teacher_reduction", "teacher_weights")
    for name in ("teacher_tokenizer", "teacher_revision"):
        given = getattr(model, name)
        if given and len(given) != len(teachers):
            raise ValueError(
                f"--{name} needs one value for each of {len(teachers)} teachers, got {len(given)}"
            )
    if guidance.compares_distributions and model.teacher_losses:
        raise ValueError(
            f"--method {guidance.method} compares distributions over words, which a store of "
            "losses does not hold: give the model itself with --teacher"
        )
    if len(teachers) > 1 and (guidance.compares_distributions or model.save_store):
        what = "--save_store" if model.save_store else f"--method {guidance.method}"
        raise ValueError(f"{what} takes one teacher, got {len(teachers)}: name one with --teacher")
    if model.save_store and guidance.method in ("kld", "uld"):
        raise ValueError(
            f"--save_store keeps token losses, which --method {guidance.method} does not compute: "
            "leave it out"
        )


def _refuse(arguments: ModelArguments | DataArguments, why: str, *names: str) -> None:
    """Refuse options that have no effect."""
    defaults = {option.name: option.default for option in fields(arguments)}
    for name in names:
        if getattr(arguments, name) != defaults[name]:
            raise ValueError(f"--{name} has no effect {why}: leave it out")
