"""Evaluations of lm-evaluation-harness and lighteval next to ours: reading, pairing, differences.

The files in tests/data/evaluators were written by the two libraries; README.md there has the
commands.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_results import edit_results, write_evaluation

from vocagnolm import __main__
from vocagnolm.report.compare import comparison_markdown, write_comparison
from vocagnolm.report.findings import compare, findings
from vocagnolm.report.foreign import ForeignItem, ForeignTask, find_foreign, read_foreign
from vocagnolm.report.questions import match, pair_by_question, read_foreign_run
from vocagnolm.shell.io import ASSETS

DATA = Path(__file__).parents[1] / "data" / "evaluators"
GREEDY, SAMPLED = DATA / "lm_eval" / "greedy", DATA / "lm_eval" / "sampled"
DATE = "2026-11-27T13-56-57.550822"


def lines(directory: Path, task: str = "sums") -> list[dict[str, Any]]:
    """The samples of a task, as they are in the file."""
    (path,) = directory.rglob(f"samples_{task}_2*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every sample of the task that generates."""
    (path,) = directory.rglob("samples_sums_2*.jsonl")
    records = lines(directory)
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def lm_eval(tmp_path: Path) -> Path:
    """A copy of the greedy evaluation, to be changed."""
    return Path(shutil.copytree(GREEDY, tmp_path / "greedy"))


@pytest.fixture
def lighteval(tmp_path: Path) -> Path:
    """The files of lighteval under the names that it gives them."""
    details = tmp_path / "lighteval" / "details" / "lab" / "student" / DATE
    results = tmp_path / "lighteval" / "results" / "lab" / "student"
    details.mkdir(parents=True)
    results.mkdir(parents=True)
    shutil.copy(DATA / "lighteval" / "details.parquet", details / f"details_sums|0_{DATE}.parquet")
    shutil.copy(DATA / "lighteval" / "results.json", results / f"results_{DATE}.json")
    return tmp_path / "lighteval"


