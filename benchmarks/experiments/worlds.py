"""Where methods are compared: students, texts, teachers, and how a student is judged.

`DemoWorld` is the world of `make demo`. `TextWorld` has real documents, unchanged or spoilt. It
knows which characters are spoilt, so that there can be an oracle. Where the oracle does not beat
plain pretraining, a world says nothing about the selection of tokens.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import llama
from vocagnolm.__main__ import main as vocagnolm
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.demo.run import BASE, PAGE_TOKENS, STUDENT_TOKENIZER, judge, make_base, train
from vocagnolm.shell.io import ASSETS
from vocagnolm.spans import encode, encode_batch
from vocagnolm.store import format as store
from vocagnolm.tokenizer import start_id

BoolArray = npt.NDArray[np.bool_]
Pieces = list[tuple[str, bool]]  # parts of a text, split at spaces, and whether each is unchanged
Spoil = Callable[[str, Random], Pieces]


class World(ABC):
    """What runs have in common, and what they need.

    A need is made once, when it is first asked for, even if several processes ask.
    `need("losses", seed)` is the path of what `make_losses(path, seed)` makes. Every world has
    these needs: `pages`, the text of the continual pretraining; `clean`, the text that is evaluated
    at the end; `teacher`; `reference`, which has the student's tokenizer; and `losses` and
    `reference_losses`, the losses of these two models on the pages.

    Attributes:
        options: options of `train.py` for every continual pretraining.
        root: the directory of the runs.
    """

    options: tuple[str, ...]

    def __init__(self, root: Path):
        self.root = root

    def seed_dir(self, seed: int) -> Path:
        """Return the directory of a seed's runs."""
        return self.root / f"seed{seed}"

    @abstractmethod
    def place(self, name: str, seed: int) -> Path:
        """Return the path of a need, which is one seed's or shared by all."""

    def need(self, name: str, seed: int) -> Path:
        """Return the path of something that runs need; make it if it is missing."""
        path = self.place(name, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{name}.lock")):
            if not path.exists():
                partial = path.with_name(f"{path.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                self.make(name, partial, seed)
                partial.rename(path)
        return path

    def make(self, name: str, path: Path, seed: int) -> None:
        """Make something that runs need."""
        getattr(self, f"make_{name}")(path, seed)

    def make_losses(self, path: Path, seed: int) -> None:
        """Store the teacher's losses on the pages."""
        self.score("teacher", path, seed)

    def make_reference_losses(self, path: Path, seed: int) -> None:
        """Store the reference's losses on the pages."""
        self.score("reference", path, seed)

    def score(self, teacher: str, path: Path, seed: int, *more: str) -> None:
        """Store the losses of a model on the pages."""
        model, pages = self.need(teacher, seed).resolve(), self.need("pages", seed)
        options = (f"--teacher={model}", f"--dataset={pages}", f"--output_dir={path}")
        if status := vocagnolm(["score", *options, "--loss_dtype=float32", *more]):
            raise SystemExit(status)

    @abstractmethod
    def student(self, seed: int) -> Path:
        """Return the student that all runs of a seed start from."""

    @abstractmethod
    def judge(self, model: Path) -> dict[str, float]:
        """Return the measures of a saved model; the first one is shown seed by seed."""


def write_corpus(path: Path, texts: Sequence[str]) -> None:
    """Write a corpus as a directory."""
    path.mkdir()
    demo_world.write_jsonl(path / "texts.jsonl", texts)


# -- The demo's world ----------------------------------------------------------------------------


class DemoWorld(World):
    """The embedded world, as in `make demo`."""

    steps, step_tokens = 650, 512  # as in recipes/demo.yaml
    options: tuple[str, ...] = (f"--max_steps={steps}", f"--global_batch_tokens={step_tokens}")

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        is_shared = name in ("teacher", "clean")
        return (self.root if is_shared else self.seed_dir(seed)) / "needs" / name

    def make_teacher(self, path: Path, _: int) -> None:
        """Link the teacher that is shipped."""
        path.symlink_to(ASSETS / TEACHER)

    def make_clean(self, path: Path, _: int) -> None:
        """Write the problems that are evaluated at the end of each run."""
        problems = demo_world.held_out_problems()[:100]
        write_corpus(path, ["".join(demo_world.render(problem)) for problem in problems])

    def make_base(self, path: Path, seed: int) -> None:
        """Train a student on noise, prose and questions."""
        path.mkdir()
        make_base(path, seed)

    def make_pages(self, path: Path, seed: int) -> None:
        """Write problems among noise, 40 % of them with wrong solutions."""
        self._write_pages(path, seed, wrong_share=0.4)

    def make_right_pages(self, path: Path, seed: int) -> None:
        """Write other pages, without wrong solutions."""
        self._write_pages(path, seed + 1000, wrong_share=0.0)

    def _write_pages(self, path: Path, seed: int, wrong_share: float) -> None:
        count = self.steps * self.step_tokens // PAGE_TOKENS
        write_corpus(path, list(demo_world.corpus(count, seed, wrong_share)))

    def make_reference(self, path: Path, seed: int) -> None:
        """Train the student on as many pages without wrong solutions."""
        pages = self.need("right_pages", seed)
        train(self.student(seed), pages, path, *self.options, "--method=cpt", f"--seed={seed}")

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed) / BASE

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        return judge(model)


# -- Real documents ------------------------------------------------------------------------------

_STUDENT, _SMALL, _LARGE = "student", "small", "large"
# The model of each tokenizer, and its size. The first two are the student's and the teacher's.
VOCABULARIES = {
    _STUDENT: (STUDENT_TOKENIZER, 4096),  # Metaspace
    "teacher": (TEACHER, 6000),  # byte-level, with single digits, like the next two
    "coarse": (TEACHER, 12000),
    "fine": (TEACHER, 1500),
}
WIDTHS_AND_LAYERS = {_SMALL: (96, 2), _LARGE: (192, 3)}
# The oracle's loss of a spoilt token. Every token also gets a random loss that is large against any
# student's loss. If there are more good tokens than are selected, those left out are then no easier
# than the others.
_SPOILT_NATS, _RANDOM_NATS = 1e6, 1e5
_FIFTHS = 5


class TextWorld(World):
    """Real documents. The beginnings of some held-out ones judge all models.

    Every second one of the others is for the students' pages. The rest is for teachers, tokenizers
    and the students' first pretraining. No document is in both. In addition to the needs of every
    world, there are `TOKENIZER-SIZE`, a teacher for each of `VOCABULARIES` and `WIDTHS_AND_LAYERS`,
    `losses-TOKENIZER-SIZE`, and `oracle_losses`, which are far larger where a page is spoilt.

    Args:
        root: the directory of the runs; what all such worlds share is next to it.
        corpora: .jsonl files with the fields `text` and, for problems with answers, `source`.
        spoil: makes a page from a document.
    """

    steps, first_steps, longer_steps = 250, 100, 600
    options = ("--max_length=256", "--global_batch_tokens=1024", f"--max_steps={steps}")
    held_out_documents, held_out_characters = 200, 500
    page_documents = 1000  # enough that no document is read twice
    shared = "text"  # the directory that all such worlds share

    def __init__(self, root: Path, corpora: Sequence[Path], spoil: Spoil):
        super().__init__(root)
        self.corpora, self.spoil = corpora, spoil

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        if name == "pages" or "losses" in name:
            return self.root / "needs" / name
        common = self.root.parent / self.shared
        return common / (f"base-{seed}" if name == "base" else name)

    def make(self, name: str, path: Path, seed: int) -> None:  # noqa: D102
        kind, _, rest = name.partition("-")
        if kind == "tokenizer":
            like, size = VOCABULARIES[rest]
            tokenizer = AutoTokenizer.from_pretrained(ASSETS / like)
            tokenizer.train_new_from_iterator(self.documents[2], size).save_pretrained(path)
        elif kind == "losses" and rest:
            self.score(rest, path, seed)
        elif rest:
            self._pretrain(kind, rest, path, self.longer_steps, seed=1002)
        else:
            super().make(name, path, seed)

    @cached_property
    def _sources(self) -> dict[str, str]:
        """The source of each document."""
        found = {}
        for file in self.corpora:
            for line in file.open(encoding="utf-8"):
                row: dict[str, Any] = json.loads(line)
                found[row["text"]] = row.get("source", "")
        return found

    @cached_property
    def documents(self) -> tuple[list[str], list[str], list[str]]:
        """The held-out documents, those for the students' pages, and the rest."""
        texts = list(self._sources)
        Random("documents").shuffle(texts)
        held_out, others = texts[: self.held_out_documents], texts[self.held_out_documents :]
        return held_out, others[::2], others[1::2]

    @cached_property
    def pages(self) -> list[tuple[str, BoolArray]]:
        """The students' pages, and which of their characters are unchanged."""
        rng, found = Random("pages"), []
        for text in self.documents[1][: self.page_documents]:
            pieces = self.spoil(text, rng)
            # Spaces join the pieces. Each space belongs to the piece after it.
            lengths = [len(piece) + (index > 0) for index, (piece, _) in enumerate(pieces)]
            is_kept = np.repeat([kept for _, kept in pieces], lengths)
            found.append((" ".join(piece for piece, _ in pieces), is_kept))
        return found

    def make_clean(self, path: Path, _: int) -> None:
        """Write the texts that are evaluated at the end of each run."""
        write_corpus(path, [text[: self.held_out_characters] for text in self.documents[0]])

    def make_pages(self, path: Path, _: int) -> None:
        """Write the pages, spoilt or not."""
        write_corpus(path, [text for text, _ in self.pages])

    def make_rest(self, path: Path, _: int) -> None:
        """Write the texts that all models are pretrained on."""
        write_corpus(path, self.documents[2])

    def make_teacher(self, path: Path, _: int) -> None:
        """Train a model larger than the student, on six times the text of its first pretraining."""
        self._pretrain("teacher", _LARGE, path, self.longer_steps, seed=1000)

    def make_reference(self, path: Path, _: int) -> None:
        """Train a model like the student, on six times the text of its first pretraining."""
        self._pretrain(_STUDENT, _SMALL, path, self.longer_steps, seed=1001)

    def make_base(self, path: Path, seed: int) -> None:
        """Train a student on a little text."""
        self._pretrain(_STUDENT, _SMALL, path, self.first_steps, seed)

    def _pretrain(
        self, tokenizer: str, size: str, path: Path, steps: int, seed: int, texts: str = "rest"
    ) -> None:
        """Train a new model on a need's texts; `seed` determines its weights and the order."""
        torch.manual_seed(seed)
        untrained = path.with_name(f"{path.name}.untrained")
        model = make_model(VOCABULARIES[tokenizer][1], *WIDTHS_AND_LAYERS[size])
        model.save_pretrained(untrained)
        read_with = self.need(f"tokenizer-{tokenizer}", seed)
        AutoTokenizer.from_pretrained(read_with).save_pretrained(untrained)
        options = (*self.options, "--method=cpt", f"--max_steps={steps}", f"--seed={seed}")
        train(untrained, self.need(texts, seed), path, *options)

    def make_oracle_losses(self, path: Path, _: int) -> None:
        """Store losses of the student's own tokens that say only which are spoilt."""
        path.mkdir()
        documents = [
            (store.document_key(text), store.StoredDocument(len(text), spans, losses))
            for (text, _), (spans, losses) in zip(self.pages, self._oracle, strict=True)
        ]
        store.write_shard(path, 0, documents, "float32")
        about = {"teacher": "oracle", "tokenizer_sha256": "", "context": 2**20}
        store.finish_store(path, about)

    @property
    def kept_share(self) -> float:
        """The share of the pages' tokens that are unchanged."""
        return float(np.mean(np.concatenate([losses for _, losses in self._oracle]) < _SPOILT_NATS))

    @cached_property
    def _oracle(self) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        tokenizer = AutoTokenizer.from_pretrained(self.need("tokenizer-student", 0))
        rng, found = np.random.default_rng(0), []
        for text, is_kept in self.pages:
            spans = encode(tokenizer, text).spans
            spoilt = np.append(0, np.cumsum(~is_kept))
            is_spoilt = spoilt[spans[:, 1]] > spoilt[spans[:, 0]]
            losses = _SPOILT_NATS * is_spoilt + rng.uniform(0, _RANDOM_NATS, len(spans))
            found.append((spans, losses.astype(np.float32)))
        return found

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed)

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        held_out, pages, _ = self.documents
        problems = [text for text in held_out if "/train/" in self._sources.get(text, "")]
        texts = [text[: self.held_out_characters] for text in held_out]
        return judge_text(model, texts, problems, pages[: self.page_documents])


