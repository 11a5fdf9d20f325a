"""Results as data and as rows: every number carries its marks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from vocagnolm.evaluation import results as report
from vocagnolm.evaluation.accuracy import one_line_summary
from vocagnolm.evaluation.records import EvaluationDirectory, to_line
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Item
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks
from vocagnolm.shell.io import write_json

SETTINGS = {"model": {"name": "runs/my_student", "revision": "sha256:aa"}}


def make_task(
    name: str, n: int = 4, limit: int | None = None, origin: Any = "harness", verified: bool = True
) -> Task:
    items = [Item(idx, f"question {idx}", str(idx)) for idx in range(limit or n)]
    data = {"origin": "a file", "digest": "d", "verified": verified}
    prompt_set = {"name": "set", "origin": origin, "sha256": "0" * 64}
    return Task(replace(BENCHMARKS[name], item_count=n), items, {}, data, prompt_set)


def build(path: Path, *tasks: Task) -> dict[str, Any]:
    """Results in which the first item of each benchmark is right; math-verify accepts none."""
    directory = EvaluationDirectory(path)
    write_json(path / "settings.json", SETTINGS)
    columns = {}
    for task in tasks:
        opinion = None if task.benchmark.answer_kind == "letter" else False
        ending = {"decided_by": "string", "finish_reason": "eos", "n_new_tokens": 5}
        with directory.appending(task.benchmark.id, 0) as file:
            for item in task.items:
                verdict = {"prediction": item.gold, "correct": item.idx == 0}
                record = {"idx": item.idx, "math_verify": opinion} | verdict | ending
                file.write(to_line(record))
        directory.complete(task.benchmark.id, [(item.idx, 0) for item in task.items])
        columns[task.benchmark.id] = report.column(task, directory)
    return report.build(columns, directory, {})


def outputs(results: dict[str, Any], path: Path) -> dict[str, str]:
    """All outputs of an evaluation that show numbers, as text."""
    report.write(results, path)
    texts = {name: (path / name).read_text() for name in ("results.json", "row.md")}
    return texts | {"printed": report.to_markdown(results)}


def test_results_hold_everything_known(tmp_path: Path) -> None:
    results = build(tmp_path, make_task("gsm8k"), make_task("mathqa", 8))
    column = results["benchmarks"]["gsm8k"]
    assert (column["rounded"], column["n"], column["correct"]) == (25.0, 4, 1)
    assert column["prompts"] == {"name": "set", "origin": "harness", "sha256": "0" * 64}
    assert column["data"] == {"origin": "a file", "digest": "d", "verified": True}
    assert results["benchmarks"]["mathqa"]["rounded"] == 12.5
    assert results["averages"] == {}
    lines = report.to_markdown(results).splitlines()
    assert lines[0] == "| model | GSM8K | MQA |"
    assert lines[2] == "| runs/my_student | 25.0 | 12.5 |"
    assert lines[4] == f"| {report.SECOND_OPINION} | 0.0 | - |"
    assert "- graded by ZubinGou/math-evaluation-harness@db77bc6" in lines
    assert {"python", "torch", "transformers", "sympy"} <= results["environment"].keys()
    written = json.loads(outputs(results, tmp_path)["results.json"])
    assert written["benchmarks"].keys() == {"gsm8k", "mathqa"}
    assert written["settings"] == SETTINGS


MARKED = {
    "partial": ({"limit": 2}, "50.0*", "partial: 2 of 4 items"),
    "other_prompts": ({"origin": "vocagnolm"}, "25.0*", "prompts: vocagnolm, not the harness's"),
    "other_data": ({"verified": False}, "25.0*", "not verified"),
}


@pytest.mark.parametrize("name", MARKED)
def test_every_output_is_marked(tmp_path: Path, name: str) -> None:
    options, cell, mark = MARKED[name]
    results = build(tmp_path, make_task("gsm8k", **options), make_task("math"))
    texts = outputs(results, tmp_path)
    assert all(mark in text for text in texts.values()), texts
    for row in ("row.md", "printed"):
        (line,) = (line for line in texts[row].splitlines() if "student" in line)
        cells = [part.strip() for part in line.strip("|").split("|")]
        assert cells[1:3] == [cell, "25.0"]
        (note,) = (line for line in texts[row].splitlines() if mark in line)
        assert note[:4] == "- * "
        assert note.endswith("(GSM8K)")
    assert results["benchmarks"]["gsm8k"]["marked"] == [name]
    assert name in json.dumps(results)


def test_average_is_marked(tmp_path: Path) -> None:
    results = build(tmp_path, *map(make_task, PAPER_BENCHMARKS))
    assert "*" not in outputs(results, tmp_path)["row.md"]
    results = build(tmp_path, make_task("sat", limit=2))
    marked = {name: value["marked"] for name, value in results["averages"].items()}
    averages = {"AVG w/o TAB, MMLU-STEM, SAT": [], "AVG w/o SAT": []}
    assert marked == {"AVG": ["partial"], **averages}
    row = report.to_markdown(results).splitlines()[2].split("|")
    assert [cell.strip() for cell in row[-4:-1]] == ["27.8*", "25.0", "25.0"]


def test_benchmark_is_marked_only_for_what_differs() -> None:
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, None)
    assert task.marks() == {}
    # The harness lacks this one.
    task = make_task("aime24", verified=False)
    assert [*task.marks()] == ["other_data"]
    assert "harness" not in task.marks()["other_data"]


def test_row_grows_benchmark_by_benchmark(tmp_path: Path) -> None:
    first, second = make_task("svamp", origin="vocagnolm"), make_task("gsm8k")
    report.write(build(tmp_path, first), tmp_path)
    results = build(tmp_path, second)
    assert list(results["benchmarks"]) == ["gsm8k", "svamp"]
    assert len(results["marks"]) == 1
    assert one_line_summary(results["benchmarks"]["svamp"]).startswith("25.0 (95 % interval")
    (tmp_path / "svamp.jsonl").unlink()
    assert build(tmp_path, second)["benchmarks"].keys() == {"gsm8k"}


def test_card_has_the_papers_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = build(tmp_path, make_task("gsm8k"))
    monkeypatch.setitem(results["model"], "name", str(tmp_path))
    path = tmp_path / "README.md"
    # There may be no card, and the card of somebody else's model does not change.
    report.write_card(results)
    theirs = "---\ntags: [theirs]\n---\nA model.\n"
    path.write_text(theirs)
    report.write_card(results)
    assert path.read_text() == theirs
    tags = "tags: [vocagnolm, 'arxiv:2503.19123']"
    ModelCard(f"---\n{tags}\n---\nA student.\n\n## Evaluation\n\nold\n\n## Mine\n").save(path)
    for _ in range(2):
        report.write_card(results)
    card = path.read_text()
    assert re.findall("(?m)^## .*", card) == ["## Evaluation", "## Mine"]
    assert ("A student." in card, "| GSM8K |" in card, "old" in card) == (True, True, False)
    for other in ("protocol", "sampling"):
        report.write_card(results | {"settings": {other: {"name": "x"}}, "benchmarks": {}})
    assert path.read_text() == card
