"""The teacher-loss store: what a teacher thinks of every token of a corpus, tied to characters.

A store is a directory of Arrow files (`shard-00000.arrow`, ...), a row per segment of a document,
and `manifest.json`, which names the teacher, says how documents were read, and holds the checksum
of every shard and of itself. A token takes about three bytes: its loss as float16, and one byte for
the characters it covers. Any student with any tokenizer is guided by it (`vocagnolm.data`).

Enters and leaves: character spans and losses. Knows neither tokenizers nor models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.host.files import ASIDE, file_sha256, read_json, write_file, write_json
from vocagnolm.host.manifest import (
    MANIFEST_FILE,
    SHARDS,
    Manifest,
    find_faults,
    manifest_sha256,
    read_manifest,
    seal,
)
from vocagnolm.spans import Spans

LossDtype = Literal["float16", "float32"]
FloatArray = npt.NDArray[np.float32]
_KEY_BYTES = 16
# A code is 2 x length + overlap; what does not fit is listed, and this stands in its place.
_ESCAPE = 255
_PROVISIONAL = ".entry.json"  # a shard's checksum, until the manifest has it


@dataclass(frozen=True)
class StoredSegment:
    """What a teacher thinks of a run of characters of a document.

    Attributes:
        start, end: of the run in the document, in characters, half-open.
        spans: [N, 2] of the teacher's tokens, in characters of the document; they leave no gap.
        losses: [N] float32, nats.
    """

    start: int
    end: int
    spans: Spans
    losses: FloatArray


def document_key(text: str) -> bytes:
    """What a document is found by: the first 16 bytes of the SHA-256 of its UTF-8 text."""
    return hashlib.sha256(text.encode()).digest()[:_KEY_BYTES]


def encode_spans(spans: Spans, start: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Spans that leave no gap, as a byte per token and a list of the few that need more.

    Args:
        spans: [N, 2] half-open, starts and ends non-decreasing, no character between two tokens.
        start: the first character.

    Returns:
        codes: uint8 [N], 2 x (characters beyond the token before) + (characters shared with it).
        exceptions: int32 [3 M], for every code 255 its number, length and overlap.

    >>> codes, exceptions = encode_spans(np.array([[0, 2], [2, 3], [2, 3], [3, 400]]), 0)
    >>> codes.tolist(), exceptions.tolist()
    ([4, 2, 1, 255], [3, 397, 0])
    """
    before = np.concatenate([[start], spans[:-1, 1]])
    length, overlap = spans[:, 1] - before, before - spans[:, 0]
    assert min(length.min(initial=0), overlap.min(initial=0)) >= 0, "spans leave a gap, or go back"
    codes = 2 * length + overlap
    is_exception = (overlap > 1) | (codes >= _ESCAPE)
    where = np.flatnonzero(is_exception)
    exceptions = np.stack([where, length[where], overlap[where]], axis=-1)
    return np.where(is_exception, _ESCAPE, codes).astype(np.uint8), exceptions.ravel().astype(
        np.int32
    )


def decode_spans(codes: npt.NDArray[Any], exceptions: npt.NDArray[Any], start: int) -> Spans:
    """The spans that `encode_spans` was given, as int64."""
    length, overlap = (codes >> 1).astype(np.int64), (codes & 1).astype(np.int64)
    where, lengths, overlaps = exceptions.astype(np.int64).reshape(-1, 3).T
    length[where], overlap[where] = lengths, overlaps
    ends = start + np.cumsum(length)
    return np.stack([ends - length - overlap, ends], axis=-1)


def schema(loss_dtype: LossDtype) -> pa.Schema:
    """The columns of a shard."""
    losses = {"float16": pa.float16(), "float32": pa.float32()}[loss_dtype]
    return pa.schema(
        [
            ("document", pa.binary(_KEY_BYTES)),
            ("start", pa.int32()),
            ("end", pa.int32()),
            ("codes", pa.list_(pa.uint8())),
            ("exceptions", pa.list_(pa.int32())),
            ("losses", pa.list_(losses)),
        ]
    )


