"""Every way to the items: files, the hub, the harness's repository, and what goes wrong there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from vocagnolm.evaluation.tasks import sources
from vocagnolm.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    Benchmark,
    HubSource,
    Item,
)
from vocagnolm.evaluation.tasks.sources import items_digest, load_items


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# From files

GSM8K_ROWS = [
    {"question": "Two and two?", "answer": "#### 4", "idx": 1},
    {"question": "One and one?", "answer": "#### 2", "idx": 0},
]
TWO = (Item(0, "One and one?", "2"), Item(1, "Two and two?", "4"))


@pytest.fixture
def tiny() -> Benchmark:
    """GSM8K with two items."""
    return replace(BENCHMARKS["gsm8k"], item_count=2, items_sha256=items_digest(TWO))


def test_load_sorts_items_when_they_carry_an_idx(tiny: Benchmark, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k/test.jsonl", GSM8K_ROWS)
    loaded = load_items(tiny, tmp_path)
    assert loaded.items == TWO
    assert (loaded.origin, loaded.verified) == ("gsm8k/test.jsonl", True)


def test_load_numbers_items_when_they_carry_no_idx(tiny: Benchmark, tmp_path: Path) -> None:
    rows = [{"question": row["question"], "answer": row["answer"]} for row in GSM8K_ROWS]
    write_jsonl(tmp_path / "gsm8k/test.jsonl", rows)
    loaded = load_items(tiny, tmp_path)
    assert loaded.items == (Item(0, "Two and two?", "4"), Item(1, "One and one?", "2"))
    assert not loaded.verified


@pytest.mark.parametrize("change", [("question", "One and one ?"), ("gold", "3"), ("idx", 5)])
def test_digest_differs_when_anything_of_an_item_does(change: tuple[str, Any]) -> None:
    assert items_digest([replace(TWO[0], **dict([change])), TWO[1]]) != items_digest(TWO)


@pytest.mark.parametrize("name", [*PAPER_BENCHMARKS, "gsm_hard"])
def test_load_says_where_to_get_the_file(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    with pytest.raises(ValueError, match="has no") as caught:
        load_items(benchmark, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    expected = [str(benchmark.file), str(benchmark.item_count), f"--data_dir {tmp_path}"]
    if benchmark.file_sha256:
        expected += [benchmark.file_sha256, "github.com/ZubinGou/math-evaluation-harness"]
    if benchmark.hub:
        expected.append(benchmark.hub.name)
    assert [text for text in expected if text not in message] == []
    assert ("reconstruction" in message) == (name == "tabmwp")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['{"question": "a", "answer": "#### 1"}'],
            "expected 2 items of gsm8k, found 1; get data/",
        ),
        (
            ['{"question": "a", "answer": "#### 1"}', "{"],
            r"test\.jsonl, line 2: expected a JSON object",
        ),
        (["", "[1]"], r"test\.jsonl, line 2: expected a JSON object, found b'"),
        (['{"question": "a"}'], r"test\.jsonl, line 1: expected a field `answer`, found question"),
        (['{"question": "a", "answer": 1}'], "line 1: expected `answer` to be str, found int"),
        (['{"question": "a", "answer": "#### 1", "idx": "0"}'], "`idx` to be int, found str"),
        (['{"question": "a", "answer": "#### 1", "idx": 3}'] * 2, "line 2: .* found 3 again"),
        (["\udcff"], "line 1: expected a JSON object, found .*utf-8"),
    ],
)
def test_load_names_the_line_when_it_is_bad(
    tiny: Benchmark, tmp_path: Path, lines: list[str], message: str
) -> None:
    path = tmp_path / "gsm8k/test.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as caught:
        load_items(tiny, tmp_path)
    assert str(tiny.file_sha256) in str(caught.value)
    assert "\n" not in str(caught.value)


TABLE = {"table": "1", "question": "?", "table_title": None, "choices": None}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("svamp", {"Body": "A pen", "Question": "How many?", "Answer": 10**400}),
        ("tabmwp", TABLE | {"answer": f"1{'0' * 400}/1", "ans_type": "integer_number"}),
        ("tabmwp", TABLE | {"answer": "1/0", "ans_type": "integer_number"}),
        ("mathqa", {"problem": "a", "options": f"[{'-' * 100_000}1]", "correct": "a"}),
        ("mathqa", {"problem": "a", "options": f"[{'-' * 3000}1]", "correct": "a"}),
        ("gsm8k", {"question": "lone \ud83d", "answer": "#### 1"}),
    ],
)
def test_load_names_the_line_of_hostile_content(
    name: str, row: dict[str, Any], tmp_path: Path
) -> None:
    benchmark = BENCHMARKS[name]
    write_jsonl(tmp_path / str(benchmark.file), [row])
    with pytest.raises(ValueError, match=r"test\.jsonl, line 1: .*; get data/"):
        load_items(benchmark, tmp_path)


@pytest.mark.parametrize("data_dir", [None, Path("nowhere")])
def test_load_makes_the_demo_when_asked(data_dir: Path | None) -> None:
    loaded = load_items(BENCHMARKS["demo"], data_dir)
    assert (loaded.origin, loaded.verified, len(loaded.items)) == ("demo_world", True, 400)
    assert all(item.question.startswith("Q: ") for item in loaded.items)
    assert all(item.question.endswith("\nA:") for item in loaded.items)
    assert all(item.gold == str(int(item.gold)) for item in loaded.items)


# From the hub

Hub = dict[tuple[str, str | None, str], list[dict[str, Any]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """What stands on the hub, by name, configuration and split; to be filled by the test."""
    parts: Hub = {}

    def load_dataset(path: str, *, name: str | None, split: str, revision: str) -> datasets.Dataset:
        assert revision == "main"
        return datasets.Dataset.from_list(parts[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return parts


def staged_rows(shared_dir: Path, benchmark: Benchmark) -> list[dict[str, Any]]:
    with (shared_dir / "data/benchmarks" / str(benchmark.file)).open() as file:
        return [json.loads(line) for line in file]


def without_idx(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "idx"} for row in rows]


def test_load_reads_the_hub(tiny: Benchmark, hub: Hub) -> None:
    hub["openai/gsm8k", "main", "test"] = without_idx(GSM8K_ROWS)[::-1]
    loaded = load_items(tiny, None)
    assert (loaded.items, loaded.origin, loaded.verified) == (TWO, "openai/gsm8k@main", True)


def test_load_joins_splits_when_the_hub_has_several(hub: Hub) -> None:
    row = {"ID": "chal-1", "Body": "A pen", "Question": "How many?", "question_concat": ""}
    hub["ChilleD/SVAMP", None, "train"] = [{**row, "Answer": "145"}]
    hub["ChilleD/SVAMP", None, "test"] = [{**row, "Answer": "2.5"}]
    loaded = load_items(replace(BENCHMARKS["svamp"], item_count=2), None)
    assert [(item.idx, item.gold) for item in loaded.items] == [(0, "145"), (1, "2.5")]


def test_load_leaves_rows_out(hub: Hub) -> None:
    row = {"body": "A pen.", "question": "How many?", "solution_type": "Sum", "formula": "1"}
    answers = ("1 (pen)", "1 (pen); 2 (pens)", "3 (pens)")
    hub["EleutherAI/asdiv", None, "validation"] = [{**row, "answer": answer} for answer in answers]
    loaded = load_items(replace(BENCHMARKS["asdiv"], item_count=2), None)
    assert [(item.idx, item.gold) for item in loaded.items] == [(0, "1"), (1, "3")]


def test_load_reads_gsm_hard(hub: Hub) -> None:
    hub["reasoning-machines/gsm-hard", None, "train"] = [
        {"input": "How far?", "code": "def solution():\n    return 1", "target": 5887.5}
    ]
    loaded = load_items(replace(BENCHMARKS["gsm_hard"], item_count=1), None)
    assert loaded.items == (Item(0, "How far?", "5887.5"),)
    assert not loaded.verified


def test_load_names_the_row(tiny: Benchmark, hub: Hub) -> None:
    hub["openai/gsm8k", "main", "test"] = [{"prompt": "a"}]
    with pytest.raises(ValueError, match=r"openai/gsm8k, main/test, item 0: .* found prompt"):
        load_items(tiny, None)
    hub["EleutherAI/asdiv", None, "validation"] = [{"prompt": "a"}]
    with pytest.raises(ValueError, match=r"asdiv, default/validation, item 0: .* found prompt"):
        load_items(BENCHMARKS["asdiv"], None)


def as_hub_parts(benchmark: Benchmark, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The staged rows as the hub's schema has them, one list for each part."""
    source = benchmark.hub
    assert isinstance(source, HubSource)
    rows = without_idx(rows)
    if benchmark.id == "svamp":
        texts = [
            {**row, "Answer": str(row["Answer"]).removesuffix(".0"), "question_concat": ""}
            for row in rows
        ]
        return [texts[:700], texts[700:]]
    if benchmark.id == "asdiv":
        several = {**rows[0], "answer": "1 (red); 2 (blue)"}
        return [[*rows[:9], several, *rows[9:], several]]
    if benchmark.id == "mmlu_stem":
        return [[row for row in rows if row["type"] == subject] for subject, _ in source.parts]
    return [rows]


