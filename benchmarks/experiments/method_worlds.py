"""Where `methods` compares the methods: students, text, teachers, and what a student is judged by.

Worlds: the embedded one of `make demo`, and real documents, as they are or spoilt.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vocagnolm.cli import score
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.judge import judge
from vocagnolm.demo.models import ASSETS, STUDENT_TOKENIZER, TEACHER
from vocagnolm.demo.worker import (
    BASE,
    BASE_OPTIONS,
    CURVE_PROBLEMS,
    PAGE_TOKENS,
    make_base,
    train,
)
from vocagnolm.spans import encode
from vocagnolm.tokenizers import start_id


@dataclass(frozen=True)
class Shape:
    """A model of `TextWorld`."""

    vocabulary_tokens: int
    hidden: int
    layers: int

    def config(self) -> LlamaConfig:
        """A Llama of this shape."""
        return LlamaConfig(
            vocab_size=self.vocabulary_tokens,
            hidden_size=self.hidden,
            intermediate_size=8 * self.hidden // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.04,
        )


SHAPES = {"student": Shape(4096, 96, 2), "teacher": Shape(6000, 192, 3)}


class World(ABC):
    """What runs have in common, and what they need.

    Needs are made once, when first asked for: `need("losses", seed)` is the path of what
    `make_losses(path, seed)` makes. Every world has the needs `pages`, the text of the continual
    pretraining; `clean`, what is read at the end; `teacher`; `reference`, which has the student's
    tokenizer; and the `losses` and `reference_losses` of both on the pages.

    Attributes:
        options: of `train.py`, of every continual pretraining.
        root: where the runs lie.
    """

    options: tuple[str, ...]

    def __init__(self, root: Path):
        self.root = root

    def seed_dir(self, seed: int) -> Path:
        """Where the runs of a seed lie."""
        return self.root / f"seed{seed}"

    @abstractmethod
    def place(self, name: str, seed: int) -> Path:
        """Where a need of a seed lies, or of all seeds."""

    def need(self, name: str, seed: int) -> Path:
        """The path of something that runs need."""
        path = self.place(name, seed)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            getattr(self, f"make_{name}")(partial, seed)
            partial.rename(path)
        return path

    def make_losses(self, path: Path, seed: int) -> None:
        """The teacher's losses on the pages, as a store."""
        self._score("teacher", path, seed)

    def make_reference_losses(self, path: Path, seed: int) -> None:
        """The reference's losses on the pages, as a store."""
        self._score("reference", path, seed)

    def _score(self, teacher: str, path: Path, seed: int) -> None:
        model, pages = self.need(teacher, seed).resolve(), self.need("pages", seed)
        options = (f"--teacher={model}", f"--dataset={pages}", f"--output_dir={path}")
        if status := score.main([*options, "--loss_dtype=float32"]):
            raise SystemExit(status)

    @abstractmethod
    def student(self, seed: int) -> Path:
        """The student that all runs of a seed begin with."""

    @abstractmethod
    def judge(self, model: Path) -> dict[str, float]:
        """What a saved model is judged by; the first number is shown seed by seed."""


class DemoWorld(World):
    """The embedded world as in `make demo`."""

    steps, step_tokens = 650, 512  # as in recipes/demo.yaml
    options = (f"--max_steps={steps}", f"--global_batch_tokens={step_tokens}")

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        is_shared = name in ("teacher", "clean")
        return (self.root if is_shared else self.seed_dir(seed)) / "needs" / name

    def make_teacher(self, path: Path, _: int) -> None:
        """The teacher that is shipped."""
        path.symlink_to(ASSETS / TEACHER)

    def make_clean(self, path: Path, _: int) -> None:
        """Problems that are read at the end of each run."""
        problems = demo_world.held_out_problems()[:CURVE_PROBLEMS]
        _write(path, ["".join(demo_world.render(problem)) for problem in problems])

    def make_base(self, path: Path, seed: int) -> None:
        """A student that has read noise, prose and questions."""
        path.mkdir()
        make_base(path, seed, BASE_OPTIONS)

    def make_pages(self, path: Path, seed: int, wrong_share: float = 0.4) -> None:
        """Problems among noise, many with wrong solutions."""
        count = self.steps * self.step_tokens // PAGE_TOKENS
        excluded = demo_world.held_out_questions()
        _write(path, list(demo_world.corpus(count, seed, wrong_share, excluded)))

    def make_right_pages(self, path: Path, seed: int) -> None:
        """Other pages, without wrong solutions."""
        self.make_pages(path, seed + 1000, wrong_share=0.0)

    def make_reference(self, path: Path, seed: int) -> None:
        """The student after as many pages without wrong solutions."""
        pages = self.need("right_pages", seed)
        train(self.student(seed), pages, path, *self.options, "--method=cpt", f"--seed={seed}")

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed) / BASE

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return asdict(judge(loaded, AutoTokenizer.from_pretrained(model)))


