"""Runs side by side: worked examples, exact tests against enumeration, and refusals to mix."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import record, write_evaluation

from vocagnolm import cli
from vocagnolm.evaluation import report
from vocagnolm.evaluation.records import RunDirectory, to_line
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.sources import load_items
from vocagnolm.evaluation.tasks.tasks import Task
from vocagnolm.report.compare import compare
from vocagnolm.report.frame import read_frame
from vocagnolm.report.paired import (
    Discordance,
    holm,
    mcnemar_p,
    percentile_interval,
    resampled_differences,
)
from vocagnolm.report.paper import REPORTED_FILE, read_reported
from vocagnolm.report.report import comparison_markdown, write_comparison
from vocagnolm.report.runs import heading, read_runs

ROW = "Qwen2.5-Math-Instruct VocAgnoLM"
# Eight items: only the first right on 1, only the other on 3, both on 2, none on 2.
FIRST = [True, False, False, False, True, True, False, False]
OTHER = [False, True, True, True, True, True, False, False]


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "results.json"
    results = json.loads(path.read_text())
    change(results)
    path.write_text(json.dumps(results))


def edit_last_item(directory: Path, name: str, **fields: Any) -> None:
    path = directory / f"{name}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[-1] = to_line(json.loads(lines[-1]) | fields)
    path.write_text("".join(lines))


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


# paired_tests


def enumerated_p(only_first: int, only_other: int) -> Fraction:
    """Of all ways in which the discordant items could fall, those at least as uneven."""
    n = only_first + only_other
    uneven = sum(
        abs(2 * sum(sides) - n) >= abs(only_first - only_other)
        for sides in itertools.product((0, 1), repeat=n)
    )
    return Fraction(uneven, 2**n)


def test_mcnemar_equals_enumeration_when_small() -> None:
    for only_first, only_other in itertools.product(range(7), repeat=2):
        expected = float(enumerated_p(only_first, only_other))
        assert mcnemar_p(only_first, only_other) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("only_first", "only_other"), [(450, 520), (1500, 1700)])
def test_mcnemar_equals_rational_sum_when_large(only_first: int, only_other: int) -> None:
    n, least = only_first + only_other, min(only_first, only_other)
    expected = min(1.0, float(Fraction(2 * sum(comb(n, k) for k in range(least + 1)), 2**n)))
    assert mcnemar_p(only_first, only_other) == expected
    assert mcnemar_p(only_other, only_first) == expected


def test_mcnemar_stays_in_range() -> None:
    assert mcnemar_p(0, 12_000) == 0.0  # below the smallest float
    assert mcnemar_p(6_000, 6_000) == 1.0


def test_holm_equals_hand_computation_when_order_is_mixed() -> None:
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, then 0.04 x 1, which may not fall below 0.06.
    expected = [0.03, 0.06, 0.06, 0.02]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(expected)
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_resampling_agrees_with_drawing_items() -> None:
    pairs = [(True, False)] * 12 + [(False, True)] * 30 + [(True, True)] * 58
    counts = Discordance.of(pairs)
    assert counts == Discordance(100, 12, 30)
    ours = resampled_differences(counts, 20_000, 0)
    gains = np.array([other - first for first, other in np.array(pairs, int)])
    drawn = np.random.default_rng(1).integers(0, 100, size=(20_000, 100))
    theirs = gains[drawn].mean(axis=1) * 100
    assert ours.mean() == pytest.approx(theirs.mean(), abs=0.2)
    assert ours.std() == pytest.approx(theirs.std(), rel=0.03)
    assert percentile_interval(ours) == pytest.approx(percentile_interval(theirs), abs=1.0)


def test_bootstrap_interval_covers_truth_when_repeated() -> None:
    rng = np.random.default_rng(0)
    shares, covered = [0.12, 0.2, 0.68], 0
    for seed in range(400):
        only_first, only_other, _ = rng.multinomial(300, shares)
        counts = Discordance(300, int(only_first), int(only_other))
        low, high = percentile_interval(resampled_differences(counts, 1000, seed))
        covered += low <= 8.0 <= high
    assert 0.92 <= covered / 400 <= 0.98


# pairs


def test_pairing_equals_hand_computation(runs: list[Path]) -> None:
    (pairing,) = compare(runs).pairings
    gsm8k, math = pairing.differences["gsm8k"], pairing.differences["math"]
    assert gsm8k.counts == Discordance(8, only_first=1, only_other=3)
    assert (gsm8k.points, math.points) == (25.0, -25.0)
    assert gsm8k.p == 0.625  # 2 (1 + 4) / 16
    assert gsm8k.p_holm == 1.0
    assert gsm8k.interval[0] < 25.0 < gsm8k.interval[1]
    assert pairing.refused == {}


def test_pairing_is_by_idx_in_any_order(runs: list[Path]) -> None:
    before = compare(runs).pairings
    path = runs[1] / "gsm8k.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert compare(runs).pairings == before


def test_pairing_is_independent_of_other_benchmarks(tmp_path: Path) -> None:
    few = [write_evaluation(tmp_path / name, {"math": FIRST}) for name in "ab"]
    many = [write_evaluation(tmp_path / name, {"gsm8k": OTHER, "math": FIRST}) for name in "cd"]
    alone, beside = (compare(paths).pairings[0].differences["math"] for paths in (few, many))
    assert alone.interval == beside.interval


def test_average_difference_is_narrower_than_its_columns(
    paper_runs: list[Path],
) -> None:
    differences = compare(paper_runs).pairings[0].differences
    assert list(differences)[-3:] == list(AVERAGES)
    for average in AVERAGES:
        assert differences[average].points == pytest.approx(25.0)
        assert differences[average].p is None
    widths = {
        name: differences[name].interval[1] - differences[name].interval[0]
        for name in ("gsm8k", "AVG")
    }
    assert widths["AVG"] == pytest.approx(widths["gsm8k"] / 3, rel=0.2)  # nine: a third


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
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


@pytest.mark.parametrize("name", REFUSALS)
def test_pairing_is_refused_when_conditions_differ(paper_runs: list[Path], name: str) -> None:
    change, reason = REFUSALS[name]
    edit(paper_runs[1], change)
    comparison = compare(paper_runs)
    (pairing,) = comparison.pairings
    assert pairing.refused["gsm8k"] == reason
    assert "gsm8k" not in pairing.differences
    assert "GSM8K" in pairing.refused["AVG"]
    assert not pairing.differences.keys() & AVERAGES.keys()
    assert ("math" in pairing.differences) == (name != "grader")
    assert f"not paired: {reason}" in comparison_markdown(comparison)


def test_pairing_is_refused_when_item_sets_differ(tmp_path: Path) -> None:
    paths = [
        write_evaluation(tmp_path / "first", {"gsm8k": FIRST}),
        write_evaluation(tmp_path / "other", {"gsm8k": OTHER[:5]}, partial=["gsm8k"]),
    ]
    assert compare(paths).pairings[0].refused == {"gsm8k": "other items: 8 and 5, shared 5"}


@pytest.mark.parametrize("fields", [{"prompt_sha256": "other"}, {"gold": "other"}])
def test_pairing_is_refused_when_items_differ(runs: list[Path], fields: dict[str, str]) -> None:
    edit_last_item(runs[1], "gsm8k", **fields)
    (pairing,) = compare(runs).pairings
    assert pairing.refused == {"gsm8k": "other prompts or golds of 1 items"}
    assert list(pairing.differences) == ["math"]


def test_average_is_refused_without_one_benchmark(paper_runs: list[Path]) -> None:
    edit(paper_runs[1], lambda results: results["benchmarks"].pop("sat"))
    (pairing,) = compare(paper_runs).pairings
    assert pairing.refused == {"AVG": "SAT not paired"}
    assert "AVG w/o SAT" in pairing.differences


def test_averages_are_those_of_both_runs(paper_runs: list[Path], tmp_path: Path) -> None:
    shared = "AVG w/o TAB, MMLU-STEM, SAT"
    few = write_evaluation(tmp_path / "few", dict.fromkeys(AVERAGES[shared], OTHER))
    (pairing,) = compare([paper_runs[0], few]).pairings
    assert list(pairing.differences) == [*AVERAGES[shared], shared]
    assert pairing.refused == {}


# The paper's rows


def readme_rows(shared_dir: Path) -> dict[str, list[float | None]]:
    """Tables 1 and 4 as the digest of the paper has them."""
    text = (shared_dir / "paper" / "README.md").read_text(encoding="utf-8")
    rows: dict[str, list[float | None]] = {}
    for title, names in (("### Table 1", 2), ("### Table 4", 1)):
        table = text.split(title)[1].split("\n\n")[1]
        for line in table.splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            key = " ".join(cells[:names])
            rows[key] = [None if cell == "-" else float(cell) for cell in cells[names:]]
    return rows


def test_reported_rows_equal_the_digest(shared_dir: Path) -> None:
    renamed = {
        "nothing: TinyLlama -": "TinyLlama",
        "nothing: TinyLlama-CPT CPT": "TinyLlama-CPT",
        "Rho-1 reference Rho-1": "Rho-1",
    }
    expected = {renamed.get(key, key): row for key, row in readme_rows(shared_dir).items()}
    tables = json.loads(REPORTED_FILE.read_text())["tables"]
    assert [len(table["rows"]) for table in tables] == [17, 9, 7, 6]
    assert {**tables[0]["rows"], **tables[3]["rows"]} == expected
    columns = [*PAPER_BENCHMARKS, *AVERAGES]
    assert [table["columns"] for table in tables] == [columns, columns, columns, columns[:10]]


@pytest.mark.parametrize("number", [2, 3])
def test_reported_tables_equal_the_papers_text(shared_dir: Path, number: int) -> None:
    (path,) = (shared_dir / "paper").glob("arxiv-*.txt")
    table = path.read_text(encoding="utf-8").split(f"\nTable {number}: ")[1].split("\n\n")[1]
    printed = [line.strip("| ").split(" | ") for line in table.splitlines() if line.count("|") > 5]
    rows = json.loads(REPORTED_FILE.read_text())["tables"][number - 1]["rows"]
    for (first, second, *values), (name, row) in zip(printed[1:], rows.items(), strict=True):
        chunks = "token level" if second == "-" else f"{second} chunks"
        assert name == (f"{chunks}, {first.lower()}" if number == 2 else f"{first} {second}")
        assert [float(value) for value in values] == row


def test_reported_table_names_all_its_rows_when_given() -> None:
    rows = read_reported(["Llemma", "Table 3", "Exclude 2B"])[1]
    assert list(dict.fromkeys(rows.table)) == ["Table 4", "Table 3"]
    assert rows.row.nunique() == 8
    assert len(rows) == 10 + 7 * 12


def test_reported_averages_are_means_of_their_columns() -> None:
    tables = json.loads(REPORTED_FILE.read_text())["tables"]
    _, rows = read_reported([name for table in tables for name in table["rows"]])
    checked = 0
    for name, row in rows.groupby("row"):
        values = row.set_index("column").reported
        for average, members in AVERAGES.items():
            if average in values:
                mean = values[list(members)].mean()
                assert values[average] == pytest.approx(mean, abs=0.0501), name
                checked += 1
    assert checked == 16 * 3 + 1 + 16 * 3 + 6  # Rho-1 has one, the teachers have AVG alone


def test_reported_row_stands_beside_ours(runs: list[Path]) -> None:
    comparison = compare(runs, [ROW])
    lines = {(line.run, line.column): line for line in comparison.against_reported.itertuples()}
    assert set(lines) == {(run, name) for run in ("first", "other") for name in ("gsm8k", "math")}
    line = lines["first", "gsm8k"]  # 3 of 8, 27.5 to 47.5
    assert (line.rounded, line.reported, line.points, line.inside) == (37.5, 11.3, 26.2, False)
    text = comparison_markdown(comparison)
    assert f"reported: {ROW} (Table 1)" in text
    assert "arXiv 2503.19123v1" in text


def test_reported_row_of_a_runs_name_stands_apart(tmp_path: Path) -> None:
    run = write_evaluation(tmp_path / "Llemma", dict.fromkeys(PAPER_BENCHMARKS, FIRST))
    text = comparison_markdown(compare([run], ["Llemma"]))
    assert cells(text, "Llemma") == ["Llemma", "harness", *["37.5 +- 10.0"] * 12]
    # Table 4 has no averages but the first.
    assert cells(text, "reported: Llemma (Table 4)")[-3:] == ["50.9", "-", "-"]


@pytest.mark.parametrize(
    ("interval", "inside"),
    [([11.3, 50.0], True), ([11.4, 50.0], False), ([0.0, 11.3], True), ([0.0, 11.2], False)],
)
def test_reported_number_is_inside_our_interval(
    runs: list[Path], interval: list[float], inside: bool
) -> None:
    edit(runs[0], lambda results: results["benchmarks"]["gsm8k"].update(interval=interval))
    line = compare(runs[:1], [ROW]).against_reported.iloc[0]  # 11.3 is reported
    assert (line.column, line.inside) == ("gsm8k", inside)


# Tables and files


def cells(text: str, start: str) -> list[str]:
    """The cells of the first row that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_the_columns_of_table_1(paper_runs: list[Path]) -> None:
    text = comparison_markdown(compare(paper_runs, ["Rho-1"]))
    names = [*map(heading, PAPER_BENCHMARKS), *AVERAGES]
    assert cells(text, "run")[2:] == names
    assert cells(text, "first") == ["first", "harness", *["37.5 +- 10.0"] * 12]
    values = dict(zip(names, cells(text, "reported: Rho-1 (Table 1)")[2:], strict=True))
    assert (values["ASDiv"], values["SAT"], values["AVG"]) == ("41.2", "-", "-")