def details(lighteval: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    (path,) = lighteval.rglob("*.parquet")
    return list(parquet.read_table(path).to_pylist())


def write_details(lighteval: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    (path,) = lighteval.rglob("*.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def own_evaluation(place: Path, questions: list[str], right: list[bool]) -> Path:
    """An evaluation of ours on the demo that records its questions."""
    path = write_evaluation(place, {"demo": right})
    records = [json.loads(line) for line in (path / "demo.jsonl").read_text().splitlines()]
    for record, question in zip(records, questions, strict=True):
        record["question"] = question
    (path / "demo.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows_of(first: Path, other: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The pairings of two evaluations, by their columns."""
    rows = compare([first, other]).pairings
    return {(row["column"], row["other_column"]): row for row in rows}


def differences(row: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (text, other) for name, text, other in row["differences"]}


# Reading


def test_verdicts_of_lm_eval_are_those_of_each_filter_and_metric() -> None:
    run = read_foreign_run("greedy", GREEDY)
    expected: dict[str, list[float]] = {}
    for record in lines(GREEDY):
        expected.setdefault(f"sums ({record['filter']})", []).append(record["exact_match"])
    for record in lines(GREEDY, "sums_choice"):
        for metric in ("acc", "acc_norm"):
            expected.setdefault(f"sums_choice ({metric})", []).append(record[metric])
    assert {name: list(count) for name, count in run.counts.items()} == {
        name: [12, sum(values)] for name, values in expected.items()
    }
    # The library's own sums are in its results.
    (path,) = GREEDY.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    values = {score["column"]: score["value"] for score in run.scores}
    assert values["sums (strict-match)"] == pytest.approx(
        100 * results["sums"]["exact_match,strict-match"]
    )
    assert values["sums_choice (acc_norm)"] == pytest.approx(
        100 * results["sums_choice"]["acc_norm,none"]
    )
    assert all(score["marked"] for score in run.scores)
    assert (run.grader, run.model) == ("lm-eval 0.4.13", "student, revision unknown")


def test_verdicts_of_lighteval_are_those_of_each_metric(lighteval: Path) -> None:
    run = read_foreign_run("lighteval", lighteval)
    rows = details(lighteval)
    right = sum(row["metric"]["extractive_match"] for row in rows)
    assert 0 < right < 12
    assert run.counts == {"sums (extractive_match)": (12, right), "sums (em)": (12, 0)}
    assert run.conditions["sums (em)"] == {
        "evaluator": "lighteval",
        "task": "sums, version 1",
        "few-shot examples": "0",
        "chat template": "not recorded",
        "system prompt": "none",
        "decoding": "greedy",
        "most new tokens": "32",
        "stops": r"'\n\n'",
        "verdict": "em",
    }


def test_details_are_read_without_their_results(lighteval: Path) -> None:
    before = read_foreign_run("lighteval", lighteval)
    shutil.rmtree(lighteval / "results")
    run = read_foreign_run("lighteval", lighteval / "details" / "lab" / "student" / DATE)
    assert run.counts == before.counts
    assert run.conditions["sums (em)"]["decoding"] == "not recorded"


def test_newest_date_is_taken_of_each_task(lm_eval: Path) -> None:
    """Another date has the results of one task, with other verdicts."""
    (old,) = lm_eval.rglob("samples_sums_2*.jsonl")
    old_date = old.name.removeprefix("samples_sums_").removesuffix(".jsonl")
    for date in ("2026-11-28T01-02-03", "2025-01-01T00-00-00.000001"):
        results = json.loads((old.parent / f"results_{old_date}.json").read_text())
        results["results"] = {}
        (old.parent / f"results_{date}.json").write_text(json.dumps(results))
        (old.parent / f"samples_sums_{date}.jsonl").write_text(old.read_text())
    new = old.with_name("samples_sums_2026-11-28T01-02-03.jsonl")
    wrong = [json.loads(line) | {"exact_match": 0.0} for line in old.read_text().splitlines()]
    new.write_text("".join(json.dumps(record) + "\n" for record in wrong))
    run = read_foreign_run("run", lm_eval)
    assert run.counts["sums (strict-match)"] == (12, 0)
    assert run.counts["sums_choice (acc)"] == (12, 8)
    assert "the newest of 3, of 2026-11-28T01-02-03 (sums)" in run.notes
    # The results file of a date selects its items.
    old_run = read_foreign_run("run", old.parent / f"results_{old_date}.json")
    assert old_run.counts["sums (strict-match)"] == (12, 8)


def test_metric_that_says_nothing_of_right_is_left_out(lm_eval: Path) -> None:
    rewrite(lm_eval, lambda record: record.update(exact_match=0.5))
    run = read_foreign_run("run", lm_eval)
    assert set(run.counts) == {"sums_choice (acc)", "sums_choice (acc_norm)"}
    (note,) = [note for note in run.notes if "(sums)" in note]
    assert "exact_match, strict-match" in note
    for path in lm_eval.rglob("samples_sums_choice_*"):
        path.unlink()
    with pytest.raises(ValueError, match="no metric says which items are right: left out"):
        read_foreign_run("run", lm_eval)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({"until": []}, "greedy"),
    "temperature alone": (
        {"temperature": 0.6, "top_p": 0.95},
        "sampled, temperature 0.6, top_p 0.95",
    ),
    "no temperature": ({"do_sample": True}, "sampled"),
    "temperature unused": ({"do_sample": False, "temperature": 0.6}, "greedy"),
    "temperature 0": ({"do_sample": True, "temperature": 0.0}, "greedy"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_decoding_is_that_of_the_request(name: str, lm_eval: Path) -> None:
    settings, expected = SETTINGS[name]
    rewrite(lm_eval, lambda record: record["arguments"]["gen_args_0"].update(arg_1=settings))
    conditions = read_foreign_run("run", lm_eval).conditions["sums (strict-match)"]
    assert conditions["decoding"] == expected
    assert conditions["most new tokens"] == "the default of lm-eval"


# Wrong files


def spoil_line(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no samples": (
        lambda run: [path.unlink() for path in run.rglob("samples_*")],
        "run lm_eval with --log_samples",
    ),
    "two models": (
        lambda run: shutil.copytree(run / "student", run / "teacher"),
        "evaluations of 2 models: give one, such as .*teacher",
    ),
    "no results": (
        lambda run: [path.unlink() for path in run.rglob("results_*")],
        "is not in the same directory",
    ),
    "older version": (
        lambda run: rewrite(run, lambda record: record.pop("metrics")),
        ":1: expected a sample of lm-eval 0.4.13, but metrics is missing",
    ),
    "no JSON": (
        lambda run: spoil_line(next(run.rglob("samples_sums_2*")), lambda text: text[:-9]),
        ":24: expected a JSON object",
    ),
    "empty": (
        lambda run: spoil_line(next(run.rglob("samples_sums_2*")), lambda text: ""),
        "holds no samples",
    ),
    "twice": (
        lambda run: spoil_line(next(run.rglob("samples_sums_2*")), lambda text: text * 2),
        ":25: doc_id 0 comes twice with exact_match, strict-match",
    ),
    "a filter lacks items": (
        lambda run: spoil_line(
            next(run.rglob("samples_sums_2*")), lambda text: "\n".join(text.splitlines()[:-2])
        ),
        "exact_match, flexible-extract is missing in 2 of 12 items",
    ),
    "other verdicts": (
        lambda run: rewrite(run, lambda record: record.update(exact_match=1.0)),
        r"exact_match, strict-match is 1.0000 over its items, and 0.6667 in the results",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_of_lm_eval_are_one_line(name: str, lm_eval: Path) -> None:
    change, message = WRONG[name]
    change(lm_eval)
    with pytest.raises(ValueError, match=message) as error:
        read_foreign_run("run", lm_eval) if find_foreign(lm_eval) else None
    assert "\n" not in str(error.value)


def test_wrong_files_of_lighteval_are_one_line(lighteval: Path, tmp_path: Path) -> None:
    rows = details(lighteval)
    write_details(lighteval, [{"example": "?", "metrics": {"em": 1}}])
    with pytest.raises(ValueError, match=r"expected doc, metric and model_response.*found example"):
        read_foreign_run("run", lighteval)
    rows[0]["metric"]["extractive_match"] = 1 - rows[0]["metric"]["extractive_match"]
    write_details(lighteval, rows)
    with pytest.raises(ValueError, match=r"extractive_match is .* over its items"):
        read_foreign_run("run", lighteval)
    (path,) = lighteval.rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete Parquet file"):
        read_foreign_run("run", lighteval)
    shutil.rmtree(lighteval / "details")
    with pytest.raises(ValueError, match="run lighteval with --save-details"):
        find_foreign(lighteval / "results" / "lab" / "student")


def test_tasks_of_two_revisions_are_refused(lm_eval: Path) -> None:
    (samples,) = lm_eval.rglob("samples_sums_2*.jsonl")
    (path,) = lm_eval.rglob("results_*.json")
    results = json.loads(path.read_text())
    results["config"]["model_sha"] = "abc"
    date = "2026-11-28T01-02-03"
    path.with_name(f"results_{date}.json").write_text(json.dumps(results))
    samples.rename(samples.with_name(f"samples_sums_{date}.jsonl"))
    with pytest.raises(ValueError, match=r"several models: student, revision .*of one date"):
        read_foreign_run("run", lm_eval)


# Pairing


def test_pairing_of_two_evaluations_of_lm_eval_equals_a_hand_count() -> None:
    rows = rows_of(GREEDY, SAMPLED)
    assert [first for first, other in rows if first != other] == []
    verdicts: list[dict[tuple[str, int], float]] = []
    for directory in (GREEDY, SAMPLED):
        verdicts.append({})
        for record in lines(directory):
            verdicts[-1][record["filter"], record["doc_id"]] = record["exact_match"]
    for name in ("strict-match", "flexible-extract"):
        gains = []
        for number in range(10):
            gains.append(verdicts[1][name, number] - verdicts[0][name, number])
        row = rows[f"sums ({name})", f"sums ({name})"]
        assert row["items"] == 10
        assert (row["only_first"], row["only_other"]) == (gains.count(-1), gains.count(1))
        assert row["points"] == pytest.approx(10 * sum(gains))
        assert row["low"] <= row["points"] <= row["high"]
        assert differences(row) == {
            "few-shot examples": ("0", "1"),
            "decoding": ("greedy", "sampled, temperature 1.2"),
            "prompts": ("", "others in 10 of 10 items"),
            "items": ("12, 2 not paired", "10, 0 not paired"),
        }
    assert rows["sums (flexible-extract)", "sums (flexible-extract)"]["only_first"] == 3


def test_ours_is_paired_with_others_by_question(tmp_path: Path, lighteval: Path) -> None:
    """Ours has the questions in reverse, with other white space, and two more."""
    records = [json.loads(line) for line in (DATA / "tasks" / "items.jsonl").open()]
    questions = ["What is one and one?", "And three?"]
    for record in records:
        questions.insert(0, "\n" + record["question"].replace(" ", "  "))
    right = [number % 2 == 0 for number in range(14)]
    own = own_evaluation(tmp_path / "own", questions, right)
    row = rows_of(own, GREEDY)["demo", "sums (strict-match)"]
    strict = [bool(record["exact_match"]) for record in lines(GREEDY)[:12]]
    # Item n of the file is item 11 - n of ours.
    pairs = [(right[11 - number], strict[number]) for number in range(12)]
    assert row["items"] == 12
    assert (row["only_first"], row["only_other"]) == (
        pairs.count((True, False)),
        pairs.count((False, True)),
    )
    found = differences(row)
    assert found["items"] == ("14, 2 not paired", "12, 0 not paired")
    assert found["evaluator"] == ("vocagnolm", "lm-eval 0.4.13")
    assert found["verdict"] == ("harness@1", "exact_match, strict-match")
    assert "right answers" not in found
    assert "task" not in found
    # lighteval has its items in another order, and its questions in a template.
    pairs = []
    for detail in details(lighteval):
        other_is_right = bool(detail["metric"]["extractive_match"])
        pairs.append((right[11 - int(detail["doc"]["id"])], other_is_right))
    row = rows_of(own, lighteval)["demo", "sums (extractive_match)"]
    assert (row["items"], row["only_first"], row["only_other"]) == (
        12,
        pairs.count((True, False)),
        pairs.count((False, True)),
    )
    assert differences(row)["prompts"] == ("not recorded", "not recorded")


def test_ours_without_questions_is_not_paired(tmp_path: Path) -> None:
    own = write_evaluation(tmp_path / "own", {"demo": [True, False]})
    (row,) = compare([own, GREEDY]).pairings
    assert row["not_paired"] == (
        "the items of own do not record their questions: evaluate it again with this version"
    )
    assert "not paired: the items of own" in comparison_markdown(compare([GREEDY, own]))


def test_ours_with_several_outputs_per_item_is_not_paired(tmp_path: Path) -> None:
    questions = [record["doc"]["question"] for record in lines(GREEDY)[:2]]
    own = own_evaluation(tmp_path / "own", questions, [True, False])
    path = own / "demo.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    both = [record | {"sample": sample} for record in records for sample in (0, 1)]
    path.write_text("".join(json.dumps(record) + "\n" for record in both))
    sampling = {"samples": 2, "temperature": 0.6, "top_p": 1.0}

    def change(results: dict[str, Any]) -> None:
        results["settings"] = {"sampling": sampling}
        results["benchmarks"]["demo"]["correct"] = 2

    edit_results(own, change)
    (row,) = compare([own, GREEDY]).pairings
    assert row["not_paired"] == "own has 2 outputs per item"


def test_ours_are_still_paired_with_each_other(tmp_path: Path) -> None:
    own = [
        write_evaluation(tmp_path / name, {"demo": right})
        for name, right in (("a", [True, False]), ("b", [True, True]))
    ]
    first_is_foreign = [(row["first"], row["other"]) for row in compare([GREEDY, *own]).pairings]
    assert first_is_foreign == [("greedy", "a"), ("greedy", "b"), ("a", "b")]
    last_is_foreign = [(row["first"], row["other"]) for row in compare([*own, GREEDY]).pairings]
    assert last_is_foreign == [("a", "b"), ("a", "greedy")]


def test_prompts_and_answers_that_differ_are_counted(lm_eval: Path) -> None:
    assert differences(rows_of(GREEDY, lm_eval)["sums_choice (acc)", "sums_choice (acc)"]) == {}

    def change(record: dict[str, Any]) -> None:
        if record["doc_id"] < 3:
            record["prompt_hash"] = "other"
        if record["doc_id"] < 2:
            record["target"] = "other"
        # If the row of the data set has changed, the question still identifies it.
        record["doc_hash"] = f"new{record['doc_id']}"

    rewrite(lm_eval, change)
    row = rows_of(GREEDY, lm_eval)["sums (strict-match)", "sums (strict-match)"]
    assert row["items"] == 12
    assert differences(row) == {
        "prompts": ("", "others in 3 of 12 items"),
        "right answers": ("", "others in 2 of 12 items"),
    }


def task(name: str, questions: list[str], **fields: Any) -> ForeignTask:
    items = [ForeignItem(question, "", "", "") for question in questions]
    protocol = {"evaluator": "lm-eval 1", "task": name}
    verdicts = {"acc": [True] * len(items)}
    return ForeignTask(name, items, **{"protocol": protocol, "verdicts": verdicts, **fields})


def test_task_of_another_name_is_paired_when_it_has_no_namesake(tmp_path: Path) -> None:
    run = read_foreign_run("run", GREEDY)

    def pairs(first: list[str], other: list[str]) -> list[tuple[str, str]]:
        runs = []
        for names in (first, other):
            tasks = [task(name, ["How many?"] if name < "x" else ["Who?"]) for name in names]
            runs.append(run.__class__(**{**vars(run), "foreign_tasks": tasks}))
        return [(row["column"], row["other_column"]) for row in pair_by_question(*runs)]

    assert pairs(["a", "b"], ["a", "b"]) == [("a", "a"), ("b", "b")]
    assert pairs(["a"], ["b", "c", "x"]) == [("a", "b"), ("a", "c")]
    assert pairs(["a", "b"], ["a", "c"]) == [("a", "a"), ("b", "c")]
    assert pairs(["a"], ["x"]) == [("a", "x")]


def test_question_that_comes_twice_is_left_out() -> None:
    first = task("a", ["one", "two", "two", "three", "four four four"])
    other = task("a", ["two", "three", "three", "four four four", "two two two"])
    matched = match(first, other)
    assert matched.pairs == [(4, 3)]
    assert matched.repeated == (3, 3)
    # A repeated question is not found in a template either.
    once, thrice = task("a", ["q q q"]), task("a", ["q q q", "q q q", "Say q q q"])
    assert match(once, thrice).pairs == match(thrice, once).pairs == []
    templated = task("a", ["Say q q q", "Say q q q"])
    assert match(once, templated).pairs == match(templated, once).pairs == []


def test_row_of_a_data_set_tells_items_of_one_question_apart() -> None:
    items = [ForeignItem("How many?", f"row {number}", "", "") for number in range(3)]
    unknown = [ForeignItem("", f"row {number}", "", "") for number in (2, 0)]
    verdicts = {"acc": [True] * 3}
    first, other = ForeignTask("a", items, verdicts, {}), ForeignTask("a", unknown, verdicts, {})
    assert match(first, first).pairs == [(0, 0), (1, 1), (2, 2)]
    assert match(first, other).pairs == [(0, 1), (2, 0)]


@pytest.mark.parametrize(("evaluator", "expected"), [("lm-eval 2", True), ("lighteval", False)])
def test_right_answers_are_compared_within_one_evaluator(evaluator: str, expected: bool) -> None:
    """Two evaluators may spell them differently."""
    run = read_foreign_run("run", GREEDY)
    runs = []
    for name, gold in (("lm-eval 1", "5"), (evaluator, "#### 5")):
        protocol = {"evaluator": name, "task": "a, version 1"}
        one = ForeignTask("a", [ForeignItem("Who?", "", gold, "")], {"acc": [True]}, protocol)
        runs.append(run.__class__(**{**vars(run), "foreign_tasks": [one]}))
    (row,) = pair_by_question(*runs)
    assert ("right answers" in differences(row)) == expected


def test_question_is_found_in_its_template_when_it_begins_another() -> None:
    """The shortest question begins that of an item whose own question is missing."""
    questions = ["What is 2 + 2", "What is 3 - 1 ?", "How many apples are left ?"]
    templated = ["What is 2 + 2 + 5", *questions[1:]]
    first = task("a", questions)
    other = task("a", [f"Solve it. {question} Answer:" for question in templated])
    assert match(first, other).pairs == [(1, 1), (2, 2)]
    assert match(other, first).pairs == [(1, 1), (2, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_matching_equals_the_truth_on_made_up_questions(seed: int) -> None:
    """Questions are drawn, put into a template and shuffled; each side lacks some."""
    rng = random.Random(seed)
    words = [letter * 2 for letter in string.ascii_lowercase]
    questions = list({" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(60)})
    sides = [rng.sample(range(len(questions)), 40) for _ in range(2)]
    template = rng.choice(["{}", "Question: {} Answer:", "{} Options: A B", "Say {}"])
    first = task("a", [questions[number] for number in sides[0]])
    other = task("a", [template.format(questions[number]) for number in sides[1]])
    expected = []
    for place, number in enumerate(sides[0]):
        if number in sides[1]:
            expected.append((place, sides[1].index(number)))
    assert match(first, other).pairs == expected
    assert match(other, first).pairs == sorted((b, a) for a, b in expected)


# The page


def test_page_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [str(GREEDY), str(SAMPLED), "--output_dir", str(out)]
    assert __main__.main(["compare", *arguments]) == 0
    text = capsys.readouterr().out
    assert "| sampled | sums      | decoding          | greedy           | sampled, temp" in text
    assert "partial: 10 of 12 items (sums)" in text
    assert "sums (strict-match)*" in text
    assert "What differs besides the model" in (out / "comparison.html").read_text()
    pairings = json.loads((out / "comparison.json").read_text())["pairings"]
    assert ["few-shot examples", "0", "1"] in pairings[0]["differences"]
    (sentence,) = findings(compare([GREEDY, SAMPLED]))
    assert "differ in: few-shot examples, decoding, prompts, items." in sentence


def test_many_tasks_are_summed_up(tmp_path: Path) -> None:
    """Fifty-seven subjects that differ in the same way take one line and one short sentence."""
    run = read_foreign_run("run", GREEDY)
    runs = []
    for shots in ("0", "5"):
        tasks = []
        for number in range(57):
            protocol = {"evaluator": "lm-eval 1", "task": f"t{number}", "shots": shots}
            tasks.append(task(f"t{number}", ["How many?"], protocol=protocol))
        runs.append(run.__class__(**{**vars(run), "foreign_tasks": tasks, "label": shots}))
    comparison = compare([GREEDY]).__class__(
        runs, [], {}, ["0", "5"], [], pair_by_question(runs[0], runs[1])
    )
    (sentence,) = findings(comparison)
    assert sentence.count("(no item decides)") == 9
    assert "and 48 more" in sentence
    text = comparison_markdown(comparison)
    assert text.count("| shots ") == 1
    assert "t0 and 56 others" in text


def test_old_picture_goes_when_there_are_no_accuracies(tmp_path: Path) -> None:
    write_comparison(compare([GREEDY]), tmp_path)
    assert (tmp_path / "comparison.png").is_file()
    write_comparison(compare([GREEDY]).__class__([], [], {}, [], [], []), tmp_path)
    assert not (tmp_path / "comparison.png").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_files_of_the_installed_lm_eval_are_read(tmp_path: Path) -> None:
    """The library asks the demo's teacher the task of the recorded files."""
    pytest.importorskip("lm_eval")
    shutil.copytree(DATA / "tasks", tmp_path / "tasks")
    model = f"pretrained={ASSETS / 'demo_teacher'},dtype=float32"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model]
    command += ["--device", "cpu", "--tasks", "sums,sums_choice", "--include_path", "."]
    command += ["--log_samples", "--output_path", str(tmp_path / "out")]
    # Its copy of the items goes to the test's own directory.
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        command, cwd=tmp_path / "tasks", env=environment, check=True, capture_output=True
    )
    run = read_foreign_run("run", tmp_path / "out")
    recorded = read_foreign(find_foreign(GREEDY)).tasks
    fields = [(item.question, item.document, item.gold) for item in recorded[0].items]
    assert [(i.question, i.document, i.gold) for i in run.foreign_tasks[0].items] == fields
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    expected = 12 * results["sums"]["exact_match,strict-match"]
    assert run.counts["sums (strict-match)"] == (12, pytest.approx(expected))
    # The model and its recorded answers differ only by another machine's rounding.
    rows = rows_of(GREEDY, tmp_path / "out")
    assert [row["items"] for row in rows.values()] == [12] * 4
    assert all(row["differences"] == [] for row in rows.values())
