"""The teacher-loss store: a teacher's loss on every token of a corpus, tied to characters.

A store is a directory of Arrow files (`shard-00000.arrow`, ...), a row per segment of a document,
and `manifest.json` (`vocagnolm.host.manifest`), which names the teacher, says how documents were
read and holds the checksum of every shard. A token takes about three bytes: its loss as float16,
and one byte for the characters it covers. Any student with any tokenizer can be guided by it.

Knows neither tokenizers nor models: character spans and losses enter and leave.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.host.manifest import (
    MANIFEST_FILE,
    SHARDS,
    FileEntry,
    Manifest,
    find_faults,
    manifest_sha256,
    read_manifest,
    seal,
)
from vocagnolm.io import ASIDE, file_sha256, json_or_empty, write_file, write_json
from vocagnolm.store.codec import (
    KEY_BYTES,
    LossDtype,
    decode_spans,
    encode_spans,
    open_shard,
    shard_schema,
)
from vocagnolm.texts.tokens import Spans

# In an unfinished store: the settings that every job must have in common with the first one.
PLAN_FILE = "plan.json"
LossArray = npt.NDArray[np.float32]
# Ends the name of a shard's description, until the manifest has it.
_PROVISIONAL = ".entry.json"
# A loss is a negative logarithm of a probability, but for rounding.
_BELOW_ZERO = -0.01


class ShardEntry(FileEntry):
    """A shard in the manifest."""

    source: str
    documents: int
    segments: int
    tokens: int
    unscored: int


# Kinds of what readers take from a manifest, of the store and of each shard.
_TOTALS = dict.fromkeys(("documents", "segments", "tokens"), int)
_OF_STORE = {"teacher": str, "tokenizer_sha256": str, "context": int, **_TOTALS}
_OF_SHARD = {"file": str, "sha256": str, "bytes": int, "source": str, **_TOTALS}


@dataclass(frozen=True)
class StoredSegment:
    """N tokens of the teacher in a run [start, end) of characters of a document.

    Their spans [N, 2] count the document's characters and leave no gap; losses are float32 [N].
    """

    start: int
    end: int
    spans: Spans
    losses: LossArray


def document_key(text: str) -> bytes:
    """Return the key of a document: the first 16 bytes of the SHA-256 of its UTF-8 text."""
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


# -- Writing -----------------------------------------------------------------------------------


def write_shard(
    directory: Path,
    number: int,
    segments: Iterable[tuple[bytes, StoredSegment]],
    loss_dtype: LossDtype,
    source: str,
    *,
    is_shared: bool = False,
) -> None:
    """Write a shard completely or not at all, and its description for `finish_store`.

    Takes the keys of documents with their segments, in the order of the corpus; `source` names the
    texts that they are made of, for `is_written`. Where the store `is_shared`, a shard that exists
    is kept, because another job may have read its checksum already; otherwise it is replaced.
    """
    fields = shard_schema(loss_dtype).with_metadata({"source": source})
    columns: dict[str, list[object]] = {name: [] for name in fields.names}
    for key, segment in segments:
        codes, exceptions = encode_spans(segment.spans, segment.start)
        losses = segment.losses.astype(loss_dtype)
        row = (key, segment.start, segment.end, codes, exceptions, losses)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    table = pa.Table.from_pydict(columns, fields)
    path = directory / shard_name(number)

    def write(sink: BinaryIO) -> None:
        with pa.ipc.new_stream(sink, fields) as writer:
            writer.write_table(table, max_chunksize=1024)

    if not is_shared:
        # The description of a shard must not outlive it.
        _entry_path(path).unlink(missing_ok=True)
    with unless_finished(directory):
        write_file(path, write, replace=not is_shared)
        write_json(_entry_path(path), _describe(path))


@contextmanager
def unless_finished(directory: Path) -> Iterator[None]:
    """Write a file of a store, or none if another job finishes the store meanwhile."""
    try:
        yield
    except FileNotFoundError:
        # That job has tidied away the file that was being written.
        if not (directory / MANIFEST_FILE).exists():
            raise


def _entry_path(path: Path) -> Path:
    return path.with_name(path.name + _PROVISIONAL)


def _entry(path: Path) -> ShardEntry:
    """Read the description of a shard, or make it."""
    entry = json_or_empty(_entry_path(path))
    try:
        _check_kinds(entry, {**_OF_SHARD, "unscored": int})
    except ValueError:
        # A kill came before it was written, another job has removed it, it is damaged or of before.
        return _describe(path)
    return cast(ShardEntry, entry)


def _describe(path: Path) -> ShardEntry:
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
            named, tokens = table["document"], pc.list_value_length(table["losses"])
            documents = pc.count_distinct(named).as_py()
            scored = pc.count_distinct(named.filter(pc.greater(tokens, 0))).as_py()
            return {
                "file": path.name,
                "source": (table.schema.metadata or {})[b"source"].decode(),
                "sha256": file_sha256(path),
                "bytes": path.stat().st_size,
                "documents": documents,
                "segments": len(table),
                "tokens": pc.sum(tokens).as_py() or 0,
                "unscored": documents - scored,
            }
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and run the same command again"
        ) from error


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05}.arrow"


def is_written(directory: Path, number: int, source: str) -> bool:
    """Return True if a shard exists; a ValueError if it is of other texts, or cannot be read."""
    path = directory / shard_name(number)
    if not path.exists():
        return False
    entry = _entry(path)
    if entry["bytes"] != path.stat().st_size:
        raise ValueError(f"{path} is damaged: delete it, and run the same command again")
    if entry["source"] != source:
        raise ValueError(
            f"{path} is made of other documents than the corpus has now: give another directory, "
            "or the corpus that it was made of"
        )
    return True


def written(directory: Path) -> list[int]:
    """List the shards of an unfinished store, in order."""
    names = (path.name.removesuffix(_PROVISIONAL) for path in directory.glob(f"*{_PROVISIONAL}"))
    return sorted(int(re.sub(r"\D", "", name)) for name in names)


def finish_store(
    directory: Path, numbers: Sequence[int], description: Mapping[str, object]
) -> None:
    """Write the manifest, which makes a directory of shards a store.

    All its shards are written; the description names teacher, tokenizer, segmentation, versions.
    """
    entries = [_entry(directory / shard_name(number)) for number in numbers]
    # Names of the shards' texts, in order, name the corpus.
    sources = "".join(entry["source"] for entry in entries)
    # Documents without losses are not counted in stores of before.
    names = (*_TOTALS, "unscored")
    about = {
        **description,
        "corpus_sha256": hashlib.sha256(sources.encode()).hexdigest(),
        **{name: sum(cast(dict[str, int], entry)[name] for entry in entries) for name in names},
    }
    with unless_finished(directory):
        seal(directory, about, SHARDS, entries)
    tidy(directory)


def tidy(directory: Path) -> None:
    """Remove all that a finished store no longer needs, and what killed jobs left."""
    for pattern in (f"*{_PROVISIONAL}", f".*{ASIDE}", PLAN_FILE):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def reopen(directory: Path, bad: Sequence[str]) -> None:
    """Turn a store into an unfinished one, without its bad shards."""
    for entry in manifest_of(directory)[SHARDS]:
        path = directory / entry["file"]
        if entry["file"] in bad:
            path.unlink(missing_ok=True)
            _entry_path(path).unlink(missing_ok=True)
        else:
            write_json(_entry_path(path), entry)
    # Last, so that a kill leaves a store that is found bad again.
    (directory / MANIFEST_FILE).unlink(missing_ok=True)


# -- Reading -----------------------------------------------------------------------------------


def manifest_of(directory: Path) -> Manifest:
    """Read the manifest of a store; a ValueError if it is unfinished, damaged or another's."""
    try:
        manifest = read_manifest(directory, SHARDS)
        _check_manifest(manifest)
    except ValueError as error:
        raise ValueError(
            f"{directory} is no finished teacher-loss store: {error}; get it again, finish it with "
            "the command that began it, or make one with `vocagnolm score`"
        ) from error
    return manifest


