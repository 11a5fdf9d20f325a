"""What an evaluation leaves on disk while it runs, so that it can be killed at any moment.

A directory holds `settings.json`, written first, and per benchmark `ID.jsonl`: one JSON line per
item, in the order of `idx`. Until a benchmark is complete its items lie in `ID.part0.jsonl`,
`ID.part1.jsonl` and so on, one file per process, in the order in which they finished.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]
SETTINGS_FILE = "settings.json"


def read_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Record]:
    """The objects of JSON lines.

    Raises:
        ValueError: a line is no JSON object; the message names it.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad UTF-8 too
            raise ValueError(f"{path}, line {number}: expected JSON, found {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
        yield record


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there completely or not at all, compressed if its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    content = text.encode()
    with aside.open("wb") as file:
        file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def to_line(record: Mapping[str, Any]) -> str:
    """A record as a line of ASCII: what a model writes may be no valid Unicode."""
    return json.dumps(record) + "\n"


class RunDirectory:
    """The files of one evaluation.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other evaluation out, for as long as this process lives at most.

        Raises:
            ValueError: another one is at work here, or the path is no directory.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"{self.path}: expected a directory, found a file: give another --output_dir"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse to continue under other settings than those of the items that are there.

        Args:
            settings: by name; those under "benchmarks" by benchmark, compared where both have it.

        Raises:
            ValueError: something differs, and the message says what was and what is now; items are
                there without settings; or the path is no directory.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"{self.path}: expected a directory, found a file: give another --output_dir"
            )
        before = self._settings()
        if not before and any(map(self.finished, settings["benchmarks"])):
            raise ValueError(
                f"{self.path}: expected {SETTINGS_FILE} beside the items, found none, so nobody "
                "knows what they belong to: give another --output_dir"
            )
        if not before:
            return
        now = json.loads(json.dumps(settings))
        changed = _differences(_binding(before), _binding(now))
        for name in before["benchmarks"].keys() & now["benchmarks"].keys():
            pair = before["benchmarks"][name], now["benchmarks"][name]
            changed += [f"{name} {change}" for change in _differences(*pair)]
        if changed:
            raise ValueError(
                f"{self.path} holds results of another evaluation ({'; '.join(sorted(changed))}): "
                "give another --output_dir"
            )

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Record the settings, together with those of benchmarks that ran before."""
        benchmarks = {**self._settings().get("benchmarks", {}), **settings["benchmarks"]}
        whole = json.dumps({**settings, "benchmarks": benchmarks}, indent=2)
        write_whole(self.path / SETTINGS_FILE, whole + "\n")

    def _settings(self) -> Record:
        """Those of the items that are there; settings without items bind nobody."""
        path = self.path / SETTINGS_FILE
        if not path.exists():
            return {}
        (settings,) = read_lines(path, [path.read_bytes()])
        if not isinstance(settings.get("benchmarks"), dict):
            raise ValueError(
                f"{path}: expected the settings of an evaluation, found no benchmarks: "
                "give another --output_dir"
            )
        return settings if any(map(self.finished, settings["benchmarks"])) else {}

    def finished(self, benchmark: str) -> dict[int, Record]:
        """The records so far, by `idx`. A last line that was cut off counts as not written.

        Raises:
            ValueError: another line is no record; the message names it.
        """
        records: dict[int, Record] = {}
        for path in self._files(benchmark):
            lines = path.read_bytes().split(b"\n")[:-1]
            try:
                for number, record in enumerate(read_lines(path, lines), 1):
                    if type(record.get("idx")) is not int:
                        raise ValueError(f"{path}, line {number}: expected an `idx`, found none")
                    records.setdefault(record["idx"], record)
            except ValueError as error:
                raise ValueError(f"{error}: delete the line to ask its item again") from error
        return records

    def is_complete(self, benchmark: str) -> bool:
        """Whether all items of a benchmark have been asked."""
        return (self.path / f"{benchmark}.jsonl").exists()

    def _files(self, benchmark: str) -> list[Path]:
        parts = self.path.glob(f"{benchmark}.part*.jsonl")
        return [
            path for path in (self.path / f"{benchmark}.jsonl", *sorted(parts)) if path.exists()
        ]

    @contextmanager
    def appending(self, benchmark: str, process: int) -> Iterator[IO[str]]:
        """The file in which a process appends its records of a benchmark."""
        path = self.path / f"{benchmark}.part{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # what a kill cut off
        with path.open("a", encoding="utf-8") as text:
            yield text

    def complete(self, benchmark: str, indices: Sequence[int]) -> None:
        """Put the records of a finished benchmark in order, into one file.

        Raises:
            ValueError: one of them is not there.
        """
        records = self.finished(benchmark)
        if missing := [idx for idx in indices if idx not in records]:
            raise ValueError(
                f"{self.path}: expected {len(indices)} items of {benchmark}, found "
                f"{len(indices) - len(missing)}: give an --output_dir that all processes share"
            )
        lines = "".join(to_line(records[idx]) for idx in indices)
        write_whole(self.path / f"{benchmark}.jsonl", lines)
        for part in self.path.glob(f"{benchmark}.part*.jsonl"):
            part.unlink()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{path}: another evaluation is at work here: wait for it, or give another --output_dir"
        ) from error


def _binding(settings: Mapping[str, Any]) -> Record:
    """What all items share. The name of a model whose content is known does not matter."""
    shared = {name: value for name, value in settings.items() if name != "benchmarks"}
    model = shared.get("model", {})
    if str(model.get("revision")).startswith("sha256:"):
        shared["model"] = model["revision"]
    return shared


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted(before.keys() | now.keys())
    return [
        f"{name}: was {before.get(name)}, now {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    ]
