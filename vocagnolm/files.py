"""Which files of a directory hold the documents of a split, as `datasets.load_dataset` has it.

Input: a path. Output: the files to read, in a stable order, and a line about those that are not.
Opens no file of documents.
"""

import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from datasets.data_files import (
    FILES_TO_IGNORE,
    _get_data_files_patterns,
    resolve_pattern,
    sanitize_patterns,
)
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCardData, metadata_load

TRAIN = "train"
# How files are read, by how their names end, before the ending of a compression.
_KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
# Formats that are read together. A directory is read in the first of these that it has: the others
# are notes and licences next to its data.
_TOGETHER = ({"json", "parquet", "arrow"}, {"csv"}, {"text"})
# The most names in the line about files.
_MOST_NAMES = 5


def kind_of(path: Path) -> str:
    """Name how a file is read, "" for none."""
    if path.suffix.lower() in _COMPRESSIONS:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix.lower(), "")


@dataclass(frozen=True)
class Files:
    """The files of the splits that are asked for, and those that are not read.

    Attributes:
        by_split: the files to read.
        others: the files of the other splits.
        left_out: files of no split, or of no format that is read.
        empty: files of these splits that have no byte.
    """

    root: Path
    by_split: dict[str, list[Path]]
    others: dict[str, list[Path]]
    left_out: list[Path]
    empty: list[Path]

    def describe(self) -> str:
        """Say what is read, and what is not; nothing for one file."""
        if self.root.is_file():
            return ""
        count = sum(len(files) for files in self.by_split.values())
        parts = [f"read {count:,} file{'s' * (count != 1)}"]
        if list(self.by_split) != [TRAIN]:
            parts[0] += f" of {' and '.join(self.by_split)}"
        left_out = []
        if self.left_out:
            left_out.append(_listing(self.left_out, self.root))
        for split, files in self.others.items():
            left_out.append(f"{split} split: {_listing(files, self.root)}")
        if left_out:
            parts.append(f"left out: {', '.join(left_out)}")
        if self.empty:
            parts.append(f"empty: {_listing(self.empty, self.root)}")
        return "; ".join(parts)


def _listing(files: Sequence[Path], root: Path) -> str:
    names = [os.path.relpath(file, root) for file in files]
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def splits_of(split: str) -> list[str]:
    """Return the names in a split as `datasets` writes it.

    >>> splits_of("train[:10%]+validation")
    ['train', 'validation']
    """
    return list(dict.fromkeys(part.partition("[")[0].strip() for part in split.split("+")))


def find_files(
    path: Path, split: str | None, config_name: str | None = None, option: str = "--dataset"
) -> Files:
    """Find the files of a split, or of several; without one, of that which is held out.

    A file is a split by itself. Raises a ValueError, which names `option`, where there is none.
    """
    if path.is_file():
        if config_name or splits_of(split or TRAIN) != [TRAIN]:
            raise ValueError(f"{option} {path}: files have no configuration, and one split, train")
        if not kind_of(path):
            raise ValueError(_no_documents(path, option))
        return Files(path, {TRAIN: [path]}, {}, [], [])
    visible = _visible_files(path)
    saved = _saved_splits(path)
    if saved is not None and config_name:
        raise ValueError(f"{option} {path}: a directory of save_to_disk has no configuration")
    splits = _splits_in(path, visible, config_name, option) if saved is None else saved
    if not splits:
        raise ValueError(_no_documents(path, option))
    # What save_to_disk wrote next to its files is not a document.
    left_out = []
    if saved is None:
        in_splits = {file for files in splits.values() for file in files}
        left_out = [file for file in visible if file not in in_splits]
    names = _splits_to_read(splits, left_out, split, path, option)
    by_split = {}
    empty = []
    for name in names:
        # An empty text is a document, which is skipped by its index.
        empty += [file for file in splits[name] if _is_empty(file)]
        by_split[name] = [file for file in splits[name] if not _is_empty(file)]
    if not any(by_split.values()):
        raise ValueError(f"{option} {path}: all files are empty: {_listing(empty, path)}")
    others = {name: files for name, files in splits.items() if name not in names}
    return Files(path, by_split, others, left_out, empty)


def _no_documents(path: Path, option: str) -> str:
    return f"{option} {path}: expected files ending in {', '.join(_KINDS)} (also compressed)"


def _is_empty(file: Path) -> bool:
    return kind_of(file) != "text" and file.stat().st_size == 0


def _splits_to_read(
    splits: dict[str, list[Path]],
    left_out: Sequence[Path],
    split: str | None,
    path: Path,
    option: str,
) -> list[str]:
    """Return the names of the splits to read, of those that are there."""
    if split is None:
        held_out = [name for name in splits if name != TRAIN]
        if len(held_out) > 1:
            raise ValueError(
                f"{option} {path} has several splits to evaluate on ({', '.join(held_out)}): give "
                "the file, or a directory of the files, of one"
            )
        return held_out or [TRAIN]
    names = splits_of(split)
    if names == ["all"]:
        return list(splits)
    for name in names:
        if name not in splits:
            choices = [f"{key} ({_listing(files, path)})" for key, files in splits.items()]
            in_no_split = [file for file in left_out if kind_of(file)]
            note = f"; in no split: {_listing(in_no_split, path)}" if in_no_split else ""
            raise ValueError(
                f"{option} {path} has no split {name}; its splits are {', '.join(choices)}{note}: "
                "give one by --dataset_split, or give files"
            )
    return names


