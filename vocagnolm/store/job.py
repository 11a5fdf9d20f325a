"""The shards of a store: which are left to score, what goes into one, and whose they are.

A corpus, a reader of the teacher and a scorer enter; a finished store leaves.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import datasets
import numpy as np
from accelerate import PartialState

from vocagnolm.chat.columns import conversations_of, is_conversations
from vocagnolm.chat.render import Template
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.dist import decided_by_one
from vocagnolm.host.manifest import MANIFEST_FILE, SHARDS, Manifest
from vocagnolm.host.settings import check_same, differences
from vocagnolm.io import read_json, write_json
from vocagnolm.readers import Reader
from vocagnolm.spans import encode_batch, encode_rendered
from vocagnolm.store import codec, store
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.served import Served, ServedScorer
from vocagnolm.store.served_text import ServedReader
from vocagnolm.store.windows import Scorer, Unscored, Window, windows
from vocagnolm.texts.column import TEXT, unusable, values
from vocagnolm.texts.tokens import Encoding, Spans

logger = logging.getLogger(__name__)

# Their versions are in every manifest.
PACKAGES = "vocagnolm torch transformers tokenizers pyarrow"
# Between two lines about the progress.
_LOG_S = 30.0
_NO_TOKENS = np.empty((0, 2), np.int64), np.empty(0, np.float32)
# As many documents as this fail together for one reason, which lies in the settings.
_HOPELESS = 8


@dataclass(frozen=True)
class ScoringJob:
    """The part of a scoring job that every process knows.

    `min_context` tokens stand before those that a further window of a document scores, and
    `shard_documents` counts documents of the corpus, usable or not.
    """

    directory: Path
    corpus: datasets.Dataset
    # None where a server reads documents itself.
    reader: Reader | None
    min_context: int
    shard_documents: int
    loss_dtype: codec.LossDtype

    @property
    def shards(self) -> int:
        """Number of shards; the last one may be smaller."""
        return -(-len(self.corpus) // self.shard_documents)

    def source(self, shard: int) -> str:
        """Return a name of the documents of a shard."""
        return _digest(map(store.document_key, self.documents(shard)))

    def documents(self, shard: int) -> list[str]:
        """Read the usable documents of a shard."""
        first = shard * self.shard_documents
        last = min(first + self.shard_documents, len(self.corpus))
        return [text for _, text in read_texts(self.corpus, range(first, last), self.template)]

    @property
    def template(self) -> Template | None:
        """How the teacher reads conversations, if the corpus is of them."""
        return self.reader.template if self.reader and is_conversations(self.corpus) else None

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode documents; one that the tokenizer cannot read has no tokens."""
        assert self.reader is not None
        try:
            return (encode_rendered if self.template else encode_batch)(
                self.reader.tokenizer, texts
            )
        except ValueError:
            if len(texts) == 1:
                return [Encoding(np.empty(0, np.int32), _NO_TOKENS[0])]
        # One of them cannot be read: find it.
        return [encoding for text in texts for encoding in self.encode([text])]

    def windows(self, encodings: Sequence[Encoding]) -> list[Window]:
        """Cut encoded documents into windows; a rendered conversation has its own start token."""
        assert self.reader is not None
        found: list[Window] = []
        for number, one in enumerate(encodings):
            own = [] if self.template and len(one.ids) else [self.reader.start]
            ids = [*own, *one.ids.tolist()]
            found += windows(number, ids[1:], ids[0], self.reader.limit, self.min_context)
        return found

    def is_written(self, shard: int) -> bool:
        """Return True if a shard exists; see `store.is_written`."""
        # Documents are read only where there is a shard to compare them with.
        exists = (self.directory / store.shard_name(shard)).exists()
        return exists and store.is_written(self.directory, shard, self.source(shard))


# -- Scoring -----------------------------------------------------------------------------------


