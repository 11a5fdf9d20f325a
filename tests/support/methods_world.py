"""A trainer for every method of `train.py`, the same in every process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from world import MAX_LENGTH, TEACHER_CONTEXT, Tokenizers, make_models, make_trainer

from vocagnolm.collator import PackedCollator
from vocagnolm.corpus import read_list
from vocagnolm.data import Segments, align_corpus
from vocagnolm.method import Method
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import (
    Reader,
    TeacherReaders,
    student_reader,
    teacher_reader,
)
from vocagnolm.store.format import Store, finish_store
from vocagnolm.store.read import StoredReader
from vocagnolm.store.scoring import ScoringJob, score_shard
from vocagnolm.store.windows import HFScorer

METHODS = (
    *("kld", "kld forward", "uld", "uld last", "rho1", "rho1 entropy"),
    *("chunk", "chunk tokens", "chunk random"),
    *("several min", "several mean", "several max", "several weighted"),
)
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
CHUNKS = 5
CHUNK_SETTINGS = {
    "chunk": {"aggregation": "mean"},
    "chunk tokens": {"chunk_selection": "tokens"},
    "chunk random": {"chunk_guidance": "random"},
}


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

    def blocks(self, *teachers: Any, by_position: bool = False) -> Blocks:
        key = (*(id(teacher) for teacher in teachers), by_position)
        if key not in self.segments:
            corpus = datasets.Dataset.from_dict({"text": self.texts})
            readers = tuple(teacher_reader(teacher, self.context) for teacher in teachers)
            guide = TeacherReaders(readers, by_position) if teachers else None
            self.segments[key] = align_corpus(
                corpus, student_reader(self.ours, self.max_length), guide
            )
        return Blocks(self.segments[key].rows, self.max_length, [self.context] * len(teachers))

    def conversations(self) -> tuple[datasets.Dataset, Reader, Reader]:
        """The texts as questions and answers, and the readers of both models."""
        turns = [(text[:6].strip() or "?", text[6:20]) for text in self.texts]
        rows = [{"prompt": question, "completion": answer} for question, answer in turns]
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
        """Make a trainer for a method of `METHODS`."""
        settings: dict[str, Any] = {"method": method.split()[0]}
        collating: dict[str, Any] = {}
        teacher: Any
        blocks: Any
        teacher, blocks = self.teacher, self.blocks(self.theirs)
        if method.startswith("kld"):
            teacher, blocks = self.reference, self.blocks()
            settings["kld_direction"] = "forward" if "forward" in method else "reverse"
        elif method.startswith("uld"):
            blocks = self.blocks(self.theirs, by_position="last" not in method)
            settings |= {"uld_weight": 0.7}
            settings["uld_pairing"] = "last" if "last" in method else "position"
        elif method.startswith("rho1"):
            teacher, blocks = self.reference, self.blocks(self.ours)
            score = "loss_and_entropy" if "entropy" in method else "loss"
            settings |= {"top_k": 0.7, "rho1_score": score}
        elif method.startswith("chunk"):
            collating["chunks"] = CHUNKS
            settings |= {"chunks": CHUNKS, **CHUNK_SETTINGS[method]}
            if "random" in method:
                teacher, blocks = None, self.blocks()
        elif method.startswith("several"):
            reduction = method.split()[1]
            weights = [1.0, 3.0] if reduction == "weighted" else None
            settings = {"teacher_reduction": reduction, "teacher_weights": weights}
            blocks = self.blocks(self.theirs, self.ours)
            teacher = [self.teacher, self.reference]
        elif method in VARIANTS:
            settings = VARIANTS[method]
        elif method in ("turns", "stored turns", "mixture"):
            teacher, blocks = self.guided(out, method)
            settings = {"aggregation": "share"}
        elif method in ("cpt", "random"):
            teacher, blocks = None, self.blocks()
        setting = Method(**settings)
        collating["shares"] = setting.aggregation_in_effect == "share"
        options = {"method": setting, "data_collator": PackedCollator(self.max_length, **collating)}
        training = {"max_length": self.max_length, **training}
        models = copy.deepcopy((self.student, teacher))
        return make_trainer(out, blocks, *models, options=options, **training)


def make_world(tiny_llama: Callable[..., Any], tokenizers: Tokenizers, texts: list[str]) -> World:
    """A world of texts with tiny models."""
    ours, _ = tokenizers
    _, reference = make_models(tiny_llama, ours, ours)
    return World(texts, tokenizers, (*make_models(tiny_llama, *tokenizers), reference))
