"""A user's own benchmarks: what a record must hold, and what its templates make of an item."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.evaluation.evaluate import check
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item, read_benchmarks
from vocagnolm.evaluation.tasks.tasks import load_items, load_tasks

Write = Callable[..., Benchmark]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(*rows, **fields)`: the benchmark m of these rows, read from its file."""

    def write_and_read(*rows: dict[str, Any], **fields: object) -> Benchmark:
        record = {"file": "a.jsonl", "question": "{ask}", "answer": "{gold}", **fields}
        (tmp_path / "mine.yaml").write_text(json.dumps({"m": record}))
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_benchmarks(tmp_path / "mine.yaml")["m"]

    return write_and_read


def test_own_benchmarks_are_of_one_command_alone(write: Write, tmp_path: Path) -> None:
    mine = write()
    argv = ["--model", "x", "--data_dir", str(tmp_path)]
    own_argv = [*argv, "--benchmarks_file", str(tmp_path / "mine.yaml")]
    assert check(own_argv).benchmarks == [mine]
    both = check([*own_argv, "--benchmarks", "gsm8k,m", "gsm8k"]).benchmarks
    assert both == [BENCHMARKS["gsm8k"], mine]
    with pytest.raises(ValueError, match="benchmarks m"):
        check([*argv, "--benchmarks", "m"])


# Items


def test_own_items_are_made_of_their_fields(write: Write) -> None:
    row = {"body": "2 +", "ask": "2?", "gold": {"value": [3, 4]}, "idx": "x"}
    mine = write(row, question="{body} {ask}", answer="{gold[value][1]}")
    items, _ = load_items(mine, Path("another"))
    assert items == [Item(0, "2 + 2?", "4")]
    # Values are not filled again, and other braces are doubled.
    row = {"ask": "Half {x}", "gold": r"\frac{1}{4}"}
    mine = write(row, question=r"{ask} of $\frac{{1}}{{2}}$ {{x}}")
    (item,), _ = load_items(mine, None)
    assert (item.question, item.gold) == (r"Half {x} of $\frac{1}{2}$ {x}", r"\frac{1}{4}")
    with pytest.raises(ValueError, match="expected 1 items of m, found 0"):
        load_items(write(), None)


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        ("Problem:\n{question}\nSolution:", None),
        ("{question}", None),
        ("Q: 1 + 1?\nA: 2\n\nQ: {question}\nA:", "\n\nQ:"),
        ("Q: Is {question} 3?\nA:", "\n\nQ: Is"),
        ("Solve it.\nQ: {question}\nA: {question} is", "\n\nQ:"),
        ("Exercise:\n{question}\nSolution:", "\n\nExercise:"),
        ("A: 2\n\n{question}\nA:", None),
        ("1. ${question}$\nA:", None),
    ],
)
def test_answer_ends_where_the_template_begins_again(
    template: str, stop: str | None, write: Write
) -> None:
    defaults = list(Benchmark("m", "m", 0, 0).stops)
    assert list(write(template=template).stops) == defaults + ([stop] if stop else [])
    assert write(template=template, stops=[]).stops == []


@pytest.mark.parametrize(
    "change", [{"stops": ["b"]}, {"answer_kind": "marked"}, {"max_new_tokens": 2}, {"version": 2}]
)
def test_own_settings_tell_what_nobody_versions(change: dict[str, Any], write: Write) -> None:
    (task,) = load_tasks([write({"ask": "a", "gold": 1})], None, None, None)
    # There is no file of the harness to compare them with.
    assert task.marks() == {}
    other = replace(task, benchmark=replace(task.benchmark, **change))
    assert other.settings() != task.settings()
