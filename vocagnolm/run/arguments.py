"""Arguments of the models, the corpus and the guidance, which `vocagnolm.run.parse` reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vocagnolm.distillation import Distance, Distillation
from vocagnolm.guidance import Guidance
from vocagnolm.host.command import CorpusOptions
from vocagnolm.host.processes import cores
from vocagnolm.models.adapters import AdapterArguments

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
class ModelArguments(AdapterArguments):
    """The student, what of it is trained, and its teacher."""

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
    teacher_quantization: str | None = field(
        default=None,
        metadata={"help": "fp8, nf4, int8, or a quantization config of transformers as JSON."},
    )
    teacher_sharding: Literal["none", "node"] = field(
        default="none",
        metadata={"help": "Spread the teacher's weights over the devices of each machine."},
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
        default=None,
        metadata={"help": "Attention of all models, as in from_pretrained, or torch_varlen."},
    )
    compile_layers: bool = field(
        default=False, metadata={"help": "Compile every decoder layer of all models."}
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

    def corpus_options(self) -> CorpusOptions:
        """Return the options of the corpus as `load_corpus` takes them."""
        return {
            "split": self.dataset_split,
            "text_column": self.text_column,
            "config_name": self.dataset_config,
        }

    def processes(self, documents: int) -> int | None:
        """Return the number of processes that share the work on a corpus; None: this one alone."""
        if documents < _MANY_DOCUMENTS:
            return None
        count = self.num_proc or cores()
        return count if count > 1 else None


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
            raise ValueError(f"--uld_weight must be positive and finite, got {self.uld_weight}")
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
                    f"--{option.name} has no effect with {self.description()}: leave it out"
                )

    def _looked_at(self) -> tuple[str, ...]:
        options: tuple[str, ...] = _LOOKED_AT[self.method]
        if self.is_unguided:
            options = tuple(name for name in options if name not in ("aggregation", "unmapped"))
        elif "top_k" in options:
            options += ("guidance_table_steps",)
        return ("method", *options)

    def description(self) -> str:
        """The method as typed."""
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
