"""Where `methods` compares the methods: students, text, teachers, and what a student is judged by.

Here is what worlds have in common, and the embedded one of `make demo`; `text_worlds` has others.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm.demo import world as demo_world
from vocagnolm.demo.judge import judge
from vocagnolm.demo.models import TEACHER
from vocagnolm.demo.worker import (
    BASE,
    BASE_OPTIONS,
    CURVE_PROBLEMS,
    PAGE_TOKENS,
    make_base,
    train,
)
from vocagnolm.io import ASSETS
from vocagnolm.store import score


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
            self.make(name, partial, seed)
            partial.rename(path)
        return path

    def make(self, name: str, path: Path, seed: int) -> None:
        """Make what runs need."""
        getattr(self, f"make_{name}")(path, seed)

    def make_losses(self, path: Path, seed: int) -> None:
        """The teacher's losses on the pages, as a store."""
        self.score("teacher", path, seed)

    def make_reference_losses(self, path: Path, seed: int) -> None:
        """The reference's losses on the pages, as a store."""
        self.score("reference", path, seed)

    def score(self, teacher: str, path: Path, seed: int, *more: str) -> None:
        """Store the losses of a need on the pages."""
        model, pages = self.need(teacher, seed).resolve(), self.need("pages", seed)
        options = (f"--teacher={model}", f"--dataset={pages}", f"--output_dir={path}")
        if status := score.main([*options, *more, "--loss_dtype=float32"]):
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
    options: tuple[str, ...] = (f"--max_steps={steps}", f"--global_batch_tokens={step_tokens}")

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        is_shared = name in ("teacher", "clean")
        return (self.root if is_shared else self.seed_dir(seed)) / "needs" / name

    def make_teacher(self, path: Path, _: int) -> None:
        """The teacher that is shipped."""
        path.symlink_to(ASSETS / TEACHER)

    def make_clean(self, path: Path, _: int) -> None:
        """Problems that are read at the end of each run."""
        problems = demo_world.held_out_problems()[:CURVE_PROBLEMS]
        write_corpus(path, ["".join(demo_world.render(problem)) for problem in problems])

    def make_base(self, path: Path, seed: int) -> None:
        """A student that has read noise, prose and questions."""
        path.mkdir()
        make_base(path, seed, BASE_OPTIONS)

    def make_pages(self, path: Path, seed: int) -> None:
        """Problems among noise, many with wrong solutions."""
        self._write_pages(path, seed, wrong_share=0.4)

    def _write_pages(self, path: Path, seed: int, wrong_share: float) -> None:
        count = self.steps * self.step_tokens // PAGE_TOKENS
        excluded = demo_world.held_out_questions()
        write_corpus(path, list(demo_world.corpus(count, seed, wrong_share, excluded)))

    def make_right_pages(self, path: Path, seed: int) -> None:
        """Other pages, without wrong solutions."""
        self._write_pages(path, seed + 1000, wrong_share=0.0)

    def make_reference(self, path: Path, seed: int) -> None:
        """The student after as many pages without wrong solutions."""
        pages = self.need("right_pages", seed)
        train(self.student(seed), pages, path, *self.options, "--method=cpt", f"--seed={seed}")

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed) / BASE

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return asdict(judge(loaded, AutoTokenizer.from_pretrained(model)))


def write_corpus(path: Path, texts: Sequence[str]) -> None:
    """Write a corpus as a directory."""
    path.mkdir()
    demo_world.write_jsonl(path / "texts.jsonl", texts)