def _check_kinds(found: Mapping[str, object], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"{MANIFEST_FILE} has {found.get(name)!r:.40} as {name}")


def _check_manifest(manifest: Manifest) -> None:
    """Raise a ValueError where a manifest is no store's: its checksum may be right all the same."""
    shards = manifest[SHARDS]
    _check_kinds(manifest, _OF_STORE)
    for shard in shards:
        _check_kinds(shard, _OF_SHARD)
    names = [shard["file"] for shard in shards]
    # Anything else might be a file of the user's, which `reopen` would delete.
    if strange := [name for name in names if not re.fullmatch(r"shard-\d{5,}\.arrow", name)]:
        raise ValueError(f"{MANIFEST_FILE} has {strange[0]!r:.40} as the name of a shard")
    sums = {name: sum(shard[name] for shard in shards) for name in _TOTALS}
    if len(set(names)) < len(names) or any(manifest[name] != sums[name] for name in sums):
        raise ValueError(f"{MANIFEST_FILE} counts {sums} in {len(set(names))} shards")
    # A start token, and one that it scores.
    if not 2 <= manifest["context"] < 2**31:
        raise ValueError(f"{MANIFEST_FILE} has {manifest['context']} as context")


def bad_shards(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Compare every byte with the checksums; returns reasons by file."""
    return dict(sorted(find_faults(directory, manifest[SHARDS])))


def remedy(manifest: Manifest) -> str:
    """Return advice about bad shards."""
    if manifest.get("engine") == "training":
        return "make it again with the training run that saved it, or score the corpus"
    return "run the `vocagnolm score` that made it again, with --repair"


class Store:
    """A finished store, memory-mapped, by document."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.manifest = manifest_of(self.directory)
        self._batches: list[pa.RecordBatch] = []

    def fingerprint(self) -> str:
        """Return a name of the content."""
        return manifest_sha256(self.manifest)

    def check(self) -> None:
        """Compare every shard with its checksum; a ValueError names the first bad ones."""
        if faults := bad_shards(self.directory, self.manifest):
            shown = "; ".join(f"{file} {fault}" for file, fault in list(faults.items())[:10])
            raise ValueError(
                f"the teacher-loss store {self.directory} is damaged, {len(faults)} of "
                f"{len(self.manifest[SHARDS])} shards: {shown}; get it again, or "
                f"{remedy(self.manifest)}"
            )

    def segments(self, text: str) -> list[StoredSegment] | None:
        """Return the segments of a document, in order; None if some of it is missing."""
        try:
            whole = self.of_key(document_key(text))
        except ValueError as error:
            raise ValueError(
                f"the teacher-loss store {self.directory} has {error}, met at the document that "
                f"begins {text[:60]!r}: get it again, or score the corpus again"
            ) from error
        return whole if whole and whole[-1].end == len(text) else None

    def document_keys(self) -> set[bytes]:
        """Return the keys of all documents."""
        self._open()
        # NumPy leaves out zeros at the end.
        return {key.ljust(KEY_BYTES, b"\0") for key in self._keys.tolist()}

    def of_key(self, key: bytes) -> list[StoredSegment]:
        """Return the segments of a document that follow each other from its start."""
        self._open()
        # Rows with the same key stand together, in any order of their starts.
        first, last = (np.searchsorted(self._keys, key, side=s) for s in ("left", "right"))
        found = sorted(map(self._segment, self._rows[first:last]), key=lambda part: part.start)
        whole, at = [], 0
        for segment in found:
            # A document that the corpus has twice is stored twice: take each segment once.
            if segment.start == at:
                whole.append(segment)
                at = segment.end
        return whole

    def _open(self) -> None:
        if not self._batches:
            self._batches = self._map()

    def _map(self) -> list[pa.RecordBatch]:
        """Open the shards and sort the keys: 24 bytes of memory per segment.

        Rows are numbered through all batches of all shards:

            batch    |     0     |    1    |  2  |
            row      | 0 1 2 3 4 | 5 6 7 8 | 9 10|
            _ends              5         9     11
            _keys    sorted; `_rows` has the row of each
        """
        paths = (self.directory / entry["file"] for entry in self.manifest[SHARDS])
        batches = list(chain.from_iterable(map(open_shard, paths)))
        # The second buffer of a column of fixed width holds its values, one behind the other.
        keys = [np.frombuffer(b.column("document").buffers()[1], "S16", len(b)) for b in batches]
        self._ends = np.cumsum(list(map(len, batches)))
        unsorted = np.concatenate([*keys, np.empty(0, "S16")])
        self._rows = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[self._rows]
        return batches

    def _segment(self, row: int) -> StoredSegment:
        """Read a row: of the first batch that ends behind it, counted from that batch's start."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        batch = self._batches[number]
        at = row - (int(self._ends[number]) - len(batch))
        start, end = (batch.column(name)[at].as_py() for name in ("start", "end"))
        codes, exceptions, losses = (
            batch.column(name)[at].values.to_numpy() for name in ("codes", "exceptions", "losses")
        )
        if len(codes) != len(losses):
            raise ValueError(f"{len(losses)} losses of {len(codes)} tokens")
        if not (np.isfinite(losses).all() and losses.min(initial=0) > _BELOW_ZERO):
            raise ValueError("losses that are not finite, or below zero")
        spans = decode_spans(codes, exceptions, start, end)
        return StoredSegment(start, end, spans, losses.astype(np.float32))

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        # Another process maps the files itself.
        return Store, (self.directory,)
