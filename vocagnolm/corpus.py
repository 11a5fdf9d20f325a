"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Input: a path or a hub name. Output: a `datasets.Dataset` with one column, `text`; conversations
have the columns of `vocagnolm.chat.formats` beside it. Knows no tokenizer.
"""

import glob
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.arrow_writer import ArrowWriter
from datasets.utils import tqdm
from filelock import FileLock

from vocagnolm.chat.formats import (
    conversation_columns,
    no_conversation,
    read_row,
)
from vocagnolm.conventions import TEXT
from vocagnolm.files import Files, find_files, kind_of, splits_of
from vocagnolm.hub import check_name
from vocagnolm.io import FullDiskError, disk_fault
from vocagnolm.jsonl import Row, open_file, read_rows
from vocagnolm.texts import (
    CONVERSATION_FEATURES,
    DOCUMENT_FEATURES,
    FAULT,
    FORMAT,
    STRING,
    columns_to_read,
    document_of,
    is_conversations,
    joined,
    only_text,
    without_faults,
)

logger = logging.getLogger(__name__)

# Columns are looked for in this many bytes of the first rows of a JSON file.
_HEAD_BYTES = 10 << 20
# The most that is written as one table.
_TABLE_BYTES = 10 << 20
_TABLE_ROWS = 10_000


def load_corpus(
    dataset: str,
    *,
    split: str | None = "train",
    text_column: str | None = None,
    config_name: str | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with a column `text`.

    Conversations, which are known by their columns, have more. A `text_column` that is given holds
    documents, whatever other columns there are.

    `dataset` is a file (JSON lines, JSON, Parquet, Arrow, CSV, text; each may be compressed), a
    directory, which is read as `datasets.load_dataset` reads it (`vocagnolm.files`), or the name of
    a dataset on the hub. Every `.txt` file is one document. A document that is empty or not text,
    and a line that is not JSON, keep their places: they are skipped, with their reasons, when the
    corpus is aligned. Where there are such rows, a column `fault` has the reasons, or null.

    Without a split, that of a directory is read which is held out, if there is one.

    Raises:
        ValueError: it cannot be read, or is damaged as a whole; `option` is named.
    """
    files = files_of(dataset, split=split, config_name=config_name, option=option)
    if files is None:
        split = split or "train"
        corpus = _read_hub(dataset, option, name=config_name or None, split=split)
        return only_text(corpus, text_column, dataset)
    by_split: dict[str, datasets.Dataset] = {}
    for name, paths in files.by_split.items():
        by_split[name] = _read_files(paths, text_column, f"{option} {files.root}", option)
    instruction = split or next(iter(by_split))
    if splits_of(instruction) == ["all"]:
        return joined(list(by_split.values()), f"{option} {dataset}")
    try:
        sizes = {name: len(corpus) for name, corpus in by_split.items()}
        parts = datasets.ReadInstruction.from_spec(instruction).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"--dataset_split {split}: {error}") from error
    chosen = []
    for part in parts:
        corpus = by_split[part.splitname]
        is_whole = part.from_ is None and part.to is None
        if not is_whole:
            start, stop, _ = slice(part.from_, part.to).indices(len(corpus))
            corpus = corpus.select(range(start, max(start, stop)))
        chosen.append(corpus)
    return joined(chosen, f"{option} {dataset}")


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns them as `load_corpus` does, with the count of all, None if it is not known.
    """
    if _local_path(dataset, "--dataset"):
        corpus = load_corpus(dataset, split=split, text_column=text_column, config_name=config_name)
        return corpus.select(range(min(count, len(corpus)))), len(corpus)
    stream = _read_hub(dataset, "--dataset", name=config_name or None, split=split, streaming=True)
    corpus = datasets.Dataset.from_list(list(stream.take(count)))
    info = (stream.info.splits or {}).get(split)
    return only_text(corpus, text_column, dataset), info.num_examples if info else None


def files_of(
    dataset: str,
    *,
    split: str | None = "train",
    config_name: str | None = None,
    option: str = "--dataset",
) -> Files | None:
    """Find the files of a dataset that is here, and those that are not read; None of the hub."""
    path = _local_path(dataset, option)
    return find_files(path, split, config_name, option) if path else None


def _local_path(dataset: str, option: str) -> Path | None:
    """Return the path that a name is here, None for one that the hub is to be asked for."""
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    if kind_of(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    check_name(option, dataset, "dataset")
    return None


# -- Files -----------------------------------------------------------------------------------------


def _read_files(
    files: Sequence[Path], text_column: str | None, source: str, option: str
) -> datasets.Dataset:
    corpora = []
    # One by one, since their formats and other columns may differ.
    for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
        corpus = _read_file(file, text_column, f"{option} {file}")
        if len(corpus):
            corpora.append(corpus)
    if not corpora:
        raise ValueError(f"{source} cannot be read: it holds no documents")
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        raise ValueError(
            f"{source}: holds conversations and documents: give one directory for each"
        )
    return joined(corpora, source)


def _read_file(file: Path, text_column: str | None, source: str) -> datasets.Dataset:
    """Read the documents or conversations of a file, and cache them."""
    kind, name = kind_of(file), str(file)
    if kind == "json":
        return _read_json(file, text_column, source)
    if kind == "text":
        columns_to_read([TEXT], text_column, source)
        return _cached(file, [TEXT], _text_table(file), source)
    if kind == "parquet":
        names = _try(lambda: pq.read_schema(file).names, source)
        columns = columns_to_read(names, text_column, source)
        corpus = _load("parquet", source, file, columns=columns)
    elif kind == "arrow":
        corpus = _load("arrow", source, file)
        corpus = corpus.select_columns(columns_to_read(corpus.column_names, text_column, source))
    else:
        separator = "\t" if ".tsv" in [suffix.lower() for suffix in file.suffixes] else ","
        names = _try(lambda: _header(file, separator), source)
        columns = columns_to_read(names, text_column, source)
        # Every value is text, whatever it looks like, and no word stands for null.
        corpus = _load(
            "csv",
            source,
            file,
            sep=separator,
            usecols=columns,
            features=datasets.Features(dict.fromkeys(columns, STRING)),
            keep_default_na=False,
        )
    return only_text(corpus, text_column, name)


def _header(file: Path, separator: str) -> list[str]:
    with open_file(file) as content:
        row = pd.read_csv(content, sep=separator, header=None, nrows=1, dtype=str)
    return [str(name) for name in row.iloc[0]]


def _try(read: Any, source: str) -> Any:
    try:
        return read()
    # A broken file can raise anything: what decompression raises comes as it is.
    except Exception as error:
        full_disk = disk_fault(error)
        if not full_disk and error.__cause__:
            full_disk = disk_fault(error.__cause__)
        if full_disk:
            # The fault is not in the file, but in the place that it is read into.
            cache = datasets.config.HF_DATASETS_CACHE
            advice = "Free some room, or set HF_DATASETS_CACHE to another disk"
            raise FullDiskError(f"{cache} cannot be written to: {full_disk}. {advice}") from error
        # The library wraps the error whose message helps the user.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            reason = "it holds no documents, or is cut off"
        if reason.startswith("--text_column"):
            raise ValueError(reason) from error
        raise ValueError(f"{source} cannot be read: {reason}") from error


def _load(builder: str, source: str, file: Path, **options: Any) -> datasets.Dataset:
    # Escaped, since file names count as patterns.
    return _read(builder, source, data_files=glob.escape(str(file)), split="train", **options)


def _read_hub(dataset: str, option: str, **options: object) -> datasets.Dataset:
    source = f"{option} {dataset} (no file or directory here, so a hub dataset)"
    return _read(dataset, source, **options)


def _read(builder: str, source: str, **options: Any) -> datasets.Dataset:
    # Its errors come back as one line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    return _try(lambda: datasets.load_dataset(builder, **options), source)


def _cached(
    file: Path, columns: Sequence[str], tables: Iterator[pa.Table], source: str
) -> datasets.Dataset:
    """Write the tables of a file into the cache of `datasets`, if they are not there."""
    status = file.stat()
    key = (str(file.absolute()), status.st_size, status.st_mtime_ns) + tuple(columns) + (FORMAT,)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    directory = Path(datasets.config.HF_DATASETS_CACHE, "vocagnolm", name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rows.arrow"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _try(lambda: _write(tables, directory / "incomplete", path), source)
    corpus = datasets.Dataset.from_file(str(path))
    corpus._fingerprint = name
    return without_faults(corpus)


def _write(tables: Iterator[pa.Table], incomplete: Path, path: Path) -> None:
    """Write tables to a file that is there as a whole, or not at all."""
    features = DOCUMENT_FEATURES
    first = next(tables, None)
    if first is not None and "roles" in first.column_names:
        features = CONVERSATION_FEATURES
    with ArrowWriter(path=str(incomplete), features=features) as writer:
        if first is None:
            first = features.arrow_schema.empty_table()
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
        writer.finalize()
    incomplete.replace(path)


def _text_table(file: Path) -> Iterator[pa.Table]:
    """Make one document of a file of text; line ends are as in text that Python reads."""
    with open_file(file) as opened:
        content = opened.read()
    try:
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        row = {TEXT: [text], FAULT: [None]}
    except UnicodeDecodeError:
        row = {TEXT: [None], FAULT: [f"{file.name}:1: not valid UTF-8"]}
    yield pa.table(row, DOCUMENT_FEATURES.arrow_schema)


def _read_json(file: Path, text_column: str | None, source: str) -> datasets.Dataset:
    rows = read_rows(file)
    head, columns = _try(lambda: _head(rows), source)
    if not head:
        return datasets.Dataset.from_dict({TEXT: []}, datasets.Features({TEXT: STRING}))
    if not columns:
        number, _, reason = head[0]
        raise ValueError(f"{source}: none of its lines is a JSON object (line {number}: {reason})")
    names = columns_to_read(columns, text_column, source)
    is_turns = not text_column and bool(conversation_columns(columns))
    # The key has the columns that are read, so that a column that is named and one that is found
    # share a cache.
    return _cached(file, names, _json_tables(file, chain(head, rows), names, is_turns), source)


def _json_tables(
    file: Path, rows: Iterable[Row], names: Sequence[str], is_turns: bool
) -> Iterator[pa.Table]:
    """Make tables of the documents of a JSON file, or of its conversations."""
    schema = (CONVERSATION_FEATURES if is_turns else DOCUMENT_FEATURES).arrow_schema
    documents: list[dict[str, Any]] = []
    read_bytes = 0
    for number, size, row in rows:
        if isinstance(row, str):
            documents.append(no_conversation(f"{file.name}:{number}: {row}"))
        elif is_turns:
            documents.append(read_row({name: row.get(name) for name in names}))
        else:
            text, fault = document_of(row.get(names[0]))
            documents.append({TEXT: text, FAULT: fault})
        read_bytes += size
        if read_bytes > _TABLE_BYTES or len(documents) == _TABLE_ROWS:
            yield _table_of(documents, schema)
            documents = []
            read_bytes = 0
    yield _table_of(documents, schema)


def _table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.table({name: [row[name] for row in rows] for name in schema.names}, schema)


def _head(rows: Iterator[Row]) -> tuple[list[Row], list[str]]:
    """Take the first rows, and list their columns."""
    head = []
    read_bytes = 0
    # A dict keeps the order in which columns are met.
    columns: dict[str, None] = {}
    for number, size, row in rows:
        head.append((number, size, row))
        if isinstance(row, dict):
            columns |= dict.fromkeys(row)
        read_bytes += size
        if read_bytes > _HEAD_BYTES:
            break
    return head, list(columns)