def test_outputs_mark_partial_columns(tmp_path: Path) -> None:
    paths = [
        write_evaluation(tmp_path / name, {"gsm8k": FIRST, "math": FIRST}, partial=["math"])
        for name in ("first", "other")
    ]
    text = comparison_markdown(compare(paths, ["Rho-1"]))
    accuracy, paired, reported = (
        [line for line in part.splitlines() if line.startswith("|")][2:]
        for part in text.split("\n## ")
    )
    assert [line.count("*") for line in accuracy] == [1, 1, 0]
    assert [line.split("|")[2].strip() for line in paired] == ["GSM8K", "MATH*"]
    assert [line.split("|")[3:5] for line in reported] == [[" +30.4 out ", " +32.5* out "]] * 2
    assert "partial: 8 of many items (MATH)" in text
    # A paragraph, and then a list.
    assert "say why.\n\n- first: first, revision abc" in text


def test_table_names_the_prompts(runs: list[Path]) -> None:
    def ours(results: dict[str, Any]) -> None:
        for benchmark in results["benchmarks"].values():
            benchmark["prompts"].update(origin="vocagnolm", sha256="q")
            benchmark["marked"] = ["own_prompts"]
            benchmark["marks"] = ["prompts: not the harness's"]

    edit(runs[1], ours)
    text = comparison_markdown(compare(runs))
    accuracies = text.split("\n## ")[0].splitlines()
    rows = [line for line in accuracies if line.startswith(("| first", "| other"))]
    assert [row.split("|")[2].strip() for row in rows] == ["harness", "ours"]
    assert [row.count("*") for row in rows] == [0, 2]
    assert "prompts: not the harness's (GSM8K, MATH)" in text