def write_shard(
    directory: Path,
    number: int,
    segments: Iterable[tuple[bytes, StoredSegment]],
    loss_dtype: LossDtype,
    source: str,
    *,
    is_shared: bool = False,
) -> None:
    """Write a shard completely or not at all, and its checksum for `finish`.

    Args:
        directory: of the store.
        number: of the shard.
        segments: key of a document and a segment of it, in the order of the corpus.
        loss_dtype: of the losses in the file.
        source: a name of the texts that the shard is made of, for `is_written`.
        is_shared: other jobs may write it too: a shard that is there stays as it is, because
            another job may have read its checksum. Otherwise it is replaced.
    """
    keys, found = [], []
    for key, segment in segments:
        keys.append(key)
        found.append(segment)
    spans = [encode_spans(segment.spans, segment.start) for segment in found]
    columns = [
        keys,
        [segment.start for segment in found],
        [segment.end for segment in found],
        [codes for codes, _ in spans],
        [exceptions for _, exceptions in spans],
        [segment.losses.astype(loss_dtype) for segment in found],
    ]
    fields = schema(loss_dtype).with_metadata({"source": source})
    table = pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)],
        schema=fields,
    )
    path = directory / shard_name(number)

    def write(sink: BinaryIO) -> None:
        with pa.ipc.new_stream(sink, fields) as writer:
            writer.write_table(table, max_chunksize=1024)

    if not is_shared:
        _entry_path(path).unlink(missing_ok=True)  # it is about what is replaced
    try:
        write_file(path, write, replace=not is_shared)
        write_json(_entry_path(path), _describe(path))
    except FileNotFoundError:
        if not (directory / MANIFEST_FILE).exists():  # else another job has finished and tidied
            raise


def _entry_path(path: Path) -> Path:
    return path.with_name(path.name + _PROVISIONAL)


