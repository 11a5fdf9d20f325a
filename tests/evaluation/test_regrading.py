"""Grading stored outputs: what is read, what is written, and what is rejected."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from inline_grader import InlineGrader, graded_inline

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import regrading
from vocagnolm.evaluation.regrading import regrade
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

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


@pytest.fixture
def inline() -> Iterator[None]:
    """Grade in this process, as workers take seconds to start."""
    with graded_inline(regrading):
        yield


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", ["outputs.jsonl", "outputs.jsonl.gz"])
def test_regrade_writes_what_the_grader_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, output = write(tmp_path / name, OUTPUTS), tmp_path / "new" / "graded.jsonl"
    argv = ["--regrade", str(file), "--benchmark", "gsm8k", "--output", str(output)]
    assert evaluate_math.main(argv) == 0
    pairs = [(record["raw_output"], str(record["gold"])) for record in OUTPUTS]
    verdicts = list(InlineGrader().grade(BENCHMARKS["gsm8k"].answer_kind, pairs))
    graded = read(output.read_text())
    assert graded == [
        record | {"benchmark": "gsm8k"} | asdict(verdict)
        for record, verdict in zip(OUTPUTS, verdicts, strict=True)
    ]
    assert [record["correct"] for record in graded][:4] == [True, True, True, False]
    printed, complained = capsys.readouterr()
    assert complained == ""
    right = sum(record["correct"] for record in graded)
    assert f"as gsm8k: {100 * right / 7:.1f} (95 % interval" in printed
    assert f"{right} of 7 right" in printed


@pytest.mark.usefixtures("inline")
def test_regrade_marks_answers_of_a_chat(tmp_path: Path) -> None:
    boxed = [{"idx": 0, "gold": "8", "raw_output": r"It is $\boxed{8}$."}]
    file, output = write(tmp_path / "f.jsonl", boxed), tmp_path / "graded.jsonl"
    regrade(file, BENCHMARKS["gsm8k"].in_chat(), output)
    (graded,) = read(output.read_text())
    assert (graded["correct"], graded["protocol"]) == (True, "zero-shot chat")


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"benchmark": "math"}, "of {'benchmark': 'math'}"),
        ({"benchmark": None}, "of {'benchmark': None}"),
        ({"benchmark": 3}, "of {'benchmark': 3}"),
        ({"benchmark": "gsm8k", "protocol": "zero-shot chat"}, "'protocol': 'zero-shot chat'}"),
    ],
)
def test_regrade_rejects_items_of_another_benchmark(
    tmp_path: Path, of: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "o.jsonl", [OUTPUTS[0], OUTPUTS[1] | of])
    with pytest.raises(ValueError, match=f"{file}:2: .*{said}"):
        regrade(file, BENCHMARKS["gsm8k"], None)


def test_regrade_in_a_chat_rejects_few_shot_items(tmp_path: Path) -> None:
    file = write(tmp_path / "o.jsonl", [OUTPUTS[0] | {"benchmark": "gsm8k"}])
    with pytest.raises(ValueError, match=r"found one of {'benchmark': 'gsm8k'}"):
        regrade(file, BENCHMARKS["gsm8k"].in_chat(), None)


@pytest.mark.usefixtures("inline")
def test_regrade_normalises_golds(tmp_path: Path) -> None:
    output = tmp_path / "graded.jsonl"
    number = {"idx": 0, "gold": "1,250 inches", "raw_output": "The answer is 1250."}
    regrade(write(tmp_path / "numbers.jsonl", [number]), BENCHMARKS["gsm8k"], output)
    assert [record["correct"] for record in read(output.read_text())] == [True]
    golds = ["b", "(B)", "B.", "c"]
    letters = [
        {"idx": idx, "gold": gold, "raw_output": "The answer is (B)."}
        for idx, gold in enumerate(golds)
    ]
    regrade(write(tmp_path / "letters.jsonl", letters), BENCHMARKS["sat"], output)
    assert [record["correct"] for record in read(output.read_text())] == [True, True, True, False]
    letters[3]["gold"] = "F"
    with pytest.raises(ValueError, match=r"letters.jsonl:4: .*letter from A to E, found F"):
        regrade(write(tmp_path / "letters.jsonl", letters), BENCHMARKS["sat"], output)


@pytest.mark.usefixtures("inline")
def test_regrade_gives_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "outputs.jsonl", OUTPUTS)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    regrade(file, BENCHMARKS["gsm8k"], first)
    damaged = [record | {"correct": None, "decided_by": 3} for record in read(first.read_text())]
    regrade(write(tmp_path / "damaged.jsonl", damaged), BENCHMARKS["gsm8k"], second)
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.usefixtures("inline")
def test_regrade_sums_up_several_outputs_of_an_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 2 and 1 of 2 are right, so 75 %, and every item has a right one."""
    texts = [("8", "8"), ("8", "9")]
    drawn = []
    for idx, pair in enumerate(texts):
        for sample, text in enumerate(pair):
            drawn.append({"idx": idx, "sample": sample, "gold": "8", "raw_output": text})
    file, output = write(tmp_path / "drawn.jsonl", drawn), tmp_path / "graded.jsonl"
    regrade(file, BENCHMARKS["gsm8k"], output)
    assert [(r["idx"], r["sample"], r["correct"]) for r in read(output.read_text())] == [
        (0, 0, True),
        (0, 1, True),
        (1, 0, True),
        (1, 1, False),
    ]
    printed = capsys.readouterr().out
    assert "as gsm8k: avg@2 75.0 (95 % interval" in printed
    assert "pass@2 100.0, 3 of 4 right" in printed


