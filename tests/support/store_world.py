"""Stores of teacher losses, and the commands that write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from teacher_server import MODEL, TeacherServer
from transformers import PreTrainedTokenizerBase

from vocagnolm import __main__
from vocagnolm.readers import teacher_reader
from vocagnolm.spans import encode
from vocagnolm.store.format import (
    LossDtype,
    Store,
    StoredDocument,
    document_key,
    finish_store,
    write_shard,
)
from vocagnolm.store.scoring import ScoringJob
from vocagnolm.store.windows import Window

CONTEXT, MIN_CONTEXT = 48, 8
DOCUMENTS = 36
# The minimum that a store says about itself.
ABOUT = {
    "teacher": "T",
    "teacher_revision": None,
    "tokenizer_sha256": "",
    "special_tokens": {"before": 0},
    "context": CONTEXT,
}
_WHOLE = 100_000  # tokens: more than any document of the tests has


def in_memory(texts: Sequence[str]) -> datasets.Dataset:
    """A corpus of texts."""
    return datasets.Dataset.from_dict({"text": list(texts)})


def write_corpus(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# Stores without a command


def write_store(
    directory: Path,
    documents: Iterable[tuple[str, StoredDocument]],
    *,
    context: int = _WHOLE,
    teacher: str = "some/teacher",
    loss_dtype: LossDtype = "float32",
    template: Mapping[str, Any] | None = None,
) -> Store:
    """A store of documents, or of texts that a template has rendered, in two shards."""
    directory.mkdir(parents=True)
    keyed = [(document_key(text), document) for text, document in documents]
    half = len(keyed) // 2
    for number, part in enumerate((keyed[:half], keyed[half:])):
        write_shard(directory, number, part, loss_dtype)
    description = {"teacher": teacher, "tokenizer_sha256": "", "context": context}
    finish_store(directory, description | dict(template or {}))
    return Store(directory)


def random_store(
    directory: Path, texts: Sequence[str], tokenizer: Any, *, seed: int = 0, **options: Any
) -> Store:
    """A store of whole documents with random losses, without texts that have no token."""
    rng = np.random.default_rng(seed)
    documents = []
    for text in dict.fromkeys(texts):
        spans = encode(tokenizer, text).spans
        if len(spans):
            losses = rng.uniform(0, 8, len(spans)).astype(np.float32)
            documents.append((text, StoredDocument(len(text), spans, losses)))
    return write_store(directory, documents, **options)


class FakeScorer:
    """Makes up losses from ids; a token in `bad` has a loss that no store can hold."""

    def __init__(self, bad: dict[int, float] | None = None):
        self.bad = bad or {}
        self.windows: list[Window] = []

    def losses(self, windows: list[Window], report: Any = None) -> list[Any]:
        self.windows += windows
        return [
            np.array(
                [self.bad.get(token, token % 97 / 16) for token in window.ids[-window.scored :]],
                np.float32,
            )
            for window in windows
        ]


def make_job(
    directory: Path,
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    loss_dtype: LossDtype = "float16",
) -> ScoringJob:
    corpus = datasets.Dataset.from_dict({"text": texts})
    return ScoringJob(
        directory, corpus, teacher_reader(tokenizer, CONTEXT), MIN_CONTEXT, 2, loss_dtype
    )


# Commands


def arguments(teacher: Path, corpus: Path, path: Path, *more: str) -> list[str]:
    sizes = ["--context", str(CONTEXT), "--min_context", str(MIN_CONTEXT)]
    options = [*sizes, "--shard_documents", "4", "--batch_tokens", "256"]
    where = ["--teacher", str(teacher), "--dataset", str(corpus), "--output_dir", str(path)]
    return ["score", *where, *options, *more]


def server_arguments(
    server: TeacherServer, teacher: Path, corpus: Path, path: Path, *more: str
) -> list[str]:
    argv = arguments(teacher, corpus, path, "--server", server.url, "--served_model", MODEL, *more)
    # The option is for local weights.
    at = argv.index("--batch_tokens")
    return argv[:at] + argv[at + 2 :]


def contents(path: Path) -> dict[str, bytes]:
    """The files of a store, without what killed jobs left."""
    files = sorted(path.glob("[!.]*"))
    return {file.name: file.read_bytes() for file in files}


def error(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """Return the one line with which the command rejects its arguments."""
    capsys.readouterr()
    assert __main__.main(argv) == status
    printed, complained = capsys.readouterr()
    assert printed == ""
    assert complained.startswith("vocagnolm score: error: ")
    assert complained.count("\n") == 1
    return complained
