"""Runs side by side: worked examples, what is never mixed, the paper's rows, tables and page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from fake_results import edit_results, record, write_evaluation, write_json, write_run
from real_data import real_data

from vocagnolm import __main__, method
from vocagnolm.evaluation import report
from vocagnolm.evaluation.runner import RunDirectory
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks, to_line
from vocagnolm.report.compare import (
    Comparison,
    compare,
    comparison_markdown,
    difference,
    findings,
    to_json,
    write_comparison,
)
from vocagnolm.report.paper import REPORTED_FILE, read_reported, teacher_name
from vocagnolm.report.plots import bar_series, read_curves
from vocagnolm.report.runs import (
    METHODS,
    are_alike,
    find_places,
    heading,
    read_run,
)
from vocagnolm.report.statistics import pair
from vocagnolm.run import parser
from vocagnolm.training.settings import settings_of

ROW = "Qwen2.5-Math-Instruct VocAgnoLM"
# Eight items: only the first is right on 1, only the other on 3, both on 2, neither on 2.
FIRST = [True, False, False, False, True, True, False, False]
OTHER = [False, True, True, True, True, True, False, False]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs on GSM8K and MATH, GSM8K as in `FIRST` and `OTHER`, MATH the other way round."""
    first = write_evaluation(tmp_path / "first", {"gsm8k": FIRST, "math": OTHER})
    other = write_evaluation(tmp_path / "other", {"gsm8k": OTHER, "math": FIRST})
    return [first, other]


@pytest.fixture
def paper_runs(tmp_path: Path) -> list[Path]:
    """Two runs on the paper's nine benchmarks, the other better by 25 points on each."""
    return [
        write_evaluation(tmp_path / name, dict.fromkeys(PAPER_BENCHMARKS, right))
        for name, right in (("first", FIRST), ("other", OTHER))
    ]


def paired(comparison: Comparison) -> dict[str, Any]:
    """The rows of the only pairing, by column."""
    assert len({(row["first"], row["other"]) for row in comparison.pairings}) == 1
    return {row["column"]: SimpleNamespace(**row) for row in comparison.pairings}


def rejected(comparison: Comparison) -> dict[str, str]:
    rows = paired(comparison).values()
    return {row.column: row.not_paired for row in rows if row.not_paired}


