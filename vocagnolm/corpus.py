"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Enters: a path or a hub name. Leaves: a `datasets.Dataset` with one column, `text`. Knows no
tokenizer.
"""

from __future__ import annotations

import logging
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

TEXT = "text"
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def load_corpus(
    dataset: str,
    *,
    split: str = "train",
    text_column: str = TEXT,
    config_name: str | None = None,
    limit: int | None = None,
) -> datasets.Dataset:
    """Load the documents of `dataset` in a stable order.

    Args:
        dataset: a file (`.jsonl`, `.json`, `.parquet`, `.txt`; each may be compressed), a directory
            that holds such files at any depth, or the name of a dataset on the hub. Every `.txt`
            file is one document.
        split: split of a hub dataset; local files have only `train`.
        text_column: the column that holds the text.
        config_name: configuration of a hub dataset.
        limit: read only about the first so many documents of a hub dataset.

    Returns:
        A dataset whose only column is `text`. Values are not checked here: a document that is
        empty or not text is skipped, with its reason, when it is aligned.

    Raises:
        ValueError: the path does not exist, holds no or mixed formats, cannot be read, or has no
            such split or column. The message is one line and says what to do.
    """
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # its errors come back as one line
    path = Path(dataset).expanduser()
    if path.exists():
        corpus = _load_local(path, split)
    elif path.is_absolute() or dataset.startswith((".", "~")) or _format(path) is not None:
        raise ValueError(f"--dataset {dataset}: no such file or directory")
    else:
        corpus = _load_hub(dataset, config_name, split, limit)
    if text_column not in corpus.column_names:
        raise ValueError(
            f"--text_column {text_column!r} is not a column of {dataset}; "
            f"its columns are {', '.join(corpus.column_names)}"
        )
    corpus = corpus.select_columns([text_column])
    return corpus if text_column == TEXT else corpus.rename_column(text_column, TEXT)


def _format(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes = suffixes[:-1]
    return _BUILDERS.get(suffixes[-1]) if suffixes else None


def _load_local(path: Path, split: str) -> datasets.Dataset:
    if split != "train":
        raise ValueError(
            f"--dataset_split {split}: local files have only the split train, "
            "give the files of one split to --dataset"
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _format(p))
    known = ", ".join(_BUILDERS)
    if not files or not _format(files[0]):
        raise ValueError(f"--dataset {path}: expected files ending in {known} (also compressed)")
    formats = sorted({_format(file) or "" for file in files})
    if len(formats) > 1:
        raise ValueError(
            f"--dataset {path}: holds several formats ({', '.join(formats)}); "
            "give a directory with one of them"
        )
    options = {"sample_by": "document"} if formats == ["text"] else {}
    return _load(str(path), formats[0], data_files=[str(file) for file in files], **options)


def _load_hub(
    name: str, config_name: str | None, split: str, limit: int | None
) -> datasets.Dataset:
    shown = f"{name} (no file or directory here, so a hub dataset)"
    if limit is None:
        return _load(shown, name, name=config_name, split=split)
    # A look at a corpus of terabytes must not download it.
    stream = _load(shown, name, name=config_name, split=split, streaming=True)
    return datasets.Dataset.from_list(list(stream.take(limit)))


def _load(shown: str, builder: str, split: str = "train", **options: object) -> datasets.Dataset:
    try:
        return datasets.load_dataset(builder, split=split, **options)
    except (DatasetsError, OSError, ValueError) as error:
        # The library wraps what went wrong; its cause is what helps the user.
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--dataset {shown} cannot be read: {reason[0]}") from error
