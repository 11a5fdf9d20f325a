"""Arguments of the models, the corpus and the guidance, which `vocagnolm.run.parse` reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vocagnolm.chat.formats import FORMATS
from vocagnolm.chat.reading import TrainOn
from vocagnolm.cli import corpora_of
from vocagnolm.dist import cores
from vocagnolm.host.options import faults_of, option, raise_first
from vocagnolm.models.adapters import AdapterArguments
from vocagnolm.objective import Method

# Below this, processes take longer to start than they save on 32 cores (docs/running.md).
_MANY_DOCUMENTS = 10_000


@dataclass
class ModelArguments(AdapterArguments):
    """The student, what of it is trained, and its teacher."""

    student: str = option(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "Model to train: a hub name or a directory.",
    )
    teacher: list[str] | None = option(
        None, "Causal LM that guides it, with any vocabulary, or several."
    )
    student_revision: str | None = option(None, "Hub revision.")
    teacher_revision: list[str] | None = option(
        None, "Hub revision, for each teacher ('' for a directory)."
    )
    student_tokenizer: str | None = option(
        None, "Tokenizer of the student, if it is not with its weights."
    )
    teacher_tokenizer: list[str] | None = option(
        None, "Tokenizer of each teacher, if they are not with their weights."
    )
    student_chat_template: str | None = option(None, "plain, chatml or a file; by default its own.")
    teacher_chat_template: list[str] | None = option(
        None, "The same of each teacher, or one for all."
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the teacher; auto is bfloat16 on a GPU, float32 on a CPU."
    )
    teacher_quantization: str | None = option(
        None, "fp8, nf4, int8, or a quantization config of transformers as JSON."
    )
    teacher_sharding: Literal["none", "node"] = option(
        "none", "Spread the teacher's weights over the devices of each machine."
    )
    teacher_losses: list[str] | None = option(
        None, "Stores of teacher losses (vocagnolm score) instead of a teacher."
    )
    save_store: str | None = option(None, "Keep the teacher's losses as a store in this directory.")
    store_dtype: Literal["float16", "float32"] = option(
        "float16", "Precision of the losses in --save_store."
    )
    attn_implementation: str | None = option(
        None, "Attention of all models, as in from_pretrained, or torch_varlen."
    )
    overlap_teacher: bool = option(
        False,
        "Score the next micro-batch on a second stream of the GPU, meanwhile (exact; more memory).",
    )
    compile_layers: bool = option(False, "Compile every decoder layer of all models.")
    trust_remote_code: bool = option(False, "Run model code from the hub.")


@dataclass
class DataArguments:
    """The corpus and how it is cut."""

    dataset: list[str] = option(
        ["open-web-math/open-web-math"], "A file, a directory or a hub name; or several."
    )
    dataset_weights: list[float] | None = option(
        None, "Shares of the corpora in every global batch."
    )
    dataset_config: list[str] | None = option(
        None, "Hub configuration, for all or each ('' for files)."
    )
    dataset_split: list[str] = option(["train"], "Split of a hub dataset, one for all or each.")
    text_column: list[str] = option(["text"], "Column of the text, one for all or each.")
    format: list[str] | None = option(
        None, "text, messages or prompt_completion, for all or each; by default as the columns say."
    )
    train_on: TrainOn | None = option(
        None, "Tokens of conversations with labels: completions (default; answers), or all."
    )
    max_length: int = option(2048, "Student tokens of a block.")
    eval_fraction: float = option(0.0, "Share of the documents held out for evaluation, [0, 1).")
    eval_dataset: str | None = option(
        None, "Evaluate on these documents instead of a held-out share."
    )
    missing_losses: Literal["error", "skip"] = option(
        "error", "What to do about documents that --teacher_losses does not have."
    )
    attend_across_documents: bool = option(False, "Let attention cross the documents of a block.")
    num_proc: int | None = option(
        None, "Processes that tokenize and align; by default one for each core."
    )

    def __post_init__(self) -> None:
        raise_first(self._faults())

    def _faults(self) -> Iterator[str]:
        if unknown := sorted({*(self.format or ())} - {*FORMATS}):
            yield f"--format must be one of {', '.join(FORMATS)}, got {unknown[0]}"
        yield from faults_of(self)
        yield from self._faults_of_corpora()
        if self.eval_dataset and self.eval_fraction:
            yield "--eval_dataset and --eval_fraction exclude each other: give one"

    def _faults_of_corpora(self) -> Iterator[str]:
        count, weights = len(self.dataset), self.dataset_weights
        if twice := [name for name in self.dataset if self.dataset.count(name) > 1]:
            yield f"--dataset names {twice[0]} twice: name it once, and give --dataset_weights"
        if weights is not None and len(weights) != count:
            yield f"--dataset_weights needs one for each of {count} corpora, got {len(weights)}"
        for name in ("text_column", "format"):
            if self.eval_dataset and len(vars(self)[name] or ()) > 1:
                yield f"--eval_dataset needs one --{name}: hold out an --eval_fraction instead"
        # Said before anything is read.
        corpora_of(self)

    def processes(self, documents: int) -> int | None:
        """Return the number of processes that share the work on a corpus; None: this one alone."""
        if documents < _MANY_DOCUMENTS:
            return None
        count = self.num_proc or cores()
        return count if count > 1 else None


@dataclass(frozen=True)
class GuidanceArguments(Method):
    """The method, and how often its guidance is shown."""

    guidance_table_steps: int = option(
        0, "Show the guidance of a sample every so many steps; 0: never."
    )

    def _looked_at(self) -> tuple[str, ...]:
        names = super()._looked_at()
        # Only where tokens are chosen by guidance is there some to show.
        return (*names, "guidance_table_steps") if self.choice == "guided" else names
