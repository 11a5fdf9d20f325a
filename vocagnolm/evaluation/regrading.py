"""Grade outputs that are stored in a file, without a model."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tqdm.auto import tqdm

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.grading.normalization import strip_string
from vocagnolm.evaluation.records import Record, read_lines, to_line
from vocagnolm.evaluation.report import GRADER, second_opinion
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.host.files import write_text

# The fields of a line, with the types each may have.
_FIELDS = {"idx": (object,), "gold": (str, int, float), "raw_output": (str,)}


def regrade(file: Path, benchmark: str, output: Path | None) -> None:
    """Grade stored outputs and write every line again, with the graders' verdicts.

    Args:
        file: JSON lines, gzipped if the name ends in .gz, each with `idx`, `gold` (already parsed)
            and `raw_output`; an item file of ours is one.
        benchmark: its rules find the answer.
        output: receives the lines, all or none; None for the standard output.

    Raises:
        ValueError: the file cannot be read, or a line is not of this form; nothing is written.
    """
    if output is not None and output.exists() and not output.is_file():
        raise ValueError(f"--output {output}: expected a file, found something else: give another")
    records = list(_read(file))
    if not records:
        raise ValueError(f"{file}: expected stored outputs, one JSON object per line, found none")
    answers = [(record["raw_output"], strip_string(record["gold"])) for record in records]
    with Grader() as grader:
        graded = grader.grade(BENCHMARKS[benchmark].answer_kind, answers)
        shown = tqdm(graded, total=len(records), unit="output", disable=None)
        verdicts = [asdict(verdict) for verdict in shown]
    pairs = zip(records, verdicts, strict=True)
    text = "".join(to_line(record | verdict) for record, verdict in pairs)
    summary = _summary(file, benchmark, summarize(verdicts))
    if output is None:
        sys.stdout.write(text)
        sys.stderr.write(summary)
    else:
        write_text(output, text)
        sys.stdout.write(summary)


def _read(file: Path) -> Iterator[Record]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, record in enumerate(read_lines(file, lines), 1):
                yield _checked(record, f"{file}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"--regrade {file} cannot be read: {error}") from error


def _checked(record: Record, where: str) -> Record:
    if missing := [field for field in _FIELDS if field not in record]:
        raise ValueError(
            f"{where}: expected the fields {', '.join(_FIELDS)}, found no {', '.join(missing)}"
        )
    for field, types in _FIELDS.items():
        if not isinstance(record[field], types):
            kind = type(record[field]).__name__
            expected = " or ".join(each.__name__ for each in types)
            raise ValueError(f"{where}: expected `{field}` to be {expected}, found {kind}")
    return record


def _summary(file: Path, benchmark: str, summary: Record) -> str:
    low, high = summary["interval"]
    expected = BENCHMARKS[benchmark].item_count
    partial = f" (partial: {summary['n']} of {expected} items)" if summary["n"] < expected else ""
    text = (
        f"{file} as {benchmark}{partial}: {summary['rounded']:.1f} "
        f"(95 % interval {low:.1f} to {high:.1f}), {summary['correct']} of {summary['n']} right, "
        f"{summary['unanswered']:.1%} without an answer, graded by {GRADER}\n"
    )
    if opinion := summary["math_verify"]:
        text += (
            f"{second_opinion()}, stricter: {opinion['rounded']:.1f}, the same verdict on "
            f"{opinion['agreement']:.1%}, none in time on {opinion['without_opinion']} outputs\n"
        )
    return text