def _entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a shard."""
    try:
        return read_json(_entry_path(path))
    except FileNotFoundError:  # cut off just before it was written, or gone with another's `finish`
        return _describe(path)


def _describe(path: Path) -> dict[str, Any]:
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
            return {
                "file": path.name,
                "source": (table.schema.metadata or {})[b"source"].decode(),
                "sha256": file_sha256(path),
                "bytes": path.stat().st_size,
                "documents": pc.count_distinct(table["document"]).as_py(),
                "segments": len(table),
                "tokens": pc.sum(pc.list_value_length(table["losses"])).as_py() or 0,
            }
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and run the same command again"
        ) from error


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:05}.arrow"


def is_written(directory: Path, number: int, source: str) -> bool:
    """Whether a shard is there, from a job that was cut off or from another one.

    Raises:
        ValueError: it is made of other texts, or cannot be read.
    """
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
    """The shards of an unfinished store that are written completely, in order."""
    names = (path.name.removesuffix(_PROVISIONAL) for path in directory.glob(f"*{_PROVISIONAL}"))
    return sorted(int(re.sub(r"\D", "", name)) for name in names)


def finish(directory: Path, numbers: Sequence[int], description: Mapping[str, Any]) -> None:
    """Write the manifest, which makes a directory of shards a store.

    Args:
        directory: of the store, with all shards written.
        numbers: of its shards.
        description: what a reader has to know: teacher, tokenizer, segmentation, versions.
    """
    entries = [_entry(directory / shard_name(number)) for number in numbers]
    totals = {name: sum(e[name] for e in entries) for name in ("documents", "segments", "tokens")}
    sources = "".join(entry["source"] for entry in entries)
    corpus = {"corpus_sha256": hashlib.sha256(sources.encode()).hexdigest()}
    seal(directory, {**description, **corpus, **totals}, SHARDS, entries)
    tidy(directory)


def tidy(directory: Path) -> None:
    """Remove what a finished store needs no more, also what jobs that were cut off left."""
    for pattern in (f"*{_PROVISIONAL}", f".*{ASIDE}"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def reopen(directory: Path, bad: Sequence[str]) -> None:
    """Turn a store into an unfinished one again, without its bad shards.

    Args:
        directory: of the store.
        bad: names of shards that are to be written again.
    """
    for entry in manifest_of(directory)[SHARDS]:
        path = directory / entry["file"]
        if entry["file"] in bad:
            path.unlink(missing_ok=True)
            _entry_path(path).unlink(missing_ok=True)
        else:
            write_json(_entry_path(path), entry)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)


def manifest_of(directory: Path) -> Manifest:
    """Read the manifest of a finished store.

    Raises:
        ValueError: it is missing, damaged or of another format.
    """
    try:
        manifest = read_manifest(directory)
        if SHARDS not in manifest:
            raise ValueError(f"{MANIFEST_FILE} names no shards")
    except ValueError as error:
        raise ValueError(
            f"{directory} is no finished teacher-loss store: {error}; get it again, finish it with "
            "the command that began it, or make one with `vocagnolm score`"
        ) from error
    return manifest


def remedy(manifest: Mapping[str, Any]) -> str:
    """What to do about bad shards."""
    if manifest.get("engine") == "training":
        return "make it again with the training run that saved it, or score the corpus"
    return "run the `vocagnolm score` that made it again, with --repair"


class Store:
    """A finished store, memory-mapped, by document.

    Args:
        directory: of the store.

    Raises:
        ValueError: it is not finished, of another format, or damaged; the message says what to do.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.manifest = manifest_of(self.directory)
        self._batches: list[pa.RecordBatch] = []

    def fingerprint(self) -> str:
        """Another one for any other content."""
        return manifest_sha256(self.manifest)

    def check(self) -> None:
        """Compare every shard with its checksum.

        Raises:
            ValueError: a shard is bad; the message names the first ones.
        """
        if faults := dict(find_faults(self.directory, self.manifest[SHARDS])):
            shown = "; ".join(f"{file} {fault}" for file, fault in list(faults.items())[:10])
            raise ValueError(
                f"the teacher-loss store {self.directory} is damaged, {len(faults)} of "
                f"{len(self.manifest['shards'])} shards: {shown}; get it again, or "
                f"{remedy(self.manifest)}"
            )

    def segments(self, text: str) -> list[StoredSegment] | None:
        """The segments of a document, in order and without a gap; None if it is not all there."""
        if not self._batches:
            self._map()
        key = document_key(text)
        first, last = (np.searchsorted(self._keys, key, side=side) for side in ("left", "right"))
        found = sorted(map(self._segment, self._rows[first:last]), key=lambda part: part.start)
        whole, at = [], 0
        for segment in found:
            if segment.start == at:  # a document that the corpus has twice is stored twice
                whole.append(segment)
                at = segment.end
        return whole if at == len(text) and whole else None

    def _map(self) -> None:
        """Open the shards and sort the keys: 24 bytes of memory per segment."""
        for entry in self.manifest["shards"]:
            file = pa.memory_map(str(self.directory / entry["file"]))
            self._batches.extend(pa.ipc.open_stream(file))
        keys = [np.frombuffer(b.column("document").buffers()[1], "S16") for b in self._batches]
        self._ends = np.cumsum([len(part) for part in keys])
        unsorted = np.concatenate([*keys, np.empty(0, "S16")])
        self._rows = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[self._rows]

    def _segment(self, row: int) -> StoredSegment:
        number = int(np.searchsorted(self._ends, row, side="right"))
        batch = self._batches[number]
        at = row - int(self._ends[number]) + len(batch)
        start, end = (batch.column(name)[at].as_py() for name in ("start", "end"))
        codes, exceptions, losses = (
            batch.column(name)[at].values.to_numpy() for name in ("codes", "exceptions", "losses")
        )
        spans = decode_spans(codes, exceptions, start)
        return StoredSegment(start, end, spans, losses.astype(np.float32))

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.directory,)  # another process maps the files itself
