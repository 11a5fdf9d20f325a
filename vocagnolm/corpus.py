"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Enters: a path or a hub name. Leaves: a `datasets.Dataset` with one column, `text`; conversations
have the columns of `vocagnolm.chat.formats` beside it. Knows no tokenizer.
"""

import glob
import hashlib
import logging
import lzma
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import zstandard
from datasets.exceptions import DatasetsError
from datasets.utils import tqdm

from vocagnolm.chat import formats

TEXT = "text"
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_HUB = "{} {} (no file or directory here, so a hub dataset)"
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Raised by `datasets` on bad data; StopIteration on a file without documents.
_LIBRARY_ERRORS = (DatasetsError, OSError, ValueError, TypeError, StopIteration)
# These pass through it; only a bad .bz2 or a .gz with a bad checksum is an OSError.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def load_corpus(
    dataset: str,
    *,
    split: str = "train",
    text_column: str = TEXT,
    config_name: str | None = None,
    format: formats.Format | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with one column, `text`.

    Conversations, which are known by their columns, or given as the `format`, have more columns.

    `dataset` is a file (`.jsonl`, `.json`, `.parquet`, `.txt`; each may be compressed), a directory
    that holds such files at any depth, or the name of a dataset on the hub. Every `.txt` file is
    one document. Values are not checked here: a document that is empty or not text is skipped, with
    its reason, when it is aligned. Whatever cannot be read is a ValueError of one line that says
    what to do, and names the dataset by `option`.
    """
    # Its errors come back as one line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    path = Path(dataset).expanduser()
    if _is_local(path, dataset, option):
        return _load_local(path, split, text_column, format, option)
    corpus = _load(dataset, _HUB.format(option, dataset), split, name=config_name)
    return only_text(corpus, text_column, format, dataset)


def load_corpora(sources: Sequence[tuple[str, Mapping[str, Any]]]) -> datasets.Dataset:
    """Load several corpora with the options of each, one behind the other."""
    loaded = [load_corpus(name, **options) for name, options in sources]
    if len({is_conversations(corpus) for corpus in loaded}) > 1:
        raise ValueError("--dataset: a store is of documents or of conversations: score them apart")
    return joined(loaded, [name for name, _ in sources])


