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
    others = ["gsm_hard", "math500", "aime24", "aime25", "demo"]
    assert list(BENCHMARKS) == [*PAPER_BENCHMARKS, *others]
    columns = [benchmark.column for benchmark in BENCHMARKS.values()]
    paper = "GSM8K MATH SVAMP ASDiv MAWPS TAB MQA MMLU-STEM SAT"
    assert columns == [*paper.split(), "GSM-Hard", "MATH-500", "AIME24", "AIME25", "Demo"]
    assert all(key == benchmark.id for key, benchmark in BENCHMARKS.items())
    assert {name: BENCHMARKS[name].item_count for name in PAPER_BENCHMARKS} == COUNTS


def test_texts_end_as_in_the_harness() -> None:
    """Templates and examples are those of the prompts below."""
    for benchmark in (BENCHMARKS[name] for name in (*PAPER_BENCHMARKS, "gsm_hard")):
        assert benchmark.stops == ("</s>", "\n\nQuestion:", "\n\nProblem:")
        assert benchmark.max_new_tokens == 1024


def test_long_answers_are_those_of_reports_in_a_chat() -> None:
    asked = [benchmark.in_chat() for name, benchmark in BENCHMARKS.items() if name != "demo"]
    lengths = {benchmark.id: benchmark.max_new_tokens for benchmark in asked}
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
TABLE_TEXT = "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?"
PENS = {"body": "Two pens. ", "question": " How many?"}
CASES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "math": [
        # The last box, or without a box the last number. One of MATH's golds is empty.
        (
            {"problem": "x?", "solution": r"$\boxed{1}$, no: $\boxed{\frac12}$."},
            "x?",
            r"\frac{1}{2}",
        ),
        ({"problem": "x?", "solution": "It is 1, then 2."}, "x?", "2"),
        ({"problem": "x?", "solution": r"It is $\boxed{}$."}, "x?", ""),
    ],
    "svamp": [
        (
            {"Body": " 3 pens ", "Question": " How many? ", "Answer": 145.0},
            "3 pens. How many?",
            "145",
        ),
        ({"Body": "3 pens.", "Question": "How many?", "Answer": "2.5"}, "3 pens. How many?", "2.5"),
    ],
    "asdiv": [
        ({**PENS, "answer": "9 (pens) (blue)"}, "Two pens. How many?", "9"),
        ({**PENS, "answer": "Yes"}, "Two pens. How many? (Yes or No)", "Yes"),
        # Normalised twice.
        ({**PENS, "answer": "3:30 p.m."}, "Two pens. How many?", "3:30p"),
    ],
    "mawps": [({"input": "How many ?", "target": 43.0}, "How many ?", "43")],
    "tabmwp": [
        ({**TABLE, "answer": "34.35", "ans_type": "decimal_number"}, TABLE_TEXT, "34.35"),
        ({**TABLE, "answer": "3/8", "ans_type": "decimal_number"}, TABLE_TEXT, "0.375"),
        ({**TABLE, "answer": "1,234,567", "ans_type": "integer_number"}, TABLE_TEXT, "1234567"),
        ({**TABLE, "answer": "12%", "ans_type": "integer_number"}, TABLE_TEXT, "0.12"),
        ({**TABLE, "answer": "3:15", "ans_type": "other_text"}, TABLE_TEXT, "3:15"),
        (
            {
                **TABLE,
                "table_title": "Pens",
                "choices": ["it's", "x"],
                "answer": "x",
                "ans_type": "",
            },
            TABLE_TEXT.replace("table and", 'table regarding "Pens" and')
            + """ Please select from the following options: ["it's", 'x']""",
            "x",
        ),
    ],
    "mathqa": [
        (
            {
                "problem": "how ?",
                "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5",
                "correct": "d",
            },
            f"How ?{CHOOSE}(A) 1, (B) 2, (C) 3, (D) 4, (E) 5",
            "D",
        ),
        (
            {"problem": "how ?", "options": "a ) 1 , 200 , b ) 2", "correct": "a"},
            f"How ?{CHOOSE}(A) 1, 200, (B) 2",
            "A",
        ),
        (
            {"problem": "how ?", "options": "['a ) a ) 1 cm', 'b ) b ) 2 cm']", "correct": "b"},
            f"How ?{CHOOSE}(A) 1 cm, (B) 2 cm",
            "B",
        ),
    ],
    "mmlu_stem": [
        (
            {"question": "Which?\n", "choices": ["150 m ", " Both", "x", "( 1 , 2 )"], "answer": 3},
            f"Which?\n{CHOOSE}(A) 150 m, (B) Both, (C) x, (D) ( 1 , 2 )",
            "D",
        )
    ],
    "sat": [
        (
            {"question": "Which?", "options": "A) $f(B) $ B) 2 C) 3 D) 4", "Answer": "B"},
            f"Which?{CHOOSE}(A) $f(B) $ (B) 2 (C) 3 (D) 4",
            "B",
        ),
        (
            {"question": "Which?", "options": "A. 1 B. 2 C. 3 D. 4", "Answer": "C"},
            f"Which?{CHOOSE}(A. 1 B. 2 C. 3 D. 4",
            "C",
        ),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_items_read_as_expected(name: str) -> None:
    for row, question, gold in CASES[name]:
        before = copy.deepcopy(row)
        assert BENCHMARKS[name].item(7, row) == Item(7, question, gold)
        assert row == before


def test_question_says_what_it_expects() -> None:
    for gold, hint in (("TRUE", " (True or False)"), ("no", " (Yes or No)"), ("Noon", "")):
        item = BENCHMARKS["tabmwp"].item(0, {**TABLE, "answer": gold, "ans_type": "boolean_text"})
        assert item.question == TABLE_TEXT + hint