def cells(text: str, start: str) -> list[str]:
    """The cells of the first row that begins with `start`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


# Pairs


def test_pairing_equals_hand_computation(runs: list[Path]) -> None:
    comparison = compare(runs)
    rows = paired(comparison)
    gsm8k, math = rows["gsm8k"], rows["math"]
    assert (gsm8k.items, gsm8k.only_first, gsm8k.only_other) == (8, 1, 3)
    assert (gsm8k.points, math.points) == (25.0, -25.0)
    assert gsm8k.p == 0.625  # 2 (1 + 4) / 16
    assert gsm8k.p_holm == 1.0
    assert gsm8k.low < 25.0 < gsm8k.high
    assert rejected(comparison) == {}


def test_pairing_is_by_idx_in_any_order(runs: list[Path]) -> None:
    before = compare(runs).pairings
    path = runs[1] / "gsm8k.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert compare(runs).pairings == before


def test_average_difference_is_narrower_than_its_columns(paper_runs: list[Path]) -> None:
    rows = paired(compare(paper_runs))
    assert list(rows)[-3:] == list(AVERAGES)
    for average in AVERAGES:
        assert rows[average].points == pytest.approx(25.0)
        assert rows[average].p is None
    widths = [rows[name].high - rows[name].low for name in ("AVG", "gsm8k")]
    assert widths[0] == pytest.approx(widths[1] / 3, rel=0.2)  # of nine columns, so a third


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "grader": (lambda results: results.update(grader="harness@2"), "other grader"),
    "version": (
        lambda results: results["benchmarks"]["gsm8k"].update(version=2),
        "other version of the benchmark",
    ),
    "prompts": (
        lambda results: results["benchmarks"]["gsm8k"]["prompts"].update(sha256="q"),
        "other prompts",
    ),
    "no_prompts": (
        lambda results: results["benchmarks"]["gsm8k"].update(prompts=None),
        "other prompts",
    ),
    "data": (
        lambda results: results["benchmarks"]["gsm8k"]["data"].update(digest="e"),
        "other data",
    ),
}


SETTINGS = {"max_new_tokens": 1024, "stops": ["\n\n"], "answer_kind": "free"}


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_paired_when_settings_of_a_benchmark_differ(runs: list[Path], name: str) -> None:
    """They are in the results, or in the settings if a benchmark was evaluated before."""
    for run in runs:
        write_json(run / "settings.json", {"benchmarks": {"gsm8k": SETTINGS, "math": SETTINGS}})
    assert rejected(compare(runs)) == {}
    of_one = {"math": SETTINGS | {name: "another"}}
    edit_results(runs[1], lambda results: results.update(settings={"benchmarks": of_one}))
    assert rejected(compare(runs)) == {"math": f"other {name}"}
    # An older evaluation does not say how it was made.
    (runs[0] / "settings.json").unlink()
    assert rejected(compare(runs)) == {}
    assert rejected(compare(runs[::-1])) == {}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_paired_when_conditions_differ(paper_runs: list[Path], name: str) -> None:
    change, reason = CHANGES[name]
    edit_results(paper_runs[1], change)
    comparison = compare(paper_runs)
    found = rejected(comparison)
    assert found["gsm8k"] == reason
    assert "GSM8K" in found["AVG"]
    assert AVERAGES.keys() <= found.keys()
    assert ("math" in found) == (name == "grader")
    assert paired(comparison)["gsm8k"].points is None
    assert f"not paired: {reason}" in comparison_markdown(comparison)


def test_nothing_is_paired_when_item_sets_differ(tmp_path: Path) -> None:
    paths = [
        write_evaluation(tmp_path / "first", {"gsm8k": FIRST}),
        write_evaluation(tmp_path / "other", {"gsm8k": OTHER[:5]}, partial=["gsm8k"]),
    ]
    assert rejected(compare(paths)) == {"gsm8k": "other items: 8 and 5, shared 5"}


@pytest.mark.parametrize("fields", [{"prompt_sha256": "other"}, {"gold": "other"}])
def test_nothing_is_paired_when_items_differ(runs: list[Path], fields: dict[str, str]) -> None:
    path = runs[1] / "gsm8k.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, to_line(json.loads(last) | fields)]))
    found = compare(runs)
    assert rejected(found) == {"gsm8k": "other prompts or golds of 1 items"}
    assert paired(found)["math"].points == -25.0


def test_average_is_not_paired_without_one_benchmark(paper_runs: list[Path]) -> None:
    edit_results(paper_runs[1], lambda results: results["benchmarks"].pop("sat"))
    found = compare(paper_runs)
    assert rejected(found) == {"AVG": "SAT not paired"}
    assert paired(found)["AVG w/o SAT"].points == pytest.approx(25.0)


def test_averages_are_those_of_both_runs(paper_runs: list[Path], tmp_path: Path) -> None:
    shared = "AVG w/o TAB, MMLU-STEM, SAT"
    few = write_evaluation(tmp_path / "few", dict.fromkeys(AVERAGES[shared], OTHER))
    found = compare([paper_runs[0], few])
    assert list(paired(found)) == [*AVERAGES[shared], shared]
    assert rejected(found) == {}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("results.json", lambda content: content.pop("grader"), "'grader' is missing: it was ed"),
        ("results.json", lambda content: content.update(averages=[]), "it was edited, or another"),
        (
            "run.json",
            lambda content: content.pop("global_batch_tokens"),
            "'global_batch_tokens' is",
        ),
        ("trainer_state.json", lambda content: content.pop("max_steps"), "'max_steps' is missing"),
    ],
)
def test_fields_that_are_missing_are_told_with_their_file(
    name: str, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 1.0)])
    write_evaluation(run / "evaluation", {"gsm8k": [True, False]})
    content = json.loads((path := next(run.rglob(name))).read_text())
    change(content)
    write_json(path, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        compare([run])


def test_missing_items_are_told_with_their_file(runs: list[Path]) -> None:
    (runs[0] / "gsm8k.jsonl").unlink()
    with pytest.raises(ValueError, match=r"gsm8k.jsonl is missing, and results.json has its"):
        compare(runs)


def test_items_that_contradict_their_results_are_an_error(runs: list[Path]) -> None:
    path = runs[1] / "gsm8k.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="expected 8 outputs of 8 items, 5 of them right"):
        compare(runs)


def test_chat_stands_beside_few_shot_unmixed(tmp_path: Path) -> None:
    def in_chat(results: dict[str, Any]) -> None:
        results["benchmarks"]["gsm8k"].update(prompts=None, marked=["chat"], marks=["zero-shot"])

    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "asked in a chat alone"]
    for path, right in zip(paths, (FIRST, OTHER, FIRST), strict=True):
        edit_results(write_evaluation(path / "evaluation-chat", {"gsm8k": right[1:]}), in_chat)
    for path, right in zip(paths[:2], (FIRST, OTHER), strict=True):
        write_evaluation(path / "evaluation", {"gsm8k": right})
    comparison = compare(paths)
    pairs = [[row["first"], row["other"]] for row in comparison.pairings]
    assert pairs == [["a", "b"], ["a-chat", "b-chat"], ["a-chat", f"{paths[2].name}-chat"]]
    assert not any(row["not_paired"] for row in comparison.pairings)
    text = comparison_markdown(comparison)
    assert cells(text, "a") == ["a", "harness", "37.5 (27.5 to 47.5)"]
    assert cells(text, "a-chat") == ["a-chat", "chat", "28.6* (18.6 to 38.6)"]
    series = bar_series(comparison.runs, comparison.settings, comparison.reported)
    assert {label: bars.value["gsm8k"] for label, bars in series.items()} == pytest.approx(
        dict(zip(["a", "a-chat", "b", "b-chat"], [37.5, 200 / 7, 62.5, 500 / 7], strict=True))
        | {f"{paths[2].name}-chat": 200 / 7}
    )


# Three items of four outputs. The first run has 1, 2 and 0 right ones, the other 4, 2 and 1.
DRAWN_FIRST, DRAWN_OTHER = ["+---", "++--", "----"], ["++++", "--++", "---+"]


def write_drawn(directory: Path, rights: list[str], temperature: float = 0.6) -> Path:
    """Write results of drawn outputs with their items, as an evaluation does."""
    outcomes = [mark == "+" for marks in rights for mark in marks]
    samples = len(rights[0])
    write_evaluation(directory, {"gsm8k": outcomes})
    lines = []
    for idx, marks in enumerate(rights):
        for sample, mark in enumerate(marks):
            lines.append(to_line(record(idx, mark == "+") | {"sample": sample}))
    (directory / "gsm8k.jsonl").write_text("".join(lines))

    def drawn(results: dict[str, Any]) -> None:
        sampling = {"samples": samples, "temperature": temperature, "top_p": 1.0}
        results["settings"] = {"sampling": sampling}
        column = results["benchmarks"]["gsm8k"]
        column.update(n=len(rights), samples=samples, marked=["sampled"], marks=["sampled: 4"])

    edit_results(directory, drawn)
    return directory


def test_drawn_outputs_are_paired_by_item(tmp_path: Path) -> None:
    """By hand: 7 - 3 of 12 outputs more; half of the sign flips of 3, 0 and 1 reach 4."""
    first = write_drawn(tmp_path / "first", DRAWN_FIRST)
    other = write_drawn(tmp_path / "other", DRAWN_OTHER)
    comparison = compare([first, other])
    row = paired(comparison)["gsm8k"]
    assert row.points == pytest.approx(400 / 12)
    assert (row.items, row.only_first, row.only_other, row.p) == (3, 0, 2, 0.5)
    # An item may gain 3, 0 or 1 outputs of 4.
    assert 0 <= row.low < row.points < row.high <= 75
    assert rejected(comparison) == {}


def test_drawn_outputs_stand_beside_greedy_ones_unmixed(tmp_path: Path) -> None:
    for name, rights in (("a", DRAWN_FIRST), ("b", DRAWN_OTHER)):
        write_evaluation(tmp_path / name / "evaluation", {"gsm8k": FIRST})
        write_drawn(tmp_path / name / "evaluation-sampled", rights)
        write_drawn(tmp_path / name / "evaluation-chat-sampled", rights, temperature=1.0)
    comparison = compare([tmp_path / "a", tmp_path / "b"], [ROW])
    pairs = [(row["first"], row["other"], row["not_paired"]) for row in comparison.pairings]
    assert pairs == [
        ("a", "b", None),
        ("a-sampled", "b-sampled", None),
        ("a-chat-sampled", "b-chat-sampled", None),
    ]
    # Next to the paper's greedy row, the number is marked and explained.
    text = comparison_markdown(comparison)
    assert cells(text, "a-sampled")[2].startswith("25.0* (")
    assert "sampled: 4 (GSM8K)" in text
    assert "reported: " in text


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_outputs_drawn_otherwise_are_not_paired(tmp_path: Path, temperature: float | None) -> None:
    first = write_drawn(tmp_path / "first", DRAWN_FIRST)
    other = write_drawn(tmp_path / "other", DRAWN_OTHER, temperature or 0.6)
    if temperature is None:
        other = write_evaluation(tmp_path / "greedy", {"gsm8k": FIRST[:3]})
    runs = [read_run("first", first), read_run("other", other)]
    (row,) = pair(*runs)
    assert row["not_paired"].startswith("other sampling")
    assert not are_alike(*runs)


def test_drawn_output_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """The missing one is wrong, so that the count of right ones still fits the results."""
    paths = [write_drawn(tmp_path / name, DRAWN_FIRST) for name in ("first", "other")]
    path = paths[1] / "gsm8k.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="expected 12 outputs of 3 items, 3 of them right"):
        compare(paths)


# The paper's rows


def test_reported_rows_equal_the_papers_text() -> None:
    root = real_data("paper")
    tables = json.loads(REPORTED_FILE.read_text())["tables"]
    # Tables 1 and 4 as the digest of the paper has them.
    expected: dict[str, list[float | None]] = {}
    digest = (root / "README.md").read_text(encoding="utf-8")
    for title, names in (("### Table 1", 2), ("### Table 4", 1)):
        for line in digest.split(title)[1].split("\n\n")[1].splitlines()[2:]:
            row = [cell.strip() for cell in line.strip("|").split("|")]
            numbers = [None if cell == "-" else float(cell) for cell in row[names:]]
            expected[" ".join(row[:names])] = numbers
    renamed = {"nothing: TinyLlama -": "TinyLlama", "Rho-1 reference Rho-1": "Rho-1"}
    renamed["nothing: TinyLlama-CPT CPT"] = "TinyLlama-CPT"
    ours = {**tables[0]["rows"], **tables[3]["rows"]}
    assert ours == {renamed.get(key, key): row for key, row in expected.items()}
    # Tables 2 and 3 as its text has them.
    (path,) = root.glob("arxiv-*.txt")
    for number in (2, 3):
        table = path.read_text(encoding="utf-8").split(f"\nTable {number}: ")[1].split("\n\n")[1]
        lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
        printed = [line[2:] for line in lines if len(line) > 5 and line[-1][0].isdigit()]
        rows = tables[number - 1]["rows"].values()
        assert list(rows) == [list(map(float, row)) for row in printed]


def test_reported_averages_are_means_of_their_columns() -> None:
    tables = json.loads(REPORTED_FILE.read_text())["tables"]
    rows = pd.DataFrame(read_reported([table["table"] for table in tables]))
    assert rows.row.nunique() == 17 + 9 + 7 + 6
    assert read_reported(["Table 1", "Rho-1"]) == read_reported(["Table 1"])
    checked = 0
    for name, row in rows.groupby("row"):
        values = row.set_index("column").reported
        for average, members in AVERAGES.items():
            if average in values:
                mean = values[list(members)].mean()
                assert values[average] == pytest.approx(mean, abs=0.0501), name
                checked += 1
    assert checked == 16 * 3 + 1 + 16 * 3 + 6  # Rho-1 has one, the teachers have AVG alone


def test_teachers_have_the_papers_names() -> None:
    paper = json.loads(REPORTED_FILE.read_text())
    assert paper["models"].keys() == paper["tables"][3]["rows"].keys()
    for name, others in paper["models"].items():
        assert {teacher_name(f"/x/{other}") for other in (name, *others)} == {name}
    assert teacher_name("some/qwen2.5-math-7b-rl") == "qwen2.5-math-7b-rl"


# Tables and files


def test_table_has_the_columns_of_table_1(paper_runs: list[Path]) -> None:
    edit_results(
        paper_runs[1],
        lambda results: results["benchmarks"]["gsm8k"]["prompts"].update(origin="vocagnolm"),
    )
    text = comparison_markdown(compare(paper_runs, ["Rho-1"]))
    assert cells(text, "other")[1] == "ours, harness"
    names = [*map(heading, PAPER_BENCHMARKS), *AVERAGES]
    assert cells(text, "run")[2:] == names
    assert cells(text, "first") == ["first", "harness", *["37.5 (27.5 to 47.5)"] * 12]
    values = dict(zip(names, cells(text, "reported: Rho-1 (Table 1)")[2:], strict=True))
    assert (values["ASDiv"], values["SAT"], values["AVG"]) == ("41.2", "-", "-")


def test_partial_columns_are_marked(tmp_path: Path) -> None:
    benchmarks = dict.fromkeys(("gsm8k", "math", "svamp"), FIRST)
    paths = [
        write_evaluation(tmp_path / name, benchmarks, partial=[partial])
        for name, partial in (("first", "math"), ("other", "svamp"))
    ]
    text = comparison_markdown(compare(paths, ["Rho-1"]))
    accuracy, pairs = (
        [line for line in part.splitlines() if line.startswith("|")][2:]
        for part in text.split("## ")[1:]
    )
    assert [line.count("*") for line in accuracy] == [1, 1, 0]
    assert [line.split("|")[2].strip() for line in pairs] == ["GSM8K", "MATH*", "SVAMP*"]
    assert "partial: 8 of many items (MATH)" in text


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "c"]
    for path in paths:
        write_evaluation(path / "evaluation", {"gsm8k": FIRST})
    assert list(find_places(paths)) == [str(paths[0]), str(paths[1]), "c"]
    monkeypatch.chdir(paths[2])
    assert list(find_places([Path()])) == ["c"]


@pytest.mark.parametrize("place", ["run.json", "results.json", "evaluation/results.json"])
def test_file_of_another_program_is_no_run(place: str, tmp_path: Path) -> None:
    """The demo, too, has results of its own, and runs two directories down."""
    write_json(tmp_path / place, {"cpt": {"accuracy": [0.5]}, "benchmarks": {}})
    with pytest.raises(ValueError, match="train or evaluate first"):
        find_places([tmp_path])
    write_run(tmp_path / "seed0" / "cpt", [entry(1, 1.0)])
    (tmp_path / "student").symlink_to("seed0/cpt")
    with pytest.raises(ValueError, match=f"as {tmp_path}/seed0/cpt$"):
        find_places([tmp_path])


def test_unfinished_evaluation_is_told(trained: list[Path]) -> None:
    evaluation = trained[1] / "evaluation"
    settings = {"benchmarks": {"gsm8k": {}}}
    write_json(evaluation / "settings.json", settings)
    assert compare(trained).unfinished == []
    (evaluation / "results.json").unlink()
    write_json(trained[0] / "evaluation-chat" / "settings.json", settings)
    found = findings(compare(trained))
    assert "guided: its evaluation is unfinished: run vocagnolm evaluate again." in found
    assert "plain: its evaluation-chat is unfinished: run vocagnolm evaluate again." in found
    with pytest.raises(ValueError, match="its evaluation is unfinished: run vocagnolm evaluate"):
        find_places([evaluation])


def test_files_hold_the_comparison(paper_runs: list[Path], tmp_path: Path) -> None:
    edit_results(paper_runs[1], CHANGES["prompts"][0])
    comparison = compare(paper_runs, [ROW, "Rho-1"])
    write_comparison(comparison, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    pairs = {row["column"]: row for row in data["pairings"]}
    assert pairs["gsm8k"]["not_paired"] == "other prompts"
    assert (pairs["math"]["p"], pairs["math"]["not_paired"]) == (0.625, None)
    scores = {(row["run"], row["column"]): row["value"] for row in data["scores"]}
    assert scores["first", "AVG"] == pytest.approx(37.5)
    assert list(dict.fromkeys(row["row"] for row in data["reported"])) == [ROW, "Rho-1"]
    assert (tmp_path / "out" / "comparison.md").read_text() == comparison_markdown(comparison)
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["html", "json", "md", "png"])
def test_comparison_replaces_its_own_files_and_no_others(
    kind: str, runs: list[Path], tmp_path: Path
) -> None:
    comparison = compare(runs)
    path = tmp_path / f"comparison.{kind}"
    path.write_text("mine")
    with pytest.raises(ValueError, match=f"holds {path.name}, which vocagnolm compare did not"):
        write_comparison(comparison, tmp_path)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [path.name]
    assert path.read_text() == "mine"
    path.unlink()
    write_comparison(comparison, tmp_path)
    write_comparison(comparison, tmp_path)


def test_command_prints_tables(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["compare", *map(str, runs), "--reported", ROW]) == 0
    differences = capsys.readouterr().out.split("## Points above first, over the same items")[1]
    assert cells(differences, "other")[1:3] == ["GSM8K", "+25.0"]
    assert cells(differences, "other")[4:] == ["8", "1", "3", "0.625", "1.000"]


def test_comparison_reads_what_an_evaluation_writes(tmp_path: Path) -> None:
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, len(FIRST))
    for name, right in (("first", FIRST), ("other", OTHER)):
        directory = RunDirectory(tmp_path / name / "evaluation")
        verdict = {"prediction": "1", "decided_by": "string", "math_verify": None}
        with directory.appending("demo", 0) as file:
            for item, correct in zip(task.items, right, strict=True):
                file.write(to_line(record(item.idx, correct) | verdict))
        directory.complete("demo", [(item.idx, 0) for item in task.items])
        settings = {"model": {"name": name, "revision": "r"}}
        columns = {"demo": report.column(task, directory)}
        report.write_results(report.build_results(columns, directory, settings, {}), directory)
    comparison = compare([tmp_path / "first", tmp_path / "other"])
    assert paired(comparison)["demo"].points == 25.0
    assert [run.prompts for run in comparison.runs] == ["none", "none"]
    assert "partial: 8 of 400 items (Demo)" in comparison_markdown(comparison)


# Training runs


def entry(step: int, loss: float, **values: float) -> dict[str, float]:
    return {"step": step, "student_loss_nats": loss, "selected_fraction": 0.4} | values


@pytest.fixture
def trained(tmp_path: Path) -> list[Path]:
    """Two methods with a seed each, evaluated, and a third that is not."""
    excess = {f"excess_loss_p{n}_nats": value for n, value in ((10, -1.0), (50, 0.5), (90, 2.0))}
    guided = [entry(n, 3 - n / 10, tokens_per_s=100.0 + n, **excess) for n in range(1, 10)]
    # The run was extended, so it ended twice.
    guided.insert(4, {"step": 4, "train_runtime": 60.0})
    guided.append({"step": 9, "train_runtime": 7200.0, "eval_loss": 2.5})
    paths = [
        write_run(tmp_path / "plain", [entry(1, 2.0)], method="cpt", teacher=None),
        write_run(tmp_path / "guided", guided),
        write_run(tmp_path / "wider", [entry(1, 1.0)], top_k=0.6, dataset="/home/someone/d"),
    ]
    for path, right in zip(paths, (FIRST, OTHER), strict=False):
        write_evaluation(path / "evaluation", dict.fromkeys(PAPER_BENCHMARKS, right))
    return paths


def section(text: str, title: str) -> list[list[str]]:
    """The rows of a table, without its rule."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_curves_are_means_over_the_seeds_of_a_setting(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{seed}", [entry(n, n + seed) for n in steps], seed=seed)
        for seed, steps in ((0, (1, 2, 3)), (2, (1, 2)))
    ]
    (curve,) = read_curves(compare(paths).settings)["loss on all tokens (nats)"].values()
    # Only one run has the third step.
    assert curve.to_numpy().tolist() == [[1000, 2, 1, 3], [2000, 3, 2, 4]]


