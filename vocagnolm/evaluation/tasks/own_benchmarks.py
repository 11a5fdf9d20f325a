"""A user's own benchmarks, from a YAML file."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from vocagnolm.evaluation.extraction import AnswerKind
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, Benchmark
from vocagnolm.fields import OptionError, in_range
from vocagnolm.shell.io import read_mapping


def read_benchmarks(path: Path) -> dict[str, Benchmark]:
    """Read a user's own benchmarks from a YAML file, by name.

    A record has templates `question` and `answer`, and the source of the items: a `file` of JSON
    lines in the directory of the YAML file, or `hub` and `hub_parts`. It may have other fields of
    `Benchmark`. A ValueError names the file, the benchmark and the wrong field.
    """
    records = read_mapping("benchmarks_file", path)
    benchmarks = {}
    # Results are stored by name and shown by column, so no other benchmark may have either. "model"
    # is the heading of the first column.
    taken = {"model", *AVERAGES}
    for benchmark in BENCHMARKS.values():
        taken |= {benchmark.id, benchmark.column}
    for name, record in records.items():
        try:
            benchmark = _benchmark(name, record, path.parent)
            for text in (benchmark.id, benchmark.column):
                if text in taken:
                    raise ValueError(f"{text} is a name or column of another benchmark")
        # The constructor raises a TypeError for a field that it does not know.
        except (TypeError, ValueError) as error:
            raise OptionError("benchmarks_file", f"{path}: {name}: {error}") from error
        taken |= {benchmark.id, benchmark.column}
        benchmarks[benchmark.id] = benchmark
    return benchmarks


def _benchmark(name: str, record: dict[str, Any], directory: Path) -> Benchmark:
    """Build a benchmark, and check the fields that would silently change its accuracy."""
    # Results are in files with that name.
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ValueError("a name must be of letters, digits, _ and -")
    # A count of 0 takes all items.
    defaults: dict[str, Any] = {"column": name, "item_count": 0, "shots": 0, "directory": directory}
    benchmark = Benchmark(name, **defaults | record)
    has_items = benchmark.file or (benchmark.hub and benchmark.hub_parts)
    if not (benchmark.question and benchmark.answer and has_items):
        raise ValueError("it needs question, answer, and either file or hub, hub_parts")
    in_range(benchmark, "[1, inf)", "max_new_tokens", "max_new_tokens_in_chat")
    if benchmark.answer_kind not in get_args(AnswerKind):
        raise ValueError(f"answer_kind must be one of {', '.join(get_args(AnswerKind))}")
    if "{question}" not in benchmark.template:
        raise ValueError("template must contain {question}")
    # A text would be read as a list of letters, and an empty text would stop at once.
    if isinstance(benchmark.stops, str) or "" in benchmark.stops:
        raise ValueError("stops must be a list of texts, none of them empty")
    if "stops" not in record:
        return replace(benchmark, stops=_stops(benchmark))
    return benchmark


def _stops(benchmark: Benchmark) -> Sequence[str]:
    """Return the default stops, and how another example in the style of the template begins."""
    before, _, _ = benchmark.template.partition("{question}")
    # The words are on the question's line, or on the line above, as in "Problem:\n{question}".
    _, _, paragraph = before.rpartition("\n\n")
    _, _, words = paragraph.rstrip().rpartition("\n")
    stop = f"\n\n{words}"
    # A mark alone, such as "-" or "$", may begin a paragraph of an answer, too.
    if stop in benchmark.stops or not re.search(r"[^\W\d_]", words):
        return benchmark.stops
    return [*benchmark.stops, stop]
