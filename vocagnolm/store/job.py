"""The work of `vocagnolm score`: which shards are left, and what goes into one.

Enters: a corpus, how the teacher reads it, and a scorer. Leaves: a finished store.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from accelerate.utils import broadcast_object_list

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.data import Reader
from vocagnolm.host.files import read_json
from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.host.processes import in_agreement
from vocagnolm.host.settings import check_same, differences
from vocagnolm.spans import Spans, encode_batch
from vocagnolm.store import store
from vocagnolm.store.windows import Scorer, windows

logger = logging.getLogger(__name__)
PLAN_FILE = "plan.json"  # of an unfinished store: what a job must have in common with the first one
_LOG_S = 30.0
PACKAGES = "vocagnolm torch transformers tokenizers pyarrow"  # whose versions a manifest names


@dataclass(frozen=True)
class Job:
    """What every process knows of a scoring job.

    Attributes:
        directory: of the store.
        corpus: the documents.
        reader: how the teacher reads.
        min_context: tokens of context before what a further window of a document scores.
        shard_documents: documents of the corpus per shard.
        loss_dtype: of the losses in the store.
    """

    directory: Path
    corpus: datasets.Dataset
    reader: Reader
    min_context: int
    shard_documents: int
    loss_dtype: store.LossDtype

    @property
    def shards(self) -> int:
        """How many shards the store has."""
        return -(-len(self.corpus) // self.shard_documents)

    def source(self, shard: int) -> str:
        """A name of the documents of a shard."""
        keys = map(store.document_key, self.documents(shard))
        return hashlib.sha256(b"".join(keys)).hexdigest()

    def documents(self, shard: int) -> list[str]:
        """The usable documents of a shard."""
        first = shard * self.shard_documents
        part = self.corpus.with_format("arrow")[first : first + self.shard_documents]
        return [text for text in values(part[TEXT]) if not unusable(text)]


def score_shard(job: Job, shard: int, scorer: Scorer) -> int:
    """Score the documents of a shard and write it.

    Returns:
        The number of tokens that were scored.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite; nothing is written.
    """
    documents = list(_encode(job, job.documents(shard)))
    asked = [
        window
        for number, document in enumerate(documents)
        for window in windows(
            number, document.ids, job.reader.start, job.reader.limit, job.min_context
        )
    ]
    losses: list[list[store.FloatArray]] = [[] for _ in documents]
    for window, row in zip(asked, scorer.losses(asked), strict=True):
        losses[window.document].append(row)
    segments = []
    for document, rows in zip(documents, losses, strict=True):
        whole = np.concatenate([np.empty(0, np.float32), *rows])
        _check_finite(whole, document.text, job.loss_dtype)
        segment = store.StoredSegment(0, len(document.text), document.spans, whole)
        segments.append((store.document_key(document.text), segment))
    source = job.source(shard)
    store.write_shard(job.directory, shard, segments, job.loss_dtype, source, is_shared=True)
    return sum(len(document.ids) for document in documents)


def _check_finite(losses: store.FloatArray, text: str, loss_dtype: store.LossDtype) -> None:
    if not np.isfinite(losses).all():
        raise NonFiniteLoss(
            f"the teacher's losses are NaN or infinite in the document that begins {text[:60]!r}: "
            "use --dtype float32, or another teacher"
        )
    largest = losses.max(initial=0.0)
    if largest > np.finfo(loss_dtype).max:
        raise NonFiniteLoss(
            f"a loss of {largest:g} is too large for {loss_dtype}, in the document that begins "
            f"{text[:60]!r}: use --loss_dtype float32"
        )


@dataclass(frozen=True)
class _Document:
    """A document with the teacher's tokens; it has none where the tokenizer finds none."""

    text: str
    ids: list[int]
    spans: Spans


def _encode(job: Job, texts: Sequence[str]) -> Iterator[_Document]:
    try:
        encodings = encode_batch(job.reader.tokenizer, texts)
    except ValueError:
        if len(texts) == 1:
            yield _Document(texts[0], [], np.empty((0, 2), np.int64))
        else:  # which one is it?
            for text in texts:
                yield from _encode(job, [text])
        return
    for text, encoding in zip(texts, encodings, strict=True):
        yield _Document(text, encoding.ids.tolist(), encoding.spans)


