"""The teacher-loss store: a teacher's loss on every token of a corpus, tied to characters.

A store is a directory of Arrow files (`shard-00000.arrow`, ...) with a row per document, and
`manifest.json`. The manifest names the teacher, says how documents were read, and lists the size
and SHA-256 of every shard. The manifest of an unfinished store lists no shards, only the settings
that every job must share.

A token takes about three bytes: its loss as float16, and one byte for its characters. A store can
guide any student with any tokenizer. This module knows neither tokenizers nor models, only
character spans and losses.

A store grows by further shards. Those that its manifest lists are never written again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.alignment import narrow_spans, widen_spans
from vocagnolm.conventions import Spans
from vocagnolm.shell.io import (
    JsonObject,
    file_sha256,
    json_or_empty,
    read_json,
    size_fault,
    write_file,
    write_json,
)

MANIFEST_FILE, SHARDS = "manifest.json", "shards"
LossDtype = Literal["float16", "float32"]
LossArray = npt.NDArray[np.float32]
# Raise this number when new stores cannot be read like old ones.
_FORMAT = 1
# Two documents would share a key by chance only in a corpus of about 2**64 documents.
_KEY_BYTES = 16
KEY = f"S{_KEY_BYTES}"
# The manifest has these counts for each shard, and their sums for the whole store.
_COUNTS = ("documents", "tokens", "unscored")
# This part of a manifest says what a store holds and where it came from, and all else how its
# teacher read. Stores of version 0.1 also have a server's losses of a test prompt.
_CONTENT = {"format", "dataset", "dataset_documents", "shard_documents", "server", "probe_losses"}
_CONTENT |= {"versions", SHARDS, *_COUNTS}
# Hashing releases the interpreter's lock, so threads can hash several shards at once.
_THREADS = 8


@dataclass(frozen=True)
class StoredDocument:
    """N tokens of the teacher in a document of `length` characters.

    Their spans [N, 2] count its characters and leave no gap. Losses are float32 [N]. A document
    without tokens could not be scored.
    """

    length: int
    spans: Spans
    losses: LossArray


def document_key(text: str) -> bytes:
    """Return the key of a document: the first 16 bytes of the SHA-256 of its UTF-8 text."""
    return hashlib.sha256(text.encode()).digest()[:_KEY_BYTES]


# -- Writing -----------------------------------------------------------------------------------


def write_shard(
    directory: Path,
    number: int,
    documents: Sequence[tuple[bytes, StoredDocument]],
    loss_dtype: LossDtype,
) -> None:
    """Write a shard completely or not at all. One that another job has written is kept.

    Takes documents with their keys, in the order of the corpus.
    """
    schema = pa.schema(
        {
            "document": pa.binary(_KEY_BYTES),
            "start": pa.int32(),
            "end": pa.int32(),
            # All tokens of a document are one value.
            "codes": pa.list_(pa.uint8()),
            "exceptions": pa.list_(pa.int32()),
            "losses": pa.list_(pa.from_numpy_dtype(loss_dtype)),
        },
        {"source": _source(key for key, _ in documents)},
    )
    rows = []
    for key, document in documents:
        codes, exceptions, _ = narrow_spans(document.spans)
        # An exception is (index, length, overlap). A negative length is a span that ends before the
        # one before it, and a negative overlap is a gap between the two. Encoders make neither.
        assert exceptions.reshape(-1, 3)[:, 1:].min(initial=0) >= 0
        assert len(document.losses) == len(document.spans)
        losses = document.losses.astype(loss_dtype)
        row = (key, 0, document.length, codes, exceptions, losses)
        rows.append(dict(zip(schema.names, row, strict=True)))
    table = pa.Table.from_pylist(rows, schema)

    def write(sink: BinaryIO) -> None:
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_table(table, max_chunksize=1024)

    write_file(directory / shard_name(number), write, replace=False)


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05}.arrow"


def shard_paths(directory: Path) -> list[Path]:
    """List the shards of a store in the order of their numbers."""
    # Numbers from 100,000 on have a sixth digit, so shorter names come first.
    paths = directory.glob("shard-*.arrow")
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def shard_number(file: str) -> int:
    """Return the number of a shard.

    >>> shard_number("shard-00012.arrow")
    12
    """
    return int(Path(file).stem.rpartition("-")[2])


def _source(keys: Iterable[bytes]) -> str:
    """Identify the documents of a shard."""
    return hashlib.sha256(b"".join(keys)).hexdigest()


def has_documents(shard: Path, texts: Iterable[str]) -> bool:
    """Test whether a shard has exactly these documents, in this order."""
    source: bytes = read_shard(shard).schema.metadata[b"source"]
    return source.decode() == _source(map(document_key, texts))


def teacher_of(manifest: Mapping[str, Any]) -> JsonObject:
    """Return the settings that determine losses. Stores in which they are equal have one teacher.

    >>> teacher_of({"teacher": "a/copy", "teacher_revision": "0a1b", "dtype": "float32"})
    {'teacher_revision': '0a1b', 'dtype': 'float32'}
    """
    settings = {name: value for name, value in manifest.items() if name not in _CONTENT}
    # A teacher without a known revision, such as that of a server, is identified by its name.
    if settings.get("teacher_revision") not in (None, "unknown"):
        settings.pop("teacher", None)
    # Stores of version 0.1 also say that no token comes after a document.
    if "special_tokens" in settings:
        settings["special_tokens"] = {"before": settings["special_tokens"]["before"]}
    # An error may name what differs, and a template is too long for one line.
    if "chat_template" in settings:
        settings["chat_template"] = document_key(settings["chat_template"]).hex()
    return settings


def by_teacher(manifests: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Group stores by their teachers. Returns the positions of each teacher's stores."""
    teachers: dict[str, list[int]] = {}
    for number, manifest in enumerate(manifests):
        teacher = json.dumps(teacher_of(manifest), sort_keys=True)
        teachers.setdefault(teacher, []).append(number)
    return list(teachers.values())