def test_curves_have_the_log_of_each_method(trained: list[Path]) -> None:
    found = read_curves(compare(trained).settings)
    guided = [f"VocAgnoLM, T, top_k {k}, dataset d" for k in (0.4, 0.6)]
    assert list(found["loss on all tokens (nats)"]) == ["CPT", *guided]
    (excess,) = found["excess, median (nats)"].values()
    assert excess[["mean", "low", "high"]].drop_duplicates().to_numpy().tolist() == [[0.5, -1, 2]]
    assert "unmapped share of the tokens" not in found


def test_bars_are_means_over_the_seeds_of_a_setting(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed) for seed in range(3)]
    for path, correct in zip(paths, (20, 21, 22), strict=True):
        write_evaluation(path / "evaluation", {"gsm8k": [idx < correct for idx in range(100)]})

    def bars() -> dict[str, Any]:
        found = compare(paths)
        series = bar_series(found.runs, found.settings, found.reported)
        return {label: tuple(bar.loc["gsm8k"]) for label, bar in series.items()}

    assert bars() == {"VocAgnoLM, T": (21.0, 20.0, 22.0, False)}
    # Runs asked differently are not averaged, although the first does not say how it was asked.
    for path, limit in zip(paths[1:], (1, 2), strict=True):
        settings = {"benchmarks": {"gsm8k": {"max_new_tokens": limit}}}
        write_json(path / "evaluation" / "settings.json", settings)
    assert [bar[0] for bar in bars().values()] == [20.0, 21.0, 22.0]


