"""Find the files of a directory that have the documents of a split, as `datasets` does.

The input is a path. The output is the files to read, in a stable order, and a line about the files
that are left out. No file is opened for its documents.
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
# The reader for each suffix. The suffix of a compression may follow.
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
# Kinds of files that may be mixed in one directory. The first of these groups that occurs is read.
# Files of the other groups are notes and licences next to the data.
_KIND_GROUPS = ({"json", "parquet", "arrow"}, {"csv"}, {"text"})
# A listing names this many files and counts the others.
_MAX_LISTED_FILES = 5


def kind_of(path: Path) -> str:
    """Name the reader of a file, or return "" if there is none."""
    if path.suffix.lower() in _COMPRESSIONS:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix.lower(), "")


@dataclass(frozen=True)
class Files:
    """The files of the splits to read, and the files that are not read.

    Attributes:
        root: the file or directory itself.
        by_split: the files to read.
        others: the files of the other splits.
        left_out: files that belong to no split, or whose format is not read.
        empty: files of the splits to read that have no bytes.
    """

    root: Path
    by_split: dict[str, list[Path]]
    others: dict[str, list[Path]]
    left_out: list[Path]
    empty: list[Path]

    def describe(self) -> str:
        """Say which files are read and which are not, or return "" for a single file."""
        if self.root.is_file():
            return ""
        count = sum(len(files) for files in self.by_split.values())
        plural = "" if count == 1 else "s"
        summary = f"read {count:,} file{plural}"
        if list(self.by_split) != [TRAIN]:
            summary += f" of {' and '.join(self.by_split)}"
        parts = [summary]
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
    """Name the first files by their paths below `root`, and count the others."""
    names = [os.path.relpath(file, root) for file in files[:_MAX_LISTED_FILES]]
    listing = ", ".join(names)
    unlisted = len(files) - len(names)
    if unlisted:
        listing += f" and {unlisted:,} more"
    return listing


def splits_of(split: str) -> list[str]:
    """Return the names of the splits in an instruction of `datasets`, each once.

    >>> splits_of("train[:10%]+validation")
    ['train', 'validation']
    """
    names = []
    for part in split.split("+"):
        # A slice, such as [:10%], may follow the name.
        name = part.partition("[")[0].strip()
        if name not in names:
            names.append(name)
    return names


def find_files(
    path: Path, split: str | None, config_name: str | None = None, option: str = "--dataset"
) -> Files:
    """Find the files of a split, or of several splits.

    Without a `split`, the held-out one is read, or else `train`. A single file is the split
    `train`.

    Raises:
        ValueError: there is no file to read. The message names `option`.
    """
    if path.is_file():
        return _single_file(path, split, config_name, option)
    splits, left_out = _find_splits(path, config_name, option)
    names = _splits_to_read(splits, left_out, split, path, option)
    files_by_split: dict[str, list[Path]] = {}
    empty_files = []
    for name in names:
        files_by_split[name] = []
        for file in splits[name]:
            # Only the lists of `save_to_disk` have names that nobody has looked for.
            if not file.exists():
                raise ValueError(_damaged(file, "is listed, but not there", option))
            if _is_empty(file):
                empty_files.append(file)
            else:
                files_by_split[name].append(file)
    if not any(files_by_split.values()):
        raise ValueError(f"{option} {path}: all files are empty: {_listing(empty_files, path)}")
    unread_splits = {}
    for name, files in splits.items():
        if name not in names:
            unread_splits[name] = files
    return Files(path, files_by_split, unread_splits, left_out, empty_files)


def _single_file(path: Path, split: str | None, config_name: str | None, option: str) -> Files:
    """Make a single file the split `train`, and reject other splits and configurations."""
    if config_name or splits_of(split or TRAIN) != [TRAIN]:
        raise ValueError(f"{option} {path}: a file has no configurations, and only the split train")
    if not kind_of(path):
        raise ValueError(_no_documents(path, option))
    return Files(path, {TRAIN: [path]}, {}, [], [])


def _find_splits(
    path: Path, config_name: str | None, option: str
) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the files of a directory by split, and the files that belong to no split."""
    saved_splits = _saved_splits(path, option)
    if saved_splits is not None:
        if config_name:
            raise ValueError(f"{option} {path}: a directory of save_to_disk has no configuration")
        if not saved_splits:
            raise ValueError(_no_documents(path, option))
        # The other files are save_to_disk's own, and nobody would take them for documents.
        return saved_splits, []
    visible_files = _visible_files(path)
    splits = _splits_in(path, visible_files, config_name, option)
    if not splits:
        raise ValueError(_no_documents(path, option))
    files_in_splits: set[Path] = set()
    for files in splits.values():
        files_in_splits.update(files)
    left_out = [file for file in visible_files if file not in files_in_splits]
    return splits, left_out


