"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

The input is a path or a hub name. The output is a `datasets.Dataset` with one column, `text`, or
with the columns of `vocagnolm.chat.formats` for conversations. A column `skipped` says why a row is
not used. This module knows no tokenizer.
"""

import glob
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
from datasets.utils import tqdm
from huggingface_hub import metadata_load

from vocagnolm.chat.formats import WEIGHT, has_weights
from vocagnolm.conventions import TEXT
from vocagnolm.fields import OptionError, named
from vocagnolm.shell.hub import check_name
from vocagnolm.shell.io import FullDiskError, explain_full_disk
from vocagnolm.texts import (
    BATCH_ROWS,
    FEATURES,
    FIRST_ROWS,
    FORMAT,
    KINDS,
    as_record,
    columns_to_read,
    joined,
    kind_of,
    only_text,
    read_rows,
)

TRAIN = "train"
# `save_to_disk` writes this file into the directory of each split.
_STATE = "state.json"
# Kinds of files that may be mixed in one directory. The first of these groups that occurs is read.
# Files of the other groups are notes and licences next to the data.
_KIND_GROUPS = ({"json", "parquet", "arrow"}, {"csv"}, {"text"})
# A line about a directory names this many files and counts the others.
_MAX_LISTED_FILES = 5


def load_corpus(
    dataset: str,
    *,
    split: str | None = TRAIN,
    text_column: str | None = None,
    config_name: str | None = None,
    option: str = "dataset",
    read: Callable[[Path, str | None], datasets.Dataset | None] | None = None,
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with a column `text`.

    Conversations are recognized by their columns. A `text_column` always means documents, whatever
    other columns there are.

    `dataset` is one of three:

    - a file of JSON lines, JSON, Parquet, Arrow, CSV or text, which may be compressed;
    - a directory, whose splits are those of `datasets.load_dataset` or `save_to_disk`;
    - the name of a dataset on the hub.

    Every `.txt` file is one document. Rows that cannot be used keep their places, and are skipped
    when the corpus is aligned: empty documents, values that are not text, and lines that are not
    JSON.

    Without a `split`, the held-out split of a directory is read, or else `train`.
    `info.description` says which files of a directory are read, and which are not. Otherwise it is
    empty. `read` reads another column of the rows of a file.

    Raises:
        ValueError: the dataset cannot be read, or is damaged as a whole. The message names
            `option`.
    """
    path = _local_path(dataset, option)
    if path is None:
        corpus = _read_hub(dataset, option, name=config_name or None, split=split or TRAIN)
        corpus = only_text(corpus, text_column, dataset)
        corpus.info.description = ""
        return corpus
    all_files = _files_by_split(path, config_name, option)
    instruction = split or _held_out(all_files, path, option)
    files_by_split = {}
    for part in instruction.split("+"):
        name = part.partition("[")[0].strip()
        if name not in all_files:
            splits = f"one of {', '.join(all_files)} as {named('dataset_split')}"
            raise OptionError(option, f"{path} has no split {name}: give {splits}, or give files")
        files_by_split[name] = all_files[name]
    by_split = {}
    for name, files in files_by_split.items():
        corpora = []
        # Read each file by itself, because formats and unused columns may differ between files.
        for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
            with _in_one_line(option, file):
                corpus = (read or _read_file)(file, text_column)
            if corpus is not None:
                corpora.append(corpus)
        if not corpora:
            raise OptionError(option, f"{path} cannot be read: it holds no documents")
        by_split[name] = joined(corpora, option)
    corpus = joined(_select_parts(by_split, instruction), option)
    corpus.info.description = _describe_files(path, files_by_split) if path.is_dir() else ""
    return corpus


