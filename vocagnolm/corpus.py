"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

The input is a path or a hub name. The output is a `datasets.Dataset` with one column, `text`, or
with the columns of `vocagnolm.chat.formats` for conversations. This module knows no tokenizer.
"""

import glob
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
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
from vocagnolm.csv_rows import csv_records, csv_rows
from vocagnolm.fields import OptionError
from vocagnolm.files import Files, find_files, kind_of, splits_of
from vocagnolm.jsonl import Row, open_file, read_rows
from vocagnolm.shell.hub import check_name
from vocagnolm.shell.io import FullDiskError, disk_fault
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

# The columns of a JSON file are those of its first rows, up to this many bytes. A column that
# begins later is not seen.
_HEAD_BYTES = 10 << 20
# The rows of a JSON file go to the cache in tables of at most this size, so a large file is never
# in memory as a whole.
_TABLE_BYTES = 10 << 20
_TABLE_ROWS = 10_000
# What an error says about a file without rows, or without their end.
_NO_DATA = "it holds no documents, or is cut off"


def load_corpus(
    dataset: str,
    *,
    split: str | None = "train",
    text_column: str | None = None,
    config_name: str | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with a column `text`.

    Conversations are recognized by their columns. A `text_column` always means documents, whatever
    other columns there are.

    `dataset` is one of three:

    - a file of JSON lines, JSON, Parquet, Arrow, CSV or text, which may be compressed;
    - a directory, which is read as `datasets.load_dataset` reads it (`vocagnolm.files`);
    - the name of a dataset on the hub.

    Every `.txt` file is one document. Rows that cannot be used keep their places: empty documents,
    values that are not text, and lines that are not JSON. They are skipped, with a reason, when the
    corpus is aligned. If there are any, a column `fault` has the reason, or null for usable rows.

    Without a `split`, the held-out split of a directory is read, or else `train`.

    Raises:
        ValueError: the dataset cannot be read, or is damaged as a whole. The message names
            `option`.
    """
    files = files_of(dataset, split=split, config_name=config_name, option=option)
    if files is None:
        split = split or "train"
        corpus = _read_hub(dataset, option, name=config_name or None, split=split)
        return only_text(corpus, text_column, dataset)
    by_split: dict[str, datasets.Dataset] = {}
    for name, paths in files.by_split.items():
        by_split[name] = _read_files(paths, text_column, f"{option} {files.root}", option)
    # Without a split, `files_of` has found exactly one.
    instruction = split or next(iter(by_split))
    if splits_of(instruction) == ["all"]:
        corpora = list(by_split.values())
    else:
        corpora = _select_parts(by_split, instruction)
    return joined(corpora, f"{option} {dataset}")


