"""A student, a teacher and pages for runs of `train.py`, in this process or in several others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class World(NamedTuple):
    """Where everything lies; runs are made below `root`."""

    root: Path
    student: Path
    teacher: Path
    pages: Path

    def argv(self, name: str, **changes: str | None) -> list[str]:
        """A command line for 5 steps, with checkpoints at the second and the fourth."""
        options: dict[str, str | None] = {
            "student": str(self.student),
            "teacher": str(self.teacher),
            "dataset": str(self.pages),
            "eval_fraction": "0.2",
            "max_length": "64",
            "global_batch_tokens": "512",
            "max_steps": "5",
            "save_steps": "2",
            "save_total_limit": "5",
            "learning_rate": "3e-3",
            "report_to": "none",
            "output_dir": str(self.root / name),
            **changes,
        }
        return [f"--{name}={value}" for name, value in options.items() if value is not None]


def make_world(
    root: Path,
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    texts: Sequence[str],
    **config: Any,
) -> World:
    """Models with tokenizers of their own; `config` is the student's."""
    world = World(root, root / "student", root / "teacher", root / "pages.jsonl")
    shutil.copytree(tokenizer_dirs["metaspace"], world.student)
    shutil.copytree(tokenizer_dirs["nfc_digits"], world.teacher)
    tiny_llama(700, **config).save_pretrained(world.student)
    tiny_llama(700, seed=1).save_pretrained(world.teacher)
    world.pages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return world


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """A world of 60 pages."""
    root = tmp_path_factory.mktemp("world")
    return make_world(root, tiny_llama, tokenizer_dirs, training_texts[:60])
