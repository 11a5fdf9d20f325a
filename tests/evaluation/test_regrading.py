"""Grading stored outputs: what is read, and what is written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from inline_grader import InlineGrader, graded_inline

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import regrading
from vocagnolm.evaluation.regrading import regrade
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark

OUTPUTS: list[dict[str, Any]] = [
    {"idx": 0, "gold": "8", "raw_output": "5 + 3 = 8.\nThe answer is 8."},
    {"idx": 1, "gold": 8, "raw_output": "The answer is 8.0"},
    {"idx": 2, "gold": 2.5, "raw_output": "The answer is 5/2."},
    {"idx": 3, "gold": "9", "raw_output": ""},
    {"idx": 4, "gold": "x", "raw_output": "The answer is \ud83d.", "note": "lone"},
    {"idx": 5, "gold": "7", "raw_output": "The answer is \x007\x1b."},
    {"idx": 6, "gold": "8", "raw_output": "naïve 数学: 8", "finish_reason": None},
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(autouse=True)
def inline() -> Iterator[None]:
    """Grade in this process, as workers take seconds to start."""
    with graded_inline(regrading):
        yield


def graded(directory: Path, benchmark: Benchmark, records: list[dict[str, Any]]) -> list[Any]:
    """Grade records, and return what is written."""
    output = directory / "graded.jsonl"
    regrade(write(directory / "outputs.jsonl", records), benchmark, output)
    return read(output.read_text())


@pytest.mark.parametrize("name", ["outputs.jsonl", "outputs.jsonl.gz"])
def test_regrade_writes_what_the_grader_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, output = write(tmp_path / name, OUTPUTS), tmp_path / "new" / "graded.jsonl"
    argv = ["--regrade", str(file), "--benchmark", "gsm8k"]
    assert evaluate_math.main([*argv, "--output", str(output)]) == 0
    pairs = [(record["raw_output"], str(record["gold"])) for record in OUTPUTS]
    verdicts = list(InlineGrader().grade(BENCHMARKS["gsm8k"].answer_kind, pairs))
    found = read(output.read_text())
    for record, verdict, written in zip(OUTPUTS, verdicts, found, strict=True):
        assert written == record | {"benchmark": "gsm8k"} | asdict(verdict)
    assert [record["correct"] for record in found][:4] == [True, True, True, False]
    printed, complained = capsys.readouterr()
    right = sum(record["correct"] for record in found)
    assert f"as gsm8k: {100 * right / 7:.1f} (95 % interval" in printed
    assert f"{right} of 7 right" in printed
    # Without a file, lines and summary do not mix.
    assert complained == ""
    assert evaluate_math.main(argv) == 0
    assert capsys.readouterr() == (output.read_text(), printed)
    # Earlier verdicts are replaced, and the same file may be.
    damaged = [record | {"correct": None, "decided_by": 3} for record in found]
    before = output.read_bytes()
    regrade(write(output, damaged), BENCHMARKS["gsm8k"], output)
    assert output.read_bytes() == before


def test_regrade_marks_answers_of_a_chat(tmp_path: Path) -> None:
    boxed = {"idx": 0, "gold": "8", "raw_output": r"It is $\boxed{8}$."}
    (record,) = graded(tmp_path, BENCHMARKS["gsm8k"].in_chat(), [boxed])
    assert (record["correct"], record["protocol"]) == (True, "zero-shot chat")


@pytest.mark.parametrize(
    ("name", "output", "gold", "right"),
    [
        ("gsm8k", "The answer is 1250.", "1,250 inches", True),
        ("sat", "The answer is (B).", "b", True),
        ("sat", "The answer is (B).", "(B)", True),
        ("sat", "The answer is (B).", "B.", True),
        ("sat", "The answer is (B).", "c", False),
    ],
)
def test_regrade_normalises_golds(
    name: str, output: str, gold: str, right: bool, tmp_path: Path
) -> None:
    record = {"idx": 0, "gold": gold, "raw_output": output}
    assert graded(tmp_path, BENCHMARKS[name], [record])[0]["correct"] == right


def test_regrade_sums_up_several_outputs_of_an_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 2 and 1 of 2 are right, so 75 %, and every item has a right one."""
    drawn = []
    for idx, sample, text in ((0, 0, "8"), (0, 1, "8"), ("1", 0, "8"), (1, 1, "9")):
        drawn.append({"idx": idx, "sample": sample, "gold": "8", "raw_output": text})
    graded(tmp_path, BENCHMARKS["gsm8k"], drawn)
    printed = capsys.readouterr().out
    assert "as gsm8k: avg@2 75.0 (95 % interval" in printed
    assert "pass@2 100.0, 3 of 4 right" in printed
