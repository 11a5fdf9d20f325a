"""Arguments of the models, the corpus and the guidance, which `vocagnolm.run.parse` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vocagnolm.host.command import CorpusOptions
from vocagnolm.host.processes import cores
from vocagnolm.models.adapters import AdapterArguments
from vocagnolm.objective import Method

# Below this, starting processes takes longer than they save.
_MANY_DOCUMENTS = 10_000


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


@dataclass(frozen=True)
class GuidanceArguments(Method):
    """The method, and how often its guidance is shown."""

    guidance_table_steps: int = field(
        default=0,
        metadata={"help": "Show the guidance of a sample every so many steps; 0: never."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance_table_steps < 0:
            raise ValueError(
                f"--guidance_table_steps must not be negative, got {self.guidance_table_steps}"
            )

    def _looked_at(self) -> tuple[str, ...]:
        names = super()._looked_at()
        return (*names, "guidance_table_steps") if self.choice == "guided" else names