def test_settings_are_listed_only_when_they_differ(trained: list[Path]) -> None:
    _, *rows = section(comparison_markdown(compare(trained)), "Settings that differ")
    assert {row[0]: row[1:] for row in rows} == {
        "teacher": ["-", "T", "T"],
        "method": ["cpt", "vocagnolm", "vocagnolm"],
        "top_k": ["0.4", "0.4", "0.6"],
        "dataset": ["d", "d", "d"],
    }
    assert "Settings that differ" not in comparison_markdown(compare(trained[:1]))


def test_rows_of_the_paper_need_no_evaluation(trained: list[Path]) -> None:
    text = comparison_markdown(compare(trained[2:], ["Rho-1"]))
    assert "41.2" in cells(text, "reported: Rho-1 (Table 1)")


def test_costs_are_read_off_the_log(trained: list[Path]) -> None:
    head, *rows = section(comparison_markdown(compare(trained)), "Cost")
    by_run = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(by_run) == ["plain", "guided", "wider"]
    guided = by_run["guided"]
    assert (guided["steps"], guided["student tokens"]) == ("9", "9,000")
    assert (guided["tokens/s"], guided["time"]) == ("105", "2:00:00")
    assert (guided["FLOPs"], guided["held-out loss"]) == ("3.00e+12", "2.5000")
    assert (by_run["plain"]["tokens/s"], by_run["plain"]["held-out loss"]) == ("-", "-")