def _visible_files(path: Path) -> list[Path]:
    """List all files that may be meant, in the order of their sorted paths; links to directories.

    Of hidden files only those that look like documents are listed: they are named, and not read.
    """
    files = []
    for file in sorted(path.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if file.name in FILES_TO_IGNORE or file.name in ("state.json", ".gitattributes"):
            continue
        relative = file.relative_to(path)
        is_document = kind_of(file) and ".git" not in relative.parts
        if is_document or not _is_hidden(relative):
            files.append(file)
    return files


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


def _saved_splits(path: Path) -> dict[str, list[Path]] | None:
    """Return the files by split of what `save_to_disk` wrote, None for any other directory."""
    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        saved = {name: _saved_splits(path / name) for name in names}
        return {name: files[TRAIN] for name, files in saved.items() if files}
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return {TRAIN: [path / entry["filename"] for entry in state["_data_files"]]}
    return None


def _splits_in(
    path: Path, visible: Sequence[Path], config_name: str | None, option: str
) -> dict[str, list[Path]]:
    """Return the files by split, as README's `configs` or else the files' names say."""
    config = _config_of(path, config_name, option)
    base = path / str(config.get("data_dir") or "")
    data_files = config.get("data_files")
    candidates = _candidates(path, base, visible, is_named=data_files is not None)
    if not candidates:
        return {}
    by_name = {os.path.abspath(file): file for file in candidates}
    # Escaped, since names count as patterns.
    root = glob.escape(os.path.abspath(base))

    @cache
    def resolve(pattern: str) -> list[Path]:
        """Return the candidates that a pattern matches."""
        try:
            names = resolve_pattern(pattern, root)
        except FileNotFoundError:
            return []
        return [by_name[name] for name in names if name in by_name]

    def names_of(pattern: str) -> list[str]:
        if not resolve(pattern):
            raise FileNotFoundError(pattern)
        return [str(file) for file in resolve(pattern)]

    try:
        if data_files is None:
            patterns = _get_data_files_patterns(names_of)
        else:
            patterns = sanitize_patterns(data_files)
    except ValueError as error:
        raise ValueError(f"{option} {path}: {' '.join(str(error).split())}") from error
    splits = _matching(patterns, resolve)
    if not splits:
        raise ValueError(
            f"{option} {path}: its README.md names files ({data_files}) that are not there"
        )
    return splits


def _matching(
    patterns: Mapping[Any, Sequence[str]], resolve: Callable[[str], list[Path]]
) -> dict[str, list[Path]]:
    """Return the files that the patterns of each split match."""
    splits = {}
    for split, split_patterns in patterns.items():
        matches = set()
        for pattern in split_patterns:
            matches.update(resolve(pattern))
        files = _one_format(sorted(matches))
        # A part of a data set may lack some splits.
        if files:
            splits[str(split)] = files
    return splits


def _candidates(path: Path, base: Path, visible: Sequence[Path], *, is_named: bool) -> list[Path]:
    """Return the files that may hold documents; those that README names may be called anything."""
    files = [file for file in visible if kind_of(file)]
    if is_named:
        return files
    files = [file for file in files if not _is_hidden(file.relative_to(path))]
    return _one_format([file for file in files if base in file.parents])


def _one_format(files: Sequence[Path]) -> list[Path]:
    """Keep the files of data; of others only where there are none."""
    for kinds in _TOGETHER:
        data_files = [file for file in files if kind_of(file) in kinds]
        if data_files:
            return data_files
    return []


def _config_of(path: Path, name: str | None, option: str) -> dict[str, object]:
    """Return the configuration that README's front matter has by this name, or by default."""
    readme = path / "README.md"
    configs: MetadataConfigs = MetadataConfigs()
    if readme.is_file():
        try:
            card = DatasetCardData(**(metadata_load(readme) or {}))
            configs = MetadataConfigs.from_dataset_card_data(card)
        # The front matter may hold anything, and YAML raises errors of its own.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{option} {readme}: its front matter: {reason}") from error
    if not configs:
        if name:
            raise ValueError(f"{option} {path}: has no configuration {name}, as README.md has none")
        return {}
    choices = ", ".join(configs)
    if name is None:
        name = configs.get_default_config_name()
        if name is None:
            raise ValueError(
                f"{option} {path}: has several configurations ({choices}): give one by "
                "--dataset_config"
            )
    if name not in configs:
        raise ValueError(f"{option} {path}: has no configuration {name}; it has {choices}")
    config: dict[str, object] = configs[name]
    if not re.fullmatch(r"[^/].*|", str(config.get("data_dir") or "")):
        raise ValueError(f"{option} {readme}: data_dir must be below the directory")
    return config
