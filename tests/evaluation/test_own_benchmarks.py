"""A user's own benchmarks: what a record must hold, and what its templates make of an item."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.evaluation.main import check
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item, fill_in
from vocagnolm.evaluation.tasks.own_benchmarks import read_benchmarks
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


# Files that are not benchmarks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "by their names"),
        ("{}", "by their names"),
        ("- halves", "by their names"),
        ("halves", "by their names"),
        ("halves: [", "cannot be read"),
        ("\0", "cannot be read"),
        ("m: {file: b, file: c}", "line 1: file comes twice"),
        ("m: 3", "m: expected fields"),
        ("m:", "m: expected fields"),
        ("3: {}", "3: a name"),
        ("a/b: {}", "a/b: a name"),
        ("m: {shot: 1}", "m: .*shot .did you mean shots"),
        ("m: {3: 1}", "m: .* field 3"),
    ],
)
def test_wrong_file_of_benchmarks_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^--benchmarks_file {path}.*{message}"):
        read_benchmarks(path)


# Python takes True for 1, and a text for a list of characters.
WRONG_FIELDS: dict[str, tuple[object, ...]] = {
    "question": (3, None, " "),
    "answer": (3, None, ""),
    "file": (3, True, [], ""),
    "column": (3, None, ""),
    "item_count": (-1, True, 1.0, "1", None),
    "shots": (-1, False, "1"),
    "version": (-1, True, "1", None),
    "max_new_tokens": (0, -1, True, 9.0, "9"),
    "max_new_tokens_in_chat": (0, True, "9"),
    "prompt_set": (3, True, None),
    "template": (3, "no place", "{question.x}"),
    "stops": ([""], ["a", ""], [3], [None], "a", "", 3, None, {"a": 1}),
    "answer_kind": ("d", 3, ["free"], None),
    # Only this package sets these.
    "id": ("x",),
    "directory": ("/", 3),
    "protocol": ("x", None),
    "items_sha256": ("0",),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in WRONG_FIELDS.items() for value in values],
)
def test_wrong_field_is_named_with_its_benchmark(field: str, value: object, write: Write) -> None:
    with pytest.raises(ValueError, match=rf"^--benchmarks_file \S*mine.yaml: m: .*{field}"):
        write(**{field: value})


@pytest.mark.parametrize(
    "parts",
    [3, [], "ab", ["ab"], [["a"]], [["a", 3]], [["a", None]], [[3, "b"]], [["a", "b", "c"]]],
)
def test_wrong_parts_of_the_hub_are_named(parts: object, tmp_path: Path) -> None:
    record = {"hub": "a/b", "hub_parts": parts, "question": "{q}", "answer": "{a}"}
    (tmp_path / "mine.yaml").write_text(json.dumps({"m": record}))
    with pytest.raises(ValueError, match="m: hub_parts must be"):
        read_benchmarks(tmp_path / "mine.yaml")
    record["hub_parts"] = [["a", "b"], [None, "c"]]
    (tmp_path / "mine.yaml").write_text(json.dumps({"m": record}))
    assert read_benchmarks(tmp_path / "mine.yaml")["m"].hub_parts == [["a", "b"], [None, "c"]]


@pytest.mark.parametrize(
    "record",
    [
        {"file": "a", "question": "{q}"},
        {"file": "a", "answer": "{a}"},
        {"question": "{q}", "answer": "{a}"},
        {"hub": "a/b", "question": "{q}", "answer": "{a}"},
        {"hub": "a/b", "file": "a", "question": "{q}", "answer": "{a}"},
        {"hub_parts": [[None, "a"]], "question": "{q}", "answer": "{a}"},
        {"hub": "a/b", "hub_parts": [[None, "a"]], "file": "a", "question": "{q}", "answer": "{a}"},
    ],
)
def test_record_needs_templates_and_one_place(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"m": record}))
    with pytest.raises(ValueError, match="m: it needs question, answer, and either"):
        read_benchmarks(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("headings", "fault"),
    [
        ({"gsm8k": "Mine"}, "gsm8k: gsm8k is .* ours"),
        ({"GSM8K": "Mine"}, "GSM8K: GSM8K is .* ours"),
        ({"TAB": "Mine"}, "TAB: TAB is .* ours"),
        ({"AVG": "Mine"}, "AVG: AVG is .* ours"),
        ({"m": "MATH"}, "m: MATH is .* ours"),
        ({"m": "AVG w/o SAT"}, "m: AVG w/o SAT is .* ours"),
        ({"m": "model"}, "m: model is .* ours"),
        ({"m": "X", "n": "X"}, "n: X is .* m"),
        ({"m": "n", "n": "X"}, "n: n is .* m"),
        ({"m": "X", "M": "Y"}, "M: M is .* m"),
    ],
)
def test_names_and_columns_are_of_one_benchmark(
    headings: dict[str, str], fault: str, tmp_path: Path
) -> None:
    record = {"file": "a", "question": "{q}", "answer": "{a}"}
    records = {name: {**record, "column": column} for name, column in headings.items()}
    (tmp_path / "mine.yaml").write_text(json.dumps(records))
    with pytest.raises(ValueError, match=f": {fault}: rename it"):
        read_benchmarks(tmp_path / "mine.yaml")


def test_own_benchmarks_are_of_one_command_alone(write: Write, tmp_path: Path) -> None:
    mine = write()
    argv = ["--model", "x", "--data_dir", str(tmp_path)]
    own_argv = [*argv, "--benchmarks_file", str(tmp_path / "mine.yaml")]
    assert check(own_argv).benchmarks == [mine]
    both = check([*own_argv, "--benchmarks", "gsm8k,m", "gsm8k"]).benchmarks
    assert both == [BENCHMARKS["gsm8k"], mine]
    with pytest.raises(ValueError, match=r"^--benchmarks: m.* not among gsm8k"):
        check([*argv, "--benchmarks", "m"])
    write(answer_kind="marked")
    with pytest.raises(ValueError, match=r"^--chat: m asks for no boxed answers"):
        check([*own_argv, "--chat"])


# Items


def test_own_items_are_made_of_their_fields(write: Write) -> None:
    row = {"body": "2 +", "ask": "2?", "gold": {"value": [3, 4]}, "idx": "x"}
    mine = write(row, question="{body} {ask}", answer="{gold[value][1]}")
    items, _ = load_items(mine, Path("another"))
    assert items == [Item(0, "2 + 2?", "4")]
    with pytest.raises(ValueError, match="expected 1 items of m, found 0"):
        load_items(write(), None)


@pytest.mark.parametrize(
    ("row", "templates", "fault"),
    [
        ({"ask": "a"}, {}, "answer names {gold}"),
        ({"ask": "a", "gold": None}, {}, "{gold} must be .* null"),
        ({"ask": None, "gold": 1}, {}, "{ask} must be .* null"),
        ({"ask": "a", "gold": {"v": None}}, {"answer": "{gold[v]}"}, r"{gold\[v\]} must .* null"),
        ({"ask": "a", "gold": float("nan")}, {}, "{gold} must be .* NaN"),
        ({"ask": "a", "gold": float("inf")}, {}, "{gold} must be .* Infinity"),
        ({"ask": "a", "gold": ["1", "one"]}, {}, "{gold} of answer must be"),
        ({"ask": "a", "gold": {"v": 1}}, {}, "{gold} of answer must be"),
        ({"ask": "a", "gold": " "}, {}, "must not be empty"),
        ({"ask": "a", "gold": "$"}, {}, "must not be empty"),
        ({"ask": " ", "gold": 1}, {}, "must not be empty"),
        ({"ask": "a", "gold": "two words"}, {"answer_kind": "marked"}, "one word, found two words"),
        ({"ask": "a", "gold": 1}, {"question": "{aks}: {ask}"}, "question names {aks}"),
        ({"ask": "a", "gold": 1}, {"question": "the same"}, "question names the same"),
        ({"ask": "a", "gold": 1}, {"question": "{0} {}"}, "question names {0}"),
        ({"ask": "a", "gold": {"b": 1}}, {"answer": "{gold.b}"}, "answer names {gold.b}"),
        ({"ask": "a", "q": 1}, {"question": "{ask} {q.b}"}, "question names {q.b}"),
        ({"ask": "a", "gold": 1.5}, {"answer": "{gold:.2f} {ask}"}, "answer names {gold:.2f}"),
        ({"ask": "a", "gold": {"b": 1}}, {"answer": "{gold[c]}"}, r"{gold\[c\]} is not in"),
        ({"ask": "a", "gold": [1]}, {"answer": "{gold[1]}"}, r"{gold\[1\]} is not in"),
        ({"ask": "a", "gold": [1]}, {"answer": "{gold[b]}"}, r"{gold\[b\]} is not in"),
        ({"ask": "a", "gold": "b"}, {"answer": "{gold[0]}"}, r"{gold\[0\]} is not in"),
    ],
)
def test_wrong_item_is_named(
    row: dict[str, Any], templates: dict[str, str], fault: str, write: Write
) -> None:
    mine = write(row, **templates)
    with pytest.raises(ValueError, match=rf"a.jsonl: item 0 of m: .*{fault}"):
        load_items(mine, None)


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        ("Question: {question}\nAnswer:", None),
        ("Problem:\n{question}\nSolution:", None),
        ("{question}", None),
        ("Q: 1 + 1?\nA: 2\n\nQ: {question}\nA:", "\n\nQ:"),
        ("Q: Is {question} 3?\nA:", "\n\nQ: Is"),
        ("Solve it.\nQ: {question}\nA: {question} is", "\n\nQ:"),
        ("Exercise:\n{question}\nSolution:", "\n\nExercise:"),
        ("A: 2\n\n{question}\nA:", None),
        ("- {question}\nA:", None),
        ("1. ${question}$\nA:", None),
    ],
)
def test_answer_ends_where_the_template_begins_again(
    template: str, stop: str | None, write: Write
) -> None:
    defaults = list(Benchmark("m", "m", 0, 0).stops)
    mine = write(template=template)
    assert list(mine.stops) == defaults + ([stop] if stop else [])
    assert write(template=template, stops=["\n"]).stops == ["\n"]
    assert write(template=template, stops=[]).stops == []


@pytest.mark.parametrize("kind", ["letter", "boxed_letter"])
def test_own_gold_of_multiple_choice_is_a_letter(kind: str, write: Write) -> None:
    golds = ["b", "(b)", "B", " e. "]
    rows = [{"ask": "a", "gold": gold} for gold in golds]
    items, _ = load_items(write(*rows, answer_kind=kind), None)
    assert [item.gold for item in items] == ["B", "B", "B", "E"]
    with pytest.raises(ValueError, match=r"item 4 of m: .* letter from A to E, found F"):
        load_items(write(*rows, {"ask": "a", "gold": "F"}, answer_kind=kind), None)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{question}", "x = {question}"),
        (r"$\frac{1}{2}$ {1, 2} {question}", r"$\frac{1}{2}$ {1, 2} x = {question}"),
        ("{{a}} {} {0} {", "{{a}} {} {0} {"),
        (r"\sqrt{question}: {other}", r"\sqrt" + "x = {question}: {other}"),
    ],
)  # fmt: skip
def test_braces_that_name_no_field_are_text(template: str, expected: str) -> None:
    assert fill_in(template, {"question": "x = {question}"}) == expected


def test_own_question_may_hold_latex(write: Write) -> None:
    row = {"ask": "Half", "gold": r"\frac{1}{4}"}
    mine = write(row, question=r"{ask} of $\frac{1}{2}$ {1, 2} {x}, x_{ab}")
    (item,), _ = load_items(mine, None)
    assert item.question == r"Half of $\frac{1}{2}$ {1, 2} {x}, x_{ab}"


@pytest.mark.parametrize(
    "change", [{"stops": ["b"]}, {"answer_kind": "marked"}, {"max_new_tokens": 2}, {"version": 2}]
)
def test_own_settings_tell_what_nobody_versions(change: dict[str, Any], write: Write) -> None:
    (task,) = load_tasks([write({"ask": "a", "gold": 1})], None, None, None)
    # There is no file of the harness to compare them with.
    assert task.marks() == {}
    other = replace(task, benchmark=replace(task.benchmark, **change))
    assert other.settings() != task.settings()