def held_out(place: Path, loss: float, tokens: int = 99, **options: Any) -> Path:
    log = [entry(1, 1.0, eval_loss=loss, eval_tokens=tokens)]
    return write_run(place, log, student="s", **options)


PLAIN: dict[str, Any] = {"method": "cpt", "teacher": None}


def test_findings_hold_guided_runs_against_controls(tmp_path: Path) -> None:
    paths = [
        held_out(tmp_path / "guided", 8.683),
        held_out(tmp_path / "wider", 8.0, top_k=0.6),
        held_out(tmp_path / "plain", 8.197, **PLAIN),
    ]
    narrow, wide, missing = findings(compare(paths))
    assert "CPT is ahead of VocAgnoLM, T, top_k 0.4 by 0.486 nats" in narrow
    assert "no test possible" in narrow
    assert "VocAgnoLM, T, top_k 0.6 is ahead of CPT by 0.197 nats" in wide
    assert "--method random" in missing
    assert "--method cpt" not in missing
    # Without a control, the others are compared with the first.
    pair, _ = findings(compare(paths[:2]))
    assert "top_k 0.6 is ahead of VocAgnoLM, T, top_k 0.4 by 0.683 nats" in pair


def test_findings_pair_seeds(tmp_path: Path) -> None:
    paths = []
    # The last seed favors neither.
    losses = ((2.0, 2.2), (2.1, 2.4), (2.3, 2.2), (2.5, 2.5))
    for seed, (ours, theirs) in enumerate(losses):
        paths.append(held_out(tmp_path / f"g{seed}", ours, seed=seed))
        paths.append(held_out(tmp_path / f"p{seed}", theirs, seed=seed, **PLAIN))
    finding, _ = findings(compare(paths))
    assert "VocAgnoLM, T is ahead of CPT by 0.100 nats" in finding
    assert "with 2 of 4 seeds, sign test p = 1.000" in finding