def _select_parts(
    by_split: Mapping[str, datasets.Dataset], instruction: str
) -> list[datasets.Dataset]:
    """Select what an instruction such as `train[:10%]+test` names, in its order."""
    sizes = {name: len(corpus) for name, corpus in by_split.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(instruction).to_absolute(sizes)
    # The library checks ranges with assertions.
    except (ValueError, AssertionError) as error:
        raise OptionError("dataset_split", f"{instruction}: {error}") from error
    corpora = []
    for part in parts:
        corpus = by_split[part.splitname]
        is_whole = part.from_ is None and part.to is None
        if not is_whole:
            # Bounds may be negative or beyond the split, as in a slice. If the end comes before the
            # start, the part is empty.
            start, stop, _ = slice(part.from_, part.to).indices(len(corpus))
            corpus = corpus.select(range(start, max(start, stop)))
        corpora.append(corpus)
    return corpora


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns the documents as `load_corpus` does, and the number of all documents, or None if it is
    unknown.
    """
    if _local_path(dataset, "--dataset"):
        corpus = load_corpus(dataset, split=split, text_column=text_column, config_name=config_name)
        sample = corpus.select(range(min(count, len(corpus))))
        return sample, len(corpus)
    stream = _read_hub(dataset, "--dataset", name=config_name or None, split=split, streaming=True)
    sample = read_list(list(stream.take(count)), text_column, dataset)
    # The card of a dataset may not say how many rows its splits have.
    split_info = (stream.info.splits or {}).get(split)
    total = split_info.num_examples if split_info else None
    return sample, total


def files_of(
    dataset: str,
    *,
    split: str | None = "train",
    config_name: str | None = None,
    option: str = "--dataset",
) -> Files | None:
    """Find the files of a local dataset and those that are left out. None for a hub dataset."""
    path = _local_path(dataset, option)
    if path is None:
        return None
    return find_files(path, split, config_name, option)


def _local_path(dataset: str, option: str) -> Path | None:
    """Return the path of a local dataset, or None for a dataset of the hub."""
    # An unset variable of a shell would stand for the current directory.
    if not dataset:
        raise ValueError(f"{option} is empty: give a file, a directory or a hub name")
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    # A name that ends in .jsonl or similar means a file, so the hub is not asked.
    if kind_of(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    check_name(option.removeprefix("--"), dataset, "dataset")
    return None


def read_list(
    rows: Sequence[Mapping[str, Any]], text_column: str | None, source: str
) -> datasets.Dataset:
    """Read the documents or conversations of a list of rows, as those of a JSON file are read.

    Rows may have different columns, and values of any type. The dataset is in memory.

    Raises:
        ValueError: no row has a column to read. The message names `source`.
    """
    # Rows of files come with a line and a size, which those of a list do not have.
    numbered_rows = ((0, 0, dict(row)) for row in rows)
    head, columns = _head(numbered_rows)
    names = columns_to_read(columns, text_column, source)
    tables = _row_tables(source, head, names, _are_conversations(columns, text_column))
    return without_faults(datasets.Dataset(pa.concat_tables(tables)))


# -- Files -----------------------------------------------------------------------------------------


def _read_files(
    files: Sequence[Path], text_column: str | None, source: str, option: str
) -> datasets.Dataset:
    """Read files in order, as one corpus. Messages name `source`, the whole dataset."""
    corpora = []
    # Read each file by itself, because formats and unused columns may differ between files.
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
    kind = kind_of(file)
    if kind == "json":
        return _read_json(file, text_column, source)
    if kind == "csv":
        return _read_csv(file, text_column, source)
    if kind == "text":
        columns_to_read([TEXT], text_column, source)
        return _cached(file, [TEXT], _text_table(file), source)
    if kind == "parquet":
        metadata = _try(lambda: pq.read_metadata(file), source)
        if not metadata.num_rows:
            return _no_rows()
        names = _try(lambda: pq.read_schema(file).names, source)
        columns = columns_to_read(names, text_column, source)
        # The library reads as many rows at once as the first row group has, which may be none.
        batch_rows = None
        if not metadata.row_group(0).num_rows:
            batch_rows = _TABLE_ROWS
        corpus = _load("parquet", source, file, columns=columns, batch_size=batch_rows)
    else:
        try:
            corpus = _load("arrow", source, file)
        except ValueError as error:
            # The library refuses a whole file without rows.
            if str(error).endswith(_NO_DATA):
                return _no_rows()
            raise
        corpus = corpus.select_columns(columns_to_read(corpus.column_names, text_column, source))
    return only_text(corpus, text_column, str(file))


def _no_rows() -> datasets.Dataset:
    """Make the corpus of a file without rows, whose columns do not matter."""
    return datasets.Dataset.from_dict({TEXT: []}, datasets.Features({TEXT: STRING}))


def _read_csv(file: Path, text_column: str | None, source: str) -> datasets.Dataset:
    """Read the documents or conversations of a file of comma- or tab-separated values."""
    # The name may also end in the suffix of a compression, as in pages.tsv.gz.
    suffixes = [suffix.lower() for suffix in file.suffixes]
    separator = "\t" if ".tsv" in suffixes else ","
    records = csv_records(file, separator)
    line_number, columns = _try(lambda: next(records, (1, [])), source)
    if isinstance(columns, str):
        raise ValueError(f"{source} cannot be read: line {line_number}: {columns}")
    if not columns:
        return _no_rows()
    return _read_rows(file, csv_rows(records, columns, separator), columns, text_column, source)


def _try(read: Callable[[], Any], source: str) -> Any:
    """Call `read`, and reduce what it raises to one line with `source` and the reason."""
    try:
        return read()
    # A broken file can raise anything, and decompression errors are not wrapped.
    except Exception as error:
        # `datasets` raises its own error, with the system's error as the cause.
        full_disk = disk_fault(error)
        if not full_disk and error.__cause__:
            full_disk = disk_fault(error.__cause__)
        if full_disk:
            # The file is fine, but the disk with the cache is full.
            cache = datasets.config.HF_DATASETS_CACHE
            advice = "Free some room, or set HF_DATASETS_CACHE to another disk"
            raise FullDiskError(f"{cache} cannot be written to: {full_disk}. {advice}") from error
        # The library wraps the error that has the helpful message.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            reason = _NO_DATA
        # The message about a missing column is complete: it names the option and the dataset.
        if reason.startswith("--text_column"):
            raise ValueError(reason) from error
        raise ValueError(f"{source} cannot be read: {reason}") from error


def _load(builder: str, source: str, file: Path, **options: Any) -> datasets.Dataset:
    """Read one file with a builder of `datasets`."""
    # Escape the path, because `datasets` treats it as a pattern, and names may contain [ or *.
    return _read(builder, source, data_files=glob.escape(str(file)), split="train", **options)


def _read_hub(dataset: str, option: str, **options: object) -> datasets.Dataset:
    """Read a dataset from the hub."""
    source = f"{option} {dataset} (no file or directory here, so a hub dataset)"
    return _read(dataset, source, **options)


def _read(builder: str, source: str, **options: Any) -> datasets.Dataset:
    """Call `datasets.load_dataset`; an error becomes one line with `source`."""
    # The library also logs its errors, in several lines.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    return _try(lambda: datasets.load_dataset(builder, **options), source)


def _cached(
    file: Path, content: Sequence[str], tables: Iterator[pa.Table], source: str
) -> datasets.Dataset:
    """Write the tables of a file into the cache of `datasets`, unless they are there.

    `content` says what is read of the file, such as the names of its columns.
    """
    # A file with the same path, size and time counts as unchanged, because hashing terabytes takes
    # hours.
    status = file.stat()
    key = (str(file.absolute()), status.st_size, status.st_mtime_ns) + tuple(content) + (FORMAT,)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    directory = Path(datasets.config.HF_DATASETS_CACHE, "vocagnolm", name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rows.arrow"
    # If several processes read the file, the first one writes and the others wait.
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _try(lambda: _write(tables, directory / "incomplete", path), source)
    corpus = datasets.Dataset.from_file(str(path))
    # The fingerprint is the key for everything that is computed from the corpus. The library's own
    # would change whenever this cache is written again.
    corpus._fingerprint = name
    return without_faults(corpus)


def _write(tables: Iterator[pa.Table], incomplete: Path, path: Path) -> None:
    """Write tables to a file that is either complete or absent."""
    features = DOCUMENT_FEATURES
    first_table = next(tables, None)
    if first_table is not None and "roles" in first_table.column_names:
        features = CONVERSATION_FEATURES
    with ArrowWriter(path=str(incomplete), features=features) as writer:
        if first_table is None:
            first_table = features.arrow_schema.empty_table()
        writer.write_table(first_table)
        for table in tables:
            writer.write_table(table)
        writer.finalize()
    # The file gets the name that readers look for only when it is complete. After a crash, the next
    # process writes it again from the beginning.
    incomplete.replace(path)


def _text_table(file: Path) -> Iterator[pa.Table]:
    """Make one document of a text file, with line feeds as its line ends."""
    with open_file(file) as stream:
        content = stream.read()
    try:
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        row = {TEXT: [text], FAULT: [None]}
    except UnicodeDecodeError:
        row = {TEXT: [None], FAULT: [f"{file.name}:1: not valid UTF-8"]}
    yield pa.table(row, DOCUMENT_FEATURES.arrow_schema)


def _read_json(file: Path, text_column: str | None, source: str) -> datasets.Dataset:
    """Read the documents or conversations of a JSON file, and cache them."""
    rows = read_rows(file)
    head, columns = _try(lambda: _head(rows), source)
    if not head:
        return _no_rows()
    if not columns:
        number, _, reason = head[0]
        raise ValueError(f"{source}: none of its lines is a JSON object (line {number}: {reason})")
    # The rows of the head were taken from the iterator, so put them back in front.
    return _read_rows(file, chain(head, rows), columns, text_column, source)


def _read_rows(
    file: Path, rows: Iterable[Row], columns: Sequence[str], text_column: str | None, source: str
) -> datasets.Dataset:
    """Read the documents or conversations in the rows of a file, and cache them."""
    names = columns_to_read(columns, text_column, source)
    are_conversations = _are_conversations(columns, text_column)
    tables = _row_tables(file.name, rows, names, are_conversations)
    # The cache's key has the columns that are read and as what, but not the option. So
    # --text_column text and no option share a cache.
    kind = "conversations" if are_conversations else "documents"
    return _cached(file, [kind, *names], tables, source)


def _are_conversations(columns: Sequence[str], text_column: str | None) -> bool:
    """Test whether rows with these columns are read as conversations."""
    return not text_column and bool(conversation_columns(columns))


def _row_tables(
    file_name: str, rows: Iterable[Row], names: Sequence[str], are_conversations: bool
) -> Iterator[pa.Table]:
    """Make tables of documents or conversations from rows, which a reason may replace."""
    features = CONVERSATION_FEATURES if are_conversations else DOCUMENT_FEATURES
    schema = features.arrow_schema
    documents: list[dict[str, Any]] = []
    table_bytes = 0
    for line_number, size, row in rows:
        if isinstance(row, str):
            # A line that is not an object keeps its place, so that document i is line i. A table of
            # documents takes its own columns from a conversation's.
            documents.append(no_conversation(f"{file_name}:{line_number}: {row}"))
        elif are_conversations:
            fields = {name: row.get(name) for name in names}
            documents.append(read_row(fields))
        else:
            text, fault = document_of(row.get(names[0]))
            documents.append({TEXT: text, FAULT: fault})
        table_bytes += size
        if table_bytes > _TABLE_BYTES or len(documents) == _TABLE_ROWS:
            yield _table_of(documents, schema)
            documents = []
            table_bytes = 0
    # The last table may be empty.
    yield _table_of(documents, schema)


def _table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Make a table of the columns of `schema`. Rows may have other columns, too."""
    columns = {}
    for name in schema.names:
        columns[name] = [row[name] for row in rows]
    return pa.table(columns, schema)


def _head(rows: Iterator[Row]) -> tuple[list[Row], list[str]]:
    """Take the first rows of an iterator, and list their columns in order of appearance."""
    head = []
    head_bytes = 0
    columns: list[str] = []
    seen_columns: set[str] = set()
    for line_number, size, row in rows:
        head.append((line_number, size, row))
        if isinstance(row, dict):
            for name in row:
                if name not in seen_columns:
                    seen_columns.add(name)
                    columns.append(name)
        head_bytes += size
        if head_bytes > _HEAD_BYTES:
            break
    return head, columns
