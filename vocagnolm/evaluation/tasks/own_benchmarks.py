"""A user's own benchmarks, from a YAML file. All fields are checked before a model is loaded."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import yaml

from vocagnolm.doors import near
from vocagnolm.evaluation.extraction import AnswerKind
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, Benchmark
from vocagnolm.shell.io import read_yaml

_KINDS = get_args(AnswerKind)
# Results are stored by name and shown by column, so no other benchmark may have either. "model" is
# the heading of the first column. Case is ignored, because some file systems do.
_TAKEN = {"model"}
_TAKEN.update(name.casefold() for name in AVERAGES)
for _benchmark in BENCHMARKS.values():
    _TAKEN |= {_benchmark.id.casefold(), _benchmark.column.casefold()}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_template(value: object) -> bool:
    return isinstance(value, str) and "{question}" in value


def _is_count(value: object) -> bool:
    # Python treats True as an integer.
    return type(value) is int and value >= 0


def _is_positive(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_stops(value: object) -> bool:
    # An empty text would stop at once.
    return isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value)


def _are_hub_parts(value: object) -> bool:
    if not (isinstance(value, list) and value):
        return False
    for part in value:
        if not (isinstance(part, list) and len(part) == 2):
            return False
        configuration, split = part
        if not (configuration is None or _is_text(configuration)) or not _is_text(split):
            return False
    return True


# What the fields that a user may give must contain: in words, and as a test.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "question": ("a text with fields in braces", _is_text),
    "answer": ("a text with fields in braces", _is_text),
    "file": ("a path", _is_text),
    "hub": ("the name of a dataset", _is_text),
    "hub_parts": ("a list of [configuration or null, split]", _are_hub_parts),
    "column": ("a text", _is_text),
    "item_count": ("an integer, 0 for as many as there are", _is_count),
    "shots": ("an integer of at least 0", _is_count),
    "version": ("an integer of at least 0", _is_count),
    "max_new_tokens": ("an integer of at least 1", _is_positive),
    "max_new_tokens_in_chat": ("an integer of at least 1", _is_positive),
    "prompt_set": ("the name of a prompt set", _is_text),
    "template": ("a text with {question}", _is_template),
    "stops": ("a list of texts, none of them empty", _are_stops),
    "answer_kind": (f"one of {', '.join(_KINDS)}", lambda value: value in _KINDS),
}


def read_benchmarks(path: Path) -> dict[str, Benchmark]:
    """Read a user's own benchmarks from a YAML file, by name.

    A record has templates `question` and `answer`, and the source of the items: a `file` of JSON
    lines in the directory of the YAML file, or `hub` and `hub_parts`. It may have other fields of
    `Benchmark`. A ValueError names the benchmark and the wrong field.
    """
    option = f"--benchmarks_file {path}"
    try:
        records = read_yaml(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{option} cannot be read: {error}") from error
    if not (isinstance(records, dict) and records):
        raise ValueError(f"{option}: expected benchmarks by their names, found none")
    benchmarks: dict[str, Benchmark] = {}
    # {a name or heading: the benchmark that has it}
    owners: dict[str, str] = {}
    for name, record in records.items():
        fault = _name_fault(name) or _record_fault(record)
        if fault:
            raise ValueError(f"{option}: {name}: {fault}")
        # A count of 0 takes all items.
        defaults = {"column": name, "item_count": 0, "shots": 0, "directory": path.parent}
        benchmark = Benchmark(name, **defaults | record)
        if "stops" not in record:
            benchmark = replace(benchmark, stops=_stops(benchmark))
        for text in (name, benchmark.column):
            owner = owners.setdefault(text.casefold(), name)
            if text.casefold() in _TAKEN or owner != name:
                owner = "ours" if text.casefold() in _TAKEN else owner
                raise ValueError(
                    f"{option}: {name}: {text} is a name or column of {owner}: rename it"
                )
        benchmarks[name] = benchmark
    return benchmarks


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


def _name_fault(name: object) -> str | None:
    """Return what is wrong with the name of a benchmark, or None."""
    # Its results are in files with that name.
    if isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name):
        return None
    return "a name must be a text of letters, digits, _ and -"


def _record_fault(record: object) -> str | None:
    """Return what is wrong with the record of a benchmark, or None."""
    if not isinstance(record, dict):
        return f"expected fields, found {record!r}"
    for field, value in record.items():
        if field not in _FIELDS:
            return f"it has no field {field}{near(str(field), _FIELDS)}: give {', '.join(_FIELDS)}"
        expected, is_valid = _FIELDS[field]
        if not is_valid(value):
            return f"{field} must be {expected}, found {value!r}"
    # With both a file and the hub, one of the two would be ignored.
    places = record.keys() & {"file", "hub", "hub_parts"}
    has_place = places in ({"file"}, {"hub", "hub_parts"})
    if not (has_place and {"question", "answer"} <= record.keys()):
        return "it needs question, answer, and either file or hub, hub_parts"
    return None