def test_findings_are_of_common_seeds_alone(tmp_path: Path) -> None:
    """A seed that one of two settings lacks may have held out other texts."""
    losses = [("g", 2.0, 2.1), ("h", 2.0, 2.1)]
    paths = [held_out(tmp_path / "late", 9.0, 98, seed=2)]
    for seed, (name, ours, theirs) in enumerate(losses):
        paths.append(held_out(tmp_path / name, ours, seed=seed))
        paths.append(held_out(tmp_path / f"{name}-plain", theirs, seed=seed, **PLAIN))
    finding, _ = findings(compare(paths))
    assert "VocAgnoLM, T is ahead of CPT by 0.100 nats" in finding
    assert "with 2 of 2 seeds" in finding


def test_equal_losses_are_level(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "a", 2.0), held_out(tmp_path / "b", 2.0, **PLAIN)]
    assert findings(compare(paths))[0].startswith("VocAgnoLM, T and CPT are level on held-out text")


@pytest.mark.parametrize("option", ["student", "student_tokenizer", "eval_fraction"])
def test_findings_compare_no_losses_of_other_tokens(option: str, tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "a", 2.0, **PLAIN), held_out(tmp_path / "b", 1.0, rate=1, **PLAIN)]
    assert len(findings(compare(paths))) == 1
    settings = json.loads((paths[1] / "run.json").read_text())
    write_json(paths[1] / "run.json", settings | {option: "other"})
    assert findings(compare(paths)) == []


def test_findings_have_no_test_without_two_common_seeds(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / f"{seed}", 2.0, seed=seed, **PLAIN) for seed in (1, 2)]
    paths.append(held_out(tmp_path / "guided", 1.0))
    assert "no two seeds in common" in findings(compare(paths))[0]
    assert "one seed each" in findings(compare(paths[1:]))[0]


def test_findings_compare_no_losses_of_other_texts(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "plain", 2.0, **PLAIN), held_out(tmp_path / "guided", 1.0, 98)]
    finding, _ = findings(compare(paths))
    assert finding == "VocAgnoLM, T and CPT were not evaluated on the same texts."
    # Seeds that only one of them has may have held out other texts.
    paths += [held_out(tmp_path / f"{seed}", 1.0, 99 - seed, seed=seed) for seed in (0, 1)]
    finding, _ = findings(compare([paths[0], *paths[2:]]))
    assert "is ahead of CPT by 1.000 nats" in finding


def test_findings_give_the_average_of_evaluations(paper_runs: list[Path]) -> None:
    (finding,) = findings(compare(paper_runs))
    assert "other against first, in points: AVG +25.0" in finding
    assert finding.count("+25.0") == 1