def _no_documents(path: Path, option: str) -> str:
    """Say which kinds of files are read if the directory has none."""
    return f"{option} {path}: expected files ending in {', '.join(_KINDS)} (also compressed)"


def _is_empty(file: Path) -> bool:
    """Test for a file without bytes. An empty text file is a document, and is skipped later."""
    return kind_of(file) != "text" and file.stat().st_size == 0


def _splits_to_read(
    splits: dict[str, list[Path]],
    left_out: Sequence[Path],
    split: str | None,
    path: Path,
    option: str,
) -> list[str]:
    """Return the names of the splits to read, among those in the directory."""
    if split is None:
        # Every split that is not called train is held out.
        held_out = [name for name in splits if name != TRAIN]
        if len(held_out) > 1:
            raise ValueError(
                f"{option} {path} has several splits to evaluate on ({', '.join(held_out)}): give "
                "one file, or a directory with the files of one split"
            )
        return held_out or [TRAIN]
    names = splits_of(split)
    if names == ["all"]:
        return list(splits)
    for name in names:
        if name not in splits:
            raise ValueError(_no_split(name, splits, left_out, path, option))
    return names


def _no_split(
    name: str,
    splits: Mapping[str, Sequence[Path]],
    left_out: Sequence[Path],
    path: Path,
    option: str,
) -> str:
    """Say that a split is missing, which splits there are, and which documents are in none."""
    choices = []
    for split, files in splits.items():
        choices.append(f"{split} ({_listing(files, path)})")
    note = ""
    documents_in_no_split = [file for file in left_out if kind_of(file)]
    if documents_in_no_split:
        note = f"; in no split: {_listing(documents_in_no_split, path)}"
    return (
        f"{option} {path} has no split {name}; its splits are {', '.join(choices)}{note}: "
        "give one by --dataset_split, or give files"
    )


def _visible_files(path: Path) -> list[Path]:
    """List the files and directory links that a user may mean, sorted by path.

    Hidden files are listed if they look like documents, so that they can be named. They are not
    read.
    """
    files = []
    # The order of the documents depends on this one, because the system lists files in any order.
    for file in sorted(path.rglob("*")):
        # Links to directories are not followed, so they are listed as left out.
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
    """Test whether a path below the directory, or a part of it, is hidden from `datasets`."""
    return any(part.startswith((".", "_")) for part in relative.parts)


def _saved_splits(path: Path, option: str) -> dict[str, list[Path]] | None:
    """Return by split the files that `save_to_disk` wrote, or None for any other directory."""
    dict_file = path / "dataset_dict.json"
    if dict_file.is_file():
        # A DatasetDict is a directory with a directory for each split.
        splits = {}
        for name in _saved_list(dict_file, "splits", option):
            split = _saved_splits(path / str(name), option)
            # A split that was deleted, or saved incompletely, is left out.
            if split:
                splits[str(name)] = split[TRAIN]
        return splits
    state_file = path / "state.json"
    if state_file.is_file() and (path / "dataset_info.json").is_file():
        # A Dataset's state lists its files in the order of its rows.
        files = []
        for entry in _saved_list(state_file, "_data_files", option):
            if not isinstance(entry, dict) or not isinstance(entry.get("filename"), str):
                raise ValueError(_damaged(state_file, f"names no file in {entry!r}", option))
            files.append(path / entry["filename"])
        return {TRAIN: files}
    return None