def score_corpus(
    job: ScoringJob,
    scorer: Scorer | ServedReader,
    description: Mapping[str, object],
    state: PartialState,
) -> None:
    """Score the shards that are not written, and finish the store; `description` is its manifest's.

    Every process has the same job, and its own scorer. Another job may do the same at the same
    time. A ValueError where the corpus has no usable document, or is not the one of what is
    written; a NonFiniteLoss as of `score_shard`.
    """
    # One process looks for all: another job may write a shard between the looks of two.
    left = decided_by_one(lambda: _left(job))
    if left and state.is_main_process and isinstance(scorer, Served):
        _expect(job, left, scorer, state.num_processes)
    # Every process takes every n-th shard, so that all end at about the same time.
    mine = left[state.process_index :: state.num_processes]
    tokens, started = 0, time.monotonic()
    told = started
    for done, shard in enumerate(mine, 1):
        # Another job may have written it meanwhile.
        tokens += 0 if job.is_written(shard) else score_shard(job, shard, scorer)
        now = time.monotonic()
        if state.is_main_process and (now - told >= _LOG_S or done == len(mine)):
            told = now
            _tell(done, len(mine), tokens, now - started, state.num_processes)
    state.wait_for_everyone()
    decided_by_one(lambda: store.finish_store(job.directory, range(job.shards), description))


def _left(job: ScoringJob) -> list[int]:
    """List the shards that are not written."""
    if not any(job.documents(shard) for shard in range(job.shards)):
        raise ValueError(
            f"--dataset has no usable document: {len(job.corpus):,} read, all of them empty or not "
            "text; give another one, or another --text_column"
        )
    left = [shard for shard in range(job.shards) if not job.is_written(shard)]
    if len(left) < job.shards:
        logger.info("%d of %d shards are written already", job.shards - len(left), job.shards)
    return left


def _expect(job: ScoringJob, left: Sequence[int], served: Served, processes: int) -> None:
    """Tell how much a server is asked for, by the documents of the first shard that is left."""
    documents = len(job.corpus) * len(left) // (job.shards * processes)
    sample = job.documents(left[0])
    if isinstance(served, ServedReader):
        served.estimate(documents, sample or [""])
    elif isinstance(served, ServedScorer) and sample:
        served.estimate(documents, len(sample), job.windows(job.encode(sample)))


def score_shard(job: ScoringJob, shard: int, scorer: Scorer | ServedReader) -> int:
    """Score the documents of a shard, write it, and return the number of tokens.

    A document that a server cannot score is kept without tokens, as one that no tokenizer can read.
    A NonFiniteLoss where a loss is NaN or infinite; nothing is written then.
    """
    texts = job.documents(shard)
    keys = [*map(store.document_key, texts)]
    segments, refused = [], []
    for text, key, one in zip(texts, keys, _score(job, texts, scorer), strict=True):
        spans, losses = _NO_TOKENS
        if isinstance(one, Unscored):
            refused.append(one.reason)
            logger.warning("kept without losses: %r ..., %s", text[:60], one.reason)
        else:
            spans, losses = one
        _check_finite(losses, text, job.loss_dtype)
        segments.append((key, store.StoredSegment(0, len(text), spans, losses)))
    if len(refused) == len(texts) >= _HOPELESS:
        raise ValueError(f"no document of shard {shard} could be scored: {refused[0]}")
    store.write_shard(job.directory, shard, segments, job.loss_dtype, _digest(keys), is_shared=True)
    return sum(len(segment.losses) for _, segment in segments)


def _digest(keys: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(keys)).hexdigest()


def _score(
    job: ScoringJob, texts: Sequence[str], scorer: Scorer | ServedReader
) -> Iterable[tuple[Spans, store.LossArray] | Unscored]:
    """Return spans and losses of the teacher's tokens in each text."""
    if isinstance(scorer, ServedReader):
        return scorer.read(texts)
    encodings = job.encode(texts)
    asked = job.windows(encodings)
    # The windows of a document score its tokens in order, each of them once; for the start token of
    # a conversation 0 is written.
    starts = (min(len(one.ids), 1) if job.template else 0 for one in encodings)
    found: list[list[store.LossArray]] = [[np.zeros(count, np.float32)] for count in starts]
    failed: dict[int, Unscored] = {}
    for window, row in zip(asked, scorer.losses(asked), strict=True):
        if isinstance(row, Unscored):
            failed[window.document] = row
        else:
            found[window.document].append(row)
    return [
        failed.get(number) or (encoding.spans, np.concatenate(rows))
        for number, (encoding, rows) in enumerate(zip(encodings, found, strict=True))
    ]