def test_difference_is_undecided_when_no_item_differs(tmp_path: Path) -> None:
    paths = [write_evaluation(tmp_path / x, {"gsm8k": FIRST}) for x in ("first", "other")]
    text = comparison_markdown(compare(paths)).split("## Points above first")[1]
    assert cells(text, "other")[2:] == ["+0.0", "no item decides", "8", "0", "0", "-", "-"]


def test_difference_has_a_sign_and_an_interval() -> None:
    row = {"points": -0.04, "low": -1.26, "high": 1.0}
    assert difference(row) == ("+0.0", "-1.3 to +1.0")
    # Discordant items may balance.
    assert difference(row | {"points": 0.0}) == ("+0.0", "-1.3 to +1.0")


@pytest.mark.parametrize(("items", "p"), [(10, "0.002"), (11, "< 0.001")])
def test_small_p_is_no_number(items: int, p: str, tmp_path: Path) -> None:
    paths = [
        write_evaluation(tmp_path / name, {"gsm8k": [right] * items})
        for name, right in (("first", False), ("other", True))
    ]
    text = comparison_markdown(compare(paths)).split("## Points above first")[1]
    assert cells(text, "other")[-2:] == [p, p]


def test_model_and_engine_of_an_evaluation_are_among_the_notes(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "first", {"gsm8k": FIRST})
    settings = {"engine": "hf", "dtype": "float32", "context": 2048, "limit": None}
    model = {"name": "/home/someone/m", "revision": "sha256:0123456789abcdef"}
    edit_results(path, lambda results: results.update(settings=settings, model=model))
    text = comparison_markdown(compare([path]))
    assert "- first: m, revision sha256:0123456789ab; verdicts of " in text
    assert "  - engine hf, dtype float32, context 2048\n" in text


def test_trained_runs_are_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    paths = []
    for name, seed, top_k in (("a", 0, 0.4), ("b", 0, 0.6), ("c", 1, 0.4)):
        paths.append(write_run(tmp_path / name, [entry(1, 1.0)], seed=seed, top_k=top_k))
    assert [run["run"] for run in to_json(compare(paths))["trained"]] == ["a", "b", "c"]


def test_repeated_run_stands_beside_the_other(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, [entry(1, 1.0)]) for name in ("run", "run2")]
    assert list(compare(paths).settings) == [f"VocAgnoLM, T, {name}" for name in ("run", "run2")]
    third = write_run(tmp_path / "other seed", [entry(1, 1.0)], seed=1)
    settings = compare([*paths, third]).settings
    assert list(settings) == [f"VocAgnoLM, T, {name}" for name in ("run", "run2", "other seed")]


def test_held_out_loss_is_that_of_the_last_step(tmp_path: Path) -> None:
    log = [entry(1, 1.0, eval_loss=3.0), entry(2, 1.0)]
    assert [run.eval_loss for run in compare([write_run(tmp_path, log)]).trained] == [None]


# What may differ between seeds of one setting: a server turns 1.0 into 1, paths of models contain
# the seed, also below a directory of one seed that both share, and each seed has its own corpus.
OF_SEEDS: dict[str, tuple[object, object]] = {
    "rate": (1.0, 1),
    "student": ("/x/seed0/student", "/x/seed1/student"),
    "student_tokenizer": ("/x/seed0/student", "/x/seed0/student"),
    "dataset": (["/seed0/seed0/p", "/seed0/q"], ["/seed0/seed1/p", "/seed0/q"]),
    "teacher_losses": (
        [{"store": "/seed0", "teacher": "T"}],
        [{"store": "/seed1", "teacher": "T"}],
    ),
    "data_seed": (3, 4),
    "blocks": (7, 8),
    "teacher_losses_sha256": ("a", "b"),
    "teacher_files": (["a"], ["b"]),
    "evaluation": ({"documents": {"": ["a"]}}, {"documents": {"": ["b"]}}),
}


@pytest.mark.parametrize("name", OF_SEEDS)
def test_seeds_are_pooled_when_nothing_else_differs(name: str, tmp_path: Path) -> None:
    paths = []
    for seed, value in enumerate(OF_SEEDS[name]):
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, **{name: value}))
    # A server gives the options in another order.
    settings = json.loads((paths[0] / "run.json").read_text())
    write_json(paths[0] / "run.json", dict(reversed(settings.items())))
    (runs,) = compare(paths).settings.values()
    assert len(runs) == 2


def test_seeds_are_not_pooled_when_a_path_has_another_number(tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        student = f"/x/seed{seed}3/student"
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, student=student))
    assert len(compare(paths).settings) == 2


# Settings of seeds whose digests differ without a change of any document.
OTHER_DIGESTS: dict[str, list[dict[str, Any]]] = {
    "name has the seed": [{"dataset": ["/seed0/p"]}, {"dataset": ["/seed1/p"]}],
    "held out by the seed": [{"eval_fraction": 0.1}, {"eval_fraction": 0.1}],
    "no name": [{"dataset": []}, {"dataset": []}],
    "another tokenizer": [{"student": "/seed0/s"}, {"student": "/seed1/s"}],
}