def test_second_opinion_has_its_own_table(runs: list[Path]) -> None:
    opinion = {"n": 8, "correct": 2, "rounded": 25.0, "exact": 25.0, "interval": [7.0, 59.0]}
    edit(runs[0], lambda results: results["benchmarks"]["math"].update(math_verify=opinion))
    text = comparison_markdown(compare(runs))
    verdicts, second, *_ = text.split("\n## ")
    assert "25.0 +- 26.0" not in verdicts
    row = cells(second, "first")
    assert row == ["first", "math-verify 9", "harness", "25.0 +- 26.0"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "c"]
    for path in paths:
        write_evaluation(path / "evaluation", {"gsm8k": FIRST})
    assert [run.label for run in read_runs(paths)] == [str(paths[0]), str(paths[1]), "c"]


def test_files_hold_the_comparison(paper_runs: list[Path], tmp_path: Path) -> None:
    edit(paper_runs[1], REFUSALS["prompts"][0])
    comparison = compare(paper_runs, [ROW, "Rho-1"], resamples=100)
    write_comparison(comparison, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert data["pairings"][0]["refused"]["gsm8k"] == "other prompts"
    assert data["pairings"][0]["differences"]["math"]["p"] == 0.625
    scores = {(row["run"], row["column"]): row["value"] for row in data["scores"]}
    assert scores["first", "AVG"] == pytest.approx(37.5)
    assert list(dict.fromkeys(row["row"] for row in data["reported"])) == [ROW, "Rho-1"]
    assert {row["inside"] for row in data["against_reported"]} <= {True, False}
    assert (tmp_path / "out" / "comparison.md").read_text() == comparison_markdown(comparison)
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_chat_stands_beside_few_shot_unmixed(tmp_path: Path) -> None:
    def in_chat(results: dict[str, Any]) -> None:
        results["benchmarks"]["gsm8k"].update(prompts=None, marked=["chat"], marks=["zero-shot"])

    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "asked in a chat alone"]
    for path, right in zip(paths, (FIRST, OTHER, FIRST), strict=True):
        edit(write_evaluation(path / "evaluation-chat", {"gsm8k": right[1:]}), in_chat)
    for path, right in zip(paths[:2], (FIRST, OTHER), strict=True):
        write_evaluation(path / "evaluation", {"gsm8k": right})
    comparison = compare(paths)
    firsts = [(each.first, each.other) for each in comparison.pairings]
    chats = [("a-chat", "b-chat"), ("a-chat", f"{paths[2].name}-chat")]
    assert firsts == [("a", "b"), *chats]
    assert not any(each.refused for each in comparison.pairings)
    text = comparison_markdown(comparison)
    assert cells(text, "a") == ["a", "harness", "37.5 +- 10.0"]
    assert cells(text, "a-chat") == ["a-chat", "chat", "28.6* +- 10.0"]
    assert "## Points above a, over" in text
    assert "## Points above a-chat, over" in text
    write_comparison(comparison, tmp_path / "out")
    assert "a-chat" in (tmp_path / "out" / "comparison.html").read_text()
    # A figure's mark is of one protocol.
    assert read_frame(paths[:1]).value.tolist() == [37.5]