@pytest.mark.parametrize("name", [name for name in PAPER_BENCHMARKS if BENCHMARKS[name].hub])
def test_load_finds_the_verified_items(shared_dir: Path, hub: Hub, name: str) -> None:
    benchmark = BENCHMARKS[name]
    source = benchmark.hub
    assert isinstance(source, HubSource)
    contents = as_hub_parts(benchmark, staged_rows(shared_dir, benchmark))
    for (config, split), rows in zip(source.parts, contents, strict=True):
        hub[source.name, config, split] = rows
    assert load_items(benchmark, None).verified


@pytest.mark.parametrize("name", [name for name in PAPER_BENCHMARKS if not BENCHMARKS[name].hub])
def test_load_reads_the_harnesss_file(
    shared_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The real loader, with a local directory in the place of the address."""
    assert sources._HARNESS_DATA.startswith("https://raw.githubusercontent.com/ZubinGou/")
    monkeypatch.setattr(sources, "_HARNESS_DATA", str(shared_dir / "data/benchmarks"))
    loaded = load_items(BENCHMARKS[name], None)
    assert loaded.verified
    assert loaded.origin.startswith("ZubinGou/math-evaluation-harness@db77bc6/data/")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach it\nat all"),
        FileNotFoundError("Unable to find it"),
        RuntimeError("Dataset scripts are no longer supported"),
        ValueError("Unknown split"),
    ],
)
@pytest.mark.parametrize("name", ["gsm8k", "mathqa"])
def test_load_asks_for_a_directory(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"cannot be downloaded .*--data_dir") as caught:
        load_items(BENCHMARKS[name], None)
    assert "\n" not in str(caught.value)
    assert ("openai/gsm8k" if name == "gsm8k" else "mathqa/test.jsonl") in str(caught.value)
