"""Every way to the items: files, the hub, the harness's repository, and what goes wrong there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from real_data import real_data

from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Benchmark, Item
from vocagnolm.evaluation.tasks.tasks import items_digest, load_items

SAMPLES = Path(__file__).parents[1] / "data/evaluation/items"


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_idx(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "idx"} for row in rows]


# From files

GSM8K_ROWS = [
    {"question": "Two and two?", "answer": "#### 4", "idx": 1},
    {"question": "One and one?", "answer": "#### 2", "idx": 0},
]
TWO = [Item(0, "One and one?", "2"), Item(1, "Two and two?", "4")]


@pytest.fixture
def tiny() -> Benchmark:
    """GSM8K with two items."""
    return replace(BENCHMARKS["gsm8k"], item_count=2, items_sha256=items_digest(TWO))


def test_load_sorts_items_by_their_idx_or_numbers_them(tiny: Benchmark, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k/test.jsonl", GSM8K_ROWS)
    items, data = load_items(tiny, tmp_path)
    assert items == TWO
    assert (data["origin"], data["verified"]) == ("gsm8k/test.jsonl", True)
    write_jsonl(tmp_path / "gsm8k/test.jsonl", without_idx(GSM8K_ROWS))
    items, data = load_items(tiny, tmp_path)
    assert items == [Item(0, "Two and two?", "4"), Item(1, "One and one?", "2")]
    assert not data["verified"]


@pytest.mark.parametrize("change", [("question", "One and one ?"), ("gold", "3"), ("idx", 5)])
def test_digest_differs_when_anything_of_an_item_does(change: tuple[str, Any]) -> None:
    assert items_digest([replace(TWO[0], **dict([change])), TWO[1]]) != items_digest(TWO)


@pytest.mark.parametrize("name", PAPER_BENCHMARKS)
def test_load_reads_every_layout(name: str) -> None:
    benchmark = replace(BENCHMARKS[name], item_count=3)
    items, data = load_items(benchmark, SAMPLES)
    assert (len(items), data["origin"], data["verified"]) == (3, benchmark.file, False)
    assert all(item.question and item.gold for item in items)


@pytest.mark.parametrize("data_dir", [None, Path("nowhere")])
def test_load_makes_the_demo_when_asked(data_dir: Path | None) -> None:
    items, data = load_items(BENCHMARKS["demo"], data_dir)
    assert (data["origin"], data["verified"], len(items)) == ("demo_world", True, 400)
    assert all(item.question.startswith("Q: ") for item in items)


# From the hub

Hub = dict[tuple[str, str | None, str], list[dict[str, Any]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Rows on the hub by name, configuration and split, which the test fills in."""
    parts: Hub = {}

    def load_dataset(path: str, *, name: str | None, split: str, revision: str) -> datasets.Dataset:
        assert revision == "main"
        return datasets.Dataset.from_list(parts[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return parts


def test_load_reads_the_hub(tiny: Benchmark, hub: Hub) -> None:
    hub["openai/gsm8k", "main", "test"] = without_idx(GSM8K_ROWS)[::-1]
    items, data = load_items(tiny, None)
    assert (items, data["origin"], data["verified"]) == (TWO, "openai/gsm8k@main", True)


def test_load_joins_splits_when_the_hub_has_several(hub: Hub) -> None:
    row = {"ID": "chal-1", "Body": "A pen", "Question": "How many?", "question_concat": ""}
    hub["ChilleD/SVAMP", None, "train"] = [{**row, "Answer": "145"}]
    hub["ChilleD/SVAMP", None, "test"] = [{**row, "Answer": "2.5"}]
    items, _ = load_items(replace(BENCHMARKS["svamp"], item_count=2), None)
    assert [(item.idx, item.gold) for item in items] == [(0, "145"), (1, "2.5")]


def test_load_leaves_rows_out(hub: Hub) -> None:
    row = {"body": "A pen.", "question": "How many?", "solution_type": "Sum", "formula": "1"}
    answers = ("1 (pen)", "1 (pen); 2 (pens)", "3 (pens)")
    hub["EleutherAI/asdiv", None, "validation"] = [{**row, "answer": answer} for answer in answers]
    items, _ = load_items(replace(BENCHMARKS["asdiv"], item_count=2), None)
    assert [(item.idx, item.gold) for item in items] == [(0, "1"), (1, "3")]


@pytest.mark.parametrize("name", [name for name in PAPER_BENCHMARKS if not BENCHMARKS[name].hub])
def test_load_reads_the_harnesss_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The real loader, with a local directory in place of the address."""
    assert tasks._HARNESS_DATA.startswith("https://raw.githubusercontent.com/ZubinGou/")
    monkeypatch.setattr(tasks, "_HARNESS_DATA", str(SAMPLES))
    benchmark = replace(BENCHMARKS[name], item_count=3)
    items, data = load_items(benchmark, None)
    assert items == load_items(benchmark, SAMPLES)[0]
    assert data["origin"].startswith("ZubinGou/math-evaluation-harness@db77bc6/data/")


# Benchmarks that are data alone


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
    benchmark = replace(BENCHMARKS[name], item_count=3)
    assert benchmark.file is not None
    rows = [json.loads(line) for line in (SAMPLES / benchmark.file).read_text("utf-8").splitlines()]
    rows.sort(key=lambda row: row.get("idx", 0))
    hub[part] = without_idx(rows)
    items, data = load_items(benchmark, SAMPLES)
    assert (data["origin"], data["verified"]) == (benchmark.file, False)
    from_hub, data = load_items(benchmark, None)
    assert (data["origin"], data["verified"]) == (f"{part[0]}@main", False)
    for of_file, of_hub, row in zip(items, from_hub, rows, strict=True):
        assert of_file.question == of_hub.question == row["problem"].strip()
        assert of_file.gold == of_hub.gold
    if name == "math500":
        # The golds of MATH, which are the boxes of the solutions.
        assert items == load_items(replace(BENCHMARKS["math"], item_count=3), SAMPLES)[0]
    else:
        # Without the hub's leading zeros.
        assert {item.gold for item in items} == {str(int(row["answer"])) for row in rows}


def test_math500_has_the_items_of_math() -> None:
    """Its golds are answers, and those of MATH the boxes of solutions."""
    _, data = load_items(BENCHMARKS["math500"], real_data("data") / "benchmarks")
    assert data["verified"]
    assert data["digest"] == BENCHMARKS["math"].items_sha256