def load_values(
    dataset: str, column: str | None, option: str = "", **options: Any
) -> list[str | None]:
    """Load another column of the rows of `load_corpus` with the same options, in its order.

    Values that are not texts become JSON. A row that is not read or lacks the column has None.
    Without a column, a row has the name of its file, or for a `.txt` file that of its directory.

    Raises:
        OptionError: no row has a value in the column, which `option` names.
    """
    path = _local_path(dataset, "dataset")
    if path is None:
        name = options["config_name"] or None
        corpus = _read_hub(dataset, "dataset", name=name, split=options["split"])
        if column is None:
            return [dataset] * len(corpus)
        return _as_texts(corpus.select_columns(column)[column])
    # Files of a directory are below the resolved path.
    root = path.resolve() if path.is_dir() else path.parent
    read = partial(_read_values, column=column, root=root)
    values = list(load_corpus(dataset, **options, read=read)[TEXT])
    if column is not None and set(values) == {None}:
        raise OptionError(option, f"{column}: no row of {dataset} has a value there")
    return values


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = TRAIN,
    text_column: str | None = None,
    config_name: str | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns the documents as `load_corpus` does, and the number of all documents, or None if it is
    unknown.
    """
    if _local_path(dataset, "dataset"):
        corpus = load_corpus(dataset, split=split, text_column=text_column, config_name=config_name)
        sample = corpus.select(range(min(count, len(corpus))))
        return sample, len(corpus)
    stream = _read_hub(dataset, "dataset", name=config_name or None, split=split, streaming=True)
    sample = read_list(list(stream.take(count)), text_column, dataset)
    # The card of a dataset may not say how many rows its splits have.
    split_info = (stream.info.splits or {}).get(split)
    total = split_info.num_examples if split_info else None
    return sample, total


def read_list(
    rows: Sequence[Mapping[str, Any]], text_column: str | None, source: str
) -> datasets.Dataset:
    """Read the documents or conversations of a list of rows, as those of a JSON file are read.

    Rows may have different columns, and values of any type. The dataset is in memory.

    Raises:
        ValueError: no row has a column to read. The message names `source`.
    """
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    weighted = any(map(has_weights, rows))
    names, turns = columns_to_read(list(columns), text_column, source, weighted)
    records = [as_record(row, names, turns) for row in rows]
    return datasets.Dataset.from_list(records, FEATURES[turns, WEIGHT in names])


def _describe_files(directory: Path, files_by_split: Mapping[str, Sequence[Path]]) -> str:
    """Say which files of a directory are read, and which are not."""
    read: set[Path] = set()
    for files in files_by_split.values():
        read.update(file for file in files if not _is_empty(file))
    left_out = []
    root = directory.resolve()
    for file in sorted(root.rglob("*")):
        relative = file.relative_to(root)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        is_read = not read.isdisjoint([file, *file.parents])
        if file.is_file() and not is_hidden and not is_read and file.name != "README.md":
            left_out.append(f"{relative} (empty)" if _is_empty(file) else str(relative))
    plural = "" if len(read) == 1 else "s"
    description = f"read {len(read):,} file{plural} of {' and '.join(files_by_split)}"
    if left_out:
        description += f"; left out: {', '.join(left_out[:_MAX_LISTED_FILES])}"
    if len(left_out) > _MAX_LISTED_FILES:
        description += f" and {len(left_out) - _MAX_LISTED_FILES:,} more"
    return description


def _local_path(dataset: str, option: str) -> Path | None:
    """Return the path of a local dataset, or None for a dataset of the hub."""
    # An unset variable of a shell would stand for the current directory.
    if not dataset:
        raise OptionError(option, "is empty: give a file, a directory or a hub name")
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    # A name that ends in .jsonl or similar means a file, so the hub is not asked.
    if kind_of(path):
        raise OptionError(option, f"{dataset}: no such file or directory")
    check_name(option, dataset, "dataset")
    return None


# -- Splits ----------------------------------------------------------------------------------------


def _files_by_split(path: Path, config_name: str | None, option: str) -> dict[str, list[Path]]:
    """Return the files of a path by split. A directory of `save_to_disk` stands for its files."""
    # The library resolves links to the directory, too.
    root = path.resolve()
    splits = {}
    if path.is_file():
        if config_name:
            raise OptionError("dataset_config", f"{config_name}: {path} is a file, which has none")
        if kind_of(path):
            splits[TRAIN] = [path]
    elif (root / _STATE).is_file():
        splits[TRAIN] = [root]
    elif (root / "dataset_dict.json").is_file():
        for state in sorted(root.glob(f"*/{_STATE}")):
            splits[state.parent.name] = [state.parent]
    else:
        with _in_one_line(option, root):
            data_files = _data_files(root, config_name)
        for split, names in data_files.items():
            files = _one_kind(sorted(set(map(Path, names))))
            # A directory that is part of a dataset may lack some of its splits.
            if files:
                splits[str(split)] = files
    if not splits:
        kinds = ", ".join(KINDS)
        raise OptionError(option, f"{path}: expected files ending in {kinds} (also compressed)")
    return splits


def _data_files(path: Path, config_name: str | None) -> Mapping[str, Sequence[str]]:
    """Ask `datasets` which files each split of a directory has."""
    readme = path / "README.md"
    card = metadata_load(readme) if readme.is_file() else None
    if config_name or "configs" in (card or {}):
        builder = datasets.load_dataset_builder(str(path), name=config_name)
    else:
        # By the path alone, the library would choose the kind that most files have, which may be
        # two licences next to a file of data. By the name of a kind, it returns files of all kinds.
        builder = datasets.load_dataset_builder("json", data_dir=glob.escape(str(path)))
    return builder.config.data_files  # type: ignore[no-any-return]


def _one_kind(files: Sequence[Path]) -> list[Path]:
    """Keep the files of the first group of kinds that occurs: data before tables before texts."""
    for kinds in _KIND_GROUPS:
        data_files = [file for file in files if kind_of(file) in kinds and file.name != _STATE]
        if data_files:
            return data_files
    return []


def _held_out(files: Mapping[str, object], path: Path, option: str) -> str:
    """Return the split to evaluate on: the one that is not called train, if there is one."""
    held_out = [name for name in files if name != TRAIN]
    if len(held_out) > 1:
        raise OptionError(
            option,
            f"{path} has several splits to evaluate on ({', '.join(held_out)}): give one file, or "
            "a directory with the files of one split",
        )
    return held_out[0] if held_out else TRAIN


def _select_parts(
    by_split: Mapping[str, datasets.Dataset], instruction: str
) -> list[datasets.Dataset]:
    """Select what an instruction such as `train[:10%]+test` names, in its order."""
    sizes = {name: len(corpus) for name, corpus in by_split.items()}
    with _in_one_line("dataset_split", instruction):
        parts = datasets.ReadInstruction.from_spec(instruction).to_absolute(sizes)
    corpora = []
    for part in parts:
        corpus = by_split[part.splitname]
        corpora.append(corpus.select(range(len(corpus))[part.from_ : part.to]))
    return corpora


# -- Files -----------------------------------------------------------------------------------------


def _is_empty(file: Path) -> bool:
    """Test for a file without bytes. An empty text file is a document, and is skipped later."""
    return file.stat().st_size == 0 and kind_of(file) != "text"


def _read_file(file: Path, text_column: str | None) -> datasets.Dataset | None:
    """Read a file, or a directory of `save_to_disk`. None stands for one without rows."""
    if _is_table(file):
        table = _read_table(file, text_column)
        if table is None:
            return None
        return only_text(table, text_column, str(file))
    if _is_empty(file):
        return None
    return _read_rows(file, text_column)


def _is_table(file: Path) -> bool:
    """Test for files that are not read row by row."""
    return file.is_dir() or kind_of(file) in ("parquet", "arrow")


def _read_table(file: Path, text_column: str | None, column: str | None = None) -> Any:
    """Read the columns of a table, or `column` if it has that. None stands for one without rows."""
    # Escape the path, because `datasets` treats it as a pattern, and names may contain [ or *.
    pattern = glob.escape(str(file))
    if file.is_dir():
        return datasets.load_from_disk(str(file))
    if _is_empty(file):
        return None
    if kind_of(file) == "arrow":
        return datasets.load_dataset("arrow", data_files=pattern, split=TRAIN)
    metadata = pq.read_metadata(file)
    if not metadata.num_rows:
        return None
    names = metadata.schema.to_arrow_schema().names
    columns, _ = columns_to_read(names, text_column, str(file))
    if column is not None and column in names:
        columns = [column]
    # By default, as many rows are read at once as the first group of rows has.
    limits = {"columns": columns, "batch_size": BATCH_ROWS}
    return datasets.load_dataset("parquet", data_files=pattern, split=TRAIN, **limits)


def _read_values(file: Path, text_column: str | None, column: str | None, root: Path) -> Any:
    """Read a column of the rows that `_read_file` reads, or the name of the file for each."""
    values: Any
    if column is None:
        source = file.parent if kind_of(file) == "text" else file
        values = [os.path.relpath(source, root)] * len(_read_file(file, text_column) or [])
    elif _is_table(file):
        table = _read_table(file, text_column, column)
        values = [None] * len(table or [])
        if table is not None and column in table.column_names:
            values = table.with_format(None).select_columns(column)[column]
    else:
        values = []
        for row in read_rows(file):
            # A row that is a text is the reason why it is skipped.
            values.append(None if isinstance(row, str) else row.get(column))
    features = datasets.Features({TEXT: datasets.Value("string")})
    return datasets.Dataset.from_dict({TEXT: _as_texts(values)}, features)


def _as_texts(values: Iterable[Any]) -> list[str | None]:
    """Write values that are not texts as JSON."""
    texts = []
    for value in values:
        is_text = value is None or isinstance(value, str)
        texts.append(value if is_text else json.dumps(value, default=str))
    return texts


def _read_rows(file: Path, text_column: str | None) -> datasets.Dataset | None:
    """Read the documents or conversations in the rows of a file, and cache them."""
    columns: dict[str, None] = {}
    reason = None
    weighted = False
    for row in islice(read_rows(file), FIRST_ROWS):
        if isinstance(row, str):
            reason = row
        else:
            columns.update(dict.fromkeys(row))
            weighted |= has_weights(row)
    if not columns:
        if reason is None:
            return None
        raise ValueError(reason)
    names, turns = columns_to_read(list(columns), text_column, str(file), weighted)
    # A file with the same path, size and time counts as unchanged, because hashing terabytes takes
    # hours. The same columns may be read as documents or conversations.
    status = file.stat()
    key = (str(file.absolute()), status.st_size, status.st_mtime_ns, names, turns, FORMAT)
    fingerprint = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    return datasets.Dataset.from_generator(
        _records,
        features=FEATURES[turns, WEIGHT in names],
        # Lists would stand for shards.
        gen_kwargs={"file": file, "names": tuple(names), "turns": turns},
        fingerprint=fingerprint,
        writer_batch_size=BATCH_ROWS,
    )


def _records(file: Path, names: Sequence[str], turns: bool) -> Iterator[dict[str, Any]]:
    """Yield the record of each row. One that is skipped keeps its place."""
    for row in read_rows(file):
        yield as_record(row, names, turns)


def _read_hub(dataset: str, option: str, **options: object) -> Any:
    """Read a dataset from the hub."""
    with _in_one_line(option, f"{dataset}, a hub dataset because no such file is here,"):
        corpus = datasets.load_dataset(dataset, **options)
    return corpus


@contextmanager
def _in_one_line(option: str, name: str | Path) -> Iterator[None]:
    """Reduce what a library raises to one line with the option, the name and the reason."""
    # The library also logs its errors, in several lines.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        with explain_full_disk(cache, lambda: "Set HF_DATASETS_CACHE to another disk"):
            yield
    except (FullDiskError, OptionError):
        raise
    # A broken file can raise anything, and decompression errors are not wrapped.
    except Exception as error:
        # The library wraps the error that has the helpful message.
        reason = " ".join(str(error.__cause__ or error).split())
        raise OptionError(option, f"{name} cannot be read ({reason})") from error