# The command


def test_command_prints_tables_when_called(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *map(str, runs), "--reported", ROW, "--resamples", "100"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    differences = output.out.split("## Points above first, over the same items")[1]
    assert cells(differences, "other")[1:3] == ["GSM8K", "+25.0"]
    assert cells(differences, "other")[4:] == ["8", "1", "3", "0.625", "1.000"]


# Changes the other run, or returns the paths to give in place of both.
Change = Callable[[Path, Path], object]


def write(name: str, text: str) -> Change:
    return lambda first, other: (other / name).write_text(text)


def name_twice(first: Path, other: Path) -> list[Path]:
    (other.parent / "link").symlink_to(first)
    return [first, other, other.parent / "link"]


BROKEN: dict[str, tuple[Change, str]] = {
    "no_directory": (lambda first, other: [first, other / "absent"], "expected results.json in"),
    "no_results": (lambda first, other: [first, other.parent], "run evaluate_math.py first"),
    "damaged_json": (write("results.json", '{"model": '), "Expecting value"),
    "deep_json": (write("results.json", "[" * 100_000), "maximum recursion depth exceeded"),
    "wrong_marks": (
        lambda _, other: edit(other, lambda x: x["benchmarks"]["math"].update(marked=[[1]])),
        "marked must be list[str], got [[1]] (list)",
    ),
    "wrong_type": (write("results.json", "[1]"), "expected the results of evaluate_math.py"),
    "unknown_benchmark": (
        lambda _, other: edit(other, lambda results: results["benchmarks"].update(gsm9k={})),
        "results.json: expected",
    ),
    "missing_item_field": (
        write("gsm8k.jsonl", '{"idx": 0, "correct": true}\n'),
        "the items of evaluate_math.py, found none or an unknown 'prompt_sha256'",
    ),
    "other_verdict": (
        lambda _, other: edit_last_item(other, "gsm8k", correct=True),
        "expected 8 items, 5 of them right, as in results.json",
    ),
    "no_items": (lambda _, other: (other / "gsm8k.jsonl").unlink(), "gsm8k.jsonl, found none"),
    "nothing_shared": (
        lambda first, other: [first, write_evaluation(other.parent / "third", {"svamp": FIRST})],
        "to share a benchmark, found gsm8k, math and svamp",
    ),
    "same_run": (name_twice, "twice"),
    "none": (lambda first, other: [], "expected a RUN to compare, found none: give directories of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_command_rejects_wrong_runs_in_one_line(
    runs: list[Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BROKEN[name]
    found = change(*runs)
    paths = found if isinstance(found, list) else runs
    assert cli.main(["compare", *map(str, paths)]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("vocagnolm compare: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reported", "GPT-4"], "found 'GPT-4': give one of 'Table 1', 'Table 2', "),
        (["--resamples", "0"], "--resamples must be at least 1, got 0"),
        (["--resamples", str(10**14)], "Unable to allocate"),
        (["--seed", "-1"], "--seed must be from 0 to 2^32 - 1, got -1"),
        (["--output_dir", "{file}"], "is a file, not a directory"),
    ],
)
def test_command_rejects_wrong_options_in_one_line(
    runs: list[Path], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(runs[0] / "results.json")
    argv = [option.format(file=file) for option in options]
    assert cli.main(["compare", *map(str, runs), *argv]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1


def test_command_rejects_row_without_shared_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_evaluation(tmp_path / "run", {"demo": FIRST})
    assert cli.main(["compare", str(path)]) == 0
    assert cli.main(["compare", str(path), "--reported", ROW]) == 2
    assert "expected run to share a column with the reported" in capsys.readouterr().err


# The rest of the project


def test_comparison_reads_what_an_evaluation_writes(tmp_path: Path) -> None:
    demo = BENCHMARKS["demo"]
    task = Task(demo, load_items(demo, None), None, limit=len(FIRST))
    for name, right in (("first", FIRST), ("other", OTHER)):
        directory = RunDirectory(tmp_path / name / "evaluation")
        verdict = {"prediction": "1", "decided_by": "string", "math_verify": None}
        with directory.appending("demo", 0) as file:
            for item, correct in zip(task.items, right, strict=True):
                file.write(to_line(record(item.idx, correct) | verdict))
        directory.complete("demo", [item.idx for item in task.items])
        settings = {"model": {"name": name, "revision": "r"}}
        report.write_results(report.build_results([task], directory, settings), directory)
    comparison = compare([tmp_path / "first", tmp_path / "other"])
    assert comparison.pairings[0].differences["demo"].points == 25.0
    assert [run.prompts for run in comparison.runs] == ["none", "none"]
    assert "partial: 8 of 400 items (Demo)" in comparison_markdown(comparison)
