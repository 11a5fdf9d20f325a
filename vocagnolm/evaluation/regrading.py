"""Grade outputs that are stored in a file, without a model."""

import gzip
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

from tqdm.auto import tqdm

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.engines.chat import PROTOCOL
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.grading.normalization import strip_string
from vocagnolm.evaluation.records import Record, check_fields, read_lines, to_line
from vocagnolm.evaluation.report import GRADER, second_opinion
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark
from vocagnolm.io import check_writable, write_text

# The fields of a line, with the types each may have.
_FIELDS = {"idx": (), "gold": (str, int, float, bool), "raw_output": (str,)}


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line again, all or none, with the graders' verdicts.

    The file holds JSON lines, gzipped if its name ends in .gz, each with `idx`, `gold` (already
    parsed) and `raw_output`, such as our item files. `output` None is the standard output.
    """
    if output is not None:
        if output.exists() and not output.is_file():
            found = "expected a file, found something else: give another"
            raise ValueError(f"--output {output}: {found}")
        check_writable(output.parent, "--output")
    records = _read(file, benchmark)
    if not records:
        raise ValueError(f"{file}: expected stored outputs, one JSON object per line, found none")
    answers = [(record["raw_output"], strip_string(record["gold"])) for record in records]
    with Grader() as grader:
        graded = grader.grade(benchmark.answer_kind, answers)
        shown = tqdm(graded, total=len(records), unit="output", disable=None)
        verdicts = [asdict(verdict) for verdict in shown]
    pairs = zip(records, verdicts, strict=True)
    known = benchmark.names()
    text = "".join(to_line({**record, **known, **verdict}) for record, verdict in pairs)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
    (sys.stdout if output else sys.stderr).write(_summary(file, summarize(verdicts), **known))


def _read(file: Path, benchmark: Benchmark) -> list[Record]:
    def check(record: Record) -> None:
        check_fields(record, _FIELDS)
        found = record.get("benchmark")
        # Other tools may call theirs something else.
        if found != benchmark.id and found in [*BENCHMARKS]:
            expected = f"expected an item of {benchmark.id}, found one of {found}"
            raise ValueError(f"{expected}: give --benchmark {found}")
        if record.get("protocol") == PROTOCOL != benchmark.protocol:
            raise ValueError(f"expected a few-shot answer, found one of {PROTOCOL}: give --chat")

    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            return list(read_lines(file, lines, check))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"--regrade {file} cannot be read: {error}") from error


def _summary(file: Path, summary: Record, benchmark: str, protocol: str = "few-shot") -> str:
    low, high = summary["interval"]
    expected = BENCHMARKS[benchmark].item_count
    partial = f" (partial: {summary['n']} of {expected} items)" if summary["n"] < expected else ""
    text = (
        f"{file} as {benchmark}, {protocol}{partial}: {summary['rounded']:.1f} "
        f"(95 % interval {low:.1f} to {high:.1f}), {summary['correct']} of {summary['n']} right, "
        f"{summary['unanswered']:.1%} without an answer, graded by {GRADER}\n"
    )
    if opinion := summary["math_verify"]:
        text += (
            f"{second_opinion()}, stricter: {opinion['rounded']:.1f}, the same verdict on "
            f"{opinion['agreement']:.1%}, none in time on {opinion['without_opinion']} outputs\n"
        )
    return text