def run(job: Job, scorer: Scorer, description: Mapping[str, Any], state: Any) -> None:
    """Score the shards that are not written, and finish the store.

    Another job may do the same at the same time.

    Args:
        job: the same in every process.
        scorer: on this process's device.
        description: of the manifest.
        state: Accelerate's `PartialState`.

    Raises:
        ValueError: the corpus has no usable document, or another one than what is written.
        NonFiniteLoss: see `score_shard`.
    """
    with in_agreement():
        # One looks for all: another job may write a shard between the looks of two.
        found = [_left(job) if state.is_main_process else []]
    (left,) = broadcast_object_list(found)
    mine = left[state.process_index :: state.num_processes]
    progress = _Progress(len(mine), state.num_processes)
    for shard in mine:
        written = store.is_written(job.directory, shard, job.source(shard))  # by another job
        tokens = 0 if written else score_shard(job, shard, scorer)
        if state.is_main_process:
            progress.add(tokens)
    with in_agreement():
        state.wait_for_everyone()
        if state.is_main_process:
            store.finish(job.directory, range(job.shards), description)
            tidy(job.directory)


def _left(job: Job) -> list[int]:
    """Shards that are not written."""
    if not any(job.documents(shard) for shard in range(job.shards)):
        raise ValueError(
            f"--dataset has no usable document: {len(job.corpus):,} read, all of them empty or not "
            "text; give another one, or another --text_column"
        )
    left = []
    for shard in range(job.shards):
        exists = (job.directory / store.shard_name(shard)).exists()  # spares reading the documents
        if not (exists and store.is_written(job.directory, shard, job.source(shard))):
            left.append(shard)
    if len(left) < job.shards:
        logger.info("%d of %d shards are written already", job.shards - len(left), job.shards)
    return left


class _Progress:
    """Tells from time to time how fast a process is, and when it will be done."""

    def __init__(self, shards: int, processes: int):
        self._shards, self._processes = shards, processes
        self._done = self._tokens = 0
        self._started = self._told = time.monotonic()

    def add(self, tokens: int) -> None:
        """One shard more is done."""
        self._done, self._tokens = self._done + 1, self._tokens + tokens
        now = time.monotonic()
        if now - self._told < _LOG_S and self._done < self._shards:
            return
        self._told, passed = now, max(now - self._started, 1e-9)
        left_s = passed / self._done * (self._shards - self._done)
        logger.info(
            "%d of %d shards%s, %s tokens per second, %s left",
            self._done,
            self._shards,
            "" if self._processes == 1 else f" of process 0 of {self._processes}",
            f"{self._tokens / passed:,.0f}",
            timedelta(seconds=round(left_s)),
        )


def check_corpus(job: Job, manifest: Mapping[str, Any]) -> None:
    """Compare a finished store with the corpus.

    Raises:
        ValueError: shards are made of other documents; the message says how many.
    """
    sources = [entry["source"] for entry in manifest["shards"]]
    changed = sum(source != job.source(shard) for shard, source in enumerate(sources))
    if changed:
        raise ValueError(
            f"--output_dir {job.directory} is a store of another corpus: {changed:,} of "
            f"{len(sources):,} shards are made of other documents than --dataset has now; give "
            "another directory"
        )


def tidy(directory: Path) -> None:
    """Remove what a finished store needs no more."""
    store.tidy(directory)
    (directory / PLAN_FILE).unlink(missing_ok=True)


def check_plan(directory: Path, plan: Mapping[str, Any]) -> None:
    """Refuse to go on with a store under other settings than it was begun with.

    Args:
        directory: of the store; it need not exist.
        plan: what decides the content of a store.

    Raises:
        ValueError: the directory holds another store, finished or not; the message says what
            differs.
    """
    if (before := _begun_with(directory)) is not None:
        compared = {name: value for name, value in plan.items() if name not in _names(plan)}
        check_same(
            differences(before, compared),
            f"--output_dir {directory} holds another store",
            "give another directory, or delete this one",
        )


def _names(plan: Mapping[str, Any]) -> set[str]:
    """What may be called otherwise, since its content is known: the texts, and mostly the model."""
    is_known = plan.get("teacher_revision") not in (None, "unknown")
    return {"dataset", "teacher"} if is_known else {"dataset"}


def _begun_with(directory: Path) -> dict[str, Any] | None:
    try:
        return read_json(directory / PLAN_FILE)
    except (FileNotFoundError, NotADirectoryError):  # never begun, or finished
        pass
    if (directory / MANIFEST_FILE).exists():
        return store.manifest_of(directory)
    if any(directory.glob("shard-*")):
        raise ValueError(
            f"--output_dir {directory} holds shards, but neither {PLAN_FILE} nor "
            f"{MANIFEST_FILE}, which would say of what: give another directory"
        )
    return None
