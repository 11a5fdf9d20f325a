"""A trainer for every method of `train.py`, the same in every process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from world import (
    MAX_LENGTH,
    TEACHER_CONTEXT,
    Tokenizers,
    make_models,
    make_segments,
    make_trainer,
)

from vocagnolm.corpus import read_list
from vocagnolm.data import Segments, align_corpus
from vocagnolm.method import Method
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import (
    Reader,
    student_reader,
    teacher_reader,
)
from vocagnolm.store.format import Store, finish_store
from vocagnolm.store.read import StoredReader
from vocagnolm.store.scoring import ScoringJob, score_shard
from vocagnolm.store.windows import HFScorer

# The paper's `vocagnolm`, and the same with settings changed.
VARIANTS: dict[str, dict[str, Any]] = {
    "vocagnolm": {},
    **{how: {"aggregation": how} for how in ("mean", "sum", "share")},
    "exclude": {"unmapped": "exclude"},
    "unmapped mean": {"unmapped": "mean"},
    "batch": {"selection_scope": "batch"},
    "floor": {"unselected_weight": 0.3},
    "selected": {"loss_divisor": "selected"},
    "accept": {"selection": "accept"},
}
METHODS: dict[str, dict[str, Any]] = {
    "kld": {"method": "kld"},
    "kld forward": {"method": "kld", "kld_direction": "forward"},
    "uld": {"method": "uld", "uld_weight": 0.7},
    "uld last": {"method": "uld", "uld_weight": 0.7, "uld_pairing": "last"},
    "rho1": {"method": "rho1", "top_k": 0.7},
    "rho1 entropy": {"method": "rho1", "top_k": 0.7, "rho1_score": "loss_and_entropy"},
    "chunk": {"method": "chunk", "chunks": 5, "aggregation": "mean"},
    "chunk tokens": {"method": "chunk", "chunks": 5, "chunk_selection": "tokens"},
    "chunk random": {"method": "chunk", "chunks": 5, "chunk_guidance": "random"},
    **{f"several {how}": {"teacher_reduction": how} for how in ("min", "mean", "max")},
    "several weighted": {"teacher_reduction": "weighted", "teacher_weights": [1.0, 3.0]},
    **{rule: {"selection": rule} for rule in ("dft", "stm", "eaft")},
}
CONVERSATIONS = ("turns", "stored turns", "mixture")


class World:
    """A student, a teacher with another vocabulary, and a reference with the student's."""

    def __init__(
        self,
        texts: list[str],
        tokenizers: Any,
        models: Any,
        max_length: int = MAX_LENGTH,
        context: int = TEACHER_CONTEXT,
    ):
        self.texts, (self.ours, self.theirs) = texts, tokenizers
        self.student, self.teacher, self.reference = models
        self.max_length, self.context = max_length, context
        self.segments: dict[Any, Segments] = {}
        # The weights that the corpus brings.
        self.weights: list[float] | None = None

    def blocks(self, *teachers: Any, by_position: bool = False) -> Blocks:
        key = (*(id(teacher) for teacher in teachers), by_position)
        if key not in self.segments:
            sizes = {"max_length": self.max_length, "context": self.context}
            self.segments[key] = make_segments(
                self.texts,
                self.ours,
                *teachers,
                by_position=by_position,
                weights=self.weights,
                **sizes,
            )
        return Blocks(self.segments[key].rows, self.max_length, [self.context] * len(teachers))

    def conversations(self) -> tuple[datasets.Dataset, Reader, Reader]:
        """The texts as questions and answers, and the readers of both models."""
        turns = [(text[:6].strip() or "?", text[6:20]) for text in self.texts]
        rows: list[dict[str, Any]] = []
        for number, (question, answer) in enumerate(turns):
            rows.append({"prompt": question, "completion": answer})
            if self.weights is not None:
                rows[-1]["weight"] = self.weights[number]
        corpus = read_list(rows, None, "rows")
        # A copy, as the template is set on the tokenizer, which all tests share.
        student = student_reader(copy.deepcopy(self.ours), self.max_length, "plain")
        assert student.template
        # Shorter than the built-in templates, as blocks are short.
        source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        student = replace(student, template=replace(student.template, source=source))
        return corpus, student, teacher_reader(self.theirs, self.context, "chatml")

    def store(self, directory: Path) -> Store:
        """The teacher's losses of the conversations."""
        corpus, _, reader = self.conversations()
        directory.mkdir(parents=True, exist_ok=True)
        job = ScoringJob(directory, corpus, reader, 16, 1000, "float32")
        assert job.template
        score_shard(job, 0, HFScorer(copy.deepcopy(self.teacher), 4096))
        about = {"teacher": "t", "tokenizer_sha256": "", "context": self.context}
        finish_store(directory, about | job.template.as_json())
        return Store(directory)

    def guided(self, out: Path, method: str) -> tuple[Any, Any]:
        """Return a teacher and blocks of the conversations, mixed with the texts or not."""
        corpus, student, guide = self.conversations()
        if method == "stored turns":
            stored = StoredReader([self.store(out.with_name(f"{out.name} store"))])
            rows = align_corpus(corpus, student, stored).rows
            return StoredTeacher(), Blocks(rows, self.max_length, self.context)
        talks = align_corpus(corpus, student, guide).rows
        if method == "turns":
            return self.teacher, Blocks(talks, self.max_length, self.context)
        texts = datasets.Dataset.from_dict({"text": self.texts})
        pages = align_corpus(texts, student, guide).rows
        rows, sizes = datasets.concatenate_datasets([pages, talks]), [len(pages), len(talks)]
        parts = dict(zip(("pages", "talks"), sizes, strict=True))
        blocks = Blocks(rows, self.max_length, self.context, parts)
        blocks.weights = [0.7, 0.3]
        return self.teacher, blocks

    def trainer(self, out: Path, method: str, **training: Any) -> Any:
        """Make a trainer for one of `METHODS`, `VARIANTS` and `CONVERSATIONS`, or a baseline."""
        teacher: Any
        blocks: Any
        settings = {**VARIANTS, **METHODS}.get(method, {"method": method})
        if method in CONVERSATIONS:
            settings = {"aggregation": "share"}
            teacher, blocks = self.guided(out, method)
        elif method in ("cpt", "random", "chunk random", "dft", "stm", "eaft"):
            teacher, blocks = None, self.blocks()
        elif method.startswith("kld"):
            teacher, blocks = self.reference, self.blocks()
        elif method.startswith("uld"):
            teacher, blocks = self.teacher, self.blocks(self.theirs, by_position=method == "uld")
        elif method.startswith("rho1"):
            teacher, blocks = self.reference, self.blocks(self.ours)
        elif method.startswith("several"):
            teacher, blocks = [self.teacher, self.reference], self.blocks(self.theirs, self.ours)
        else:
            teacher, blocks = self.teacher, self.blocks(self.theirs)
        options = {"method": Method(**settings)}
        training = {"max_length": self.max_length, **training}
        models = copy.deepcopy((self.student, teacher))
        return make_trainer(out, blocks, *models, options=options, **training)


def make_world(tiny_llama: Callable[..., Any], tokenizers: Tokenizers, texts: list[str]) -> World:
    """A world of texts with tiny models."""
    ours, _ = tokenizers
    _, reference = make_models(tiny_llama, ours, ours)
    return World(texts, tokenizers, (*make_models(tiny_llama, *tokenizers), reference))
