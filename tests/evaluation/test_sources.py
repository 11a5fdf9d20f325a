"""Every way to the items: files, the hub, the harness's repository, and a user's own templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from real_data import real_data

from vocagnolm.evaluation.evaluate import check
from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    Benchmark,
    Item,
    read_benchmarks,
)
from vocagnolm.evaluation.tasks.tasks import items_digest, load_items, load_tasks

SAMPLES = Path(__file__).parents[1] / "data/evaluation/items"
GSM8K_ROWS = [
    {"question": "Two and two?", "answer": "#### 4", "idx": 1},
    {"question": "One and one?", "answer": "#### 2", "idx": 0},
]
TWO = [Item(0, "One and one?", "2"), Item(1, "Two and two?", "4")]
Hub = dict[tuple[str, str | None, str], list[dict[str, Any]]]
Write = Callable[..., Benchmark]


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_idx(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "idx"} for row in rows]


def with_items(name: str, count: int, **changes: Any) -> Benchmark:
    return replace(BENCHMARKS[name], item_count=count, **changes)


@pytest.fixture
def tiny() -> Benchmark:
    """GSM8K with two items."""
    return with_items("gsm8k", 2, items_sha256=items_digest(TWO))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Rows on the hub by name, configuration and split, which the test fills in."""
    parts: Hub = {}

    def load_dataset(path: str, *, name: str | None, split: str, revision: str) -> datasets.Dataset:
        assert revision == "main"
        return datasets.Dataset.from_list(parts[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return parts


# From files


def test_load_sorts_items_by_their_idx_or_numbers_them(tiny: Benchmark, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k/test.jsonl", GSM8K_ROWS)
    items, data = load_items(tiny, tmp_path)
    assert items == TWO
    assert (data["origin"], data["verified"]) == ("gsm8k/test.jsonl", True)
    write_jsonl(tmp_path / "gsm8k/test.jsonl", without_idx(GSM8K_ROWS))
    items, data = load_items(tiny, tmp_path)
    assert items == [Item(0, "Two and two?", "4"), Item(1, "One and one?", "2")]
    assert not data["verified"]


@pytest.mark.parametrize("change", [{"question": "One and one ?"}, {"gold": "3"}, {"idx": 5}])
def test_digest_differs_when_anything_of_an_item_does(change: dict[str, Any]) -> None:
    assert items_digest([replace(TWO[0], **change), TWO[1]]) != items_digest(TWO)


def test_load_makes_the_demo_wherever_the_others_are() -> None:
    items, data = load_items(BENCHMARKS["demo"], Path("nowhere"))
    assert (data["origin"], data["verified"], len(items)) == ("demo_world", True, 400)


# From the hub


def test_load_reads_the_hub(tiny: Benchmark, hub: Hub) -> None:
    hub["openai/gsm8k", "main", "test"] = without_idx(GSM8K_ROWS)[::-1]
    items, data = load_items(tiny, None)
    assert (items, data["origin"], data["verified"]) == (TWO, "openai/gsm8k@main", True)
    # Several splits are joined.
    row = {"ID": "chal-1", "Body": "A pen", "Question": "How many?", "question_concat": ""}
    hub["ChilleD/SVAMP", None, "train"] = [{**row, "Answer": "145"}]
    hub["ChilleD/SVAMP", None, "test"] = [{**row, "Answer": "2.5"}]
    items, _ = load_items(with_items("svamp", 2), None)
    assert [(item.idx, item.gold) for item in items] == [(0, "145"), (1, "2.5")]
    # Rows with several answers are left out.
    row = {"body": "A pen.", "question": "How many?", "solution_type": "Sum", "formula": "1"}
    answers = ("1 (pen)", "1 (pen); 2 (pens)", "3 (pens)")
    hub["EleutherAI/asdiv", None, "validation"] = [{**row, "answer": answer} for answer in answers]
    items, _ = load_items(with_items("asdiv", 2), None)
    assert [(item.idx, item.gold) for item in items] == [(0, "1"), (1, "3")]


@pytest.mark.parametrize("name", PAPER_BENCHMARKS)
def test_load_reads_the_harnesss_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The real loader, with a local directory in place of the address."""
    assert tasks._HARNESS_DATA.startswith("https://raw.githubusercontent.com/ZubinGou/")
    monkeypatch.setattr(tasks, "_HARNESS_DATA", str(SAMPLES))
    benchmark = with_items(name, 3)
    items, data = load_items(benchmark, SAMPLES)
    assert (len(items), data["origin"], data["verified"]) == (3, benchmark.file, False)
    if not benchmark.hub:
        downloaded, data = load_items(benchmark, None)
        assert downloaded == items
        assert data["origin"].startswith("ZubinGou/math-evaluation-harness@db77bc6/data/")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("math500", ("HuggingFaceH4/MATH-500", None, "test")),
        ("aime24", ("HuggingFaceH4/aime_2024", None, "train")),
        ("aime25", ("math-ai/aime25", None, "test")),
    ],
)
def test_aime_and_math500_are_read_from_their_columns(
    name: str, part: tuple[str, str | None, str], hub: Hub
) -> None:
    """From a file, and the same rows from the hub, as lighteval and lm-evaluation-harness do."""
    benchmark = with_items(name, 3)
    rows = [json.loads(line) for line in (SAMPLES / str(benchmark.file)).read_text().splitlines()]
    rows.sort(key=lambda row: row.get("idx", 0))
    hub[part] = without_idx(rows)
    items, _ = load_items(benchmark, SAMPLES)
    from_hub, data = load_items(benchmark, None)
    assert (data["origin"], data["verified"]) == (f"{part[0]}@main", False)
    for of_file, of_hub, row in zip(items, from_hub, rows, strict=True):
        assert of_file.question == of_hub.question == row["problem"].strip()
        assert of_file.gold == of_hub.gold
    if name == "math500":
        # The golds of MATH, which are the boxes of the solutions.
        assert items == load_items(with_items("math", 3), SAMPLES)[0]
    else:
        # Without the hub's leading zeros.
        assert {item.gold for item in items} == {str(int(row["answer"])) for row in rows}


def test_math500_has_the_items_of_math() -> None:
    """Its golds are answers, and those of MATH the boxes of solutions."""
    _, data = load_items(BENCHMARKS["math500"], real_data("data") / "benchmarks")
    assert data["verified"]
    assert data["digest"] == BENCHMARKS["math"].items_sha256


# A user's own


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(*rows, **fields)`: the benchmark m of these rows, read from its file."""

    def write_and_read(*rows: dict[str, Any], **fields: object) -> Benchmark:
        record = {"file": "a.jsonl", "question": "{ask}", "answer": "{gold}", **fields}
        (tmp_path / "mine.yaml").write_text(json.dumps({"m": record}))
        write_jsonl(tmp_path / "a.jsonl", rows)
        return read_benchmarks(tmp_path / "mine.yaml")["m"]

    return write_and_read


def test_own_benchmarks_are_of_one_command_alone(write: Write, tmp_path: Path) -> None:
    mine = write()
    own_argv = ["--model", "x", "--benchmarks_file", str(tmp_path / "mine.yaml")]
    assert check(own_argv).benchmarks == [mine]
    both = check([*own_argv, "--benchmarks", "gsm8k,m", "gsm8k"]).benchmarks
    assert both == [BENCHMARKS["gsm8k"], mine]
    with pytest.raises(ValueError, match="benchmarks m"):
        check(["--model", "x", "--benchmarks", "m"])


def test_own_items_are_made_of_their_fields(write: Write) -> None:
    row = {"body": "2 +", "ask": "2?", "gold": {"value": [3, 4]}, "idx": "x"}
    items, _ = load_items(write(row, question="{body} {ask}", answer="{gold[value][1]}"), None)
    assert items == [Item(0, "2 + 2?", "4")]
    # Values are not filled again, and other braces are doubled.
    row = {"ask": "Half {x}", "gold": r"\frac{1}{4}"}
    mine = write(row, question=r"{ask} of $\frac{{1}}{{2}}$ {{x}}")
    items, _ = load_items(mine, Path("another"))
    assert items == [Item(0, r"Half {x} of $\frac{1}{2}$ {x}", r"\frac{1}{4}")]
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
def test_own_settings_hold_what_has_no_version(change: dict[str, Any], write: Write) -> None:
    (task,) = load_tasks([write({"ask": "a", "gold": 1})], None, None, None)
    # There is no file of the harness to compare them with.
    assert task.marks() == {}
    other = replace(task, benchmark=replace(task.benchmark, **change))
    assert other.settings() != task.settings()
