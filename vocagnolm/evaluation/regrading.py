"""Grade outputs that are stored in a file, without a model."""

import gzip
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm.auto import tqdm

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.normalization import strip_string
from vocagnolm.evaluation.records import Record, read_lines, to_line
from vocagnolm.evaluation.report import GRADER, second_opinion
from vocagnolm.evaluation.tasks.benchmarks import Benchmark
from vocagnolm.io import write_text


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line again, all or none, with the graders' verdicts.

    The file holds JSON lines, gzipped if its name ends in .gz, each with `idx`, `gold` (already
    parsed) and `raw_output`, such as our item files. `output` None is the standard output.
    """
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    records = list(read_lines(str(file), content))
    if not records:
        raise ValueError(f"{file} has no stored outputs")
    # Records of ours name their benchmark, and the chat protocol.
    asked = {"benchmark": benchmark.id, "protocol": benchmark.protocol}
    for record in records:
        for key in asked.keys() & record.keys():
            if record[key] != asked[key]:
                name = asked[key] or "few-shot prompts"
                raise ValueError(f"{file} has an item of {record[key]}, not of {name}")
    answers = [(record["raw_output"], strip_string(record["gold"])) for record in records]
    with Grader() as grader:
        graded = grader.grade(benchmark.answer_kind, answers)
        shown = tqdm(graded, total=len(records), unit="output", disable=None)
        verdicts = [asdict(verdict) for verdict in shown]
    lines = [
        to_line({**record, **benchmark.names(), **verdict})
        for record, verdict in zip(records, verdicts, strict=True)
    ]
    if output:
        write_text(output, "".join(lines))
    else:
        sys.stdout.writelines(lines)
    summary = _summary(file, benchmark, summarize(verdicts))
    (sys.stdout if output else sys.stderr).write(summary)


def _summary(file: Path, benchmark: Benchmark, summary: Record) -> str:
    low, high = summary["interval"]
    expected = benchmark.item_count
    partial = f" (partial: {summary['n']} of {expected} items)" if summary["n"] < expected else ""
    text = (
        f"{file} as {benchmark.id}, {benchmark.protocol or 'few-shot'}{partial}: "
        f"{summary['rounded']:.1f} (95 % interval {low:.1f} to {high:.1f}), "
        f"{summary['correct']} of {summary['n']} right, "
        f"{summary['unanswered']:.1%} without an answer, graded by {GRADER}\n"
    )
    if opinion := summary["math_verify"]:
        text += (
            f"{second_opinion()}, stricter: {opinion['rounded']:.1f}, the same verdict on "
            f"{opinion['agreement']:.1%}, none in time on {opinion['without_opinion']} outputs\n"
        )
    return text
