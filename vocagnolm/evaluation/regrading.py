"""Grade outputs that are stored in a file, without a model."""

import gzip
import sys
from dataclasses import asdict
from pathlib import Path

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.normalization import strip_string
from vocagnolm.evaluation.records import read_lines, to_line
from vocagnolm.evaluation.report import in_a_line
from vocagnolm.evaluation.tasks.benchmarks import Benchmark
from vocagnolm.io import write_text


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line again with its verdict, to stdout without `output`.

    The file holds JSON lines, gzipped if its name ends in .gz, each with `idx`, `gold` (already
    parsed) and `raw_output`, such as our item files.
    """
    content = file.read_bytes()
    records = list(read_lines(gzip.decompress(content) if file.suffix == ".gz" else content))
    for record in records:
        # Records of ours name their benchmark, and the chat protocol.
        found = record.get("benchmark", benchmark.id), record.get("protocol", benchmark.protocol)
        if found != (benchmark.id, benchmark.protocol):
            raise ValueError(
                f"{file} has an item of {' '.join(found).strip()}, not of {benchmark.id}"
            )
    answers = [(record["raw_output"], strip_string(record["gold"])) for record in records]
    with Grader() as grader:
        verdicts = list(map(asdict, grader.grade(benchmark.answer_kind, answers)))
    graded = zip(records, verdicts, strict=True)
    lines = [to_line({**record, **benchmark.names(), **verdict}) for record, verdict in graded]
    if output:
        write_text(output, "".join(lines))
    else:
        sys.stdout.writelines(lines)
    line = f"{file} as {benchmark.id}: {in_a_line(summarize(verdicts))}\n"
    (sys.stdout if output else sys.stderr).write(line)