@pytest.mark.parametrize("case", OTHER_DIGESTS)
def test_seeds_with_other_digests_are_pooled_where_the_seed_explains_them(
    case: str, tmp_path: Path
) -> None:
    paths = []
    for seed, (digest, options) in enumerate(zip("ab", OTHER_DIGESTS[case], strict=True)):
        options = {"corpus_digest": [digest], **options}
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, **options))
    assert len(compare(paths).settings) == 1
    assert "corpus_digest" not in comparison_markdown(compare(paths))


def test_runs_on_other_documents_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """The file was written again between the second run and the third."""
    paths = []
    for name, seed, digest in (("a", 0, "x"), ("b", 1, "x"), ("c", 2, "y"), ("d", 0, "y")):
        options = {"seed": seed, "corpus_digest": [digest], **PLAIN}
        paths.append(write_run(tmp_path / name, [entry(1, 1.0)], **options))
    # Only a run without the teacher reads alike.
    paths.append(write_run(tmp_path / "guided", [entry(1, 1.0)], corpus_digest=["z"]))
    for order in (paths, paths[::-1]):
        settings = compare(order).settings
        labels = {name: sorted(run.label for run in runs) for name, runs in settings.items()}
        assert labels == {
            "CPT, corpus_digest x": ["a", "b"],
            "CPT, corpus_digest y": ["c", "d"],
            "VocAgnoLM, T": ["guided"],
        }
    _, *rows = section(comparison_markdown(compare(paths)), "Settings that differ")
    assert ["corpus_digest", "x", "y", "-"] in rows


def test_held_out_documents_of_one_seed_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name in ("cpt", "random"):
        options = {"method": name, "teacher": None, "eval_fraction": 0.1}
        paths.append(held_out(tmp_path / name, 2.0, corpus_digest=[name], **options))
    comparison = compare(paths)
    _, *rows = section(comparison_markdown(comparison), "Settings that differ")
    assert rows[-1] == ["corpus_digest", "cpt", "random"]
    assert "were not evaluated on the same texts" in findings(comparison)[0]


def test_seeds_of_a_student_in_the_directory_of_one_seed_are_paired(tmp_path: Path) -> None:
    paths = []
    for seed in (1, 0):
        for name, options in (("guided", {}), ("plain", PLAIN)):
            log = [entry(1, 1.0, eval_loss=len(name), eval_tokens=9)]
            options = {"student": "/demo/seed0/base", "seed": seed, **options}
            paths.append(write_run(tmp_path / f"{name}{seed}", log, **options))
    assert "with 2 of 2 seeds" in findings(compare(paths))[0]
    # The first run of a setting stands for it, whichever seed it has.
    assert "with 2 of 2 seeds" in findings(compare([paths[0], *paths[:0:-1]]))[0]


def test_students_named_after_their_seeds_are_one_student(tmp_path: Path) -> None:
    paths = []
    for name, seed, options in (("guided", 0, {}), ("plain", 1, PLAIN)):
        log = [entry(1, 1.0, eval_loss=len(name), eval_tokens=9)]
        student = f"/demo/seed{seed}/base"
        paths.append(write_run(tmp_path / name, log, student=student, seed=seed, **options))
    text = comparison_markdown(compare(paths))
    assert "CPT is ahead of VocAgnoLM, T by 1.000 nats" in text
    _, *rows = section(text, "Settings that differ")
    assert [row[0] for row in rows] == ["method", "teacher"]


def test_teacher_is_named_by_stores(tmp_path: Path) -> None:
    stores = [{"store": "/s", "teacher": "Qwen/Qwen2.5-Math-7B"}, {"teacher": "x/other"}]
    settings = compare([write_run(tmp_path, [entry(1, 1.0)], teacher_losses=stores)]).settings
    assert list(settings) == ["VocAgnoLM, Qwen2.5-Math + other"]


def test_settings_of_train_py_are_read(tmp_path: Path) -> None:
    argv = ["--teacher", "a/T1", "b/T2", "--use_cpu", "True", "--output_dir", str(tmp_path)]
    settings = settings_of(parser.parse([*argv, "--student", "s", "--dataset", "d"]))
    write_json(tmp_path / "run.json", settings)
    assert list(compare([tmp_path]).settings) == ["VocAgnoLM, T1 + T2"]
    assert set(method.METHODS[:-1]) == set(METHODS)


# The page


def test_page_has_everything_and_loads_nothing(trained: list[Path], tmp_path: Path) -> None:
    write_comparison(compare(trained, ["Rho-1"]), tmp_path / "out")
    html = (tmp_path / "out" / "comparison.html").read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)|@import|url\((?!#)|<script", html)
    assert html.count("data:image/png") == 2
    for words in ("plain", "guided", "wider", "reported: Rho-1", "Differences are to plain"):
        assert words in html
    assert str(tmp_path) not in html
    assert "/home/someone" not in html
    assert "cannot be said without" in html
    titles = re.findall(r"<h2>(.*)</h2>", unescape(html))
    assert titles[:2] == ["Accuracy", "Along the training"]
    assert titles[2:4] == ["Accuracy (%)", "Points above plain, over the same items"]
    assert titles[4:] == ["Settings that differ", "Cost"]


def test_page_escapes_the_names_of_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>&$x$", [entry(1, 1.0)], teacher="<i>T $\\bad$")
    write_comparison(compare([run]), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("comparison.*"))
    assert names == ["comparison.html", "comparison.json", "comparison.md"]
    html = (tmp_path / "out" / "comparison.html").read_text()
    assert "<i>" not in html
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