class TextWorld(World):
    """Real documents; the beginnings of some that are held out judge all models.

    Every second one of the others is for the students' pages, the rest for teacher, reference,
    tokenizers and the students' first pretraining: no document is in both.

    Args:
        root: where the runs lie; what both worlds share is beside it.
        corpora: .jsonl files with a field `text`.
        is_noisy: whether the pages are spoilt (see `spoil`).
    """

    steps, first_steps, longer_steps = 250, 100, 600
    max_length, step_tokens = 256, 1024
    options = (
        f"--max_length={max_length}",
        f"--global_batch_tokens={step_tokens}",
        f"--max_steps={steps}",
    )
    held_out_documents, held_out_characters = 200, 500
    page_documents = 1000  # enough that no document is read twice

    def __init__(self, root: Path, corpora: Sequence[Path], is_noisy: bool):
        super().__init__(root)
        self.corpora, self.is_noisy = corpora, is_noisy

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        if name in ("pages", "losses", "reference_losses"):
            return self.root / "needs" / name
        common = self.root.parent / "text"  # of both worlds
        return common / (f"base{seed}" if name == "base" else name)

    @cached_property
    def documents(self) -> tuple[list[str], list[str], list[str]]:
        """The beginnings of held-out documents; those for the students' pages; the rest."""
        lines = [line for file in self.corpora for line in file.open(encoding="utf-8")]
        texts = list(dict.fromkeys(json.loads(line)["text"] for line in lines))
        Random("documents").shuffle(texts)
        held_out, others = texts[: self.held_out_documents], texts[self.held_out_documents :]
        return [text[: self.held_out_characters] for text in held_out], others[::2], others[1::2]

    def make_clean(self, path: Path, _: int) -> None:
        """What is read at the end of each run."""
        _write(path, self.documents[0])

    def make_pages(self, path: Path, _: int) -> None:
        """Documents, spoilt if the world is noisy."""
        texts, rng = self.documents[1][: self.page_documents], Random("pages")
        _write(path, [spoil(text, rng) for text in texts] if self.is_noisy else texts)

    def make_tokenizers(self, path: Path, _: int) -> None:
        """Of the demo's kinds: Metaspace BPE, and byte-level BPE with single digits."""
        for role, name in (("student", STUDENT_TOKENIZER), ("teacher", TEACHER)):
            kind = AutoTokenizer.from_pretrained(ASSETS / name)
            size = SHAPES[role].vocabulary_tokens
            kind.train_new_from_iterator(self.documents[2], size).save_pretrained(path / role)

    def make_teacher(self, path: Path, _: int) -> None:
        """A model that is larger than the student and has read six times its first text."""
        self._pretrain("teacher", path, self.longer_steps, seed=1000)

    def make_reference(self, path: Path, _: int) -> None:
        """A model like the student that has read six times its first text."""
        self._pretrain("student", path, self.longer_steps, seed=1001)

    def make_base(self, path: Path, seed: int) -> None:
        """A student that has read a little."""
        self._pretrain("student", path, self.first_steps, seed)

    def _pretrain(self, role: str, path: Path, steps: int, seed: int) -> None:
        """Train a model on documents as they are, in an order of its own."""
        tokenizer = AutoTokenizer.from_pretrained(self.need("tokenizers", seed) / role)
        torch.manual_seed(seed)
        untrained = path.with_name(f"{path.name}.untrained")
        LlamaForCausalLM(SHAPES[role].config()).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        corpus = self.need("rest", seed)
        options = (*self.options, "--method=cpt", f"--max_steps={steps}", f"--seed={seed}")
        train(untrained, corpus, path, *options)

    def make_rest(self, path: Path, _: int) -> None:
        """What all models are pretrained on."""
        _write(path, self.documents[2])

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed)

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        return judge_text(model, self.documents[0])


def _write(path: Path, texts: Sequence[str]) -> None:
    """Write a corpus as a directory."""
    path.mkdir()
    demo_world.write_jsonl(path / "texts.jsonl", texts)


def spoil(text: str, rng: Random) -> str:
    """Make a document like a bad web page, by pieces of about 200 characters.

    Half of them stay as they are, a quarter have their words in random order, and a quarter give
    way to as much of menus, dates, hashes, digits and garbled letters, in lines of their own.
    """
    words, pieces = text.split(" "), []
    while words:
        count = length = 0
        while count < len(words) and length < 200:
            length += len(words[count]) + 1
            count += 1
        piece, words = words[:count], words[count:]
        kind = rng.random()
        if kind < 0.25:
            rng.shuffle(piece)
        elif kind < 0.5:
            lines = [""]
            while sum(map(len, lines)) < length:
                lines.append(demo_world.noise(rng))
            piece = ["\n".join([*lines, ""])]
        pieces.append(" ".join(piece))
    return " ".join(pieces)


@torch.no_grad()
def judge_text(path: Path, texts: Sequence[str]) -> dict[str, float]:
    """A saved model's loss on texts, in nats per character and per token of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    start, nats, tokens = start_id(tokenizer, "student"), 0.0, 0
    for text in texts:
        ids_1S = torch.tensor([[start, *encode(tokenizer, text).ids.tolist()]])
        logits_SV = model(ids_1S).logits[0, :-1]
        nats += float(F.cross_entropy(logits_SV, ids_1S[0, 1:], reduction="sum"))
        tokens += ids_1S.shape[1] - 1
    return {"nats_per_character": nats / sum(map(len, texts)), "nats_per_token": nats / tokens}