def begin_store(directory: Path, settings: Mapping[str, object], *, replace: bool = False) -> None:
    """Write the manifest of an unfinished store. Without `replace`, another job's is kept."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / MANIFEST_FILE, {"format": _FORMAT, **settings}, replace=replace)


def finish_store(directory: Path, description: Mapping[str, object]) -> None:
    """Write the manifest of a finished store, after all of its shards.

    The description names teacher, tokenizer, segmentation and versions. What an earlier manifest
    says about a shard stays. So a store grows without another look at its older shards, and damage
    to them does not get a valid checksum.
    """
    listed = {entry["file"]: entry for entry in read_manifest(directory).get(SHARDS, ())}

    def entry_of(path: Path) -> JsonObject:
        return listed.get(path.name) or _describe(path)

    with ThreadPoolExecutor(_THREADS) as pool:
        shards = list(pool.map(entry_of, shard_paths(directory)))
    totals = dict.fromkeys(_COUNTS, 0)
    for shard in shards:
        for name in _COUNTS:
            totals[name] += shard[name]
    # Killed jobs leave temporary files and answers here. A job that is still writing a shard also
    # loses its temporary file, but then finds that the shard exists.
    for shard in shards:
        for path in directory.glob(f".{shard['file']}.*"):
            path.unlink(missing_ok=True)
    # The list of shards makes a store finished, so it is written last. A job that is killed before
    # this line continues where it was.
    content = {"format": _FORMAT, **description, **totals, SHARDS: shards}
    write_json(directory / MANIFEST_FILE, content)


def _describe(path: Path) -> JsonObject:
    table = read_shard(path)
    # A document that the corpus repeats has several rows with one key, and counts once. A document
    # that could not be scored has a row with empty lists.
    keys, tokens = table["document"], pc.list_value_length(table["losses"])
    documents = pc.count_distinct(keys).as_py()
    # Arrow's sum of no rows is null, which means 0 tokens here.
    return {
        "file": path.name,
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "documents": documents,
        "tokens": pc.sum(tokens).as_py() or 0,
        "unscored": documents - pc.count_distinct(keys.filter(pc.greater(tokens, 0))).as_py(),
    }


def read_shard(path: Path) -> pa.Table:
    """Map a shard into memory: processes share its pages, which are read when they are needed."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and score again") from error


def read_keys(shards: Iterable[pa.Table]) -> npt.NDArray[np.bytes_]:
    """Return the keys of all rows of shards, in order."""
    # The first array is for a store without documents.
    keys = [np.empty(0, KEY)]
    for shard in shards:
        for chunk in shard["document"].chunks:
            # The second buffer of a column with fixed width has its values, concatenated. A chunk
            # is a whole record batch, so its buffer begins with its first row.
            if len(chunk):
                keys.append(np.frombuffer(chunk.buffers()[1], KEY, len(chunk)))
    return np.concatenate(keys)


# -- Reading -----------------------------------------------------------------------------------


