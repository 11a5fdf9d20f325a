"""A store that runs add to, one document at a time. What it has is never asked for again.

Between runs it is a finished store. A run reads what was there when it began, and adds shards. Each
process has its own numbers for them, and a file next to them to which every document is written as
soon as it is known. Whoever opens the store next makes a shard of what a killed process left there.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from vocagnolm.store.format import (
    SHARDS,
    LossDtype,
    Store,
    StoredDocument,
    begin_store,
    document_key,
    finish_store,
    read_manifest,
    read_row,
    read_shard,
    shard_name,
    shard_paths,
    table_of,
    write_table,
)

# Losses are kept unrounded, because a run from the store must end like the run that made it.
LOSS_DTYPE: LossDtype = "float32"
# A shard is written when this many documents are known.
_SHARD_DOCUMENTS = 1000
_LEFT = ".growing-*.arrow"


def open_for_growth(directory: Path, description: Mapping[str, object]) -> None:
    """Make a directory a finished store of everything that was added. Begin one if needed.

    One process calls this, before the others open the store and after they have closed it.
    """
    earlier_shards = read_manifest(directory).get(SHARDS, ())
    begin_store(directory, description)
    for path in directory.glob(_LEFT):
        table = _read_left(path)
        if len(table):
            write_table(directory, _next_number(directory), table)
        path.unlink()
    finish_store(directory, description, earlier_shards)


def _read_left(path: Path) -> pa.Table:
    """Read the documents that a process left behind. The last one may be cut off."""
    batches = []
    # Arrow has several errors for a stream that ends too early, and one for its end.
    with path.open("rb") as file, suppress(pa.ArrowException, OSError, StopIteration):
        stream = pa.ipc.open_stream(file)
        while True:
            batches.append(stream.read_next_batch())
    return pa.Table.from_batches(batches, table_of([], LOSS_DTYPE).schema).combine_chunks()


def _next_number(directory: Path, process: int = 0, processes: int = 1) -> int:
    """Return the first free number of a shard that belongs to a process."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in shard_paths(directory)]
    number = max(numbers, default=-1) + 1
    return number + (process - number) % processes


class GrowingStore:
    """A store that one process of a job reads and adds to. Threads may share it."""

    def __init__(self, directory: Path, process: int = 0, processes: int = 1):
        self.directory = directory
        self._process, self._processes = process, processes
        self._store = Store(directory)
        # Shards written since opening, and where documents are in them.
        self._read = {path.name for path in shard_paths(directory)}
        self._tables: list[pa.Table] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        # Documents that are in no shard yet, and the file that has them meanwhile.
        self._new: dict[bytes, StoredDocument] = {}
        self._left = directory / f".growing-{uuid.uuid4().hex}.arrow"
        self._file: Any = None
        self._writer: Any = None
        self._lock = threading.Lock()

    def document(self, text: str) -> StoredDocument | None:
        """Return the tokens and losses of a document, or None."""
        key = document_key(text)
        with self._lock:
            if key in self._new:
                return self._new[key]
            if key in self._places:
                table, row = self._places[key]
                return read_row(self._tables[table], row)
            return self._store.document(text)

    def add(self, key: bytes, document: StoredDocument) -> None:
        """Add a document. After this returns, the document survives the end of the process."""
        with self._lock:
            table = table_of([(key, document)], LOSS_DTYPE)
            if self._writer is None:
                self._file = self._left.open("wb")
                self._writer = pa.ipc.new_stream(self._file, table.schema)
            self._writer.write_table(table)
            self._file.flush()
            self._new[key] = document
            if len(self._new) >= _SHARD_DOCUMENTS:
                self._write_shard()

    def refresh(self) -> None:
        """Write what is known, and read what other processes have written."""
        with self._lock:
            self._write_shard()
            for path in shard_paths(self.directory):
                self._map(path)

    def close(self) -> None:
        """Write everything that is in no shard yet."""
        with self._lock:
            self._write_shard()

    def _write_shard(self) -> None:
        if not self._new:
            return
        number = _next_number(self.directory, self._process, self._processes)
        write_table(self.directory, number, table_of(list(self._new.items()), LOSS_DTYPE))
        self._map(self.directory / shard_name(number))
        self._new.clear()
        self._writer.close()
        self._file.close()
        self._writer = None
        # Remove the file only now that the shard has its documents.
        self._left.unlink()

    def _map(self, path: Path) -> None:
        """Find the documents of a shard that was written since the store was opened."""
        if path.name in self._read:
            return
        self._read.add(path.name)
        table = read_shard(path)
        for row, key in enumerate(table["document"].to_pylist()):
            self._places[key] = len(self._tables), row
        self._tables.append(table)
