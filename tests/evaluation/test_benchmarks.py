"""Benchmarks as data: questions, golds and prompts against the harness's, and our own prompts."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import re
from dataclasses import replace
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest
from real_data import real_data

from vocagnolm.evaluation.extraction import AnswerKind, extract, strip_string
from vocagnolm.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    Item,
)
from vocagnolm.evaluation.tasks.tasks import Task, build_prompt, load_prompt_set, load_tasks

SAMPLES = Path(__file__).parents[1] / "data/evaluation"
HARNESS_NAMES = {"math": "minerva_math", "sat": "sat_math"}


# Records


def test_benchmarks_stand_in_the_papers_order() -> None:
    columns = [benchmark.column for benchmark in BENCHMARKS.values()]
    paper = "GSM8K MATH SVAMP ASDiv MAWPS TAB MQA MMLU-STEM SAT"
    assert columns == [*paper.split(), "GSM-Hard", "MATH-500", "AIME24", "AIME25", "Demo"]


def test_texts_end_as_in_the_harness_and_in_reports_of_chats() -> None:
    """Templates and examples are those of the prompts below."""
    for benchmark in (BENCHMARKS[name] for name in (*PAPER_BENCHMARKS, "gsm_hard")):
        assert benchmark.stops == ("</s>", "\n\nQuestion:", "\n\nProblem:")
        assert (benchmark.max_new_tokens, benchmark.in_chat().max_new_tokens) == (1024, 2048)
    for benchmark in (BENCHMARKS[name] for name in ("math500", "aime24", "aime25")):
        assert (benchmark.max_new_tokens, benchmark.in_chat().max_new_tokens) == (1024, 32_768)


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
        check_task(task, built)
        assert task.marks() == {}


# Questions and golds of rows made by hand


def math(solution: str) -> dict[str, Any]:
    return {"problem": "x?", "solution": solution}


def svamp(body: str, question: str, answer: object) -> dict[str, Any]:
    return {"Body": body, "Question": question, "Answer": answer}


def asdiv(answer: str) -> dict[str, Any]:
    return {"body": "Two pens. ", "question": " How many?", "answer": answer}


def table(answer: str, kind: str, title: Any = None, choices: Any = None) -> dict[str, Any]:
    row = {"table": "x | y\n1 | 2", "question": "How many?", "table_title": title}
    return {**row, "choices": choices, "answer": answer, "ans_type": kind}


def mathqa(options: str, correct: str) -> dict[str, Any]:
    return {"problem": "how ?", "options": options, "correct": correct}


def sat(options: str, answer: str) -> dict[str, Any]:
    return {"question": "Which?", "options": options, "Answer": answer}


PENS, YES = "Two pens. How many?", "Two pens. How many? (Yes or No)"
TABLE = "Read the following table and answer a question:\nx | y\n1 | 2\nHow many?"
TITLED = TABLE.replace("table and", 'table regarding "Pens" and')
TITLED += """ Please select from the following options: ["it's", 'x']"""
CHOOSE = "\nWhat of the following is the right choice? Explain your answer.\n"
TRUTH, CONSENT = f"{TABLE} (True or False)", f"{TABLE} (Yes or No)"
FIVE = "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5"
MMLU = {"question": "Which?\n", "choices": ["150 m ", " Both", "x", "( 1 , 2 )"], "answer": 3}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    # The last box, or without a box the last number. One of MATH's golds is empty.
    ("math", math(r"$\boxed{1}$, no: $\boxed{\frac12}$."), "x?", r"\frac{1}{2}"),
    ("math", math("It is 1, then 2."), "x?", "2"),
    ("math", math(r"It is $\boxed{}$."), "x?", ""),
    ("svamp", svamp(" 3 pens ", " How many? ", 145.0), "3 pens. How many?", "145"),
    ("svamp", svamp("3 pens.", "How many?", "2.5"), "3 pens. How many?", "2.5"),
    ("asdiv", asdiv("9 (pens) (blue)"), PENS, "9"),
    ("asdiv", asdiv("Yes"), YES, "Yes"),
    ("asdiv", asdiv("3:30 p.m."), PENS, "3:30p"),  # normalised twice
    ("mawps", {"input": "How many ?", "target": 43.0}, "How many ?", "43"),
    ("tabmwp", table("34.35", "decimal_number"), TABLE, "34.35"),
    ("tabmwp", table("3/8", "decimal_number"), TABLE, "0.375"),
    ("tabmwp", table("1,234,567", "integer_number"), TABLE, "1234567"),
    ("tabmwp", table("12%", "integer_number"), TABLE, "0.12"),
    ("tabmwp", table("3:15", "other_text"), TABLE, "3:15"),
    ("tabmwp", table("x", "", "Pens", ["it's", "x"]), TITLED, "x"),
    ("tabmwp", table("TRUE", "boolean_text"), TRUTH, "TRUE"),
    ("tabmwp", table("no", "boolean_text"), CONSENT, "no"),
    ("tabmwp", table("Noon", "boolean_text"), TABLE, "Noon"),
    ("mathqa", mathqa(FIVE, "d"), f"How ?{CHOOSE}(A) 1, (B) 2, (C) 3, (D) 4, (E) 5", "D"),
    ("mathqa", mathqa("a ) 1 , 200 , b ) 2", "a"), f"How ?{CHOOSE}(A) 1, 200, (B) 2", "A"),
    ("mathqa", mathqa("['a ) a ) 1', 'b ) b ) 2']", "b"), f"How ?{CHOOSE}(A) 1, (B) 2", "B"),
    ("mmlu_stem", MMLU, f"Which?\n{CHOOSE}(A) 150 m, (B) Both, (C) x, (D) ( 1 , 2 )", "D"),
    ("sat", sat("A) $f(B) $ B) 2 C) 3", "B"), f"Which?{CHOOSE}(A) $f(B) $ (B) 2 (C) 3", "B"),
    ("sat", sat("A. 1 B. 2 C. 3", "C"), f"Which?{CHOOSE}(A. 1 B. 2 C. 3", "C"),
]


@pytest.mark.parametrize(("name", "row", "question", "gold"), CASES)
def test_items_read_as_expected(name: str, row: dict[str, Any], question: str, gold: str) -> None:
    before = copy.deepcopy(row)
    assert BENCHMARKS[name].item(7, row) == Item(7, question, gold)
    assert row == before


# The exemplars are right by the evaluator's own rules, and not copied

SEPARATOR = "\n\n\n"
# Each answer, worked out again by other means than the solution's text.
GSM8K = (7 * 24 + 10, 312 - 6 * 45, 36 // 2 * 14, 9 - 4 * 2 // 2, 60 * 4 // 5 + 15)
FRACTION = Fraction(4 * 6, comb(10, 2))
ANSWERS: dict[str, list[object]] = {
    "gsm8k": [*GSM8K, 24 * 5 // 2 - 45, 2 * 11 - 4 + 3, 5 * 8 + 20 * 3],
    "minerva_math": [FRACTION, f"({-2 * 3},{4 - 1 + 2 * 3})", pow(5, 38, 13), r"3\sqrt{5}"],
    "mathqa": ["B", "C", "E", "A"],
    "mmlu_stem": ["C", "A", "D", "B"],
}
STARTS = {"gsm8k": ("Question: ", "\nAnswer: ")}
LETTERED = ("mathqa", "mmlu_stem")


def exemplars(name: str) -> list[tuple[str, str]]:
    """Question and solution of each exemplar of the package."""
    start, middle = STARTS.get(name, ("Problem:\n", "\nSolution:\n"))
    pairs = []
    for text in load_prompt_set(name, None)[0].strip().split(SEPARATOR):
        assert text.startswith(start)
        question, found, solution = text.removeprefix(start).partition(middle)
        assert found
        pairs.append((question, solution))
    return pairs


@pytest.mark.parametrize("name", ANSWERS)
def test_exemplars_give_their_answer_when_read_as_outputs(name: str) -> None:
    kind: AnswerKind = "letter" if name in LETTERED else "free"
    found = [extract(kind, solution) for _, solution in exemplars(name)]
    assert found == [strip_string(answer) for answer in ANSWERS[name]]


@pytest.mark.parametrize("name", PAPER_BENCHMARKS)
def test_prompt_holds_its_shots_when_built(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert benchmark.prompt_set is not None
    examples, _ = load_prompt_set(benchmark.prompt_set, None)
    prompt = build_prompt(benchmark, examples, "Why {not}?")
    *shots, asked = prompt.split(SEPARATOR)
    assert len(shots) == benchmark.shots == len(exemplars(benchmark.prompt_set))
    assert asked == benchmark.template.replace("{question}", "Why {not}?")
    assert not any(stop in shot for stop in benchmark.stops for shot in shots)
    # A model that goes on like the exemplars writes a stop string.
    assert any(stop in SEPARATOR + shots[0] for stop in benchmark.stops)


def test_prompt_set_is_known_by_its_bytes(tmp_path: Path) -> None:
    text, source = load_prompt_set("gsm8k", None)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    assert source == {"name": "gsm8k", "origin": "vocagnolm", "sha256": sha256}
    content = b"Question: A?\r\nAnswer: B."
    (tmp_path / "gsm8k.md").write_bytes(content)
    text, source = load_prompt_set("gsm8k", tmp_path)
    assert (source["origin"], text) == ("other", "Question: A?\nAnswer: B.")
    assert source["sha256"] == hashlib.sha256(content).hexdigest()


# Not copied


def eight_grams(text: str) -> set[tuple[str, ...]]:
    """Runs of eight words or numbers, without the lines that the format prescribes."""
    text = re.sub(r"Final Answer: The final answer is .*", " ", text.replace(CHOOSE.strip(), " "))
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}


def test_exemplars_share_no_eight_words_with_the_harnesss() -> None:
    theirs = SAMPLES / "prompts"
    taken = set().union(*(eight_grams(path.read_text()) for path in theirs.glob("*.md")))
    assert len(taken) > 1000
    for name in ANSWERS:
        assert not eight_grams(load_prompt_set(name, None)[0]) & taken
