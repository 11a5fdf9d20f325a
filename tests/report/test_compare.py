"""Comparisons: everything in numbers, what is never mixed, the command and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_results import (
    FIRST,
    OTHER,
    compared_runs,
    edit_settings,
    entry,
    record,
    write_chat,
    write_evaluation,
    write_json,
    write_run,
)

from vocagnolm import __main__
from vocagnolm.evaluation import results as report
from vocagnolm.evaluation.records import EvaluationDirectory, to_line
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.report.comparison import Comparison, compare, to_json
from vocagnolm.report.findings import UNDECIDED, difference
from vocagnolm.report.statistics import Pairing

GOLDEN = Path(__file__).parents[1] / "data" / "report" / "comparison.json"
ROWS = ["Rho-1", "Qwen2.5-Math-Instruct VocAgnoLM"]


def rounded(text: str) -> Any:
    """Read JSON, with rounded numbers: the last digits differ between processors."""
    return json.loads(text, parse_float=lambda number: round(float(number), 6))


def reasons(comparison: Comparison) -> dict[str, str]:
    """Why columns are not paired."""
    pairings = comparison.pairings
    return {pairing.column: pairing.not_paired for pairing in pairings if pairing.not_paired}


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two evaluations on GSM8K and MATH."""
    first = write_evaluation(tmp_path / "first", {"gsm8k": FIRST, "math": OTHER})
    other = write_evaluation(tmp_path / "other", {"gsm8k": OTHER, "math": FIRST})
    return [first, other]


def test_comparison_is_the_recorded_one(tmp_path: Path) -> None:
    """Seeds, chats, drawn outputs, partial numbers, rows of the paper, and some not paired."""
    content = to_json(compare(compared_runs(tmp_path), ROWS))
    assert rounded(json.dumps(content)) == rounded(GOLDEN.read_text())


# Pairs


def test_items_are_paired_by_idx_in_any_order(two: list[Path]) -> None:
    before = compare(two).pairings
    path = two[1] / "gsm8k.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert compare(two).pairings == before
    assert reasons(compare(two)) == {}


def change_item(path: Path, **values: object) -> None:
    *lines, last = (path / "gsm8k.jsonl").read_text().splitlines(keepends=True)
    lines.append(to_line(json.loads(last) | values))
    (path / "gsm8k.jsonl").write_text("".join(lines))


FEWER: dict[str, list[bool]] = {"gsm8k": OTHER[:5], "math": FIRST}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: edit_settings(path, grader="harness@2"), "grader"),
        (lambda path: edit_settings(path, "gsm8k", prompts_sha256=None), "prompts"),
        (lambda path: edit_settings(path, "gsm8k", version=2, stops=[]), "stops, version"),
        (lambda path: change_item(path, prompt_sha256="other"), "1 items"),
        (lambda path: change_item(path, gold="other"), "1 items"),
        (lambda path: write_evaluation(path, FEWER), "shared 5"),
    ],
)
def test_nothing_is_paired_when_settings_differ(
    two: list[Path], change: Callable[[Path], object], reason: str
) -> None:
    change(two[1])
    found = reasons(compare(two))
    assert reason in found["gsm8k"]
    assert ("math" in found) == (reason == "grader")


def test_outputs_drawn_otherwise_are_not_compared(two: list[Path]) -> None:
    edit_settings(two[1], sampling={"samples": 1, "temperature": 1.0, "top_p": 1.0})
    assert compare(two).pairings == []


def test_difference_is_undecided_when_no_item_differs() -> None:
    pairing = Pairing("a", "b", "gsm8k", False, points=-0.04, low=-1.26, high=1.0)
    assert difference(pairing) == ("+0.0", "-1.3 to +1.0")
    undecided = Pairing("a", "b", "gsm8k", False, points=0.0, low=0.0, high=0.0)
    assert difference(undecided) == ("+0.0", UNDECIDED)


def test_items_that_contradict_their_results_are_an_error(two: list[Path]) -> None:
    """The last output is wrong, so that the count of right ones still fits the results."""
    path = two[1] / "gsm8k.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl: 7 items.*evaluate again"):
        compare(two)


def test_comparison_reads_what_an_evaluation_writes(tmp_path: Path) -> None:
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, len(FIRST))
    for name, right in (("first", FIRST), ("other", OTHER)):
        directory = EvaluationDirectory(tmp_path / name / "evaluation")
        settings = {"model": {"name": name, "revision": "r"}, "grader": "g", "protocol": None}
        settings |= {"sampling": None, "engine": "hf", "dtype": "float32", "context": None}
        settings["benchmarks"] = {"demo": task.settings()}
        write_json(directory.path / "settings.json", settings)
        verdict = {"prediction": "1", "decided_by": "string", "math_verify": None}
        with directory.appending("demo", 0) as file:
            for item, correct in zip(task.items, right, strict=True):
                file.write(to_line(record(item.idx, correct) | verdict))
        directory.complete("demo", [(item.idx, 0) for item in task.items])
        columns = {"demo": report.column(task, directory)}
        report.write(report.build(columns, directory, {}), directory.path)
    comparison = compare([tmp_path / "first", tmp_path / "other"])
    (pairing,) = comparison.pairings
    assert (pairing.points, pairing.items) == (25.0, 8)
    assert [evaluation.prompts for evaluation in comparison.evaluations] == ["none", "none"]
    assert "partial" in comparison.evaluations[0].notes[1]


# Directories


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def labels(paths: list[Path]) -> list[str]:
        return [evaluation.label for evaluation in compare(paths).evaluations]

    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "c"]
    for path in paths:
        write_evaluation(path / "evaluation", {"gsm8k": FIRST})
    assert labels(paths) == [str(paths[0]), str(paths[1]), "c"]
    chat = paths[2] / "evaluation-chat"
    write_chat(chat, FIRST)
    assert labels([paths[2], paths[2]]) == ["c", "c-chat"]
    other = write_evaluation(tmp_path / "c-chat", {"gsm8k": FIRST})
    assert labels([paths[2], other]) == ["c", str(chat), "c-chat"]
    monkeypatch.chdir(paths[0])
    assert labels([Path()]) == ["model"]


def test_files_of_another_program_are_not_a_run(tmp_path: Path) -> None:
    """The demo, too, has results of its own."""
    for place in ("run.json", "results.json", "evaluation/results.json"):
        write_json(tmp_path / place, {"cpt": {"accuracy": [0.5]}, "benchmarks": {}})
    with pytest.raises(ValueError, match=f"{tmp_path} has no run.json"):
        compare([tmp_path])


# The command and the page


def test_command_writes_a_page_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = compared_runs(tmp_path / "runs")
    runs.append(write_run(tmp_path / "<b>&$x$", [entry(1, 1.0)], teacher="<i>T $\\bad$"))
    out = tmp_path / "out"
    argv = ["compare", *map(str, runs), "--reported", ROWS[0], "--output_dir", str(out)]
    # A second comparison replaces the first one's files.
    assert (__main__.main(argv), __main__.main(argv)) == (0, 0)
    markdown = (out / "comparison.md").read_text()
    assert capsys.readouterr().out.endswith(markdown)
    html = (out / "comparison.html").read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)|@import|url\((?!#)|<script", html)
    assert html.count("data:image/png") == 2
    for words in ("plain", "guided-chat", "reported: Rho-1", "&lt;b&gt;&amp;"):
        assert words in html
    # Neither elements nor this machine's paths come from the runs.
    for words in ("<i>", "<b>", str(tmp_path), "/home/someone"):
        assert words not in html
