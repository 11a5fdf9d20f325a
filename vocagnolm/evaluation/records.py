"""The files of an evaluation while it runs, so that it can be killed at any moment.

A directory holds `settings.json`, written first, and per benchmark `ID.jsonl`: an item per line, in
the order of `idx`. Until it is complete each process appends to its own `ID.part0.jsonl` and so on.
Settings, results and lines end with a checksum of their own.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from vocagnolm.host import lock
from vocagnolm.host.manifest import sealed, unsealed
from vocagnolm.host.settings import check_same, differences
from vocagnolm.io import check_writable, write_json, write_text

Record: TypeAlias = dict[str, Any]
# The fields of a record, with the types each may have; none for any.
Fields: TypeAlias = Mapping[str, tuple[type, ...]]
_SETTINGS_FILE = "settings.json"


def parse_object(text: bytes) -> Record:
    """Read a JSON object."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad UTF-8 too
        raise ValueError(f"expected a JSON object, found {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {text[:40]!r}")
    return record


def read_sealed(path: Path, fields: Fields, remedy: str) -> Record:
    """Read settings or results, less their checksum, which must match if there is one."""
    try:
        content = unsealed(parse_object(path.read_bytes()))
        check_fields(content, {**fields, "benchmarks": (dict,)})
        each = content["benchmarks"]
        check_fields(each, dict.fromkeys(each, (dict,)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {remedy}") from error
    return content


def read_lines(
    path: Path, lines: Iterable[bytes], check: Callable[[Record], object]
) -> Iterator[Record]:
    """Read the objects of JSON lines; a ValueError names a line that is none or is refused.

    A line that has a checksum must match it; those of other tools and earlier versions have none.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = unsealed(parse_object(line))
            check(record)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        yield record


def read_records(benchmark: str, *paths: Path) -> dict[int, Record]:
    """Read the items of a benchmark by `idx`; a last line that was cut off counts as not written.

    A ValueError where a line is damaged, of another benchmark, or contradicts another line.
    """
    records: dict[int, Record] = {}

    def check(record: Record) -> None:
        check_fields(record, {"idx": (int,)})
        # Records of earlier versions do not say what they are.
        if (found := record.get("benchmark", benchmark)) != benchmark:
            raise ValueError(f"expected an item of {benchmark}, found one of {found}")
        if records.setdefault(record["idx"], record) != record:
            raise ValueError(f"expected one record of item {record['idx']}, found another one")

    try:
        for path in paths:
            list(read_lines(path, path.read_bytes().split(b"\n")[:-1], check))
    except ValueError as error:
        remedy = "delete the line, or the file if it belongs elsewhere, to ask again"
        raise ValueError(f"{error}: {remedy}") from error
    return records


def check_fields(record: Mapping[str, object], fields: Fields) -> None:
    """Refuse a record in which a field is missing or of another type."""
    for name, types in fields.items():
        if name not in record:
            raise ValueError(f"expected a field `{name}`, found {', '.join(record) or 'none'}")
        # Exactly: a bool is an int to `isinstance`.
        if types and type(record[name]) not in types:
            expected = " or ".join(kind.__name__ for kind in types)
            found = type(record[name]).__name__
            raise ValueError(f"expected `{name}` to be {expected}, found {found}")


def to_line(record: Record) -> str:
    """Write a record, and its checksum, as ASCII: the text of a model may be no valid Unicode."""
    return json.dumps(sealed(record)) + "\n"


class RunDirectory:
    """The files of one evaluation; the directory need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def lock(self) -> AbstractContextManager[None]:
        """Keep every other evaluation out, and refuse at once where one is at work."""
        check_writable(self.path)
        return lock.locked(self.path, patience_s=0)

    def check_settings(self, settings: Record) -> None:
        """Refuse to continue under other settings than those of the items that are there."""
        check_writable(self.path)
        before = self._settings()
        if not before:
            if any(map(self.finished, settings["benchmarks"])):
                found = f"expected {_SETTINGS_FILE} beside the items, found none"
                raise ValueError(f"{self.path}: {found}: give another --output_dir")
            return
        both = before["benchmarks"].keys() & settings["benchmarks"].keys()
        old, new = _binding(before, both), _binding(settings, both)
        # A setting that is gone is a change too.
        changed = differences(old, dict.fromkeys(old) | new)
        holder = f"{self.path} holds results of another evaluation"
        check_same(changed, holder, "give another --output_dir")

    def write_settings(self, settings: Record) -> None:
        """Record the settings, together with those of benchmarks that ran before."""
        benchmarks = {**self._settings().get("benchmarks", {}), **settings["benchmarks"]}
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / _SETTINGS_FILE, sealed({**settings, "benchmarks": benchmarks}))

    def _settings(self) -> Record:
        # Without items they bind nobody.
        path = self.path / _SETTINGS_FILE
        if not path.exists():
            return {}
        settings = read_sealed(path, {"model": (dict,)}, "give another --output_dir")
        return settings if any(map(self.finished, settings["benchmarks"])) else {}

    def finished(self, benchmark: str) -> dict[int, Record]:
        """Read the records so far, by `idx`; see `read_records`."""
        whole = self.path / f"{benchmark}.jsonl"
        return read_records(benchmark, *filter(Path.exists, (whole, *self._parts(benchmark))))

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


def _binding(settings: Record, benchmarks: Iterable[str]) -> Record:
    shared = {name: value for name, value in settings.items() if name != "benchmarks"}
    for name in benchmarks:
        shared |= {f"{name} {key}": value for key, value in settings["benchmarks"][name].items()}
    # The name of a model whose content is known does not matter.
    model = shared.get("model", {})
    if str(model.get("revision")).startswith("sha256:"):
        shared["model"] = model["revision"]
    return shared