def _saved_list(file: Path, key: str, option: str) -> list[Any]:
    """Return a list from a JSON file of `save_to_disk`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(_damaged(file, f"not valid JSON ({error})", option)) from error
    items = content.get(key) if isinstance(content, dict) else None
    if not isinstance(items, list):
        raise ValueError(_damaged(file, f"has no list {key}", option))
    return items


def _damaged(file: Path, reason: str, option: str) -> str:
    """Say what is wrong with a file of `save_to_disk`, and what helps."""
    return f"{option} {file}: {reason}: copy the directory again, or save the dataset again"


def _splits_in(
    path: Path, visible: Sequence[Path], config_name: str | None, option: str
) -> dict[str, list[Path]]:
    """Return the files by split, from the `configs` of README.md or else from the files' names."""
    config = _config_of(path, config_name, option)
    base = path / str(config.get("data_dir") or "")
    data_files = config.get("data_files")
    candidates = _candidates(path, base, visible, is_named=data_files is not None)
    if not candidates:
        return {}
    resolve = _resolver(candidates, base)

    def names_of(pattern: str) -> list[str]:
        """Return the names that a pattern matches, in the form that the library expects."""
        files = resolve(pattern)
        # At this error, the library tries its next pattern.
        if not files:
            raise FileNotFoundError(pattern)
        return [str(file) for file in files]

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


def _resolver(candidates: Sequence[Path], base: Path) -> Callable[[str], list[Path]]:
    """Return a function that finds the candidates that a pattern matches below `base`."""
    # The library returns absolute names.
    candidates_by_name = {os.path.abspath(file): file for file in candidates}
    # Escape the directory, because the library makes it part of the pattern.
    root = glob.escape(os.path.abspath(base))

    # The library tries a pattern first, and `_matching` tries it again. Each time would list the
    # directories again.
    @cache
    def resolve(pattern: str) -> list[Path]:
        try:
            names = resolve_pattern(pattern, root)
        except FileNotFoundError:
            return []
        files = []
        for name in names:
            if name in candidates_by_name:
                files.append(candidates_by_name[name])
        return files

    return resolve


def _matching(
    patterns: Mapping[Any, Sequence[str]], resolve: Callable[[str], list[Path]]
) -> dict[str, list[Path]]:
    """Return the files that the patterns of each split match."""
    splits = {}
    for split, split_patterns in patterns.items():
        matches: set[Path] = set()
        for pattern in split_patterns:
            matches.update(resolve(pattern))
        # A file that matches several patterns is read once, in the order of the paths.
        files = _one_kind_group(sorted(matches))
        # A directory that is part of a dataset may lack some of its splits.
        if files:
            splits[str(split)] = files
    return splits


def _candidates(path: Path, base: Path, visible: Sequence[Path], *, is_named: bool) -> list[Path]:
    """Return the files in the directory `base` that may have documents.

    If README.md names the files (`is_named`), they may be hidden, or anywhere.
    """
    documents = [file for file in visible if kind_of(file)]
    if is_named:
        return documents
    candidates = []
    for file in documents:
        is_below_base = base in file.parents
        if is_below_base and not _is_hidden(file.relative_to(path)):
            candidates.append(file)
    return _one_kind_group(candidates)


def _one_kind_group(files: Sequence[Path]) -> list[Path]:
    """Keep the files of the first group of kinds that occurs: data before tables before texts."""
    for kinds in _KIND_GROUPS:
        data_files = [file for file in files if kind_of(file) in kinds]
        if data_files:
            return data_files
    return []


def _config_of(path: Path, name: str | None, option: str) -> dict[str, object]:
    """Return a configuration from the front matter of README.md, by its name or the default one."""
    readme = path / "README.md"
    configs: MetadataConfigs = MetadataConfigs()
    if readme.is_file():
        try:
            card = DatasetCardData(**(metadata_load(readme) or {}))
            configs = MetadataConfigs.from_dataset_card_data(card)
        # The front matter may contain anything, and YAML's errors are not ValueErrors.
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
    # An absolute path would leave the directory. Without a path, it is the directory itself.
    if not re.fullmatch(r"[^/].*|", str(config.get("data_dir") or "")):
        raise ValueError(f"{option} {readme}: data_dir must be below the directory")
    return config
