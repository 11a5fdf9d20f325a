"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Input: a path or a hub name. Output: a `datasets.Dataset` with one column, `text`; conversations
have the columns of `vocagnolm.chat.formats` beside it. Knows no tokenizer.
"""

import glob
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.utils import tqdm

from vocagnolm.chat.formats import COLUMNS, Conversation, read_row
from vocagnolm.chat.render import Template
from vocagnolm.conventions import TEXT
from vocagnolm.hub import check_name

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def load_corpus(
    dataset: str,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with one column, `text`.

    Conversations, which are known by their columns, have more. A `text_column` that is given holds
    documents, whatever columns there are beside it.

    `dataset` is a file (`.jsonl`, `.json`, `.parquet`, `.txt`; each may be compressed), a directory
    that holds such files at any depth, or the name of a dataset on the hub. Every `.txt` file is
    one document. Values are not checked here: a document that is empty or not text is skipped, with
    its reason, when it is aligned. What cannot be read is a ValueError that names `option`.
    """
    path = _local_path(dataset, option)
    if path is None:
        corpus = _read_hub(dataset, option, name=config_name or None, split=split)
        return only_text(corpus, text_column, dataset)
    if config_name or split != "train":
        raise ValueError(f"{option} {path}: files have no configuration, and one split, train")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if _builder(file)]
    if not files:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"{option} {path}: expected files ending in {known} (also compressed)")
    corpora = []
    # One by one, since their formats and other columns may differ.
    for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
        builder = _builder(file)
        options = {"sample_by": "document"} if builder == "text" else {}
        # Escaped, since file names count as patterns.
        name = glob.escape(str(file))
        raw = _read(builder, f"{option} {file}", data_files=name, split="train", **options)
        corpora.append(only_text(raw, text_column, str(file)))
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        raise ValueError(
            f"{option} {path}: holds conversations and documents: give one directory for each"
        )
    return joined(corpora, [file.name for file in files], f"{option} {path}")


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


def _local_path(dataset: str, option: str) -> Path | None:
    """Return the path that a name is here, None for one that the hub is to be asked for."""
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    if _builder(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    check_name(option, dataset, "dataset")
    return None


def _builder(path: Path) -> str:
    """Name the builder that reads a file, "" for none."""
    if path.suffix in _COMPRESSIONS:
        path = path.with_suffix("")
    return _BUILDERS.get(path.suffix, "")


def _read_hub(dataset: str, option: str, **options: object) -> datasets.Dataset:
    shown = f"{option} {dataset} (no file or directory here, so a hub dataset)"
    return _read(dataset, shown, **options)


def _read(builder: str, shown: str, **options: Any) -> datasets.Dataset:
    # Its errors come back as one line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(builder, **options)
    # A broken file can raise anything: what decompression raises comes as it is.
    except Exception as error:
        # The library wraps the error whose message helps the user.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            reason = "it holds no documents, or is cut off"
        raise ValueError(f"{shown} cannot be read: {reason}") from error


def joined(
    corpora: Sequence[datasets.Dataset], names: Sequence[str], shown: str = "--dataset"
) -> datasets.Dataset:
    """Concatenate corpora, if their texts have one type; of a mix with conversations, the texts."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    types = {str(corpus.features[TEXT]): name for corpus, name in zip(corpora, names, strict=True)}
    if len(types) > 1:
        found = ", ".join(f"{kind} in {name}" for kind, name in types.items())
        raise ValueError(f"{shown}: the texts have several types ({found}): make them text")
    return datasets.concatenate_datasets(list(corpora))


def only_text(corpus: datasets.Dataset, text_column: str | None, shown: str) -> datasets.Dataset:
    """Keep the column of documents, or read conversations, if no column is given.

    A ValueError that names the dataset as `shown` where there is neither.
    """
    columns = corpus.column_names
    if text_column is None and ("messages" in columns or {"prompt", "completion"} <= {*columns}):
        return _as_conversations(corpus)
    text_column = text_column or TEXT
    if text_column not in columns:
        raise ValueError(
            f"--text_column {text_column!r} is not a column of {shown}; its columns are "
            f"{', '.join(columns)}"
        )
    corpus = corpus.select_columns([text_column])
    return corpus if text_column == TEXT else corpus.rename_column(text_column, TEXT)


def column_values(column: pa.ChunkedArray | list[Any]) -> list[Any]:
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


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus holds conversations, not documents."""
    return "roles" in corpus.column_names


def _as_conversations(corpus: datasets.Dataset) -> datasets.Dataset:
    """Replace all columns by those of `formats.read_row`."""
    texts, places = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    kinds = (texts, datasets.List(texts), places, places, texts, texts)
    columns = dict(zip(COLUMNS, kinds, strict=True))
    named = f"{corpus._fingerprint}|{[*columns]}"
    return corpus.map(
        read_row,
        remove_columns=corpus.column_names,
        features=datasets.Features(columns),
        new_fingerprint=hashlib.sha256(named.encode()).hexdigest()[:32],
        desc="Reading conversations",
    )


def conversations_of(
    batch: Mapping[str, Any], documents: Sequence[int]
) -> tuple[dict[int, Conversation], dict[int, str]]:
    """Return the conversations of a batch by index, and the reasons why others are none."""
    found: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    columns = (column_values(batch[name]) for name in COLUMNS)
    for index, text, roles, ends, untrained, given, fault in zip(documents, *columns, strict=True):
        if fault is not None:
            faults[index] = fault
        else:
            found[index] = Conversation(text, tuple(roles), tuple(ends), tuple(untrained), given)
    return found, faults


def read_texts(
    corpus: datasets.Dataset, indices: range, template: Template | None = None
) -> Iterator[tuple[int, str]]:
    """Read usable documents with their indices; conversations are rendered by the template."""
    for at in range(0, len(indices), 1000):
        part = indices[at : at + 1000]
        columns = corpus.with_format("arrow")[part.start : part.stop]
        if template is None:
            for index, text in zip(part, column_values(columns[TEXT]), strict=True):
                if not unusable(text):
                    yield index, text
        else:
            conversations, _ = conversations_of(columns, part)
            for index, one in conversations.items():
                rendered = template.render(one)
                if not isinstance(rendered, str):
                    yield index, rendered.text
