"""The files of an evaluation while it runs, so that it can be killed at any moment.

A directory holds `settings.json`, written first, and per benchmark `ID.jsonl`: an item per line, in
the order of `idx`. Until it is complete each process appends to its own `ID.part0.jsonl` and so on.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from filelock import FileLock, Timeout

from vocagnolm.io import differences, json_or_empty, write_json, write_text

Record: TypeAlias = dict[str, Any]
_SETTINGS_FILE = "settings.json"


def read_lines(content: bytes) -> Iterator[Record]:
    """Parse JSON lines."""
    # Not by `splitlines`: JSON allows other line separators inside strings.
    return (json.loads(line) for line in content.split(b"\n") if line.strip())


def to_line(record: Record) -> str:
    """Write a record as ASCII: the text of a model may be no valid Unicode."""
    return json.dumps(record) + "\n"


def read_records(*paths: Path) -> dict[int, Record]:
    """Read items by `idx`; a last line that was cut off counts as not written."""
    records: dict[int, Record] = {}
    for path in paths:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        for record in read_lines(whole):
            records[record["idx"]] = record
    return records


class RunDirectory:
    """The files of one evaluation; the directory need not exist."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other evaluation out of the directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(f"{self.path}: another evaluation is writing there") from error

    def check_settings(self, settings: Record) -> None:
        """Reject settings that differ from those of the items that are there."""
        before = json_or_empty(self.path / _SETTINGS_FILE)
        asked_before = before.get("benchmarks", {}).keys()
        if not any(map(self.finished, asked_before | settings["benchmarks"].keys())):
            return
        both = asked_before & settings["benchmarks"].keys()
        if changed := differences(_flat(before, both), _flat(settings, both)):
            holder = f"{self.path} holds results of another evaluation"
            raise ValueError(f"{holder} ({'; '.join(changed)}): give another --output_dir")

    def write_settings(self, settings: Record) -> None:
        """Write the settings, together with those of benchmarks that ran before."""
        before = json_or_empty(self.path / _SETTINGS_FILE).get("benchmarks", {})
        benchmarks = {name: x for name, x in before.items() if self.finished(name)}
        benchmarks |= settings["benchmarks"]
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / _SETTINGS_FILE, {**settings, "benchmarks": benchmarks})

    def finished(self, benchmark: str) -> dict[int, Record]:
        """Read the records so far, by `idx`; see `read_records`."""
        whole = self.path / f"{benchmark}.jsonl"
        return read_records(*filter(Path.exists, (whole, *self._parts(benchmark))))

    def _parts(self, benchmark: str) -> list[Path]:
        return sorted(self.path.glob(f"{benchmark}.part*.jsonl"))

    @contextmanager
    def appending(self, benchmark: str, process: int) -> Iterator[IO[str]]:
        """Open the file in which a process appends its records of a benchmark."""
        path = self.path / f"{benchmark}.part{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # A kill may have cut off the last line.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        with path.open("a", encoding="utf-8") as text:
            yield text

    def complete(self, benchmark: str, indices: Sequence[int]) -> None:
        """Put the records of a finished benchmark in order, into one file."""
        records = self.finished(benchmark)
        found = sum(idx in records for idx in indices)
        if found < len(indices):
            counts = f"expected {len(indices)} items of {benchmark}, found {found}"
            remedy = "give an --output_dir that all processes share"
            raise ValueError(f"{self.path}: {counts}: {remedy}")
        lines = "".join(to_line(records[idx]) for idx in indices)
        # The whole file is there before a part goes: killed in between, nothing is lost.
        write_text(self.path / f"{benchmark}.jsonl", lines)
        for part in self._parts(benchmark):
            part.unlink()


def _flat(settings: Record, benchmarks: Iterable[str]) -> Record:
    flat = {name: value for name, value in settings.items() if name != "benchmarks"}
    for name in benchmarks:
        flat |= {f"{name} {key}": value for key, value in settings["benchmarks"][name].items()}
    # A model whose content is known may be moved.
    if (model := flat.get("model")) and model["revision"] != "unknown":
        flat["model"] = model["revision"]
    return flat
