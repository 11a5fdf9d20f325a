"""Grade outputs that are stored in a file, without a model."""

import gzip
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm.auto import tqdm

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.normalization import strip_string
from vocagnolm.evaluation.records import read_lines, to_line
from vocagnolm.evaluation.report import GRADER, in_a_line
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
    sums, expected = summarize(verdicts), benchmark.item_count
    protocol = benchmark.protocol or "few-shot"
    partial = f", {len(records)} of {expected} items" if len(records) < expected else ""
    line = f"{file} as {benchmark.id}, {protocol}{partial}: {in_a_line(sums)}; graded by {GRADER}\n"
    (sys.stdout if output else sys.stderr).write(line)