def joined(corpora: Sequence[datasets.Dataset], names: Sequence[str]) -> datasets.Dataset:
    """Put corpora one behind the other, if their columns have one type.

    Of documents and conversations only the texts are kept.
    """
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    try:
        return datasets.concatenate_datasets(list(corpora))
    except ValueError as error:
        kinds = zip(names, corpora, strict=True)
        shown = ", ".join(f"{corpus.features[TEXT]} in {name}" for name, corpus in kinds)
        raise ValueError(
            f"--dataset: the texts have several types ({shown}): make them alike"
        ) from error


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = "train",
    text_column: str = TEXT,
    config_name: str | None = None,
    format: formats.Format | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns them as `load_corpus` does, with the number of all, None if it is not known.
    """
    if _is_local(Path(dataset).expanduser(), dataset, "--dataset"):
        corpus = load_corpus(dataset, split=split, text_column=text_column, format=format)
        return corpus.select(range(min(count, len(corpus)))), len(corpus)
    shown = _HUB.format("--dataset", dataset)
    stream = _load(dataset, shown, split, name=config_name, streaming=True)
    corpus = datasets.Dataset.from_list(list(stream.take(count)))
    info = (stream.info.splits or {}).get(split)
    corpus = only_text(corpus, text_column, format, dataset)
    return corpus, info.num_examples if info else None


def _is_local(path: Path, dataset: str, option: str) -> bool:
    """Test whether a name exists here; the hub is asked for any other that is no path."""
    if path.exists():
        return True
    if path.is_absolute() or dataset.startswith((".", "~")) or _format(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    return False


def _format(path: Path) -> str:
    """Name the builder that reads a file, "" for none."""
    suffixes = ["", *path.suffixes]
    if suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return _BUILDERS.get(suffixes[-1], "")


def _load_local(
    path: Path, split: str, text_column: str, format: formats.Format | None, option: str
) -> datasets.Dataset:
    if split != "train":
        raise ValueError(
            f"--dataset_split {split}: local files have only the split train, "
            f"give the files of one split to {option}"
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if _format(file)]
    # The library reads one format at a time.
    kinds = sorted({_format(file) for file in files})
    if not kinds:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"{option} {path}: expected files ending in {known} (also compressed)")
    if len(kinds) > 1:
        raise ValueError(
            f"{option} {path}: holds several formats ({', '.join(kinds)}); "
            "give a directory with one of them"
        )
    options = {"sample_by": "document"} if kinds == ["text"] else {}
    # One by one, since their other columns may differ; escaped, since file names count as patterns.
    corpora = []
    for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
        name = [glob.escape(str(file))]
        corpus = _load(kinds[0], f"{option} {file}", "train", data_files=name, **options)
        corpora.append(only_text(corpus, text_column, format, str(file)))
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        found = (
            f.name for f, corpus in zip(files, corpora, strict=True) if is_conversations(corpus)
        )
        raise ValueError(
            f"{option} {path}: holds conversations ({', '.join(found)}) and documents: give one "
            "directory for each kind"
        )
    try:
        return datasets.concatenate_datasets(corpora)
    except ValueError as error:
        pairs = zip(corpora, files, strict=True)
        types = {str(corpus.features[TEXT]): file.name for corpus, file in pairs}
        shown = ", ".join(f"{kind} in {name}" for kind, name in types.items())
        raise ValueError(
            f"{option} {path}: column {text_column!r} has several types ({shown}): "
            "make it text everywhere"
        ) from error


def _load(builder: str, shown: str, split: str, **options: object) -> datasets.Dataset:
    try:
        return datasets.load_dataset(builder, split=split, **options)
    except (*_LIBRARY_ERRORS, *_DECOMPRESSION_ERRORS) as error:
        # The library wraps the error whose message helps the user.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            compressed = shown.endswith(_COMPRESSIONS)
            reason = "it is empty or cut off" if compressed else "it holds no documents"
        raise ValueError(f"{shown} cannot be read: {reason}") from error


def only_text(
    corpus: datasets.Dataset, text_column: str, format: formats.Format | None, shown: str
) -> datasets.Dataset:
    """Keep the column of documents, or read those of conversations; `shown` names it in errors."""
    names = {text_column, "messages", "prompt", "completion"} & {*corpus.column_names}
    if len(names) > 1:
        table = corpus.with_format("arrow")
        held = {name: table[name][:].is_valid().to_pylist() for name in names}
        formats.check_unmixed(held, text_column, shown)
    format = formats.find_format(corpus.column_names, format, text_column, shown)
    if format != "text":
        return _conversations(corpus, format)
    corpus = corpus.select_columns([text_column])
    return corpus if text_column == TEXT else corpus.rename_column(text_column, TEXT)


def _conversations(corpus: datasets.Dataset, format: formats.Format) -> datasets.Dataset:
    texts, places = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    kinds = (texts, datasets.List(texts), places, places, texts, texts)
    columns = dict(zip((TEXT, *formats.COLUMNS), kinds, strict=True))
    named = f"{corpus._fingerprint}|{format}|{[*columns]}"
    return corpus.map(
        partial(_read_rows, format=format),
        batched=True,
        remove_columns=corpus.column_names,
        features=datasets.Features(columns),
        new_fingerprint=hashlib.sha256(named.encode()).hexdigest()[:32],
        desc="Reading conversations",
    )


def _read_rows(batch: Mapping[str, list[Any]], format: formats.Format) -> dict[str, list[Any]]:
    rows = (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))
    return formats.read_rows(rows, format)


def conversations_of(
    batch: Mapping[str, Any], numbers: Sequence[int]
) -> tuple[dict[int, formats.Conversation], dict[int, str]]:
    """Return the conversations of a batch by their numbers, and the reasons why others are none."""
    found: dict[int, formats.Conversation] = {}
    faults: dict[int, str] = {}
    columns = (values(batch[name]) for name in (TEXT, *formats.COLUMNS))
    for number, text, roles, ends, untrained, given, fault in zip(numbers, *columns, strict=True):
        if fault is not None:
            faults[number] = fault
        else:
            places = tuple(ends), tuple(untrained)
            found[number] = formats.Conversation(text, tuple(roles), *places, given)
    return found, faults


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Tell a corpus of conversations from one of documents."""
    return formats.ROLES in corpus.column_names


def values(column: pa.ChunkedArray | list[Any]) -> list[Any]:
    """Return the values of a column; bytes where text is not valid UTF-8."""
    if isinstance(column, list):
        return column
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decode(value) for value in column.cast(pa.binary()).to_pylist()]


def _decode(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def unusable(text: object) -> str | None:
    """Return the reason why a value of the column is no document; None if it is one."""
    if isinstance(text, bytes):
        return "not valid UTF-8"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    return None if text.strip() else "empty"
