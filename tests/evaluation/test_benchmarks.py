"""Benchmarks as data: every question, gold and prompt against the harness's."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_data import real_data

from vocagnolm.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    Item,
)
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks

SAMPLES = Path(__file__).parents[1] / "data/evaluation"
COUNTS = dict(
    zip(PAPER_BENCHMARKS, (1319, 500, 1000, 2215, 2065, 1000, 1000, 3018, 32), strict=True)
)
HARNESS_NAMES = {"math": "minerva_math", "sat": "sat_math"}
CHOOSE = "\nWhat of the following is the right choice? Explain your answer.\n"


# Records


def test_benchmarks_stand_in_the_papers_order_when_listed() -> None:
    assert list(BENCHMARKS) == [
        *PAPER_BENCHMARKS,
        "gsm_hard",
        "math500",
        "aime24",
        "aime25",
        "demo",
    ]
    columns = [benchmark.column for benchmark in BENCHMARKS.values()]
    paper = "GSM8K MATH SVAMP ASDiv MAWPS TAB MQA MMLU-STEM SAT"
    assert columns == [*paper.split(), "GSM-Hard", "MATH-500", "AIME24", "AIME25", "Demo"]
    assert all(key == benchmark.id for key, benchmark in BENCHMARKS.items())
    assert {name: BENCHMARKS[name].item_count for name in PAPER_BENCHMARKS} == COUNTS


def test_benchmarks_are_the_harnesss_settings_when_read() -> None:
    letters = {"mathqa", "mmlu_stem", "sat"}
    for benchmark in (BENCHMARKS[name] for name in (*PAPER_BENCHMARKS, "gsm_hard")):
        is_problem = benchmark.id in letters | {"math"}
        assert benchmark.shots == (4 if is_problem else 8)
        assert benchmark.template.startswith("Problem:\n" if is_problem else "Question: ")
        assert benchmark.answer_kind == ("letter" if benchmark.id in letters else "free")
        assert benchmark.stops == ("</s>", "\n\nQuestion:", "\n\nProblem:")
        assert benchmark.max_new_tokens == 1024
    sets = {name: BENCHMARKS[name].prompt_set for name in BENCHMARKS}
    assert sets["math"] == "minerva_math"
    assert sets["mathqa"] == "mathqa"
    assert sets["mmlu_stem"] == sets["sat"] == "mmlu_stem"
    assert {sets[name] for name in ("gsm8k", "svamp", "asdiv", "mawps", "tabmwp")} == {"gsm8k"}
    assert sets["gsm_hard"] == "gsm8k"


def test_long_answers_are_those_of_reports_in_a_chat() -> None:
    lengths = {name: benchmark.in_chat().max_new_tokens for name, benchmark in BENCHMARKS.items()}
    long = {name for name, length in lengths.items() if length == 32_768}
    assert long == {"math500", "aime24", "aime25"}
    assert {lengths[name] for name in PAPER_BENCHMARKS} == {2048}
    assert {BENCHMARKS[name].max_new_tokens for name in long} == {1024}


# Items and prompts against what the harness built of them


def check_task(task: Task, built: list[dict[str, Any]]) -> None:
    expected = [Item(row["idx"], row["question"], row["gold"]) for row in built]
    assert task.items == expected
    assert task.data["origin"] == task.benchmark.file
    hashes = [hashlib.sha256(prompt.encode()).hexdigest() for prompt in task.prompts.values()]
    assert hashes == [row["prompt_sha256"] for row in built]
    assert task.prompt_set is not None
    assert task.prompt_set["origin"] == "harness"


@pytest.mark.parametrize("name", ["gsm8k", "math", "svamp", "mmlu_stem"])
def test_prompts_equal_the_harnesss(name: str) -> None:
    lines = (SAMPLES / "built.jsonl").read_text("utf-8").splitlines()
    built = [row for row in map(json.loads, lines) if row["benchmark"] == name]
    benchmark = replace(BENCHMARKS[name], item_count=len(built))
    (task,) = load_tasks([benchmark], SAMPLES / "items", SAMPLES / "prompts", None)
    check_task(task, built)


@pytest.mark.slow
def test_all_prompts_equal_the_harnesss() -> None:
    data = real_data("data")
    benchmarks = [BENCHMARKS[name] for name in PAPER_BENCHMARKS]
    for task in load_tasks(benchmarks, data / "benchmarks", data / "prompts/cot", None):
        name = task.benchmark.id
        file = f"grading/built/{HARNESS_NAMES.get(name, name)}.jsonl.gz"
        with gzip.open(data / file, "rt") as lines:
            built = [json.loads(line) for line in lines]
        assert len(built) == COUNTS[name]
        check_task(task, built)
        assert task.marks() == {}


# Questions and golds of rows made by hand

TABLE = {"table": "x | y\n1 | 2", "question": "How many?", "table_title": None, "choices": None}
ROWS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gsm8k": (
        "gsm8k",
        {"question": " How far? ", "answer": "2+2=4\n#### 1,004"},
        "How far?",
        "1,004",
    ),
    "math takes the last box": (
        "math",
        {"problem": "Find $x$.", "solution": r"$\boxed{1}$, no: $\boxed{\frac12}$.", "answer": "9"},
        "Find $x$.",
        r"\frac{1}{2}",
    ),
    "math without a box takes the last number": (
        "math",
        {"problem": "Find $x$.", "solution": "It is 1, then 2."},
        "Find $x$.",
        "2",
    ),
    "math has one gold that is empty": (
        "math",
        {"problem": "Find $x$.", "solution": r"It is $\boxed{}$."},
        "Find $x$.",
        "",
    ),
    "svamp adds a full stop": (
        "svamp",
        {"Body": " Dan had 3 pens ", "Question": " How many? ", "Answer": 145.0},
        "Dan had 3 pens. How many?",
        "145",
    ),
    "svamp keeps the full stop": (
        "svamp",
        {"Body": "Dan had 3 pens.", "Question": "How many?", "Answer": "2.5"},
        "Dan had 3 pens. How many?",
        "2.5",
    ),
    "asdiv drops every unit": (
        "asdiv",
        {"body": "Two pens. ", "question": " How many?", "answer": "9 (pens) (blue)"},
        "Two pens. How many?",
        "9",
    ),
    "asdiv asks yes or no": (
        "asdiv",
        {"body": "Two pens.", "question": "Enough?", "answer": "Yes"},
        "Two pens. Enough? (Yes or No)",
        "Yes",
    ),
    "asdiv is normalised twice": (
        "asdiv",
        {"body": "It is noon.", "question": "When?", "answer": "3:30 p.m."},
        "It is noon. When?",
        "3:30p",
    ),
    "mawps": ("mawps", {"input": "How many ?", "target": 43.0}, "How many ?", "43"),
    "tabmwp without a title": (
        "tabmwp",
        {**TABLE, "answer": "34.35", "ans_type": "decimal_number"},
        "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?",
        "34.35",
    ),
    "tabmwp with title and choices": (
        "tabmwp",
        {
            **TABLE,
            "table_title": "Pens",
            "choices": ["it's", "linear"],
            "answer": "linear",
            "ans_type": "extractive_text",
        },
        'Read the following table regarding "Pens" and answer a question:\nx | y\n1 | 2\nHow many?'
        """ Please select from the following options: ["it's", 'linear']""",
        "linear",
    ),
    "tabmwp divides": (
        "tabmwp",
        {**TABLE, "answer": "3/8", "ans_type": "decimal_number"},
        "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?",
        "0.375",
    ),
    "tabmwp takes commas out": (
        "tabmwp",
        {**TABLE, "answer": "1,234,567", "ans_type": "integer_number"},
        "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?",
        "1234567",
    ),
    "tabmwp divides percents": (
        "tabmwp",
        {**TABLE, "answer": "12%", "ans_type": "integer_number"},
        "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?",
        "0.12",
    ),
    "tabmwp keeps text": (
        "tabmwp",
        {**TABLE, "answer": "3:15", "ans_type": "other_text"},
        "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?",
        "3:15",
    ),
    "mathqa": (
        "mathqa",
        {
            "problem": "how much ?",
            "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5",
            "correct": "d",
        },
        f"How much ?{CHOOSE}(A) 1, (B) 2, (C) 3, (D) 4, (E) 5",
        "D",
    ),
    "mathqa closes up commas inside of options": (
        "mathqa",
        {"problem": "how much ?", "options": "a ) 1 , 200 , b ) 2", "correct": "a"},
        f"How much ?{CHOOSE}(A) 1, 200, (B) 2",
        "A",
    ),
    "mathqa reads a list with doubled labels": (
        "mathqa",
        {"problem": "how much ?", "options": "['a ) a ) 1 cm', 'b ) b ) 2 cm']", "correct": "b"},
        f"How much ?{CHOOSE}(A) 1 cm, (B) 2 cm",
        "B",
    ),
    "mmlu_stem strips choices": (
        "mmlu_stem",
        {"question": "Which?\n", "choices": ["150 m ", " Both", "x", "( 1 , 2 )"], "answer": 3},
        f"Which?\n{CHOOSE}(A) 150 m, (B) Both, (C) x, (D) ( 1 , 2 )",
        "D",
    ),
    "sat with parentheses": (
        "sat",
        {"question": "Which?", "options": "A) $f(B) $ B) 2 C) 3 D) 4", "Answer": "B"},
        f"Which?{CHOOSE}(A) $f(B) $ (B) 2 (C) 3 (D) 4",
        "B",
    ),
    "sat with points stays as it is": (
        "sat",
        {"question": "Which?", "options": "A. 1 B. 2 C. 3 D. 4", "Answer": "C"},
        f"Which?{CHOOSE}(A. 1 B. 2 C. 3 D. 4",
        "C",
    ),
    "gsm_hard": ("gsm_hard", {"input": "How far?", "target": -9867630.0}, "How far?", "-9867630"),
    "demo": ("demo", {"question": "Q: How far?\nA:", "answer": "12"}, "Q: How far?\nA:", "12"),
}


@pytest.mark.parametrize("case", ROWS)
def test_item_reads_as_expected(case: str) -> None:
    name, row, question, gold = ROWS[case]
    before = copy.deepcopy(row)
    assert BENCHMARKS[name].item(7, row) == Item(7, question, gold)
    assert row == before


@pytest.mark.parametrize(
    ("gold", "hint"),
    [
        ("TRUE", " (True or False)"),
        ("false", " (True or False)"),
        ("no", " (Yes or No)"),
        ("Noon", ""),
    ],
)
def test_question_says_what_it_expects(gold: str, hint: str) -> None:
    row = {**TABLE, "answer": gold, "ans_type": "boolean_text"}
    assert BENCHMARKS["tabmwp"].item(0, row).question.partition("How many?")[2] == hint
