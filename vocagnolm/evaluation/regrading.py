"""Grades stored outputs: ours, or those of another evaluator in the same form."""

import gzip
import math
import sys
import zlib
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.accuracy import one_line_summary, summarize
from vocagnolm.evaluation.extraction import normalise_gold
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import numbered_lines, to_line
from vocagnolm.evaluation.tasks.benchmarks import Benchmark
from vocagnolm.fields import OptionError
from vocagnolm.shell.io import JsonObject, write_text


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line with its new verdict to `output`, or to stdout.

    The file has JSON lines, gzipped if its name ends in .gz. Each has `idx`, `gold` (parsed) and
    `raw_output`, like our item files.
    """
    # Read the whole file first, so that a wrong line is found before any grading.
    records = []
    answers = []
    for number, record in numbered_lines(_content(file), f"--regrade {file}"):
        try:
            answers.append(_answer(record, benchmark))
        except ValueError as error:
            raise OptionError("regrade", f"{file}:{number}: {error}") from error
        records.append(record)
    # Another evaluator may write 7 and "7" for the same item.
    outputs = {(str(record["idx"]), record.get("sample", 0)) for record in records}
    samples = Counter(idx for idx, _ in outputs)
    # Otherwise an output would count twice, or some items more than others.
    if len(outputs) < len(records) or len(set(samples.values())) != 1:
        count = f"{len(records)} outputs of {len(samples)} items"
        fault = f"has {count}: each item needs as many, numbered by sample from 0"
        raise OptionError("regrade", f"{file} {fault}")
    with Grader() as grader:
        verdicts = [asdict(verdict) for verdict in grader.grade(benchmark.answer_kind, answers)]
    # The verdict replaces the fields of an earlier one. All other fields stay.
    lines = ""
    judged = []
    for record, verdict in zip(records, verdicts, strict=True):
        lines += to_line(record | benchmark.names() | verdict)
        judged.append({"idx": str(record["idx"])} | verdict)
    if output:
        write_text(output, lines)
    else:
        sys.stdout.write(lines)
    # If the lines go to stdout, another program may read them, so the summary goes to stderr.
    line = f"{file} as {benchmark.id}: {one_line_summary(summarize(judged))}"
    print(line, file=sys.stdout if output else sys.stderr)


def _content(file: Path) -> bytes:
    content = file.read_bytes()
    if file.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise OptionError("regrade", f"{file} is not a complete gzip file ({error})") from error


def _answer(record: JsonObject, benchmark: Benchmark) -> tuple[str, str]:
    """Return output and gold of a record. A ValueError says why it cannot be graded."""
    # Our own records name their benchmark and the chat protocol.
    names = {name: record[name] for name in ("benchmark", "protocol") if name in record}
    if names and names != benchmark.names():
        raise ValueError(f"expected an output of {benchmark.names()}, found one of {names}")
    output = record.get("raw_output")
    gold: Any = record.get("gold")
    # Any other gold would be compared as text. Python's JSON may contain NaN, for example for an
    # answer that a table lacks.
    is_number = type(gold) in (int, float) and math.isfinite(gold)
    if "idx" not in record or not isinstance(output, str) or not (is_number or type(gold) is str):
        expected = "idx, gold (a text or a number) and raw_output (one text)"
        raise ValueError(f"expected {expected}, found {record!s:.200}")
    return output, normalise_gold(benchmark.answer_kind, gold)