def _check_finite(losses: store.LossArray, text: str, loss_dtype: codec.LossDtype) -> None:
    where = f"in the document that begins {text[:60]!r}"
    if not np.isfinite(losses).all():
        raise NonFiniteLoss(
            f"the teacher's losses are NaN or infinite {where}: use --dtype float32, or another "
            "teacher"
        )
    largest = losses.max(initial=0.0)
    if largest > np.finfo(loss_dtype).max:
        raise NonFiniteLoss(
            f"a loss of {largest:g} is too large for {loss_dtype}, {where}: use --loss_dtype "
            "float32"
        )


def _tell(done: int, shards: int, tokens: int, passed_s: float, processes: int) -> None:
    """Log the speed of the first process and the time that is left."""
    logger.info(
        "%d of %d shards%s, %s tokens per second, %s left",
        done,
        shards,
        "" if processes == 1 else f" of process 0 of {processes}",
        f"{tokens / max(passed_s, 1e-9):,.0f}",
        timedelta(seconds=round(passed_s / done * (shards - done))),
    )


# -- Whose store a directory is ----------------------------------------------------------------


def begin(directory: Path, plan: Mapping[str, object]) -> None:
    """Claim a directory for a store, unless another job has just claimed it for another one."""
    # The first job's plan stays; the others compare theirs with it.
    with store.unless_finished(directory):
        write_json(directory / store.PLAN_FILE, plan, replace=False)
    check_plan(directory, plan)


def check_plan(directory: Path, plan: Mapping[str, object]) -> None:
    """Refuse to continue a store under other settings than it was begun with.

    The directory need not exist; `plan` is all that decides the content of a store.
    """
    before = _begun_with(directory)
    if before is None:
        return
    # The corpus is known by its texts, and a teacher with a revision by that: names do not matter,
    # nor where a server is.
    names = {"dataset", "server"}
    if plan.get("teacher_revision") not in (None, "unknown"):
        names.add("teacher")
    compared = {name: value for name, value in plan.items() if name not in names}
    check_same(
        differences(before, compared),
        f"--output_dir {directory} holds another store",
        "give another directory, or delete this one",
    )


def _begun_with(directory: Path) -> Manifest | None:
    """Read the settings of a store, finished or not; None if there is none."""
    try:
        return read_json(directory / store.PLAN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        pass
    if (directory / MANIFEST_FILE).exists():
        return store.manifest_of(directory)
    if any(directory.glob("shard-*")):
        raise ValueError(
            f"--output_dir {directory} holds shards, but neither {store.PLAN_FILE} nor "
            f"{MANIFEST_FILE}, which would say of what: give another directory"
        )
    return None


def check_corpus(job: ScoringJob, manifest: Manifest) -> None:
    """Refuse a finished store whose shards are made of other documents."""
    sources = [entry["source"] for entry in manifest[SHARDS]]
    changed = sum(source != job.source(shard) for shard, source in enumerate(sources))
    if changed:
        raise ValueError(
            f"--output_dir {job.directory} is a store of another corpus: {changed:,} of "
            f"{len(sources):,} shards are made of other documents than --dataset has now; give "
            "another directory"
        )


def find_missing(opened: store.Store, corpus: datasets.Dataset) -> list[int]:
    """List the numbers of the usable documents of a corpus that a store lacks."""
    template = None
    if is_conversations(corpus):
        StoredReader([opened]).check_templates()
        template = Template.of_json(opened.manifest)
    missing = []
    for first in range(0, len(corpus), 1000):
        part = range(first, min(first + 1000, len(corpus)))
        texts = read_texts(corpus, part, template)
        missing += [number for number, text in texts if opened.segments(text) is None]
    return missing


def read_texts(
    corpus: datasets.Dataset, numbers: range, template: Template | None
) -> Iterator[tuple[int, str]]:
    """Read usable documents with their numbers; conversations are rendered by the template."""
    part = corpus.with_format("arrow")[numbers.start : numbers.stop]
    if template is None:
        for number, text in zip(numbers, values(part[TEXT]), strict=True):
            if not unusable(text):
                yield number, text
        return
    conversations, _ = conversations_of(part, numbers)
    for number, one in conversations.items():
        if not isinstance(rendered := template.render(one), str):
            yield number, rendered.text