def make_model(vocabulary: int, width: int, layers: int) -> Any:
    """Make an untrained model."""
    options = {"tie_word_embeddings": True, "max_position_embeddings": 512}
    options |= {"intermediate_size": 8 * width // 3, "initializer_range": 0.04}
    return llama(vocabulary, width, layers, 4, **options)


# -- Spoiling ------------------------------------------------------------------------------------

_BOILERPLATE = (
    *("[edit]", "[1]", "&nbsp;", "<br>", "Advertisement", "Read more", "Click here", "Share this"),
    *("Log in", "Sign up", "Cookie policy", "Home", "Next", "Previous", "Copyright 2014", "Menu"),
    *("All rights reserved", "Report abuse", "Reply", "Quote", "0 comments", "Posted by admin"),
    *("Subscribe", "Terms of use", "Loading...", "Page 12"),
)


def keep(text: str, _: Random) -> Pieces:
    """Keep a document unchanged."""
    return [(text, True)]


def spoil(text: str, rng: Random) -> Pieces:
    """Make a document like a bad web page, in pieces of about 200 characters.

    Half of the pieces are unchanged. A quarter have their words in random order. A quarter are
    replaced by as much text of menus, dates, hashes, digits and garbled letters, in lines of its
    own.
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
        pieces.append((" ".join(piece), kind >= 0.5))
    return pieces


def insert(text: str, rng: Random) -> Pieces:
    """Insert boilerplate of web pages before 40 % of the words."""
    pieces: Pieces = []
    for word in text.split(" "):
        if rng.random() < 0.4:
            pieces.append((rng.choice(_BOILERPLATE), False))
        pieces.append((word, True))
    return pieces


SPOILS: dict[str, Spoil] = {"clean": keep, "noisy": spoil, "inserted-40": insert}


# -- Judging -------------------------------------------------------------------------------------


@torch.no_grad()
def judge_text(
    path: Path, texts: Sequence[str], problems: Sequence[str], pages: Sequence[str]
) -> dict[str, float]:
    """Measure a saved model on texts, and on the answers of problems.

    Args:
        path: the model.
        texts: texts that count as a whole.
        problems: each is a question, a line break (or an empty line, if there is one), the answer.
        pages: texts that determine which tokens are rare or frequent.

    Returns:
        nats per character and per token, the share of tokens that the model finds likeliest, nats
        per character of answers, and nats per token by fifths of the tokens, rarest first.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    start = start_id(tokenizer, "student")
    longest = model.config.max_position_embeddings

    def read(text: str) -> tuple[npt.NDArray[np.int64], list[torch.Tensor]]:
        encoding = encode(tokenizer, text)
        ids_S = torch.tensor([start, *encoding.ids.tolist()])[:longest]
        logits_SV = model(ids_S[None]).logits[0, :-1]
        nats_S = F.cross_entropy(logits_SV, ids_S[1:], reduction="none").double()
        is_likeliest_S = logits_SV.argmax(-1) == ids_S[1:]
        return encoding.spans[: longest - 1], [ids_S[1:], nats_S, is_likeliest_S]

    ids_N, nats_N, right_N = map(torch.cat, zip(*(read(text)[1] for text in texts), strict=True))
    answer_nats = answer_characters = 0.0
    for text in problems:
        spans, (_, nats_S, _) = read(text)
        at = text.index("\n\n") if "\n\n" in text else text.index("\n")
        answer_nats += float(nats_S[torch.from_numpy(spans[:, 0] >= at)].sum())
        answer_characters += spans[-1, 1] - at
    encodings = encode_batch(tokenizer, pages)
    ids = np.concatenate([encoding.ids for encoding in encodings])
    counts_V = np.bincount(ids, minlength=len(tokenizer))
    counts_N = torch.from_numpy(counts_V)[ids_N]
    fifths = nats_N[counts_N.argsort(stable=True)].chunk(_FIFTHS)
    return {
        "nats_per_character": float(nats_N.sum()) / sum(map(len, texts)),
        "nats_per_token": float(nats_N.mean()),
        "top1": float(right_N.double().mean()),
        "answer_nats_per_character": answer_nats / max(answer_characters, 1),
        **{f"nats_fifth_{number}": float(part.mean()) for number, part in enumerate(fifths, 1)},
    }