def read_manifest(directory: Path) -> JsonObject:
    """Read the manifest of a store, finished or not. {} if there is none."""
    path = directory / MANIFEST_FILE
    manifest = read_json(path) if path.exists() else {}
    if manifest and manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} is not the manifest of a teacher-loss store of format {_FORMAT}")
    return manifest


def is_store(directory: Path) -> bool:
    """Test whether a directory has a store, finished or not."""
    return bool(json_or_empty(directory / MANIFEST_FILE).get("format") == _FORMAT)


def manifest_of(directory: Path) -> JsonObject:
    """Read the manifest of a finished store.

    Raises:
        ValueError: the directory has none.
    """
    manifest = read_manifest(directory)
    if SHARDS not in manifest:
        raise ValueError(
            f"{directory} is not a finished teacher-loss store: finish it with the command that "
            "began it, or make one with `vocagnolm score`"
        )
    return manifest


def find_faults(
    directory: Path, shards: Sequence[JsonObject], *, by_hash: bool = False
) -> dict[str, str]:
    """Compare the sizes of a manifest's shards, or every byte. Returns what is wrong, by file."""

    def fault(entry: JsonObject) -> str | None:
        file = entry["file"]
        # A missing or truncated shard shows in its size, and need not be hashed.
        reason = size_fault(directory, {file: entry["bytes"]})
        if not reason and by_hash and file_sha256(directory / file) != entry["sha256"]:
            return f"{file} does not match its checksum"
        return reason

    faults = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for entry, reason in zip(shards, pool.map(fault, shards), strict=True):
            if reason:
                faults[entry["file"]] = reason
    return faults


def first_scored(documents: Iterable[StoredDocument | None]) -> StoredDocument | None:
    """Return what the first store with losses of a document has of it, or else any store."""
    unscored = None
    for document in documents:
        if document is not None and len(document.losses):
            return document
        unscored = unscored or document
    return unscored


class Store:
    """A finished store, mapped into memory, by document."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.manifest = manifest_of(self.directory)
        faults = find_faults(self.directory, self.manifest[SHARDS])
        if faults:
            examples = "; ".join(list(faults.values())[:10])
            raise ValueError(
                f"the teacher-loss store {directory} is damaged, {len(faults)} of "
                f"{len(self.manifest[SHARDS])} shards ({examples}): delete them, and run the "
                "command that made it again"
            )
        # Map shards with the first document, so that a process that needs only the manifest reads
        # none of them.
        self._table: pa.Table = None

    def fingerprint(self) -> str:
        """Return an identifier of the content.

        It ignores where the corpus and the server were. Older stores also have a server's losses of
        a test prompt.
        """
        content = self.manifest.copy()
        for name in ("dataset", "server", "probe_losses"):
            content.pop(name, None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def document(self, text: str) -> StoredDocument | None:
        """Return the tokens and losses of a document, or None if the store lacks it."""
        row = self._find(text)
        if row is None:
            return None
        # A shard is written completely or not at all, so its values need no check here.
        codes = self._table["codes"][row].values.to_numpy()
        exceptions = self._table["exceptions"][row].values.to_numpy()
        losses = self._table["losses"][row].values.to_numpy()
        return StoredDocument(
            length=self._table["end"][row].as_py(),
            spans=widen_spans(codes, exceptions),
            losses=losses.astype(np.float32),
        )

    def __contains__(self, text: str) -> bool:
        """Test whether there is a row for a document, with or without losses."""
        return self._find(text) is not None

    def _find(self, text: str) -> int | None:
        """Return the row of a document, or None."""
        if self._table is None:
            self._open()
        key = document_key(text)
        first = np.searchsorted(self._keys, key, side="left")
        last = np.searchsorted(self._keys, key, side="right")
        # A document that the corpus repeats is stored repeatedly, with the same losses.
        return None if first == last else int(self._rows[first])

    def _open(self) -> None:
        """Map the shards, and sort the keys with their rows, in 24 bytes of memory per document."""
        tables = []
        for entry in self.manifest[SHARDS]:
            tables.append(read_shard(self.directory / entry["file"]))
        # Keys and tables are joined in the same order, so a key's index is its row's index. The
        # sort is stable, so of a repeated document the copy that was stored first is always used.
        unsorted = read_keys(tables)
        self._rows = np.argsort(unsorted, kind="stable")
        self._keys = unsorted[self._rows]
        self._table = pa.concat_tables(tables) if tables else None

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        # A data loader's process gets the directory and maps the files itself, because pickling the
        # table would copy all of it.
        return Store, (self.directory,)
