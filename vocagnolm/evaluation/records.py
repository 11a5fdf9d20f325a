"""The files of an evaluation: one output per line, and the settings that all outputs share.

A directory has `settings.json`, written first, and per benchmark `ID.jsonl`, with one output per
line in the order of `idx` and `sample`. Until it is complete, each process appends to its own
`ID.part0.jsonl` and so on.

A record has `idx`, `sample` if outputs are drawn, `question`, `prompt_sha256`, `raw_output`,
`gold`, the numbers of tokens, why the output ended, and the fields of a `grading.Verdict`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vocagnolm.fields import OptionError
from vocagnolm.record import differences
from vocagnolm.shell.io import JsonObject, json_or_empty, write_json, write_text

SETTINGS_FILE = "settings.json"


class EvaluationDirectory:
    """The files of one evaluation. The directory need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def settings(self) -> JsonObject:
        """Read the settings of the existing evaluation, or return an empty dictionary."""
        return json_or_empty(self.path / SETTINGS_FILE)

    def write_settings(self, settings: JsonObject) -> None:
        """Write the settings, together with those of benchmarks that were run before.

        Rejects settings that differ from those of existing items.
        """
        earlier = self.settings()
        benchmarks = earlier.get("benchmarks", {}) | settings["benchmarks"]
        # A benchmark without a record has nothing that new settings could contradict.
        recorded = [name for name in benchmarks if self.finished(name)]
        if recorded:
            now = settings | {"benchmarks": benchmarks}
            changed = differences(_shared(earlier, recorded), _shared(now, recorded))
            if changed:
                fault = f"holds results of another evaluation ({'; '.join(changed)})"
                raise OptionError("output_dir", f"{self.path} {fault}: give another directory")
        # Benchmarks that are not run now keep their settings, because their items stay.
        kept = {name: benchmarks[name] for name in recorded} | settings["benchmarks"]
        write_json(self.path / SETTINGS_FILE, settings | {"benchmarks": kept})

    def finished(self, benchmark: str) -> dict[tuple[int, int], JsonObject]:
        """Read the records so far by `idx` and `sample`; see `read_records`."""
        # There may be the whole file, parts, or both after a kill in between.
        paths = self._parts(benchmark)
        whole = self.path / f"{benchmark}.jsonl"
        if whole.exists():
            paths.insert(0, whole)
        return read_records(*paths)

    def _parts(self, benchmark: str) -> list[Path]:
        """List the files to which processes have appended records of a benchmark."""
        parts = []
        for path in sorted(self.path.glob(f"{benchmark}.part*.jsonl")):
            # A copy by another name is the user's, and parts are removed in the end.
            if re.fullmatch(rf"{re.escape(benchmark)}\.part\d+\.jsonl", path.name):
                parts.append(path)
        return parts

    @contextmanager
    def appending(self, benchmark: str, process: int) -> Iterator[IO[str]]:
        """Open the file to which a process appends its records of a benchmark."""
        path = self.path / f"{benchmark}.part{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # If a kill has cut off the last line, the next record must begin a new line.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        # The file was opened in binary mode only to look at its end. Records are appended as text.
        with path.open("a", encoding="utf-8") as text:
            yield text

    def complete(self, benchmark: str, outputs: Sequence[tuple[int, int]]) -> None:
        """Put the records of a finished benchmark into one file, by `idx` and `sample`."""
        # Processes that do not share a directory would each find only their own items.
        records = self.finished(benchmark)
        if not records.keys() >= set(outputs):
            raise OptionError("output_dir", f"{self.path} must be shared by all processes")
        lines = "".join(to_line(records[output]) for output in outputs)
        # Write the whole file before parts are removed, so that a kill in between loses nothing.
        write_text(self.path / f"{benchmark}.jsonl", lines)
        for part in self._parts(benchmark):
            part.unlink()


def _shared(settings: JsonObject, benchmarks: Sequence[str]) -> JsonObject:
    """Return what all items of some benchmarks must share."""
    shared = settings | {"benchmarks": None}
    for name in benchmarks:
        shared[name] = settings.get("benchmarks", {}).get(name)
    # A model with a known revision may be moved.
    model = shared.get("model")
    if model and model["revision"] != "unknown":
        shared["model"] = model["revision"]
    return shared


def numbered_lines(content: bytes, name: str) -> Iterator[tuple[int, JsonObject]]:
    """Parse JSON lines, with their numbers from 1; an error names a line that is not an object."""
    # `splitlines` would also split at other line separators, which JSON allows inside strings.
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        record = None
        with suppress(ValueError):
            record = json.loads(line)
        if not isinstance(record, dict):
            start = line[:100].decode(errors="replace")
            raise ValueError(f"{name}:{number}: expected a JSON object, found {start}")
        yield number, record


def to_line(record: JsonObject) -> str:
    """Write a record as ASCII, because a model's text may not be valid Unicode."""
    return json.dumps(record) + "\n"


def read_records(*paths: Path) -> dict[tuple[int, int], JsonObject]:
    """Read outputs by `idx` and `sample`, which is 0 if a line does not have it.

    A last line that was cut off counts as not written.
    """
    records: dict[tuple[int, int], JsonObject] = {}
    # A kill may leave both the whole file and its parts, which then have the same records.
    for path in paths:
        whole_lines, _, _ = path.read_bytes().rpartition(b"\n")
        for _, record in numbered_lines(whole_lines, str(path)):
            records[record["idx"], record.get("sample", 0)] = record
    return records
