"""A tiny teacher, a corpus, and the store of its losses, as `vocagnolm score` writes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_world import arguments, write_corpus
from teacher_server import TeacherServer, serve
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from vocagnolm import __main__
from vocagnolm.store import server as serving


@pytest.fixture(scope="session")
def teacher(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., Any],
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """A tiny teacher; read-only by convention."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    tiny_llama(len(teacher_tokenizer), initializer_range=0.3).save_pretrained(path)
    teacher_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def texts(training_texts: list[str]) -> list[str]:
    """Documents of one character up to several contexts, and one of them twice."""
    rng = random.Random(0)
    found = [" ".join(rng.sample(training_texts, rng.choice([1, 1, 2, 6]))) for _ in range(33)]
    return [*found, "x", "😀", found[0]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "pages.jsonl", texts)


@pytest.fixture(scope="session")
def scored(teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store of the corpus; read-only by convention."""
    path = tmp_path_factory.mktemp("scored") / "S"
    assert __main__.main(arguments(teacher, corpus, path)) == 0
    return path


@pytest.fixture(scope="session")
def answering(teacher: Path) -> tuple[Any, dict[Any, Any]]:
    """The teacher's model, and its answers, which all servers share."""
    return AutoModelForCausalLM.from_pretrained(teacher), {}


@pytest.fixture
def server(
    answering: tuple[Any, dict[Any, Any]],
    teacher_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TeacherServer]:
    """The teacher behind a server; requests are repeated without a wait."""
    monkeypatch.setattr(serving, "RETRIES", serving.RETRIES.new(total=8, backoff_factor=0))
    model, known = answering
    with serve(model, teacher_tokenizer, known) as server:
        yield server
