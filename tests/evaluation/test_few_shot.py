"""The exemplars are right by the evaluator's own rules, and not copied."""

from __future__ import annotations

import hashlib
import re
from fractions import Fraction
from math import comb
from pathlib import Path

import pytest

from vocagnolm.evaluation.extraction import extract, strip_string
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import build_prompt, load_prompt_set

SEPARATOR = "\n\n\n"
CHOOSE = "What of the following is the right choice? Explain your answer."
# Each answer, worked out again by other means than the solution's text.
ANSWERS = {
    "gsm8k": (
        str(7 * 24 + 10),
        str(312 - 6 * 45),
        str(36 // 2 * 14),
        str(9 - 4 * 2 // 2),
        str(60 * 4 // 5 + 15),
        str(24 * 5 // 2 - 45),
        str(2 * 11 - 4 + 3),
        str(5 * 8 + 20 * 3),
    ),
    "minerva_math": (
        strip_string(Fraction(4 * 6, comb(10, 2))),
        f"({-2 * 3},{4 - 1 + 2 * 3})",
        str(pow(5, 38, 13)),
        r"3\sqrt{5}",  # the square is 45
    ),
    "mathqa": ("B", "C", "E", "A"),
    "mmlu_stem": ("C", "A", "D", "B"),
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
    kind = "letter" if name in LETTERED else "free"
    found = tuple(extract(kind, solution) for _, solution in exemplars(name))
    assert found == ANSWERS[name]
    assert all(strip_string(answer) == answer for answer in ANSWERS[name])


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


def test_prompt_is_written_out_when_built() -> None:
    examples = "\nQuestion: A?\nAnswer: B.\n\n"
    shot = "Question: A?\nAnswer: B."
    gsm8k, math = BENCHMARKS["gsm8k"], BENCHMARKS["math"]
    assert build_prompt(gsm8k, examples, "C?") == f"{shot}\n\n\nQuestion: C?\nAnswer:"
    assert build_prompt(math, examples, "C?") == f"{shot}\n\n\nProblem:\nC?\nSolution:"
    assert build_prompt(gsm8k, "", "C?") == "Question: C?\nAnswer:"
    assert build_prompt(BENCHMARKS["demo"], "", "Q: C?\nA:") == "Q: C?\nA:"


# Where they come from


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
    text = re.sub(r"Final Answer: The final answer is .*", " ", text.replace(CHOOSE, " "))
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}


def test_exemplars_share_no_eight_words_with_the_harnesss() -> None:
    theirs = Path(__file__).parents[1] / "data/evaluation/prompts"
    taken = set().union(*(eight_grams(path.read_text()) for path in theirs.glob("*.md")))
    assert len(taken) > 1000
    for name in ANSWERS:
        assert not eight_grams(load_prompt_set(name, None)[0]) & taken