def test_regrade_needs_equally_many_outputs_of_each_item(tmp_path: Path) -> None:
    file = write(tmp_path / "o.jsonl", [OUTPUTS[0], OUTPUTS[1], OUTPUTS[1] | {"sample": 1}])
    with pytest.raises(ValueError, match=rf"{file}: .*\[1, 2\] per item"):
        regrade(file, BENCHMARKS["gsm8k"], None)


# Line two of a file whose first is good.
FOREIGN: list[tuple[object, str]] = [
    ({"idx": 1, "gold": "8"}, "raw_output"),
    ({"idx": 1, "gold": "8", "raw_output": ["8", "9"]}, "raw_output .*list"),
    ({"idx": 1, "gold": "8", "raw_output": None}, "raw_output .*None"),
    ({"idx": 1, "gold": None, "raw_output": "8"}, "gold .*None"),
    ({"idx": 1, "gold": ["8"], "raw_output": "8"}, "gold .*8"),
    ({"idx": 1, "gold": float("nan"), "raw_output": "8"}, "gold .*nan"),
    ({"idx": 1, "gold": True, "raw_output": "8"}, "gold .*True"),
    ([{"idx": 1}], "list"),
    ("text", "str"),
]


@pytest.mark.parametrize(("record", "reason"), FOREIGN, ids=[reason for _, reason in FOREIGN])
def test_foreign_output_is_told_by_file_line_and_field(
    record: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "outputs.jsonl"
    file.write_text(f"{json.dumps(OUTPUTS[0])}\n{json.dumps(record)}\n")
    assert evaluate_math.main(["--regrade", str(file), "--benchmark", "gsm8k"]) == 2
    error = capsys.readouterr().err
    assert re.search(f"{file}:2: .*{reason}", error)


@pytest.mark.parametrize("more", [{"idx": 0}, {"idx": "0"}, {"idx": 0, "sample": 0}])
def test_output_counts_once(more: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "outputs.jsonl", [OUTPUTS[0], OUTPUTS[0] | more])
    with pytest.raises(ValueError, match="idx 0 comes twice"):
        regrade(file, BENCHMARKS["gsm8k"], None)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.jsonl", b'{"idx": 0, "gold": "8", "raw_ou', ":1: expected a JSON object"),
        ("table.csv", b"idx,gold\n0,8\n", ":1: expected a JSON object"),
        ("empty.jsonl", b"", "found none"),
        ("plain.jsonl.gz", b"not gzip", "is not a complete gzip file"),
        ("cut.jsonl.gz", gzip.compress(b"{}" * 999, mtime=0)[:20], "is not a complete gzip file"),
    ],
)
def test_file_of_no_outputs_is_one_line(
    name: str, content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert evaluate_math.main(["--regrade", str(tmp_path / name), "--benchmark", "gsm8k"]) == 2
    error = capsys.readouterr().err
    assert (name in error, reason in error, error.count("\n")) == (True, True, 1)


def test_output_that_cannot_be_written_costs_no_grading(tmp_path: Path) -> None:
    """No grader is started."""
    file = write(tmp_path / "outputs.jsonl", OUTPUTS)
    with pytest.raises(ValueError, match=f"^--output .*{file} is a file"):
        regrade(file, BENCHMARKS["gsm8k"], file / "graded.jsonl")
