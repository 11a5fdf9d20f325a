"""Grading stored outputs: what is read, what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from inline_grader import graded_inline

from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.evaluation import regrading
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import read_records, to_line
from vocagnolm.evaluation.regrading import regrade
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.host.manifest import unsealed

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
    return [unsealed(json.loads(line)) for line in text.splitlines()]


@pytest.fixture
def inline() -> Iterator[None]:
    """Grading in this process: workers take seconds to start."""
    with graded_inline(regrading):
        yield


@pytest.mark.processes
@pytest.mark.parametrize("name", ["outputs.jsonl", "outputs.jsonl.gz"])
def test_regrade_writes_what_the_grader_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, output = write(tmp_path / name, OUTPUTS), tmp_path / "new" / "graded.jsonl"
    argv = ["--regrade", str(file), "--benchmark", "gsm8k", "--output", str(output)]
    assert evaluate_math.main(argv) == 0
    with Grader(1) as grader:
        pairs = [(record["raw_output"], str(record["gold"])) for record in OUTPUTS]
        verdicts = list(grader.grade(BENCHMARKS["gsm8k"].answer_kind, pairs))
    graded = read(output.read_text())
    assert graded == [
        record | {"benchmark": "gsm8k"} | asdict(verdict)
        for record, verdict in zip(OUTPUTS, verdicts, strict=True)
    ]
    assert [record["correct"] for record in graded][:4] == [True, True, True, False]
    printed, complained = capsys.readouterr()
    assert complained == ""
    right = sum(record["correct"] for record in graded)
    assert (
        f"as gsm8k, few-shot (partial: 7 of 1319 items): {100 * right / 7:.1f} (95 % interval "
        in printed
    )
    assert f"{right} of 7 right, 14.3% without an answer, graded by ZubinGou/math-eval" in printed
    assert "math-verify 0." in printed


@pytest.mark.usefixtures("inline")
def test_regrade_marks_answers_of_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boxed = [{"idx": 0, "gold": "8", "raw_output": r"It is $\boxed{8}$."}]
    file, output = write(tmp_path / "f.jsonl", boxed), tmp_path / "graded.jsonl"
    regrade(file, BENCHMARKS["gsm8k"].in_chat(), output)
    (graded,) = read(output.read_text())
    assert (graded["correct"], graded["protocol"]) == (True, "zero-shot chat")
    assert "as gsm8k, zero-shot chat (partial: 1 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"benchmark": "math"}, "expected an item of gsm8k, found one of math: give --benchmark"),
        ({"protocol": "zero-shot chat"}, "found one of zero-shot chat: give --chat"),
    ],
)
def test_regrade_refuses_items_of_another_benchmark(
    tmp_path: Path, of: dict[str, str], said: str
) -> None:
    file = write(tmp_path / "o.jsonl", [OUTPUTS[0], OUTPUTS[1] | of])
    with pytest.raises(ValueError, match=f"line 2: .*{said}"):
        regrade(file, BENCHMARKS["gsm8k"], None)


@pytest.mark.usefixtures("inline")
def test_regrade_gives_old_items_a_checksum(tmp_path: Path) -> None:
    old = [record | {"prompt_sha256": f"p{record['idx']}"} for record in OUTPUTS]
    path = write(tmp_path / "gsm8k.jsonl", old)
    regrade(path, BENCHMARKS["gsm8k"], path)
    assert all("sha256" in json.loads(line) for line in path.read_text().splitlines())
    records = read_records("gsm8k", path)
    assert [record["prompt_sha256"] for record in records.values()] == [
        record["prompt_sha256"] for record in old
    ]


@pytest.mark.usefixtures("inline")
def test_regrade_keeps_summary_and_lines_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "outputs.jsonl", OUTPUTS[:2])
    regrade(file, BENCHMARKS["gsm8k"], None)
    printed, complained = capsys.readouterr()
    assert [record["idx"] for record in read(printed)] == [0, 1]
    assert "2 of 2 right" in complained


@pytest.mark.usefixtures("inline")
def test_regrade_finds_letters(tmp_path: Path) -> None:
    outputs = [
        {"idx": idx, "gold": "B", "raw_output": text}
        for idx, text in enumerate(("the choice is (b).", "The answer is 2."))
    ]
    file, output = write(tmp_path / "o.jsonl", outputs), tmp_path / "graded.jsonl"
    regrade(file, BENCHMARKS["mathqa"], output)
    assert [(r["prediction"], r["correct"]) for r in read(output.read_text())] == [
        ("B", True),
        ("placeholder", False),
    ]


@pytest.mark.usefixtures("inline")
def test_regrade_gives_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "outputs.jsonl", OUTPUTS)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    regrade(file, BENCHMARKS["gsm8k"], first)
    damaged = [record | {"correct": None, "decided_by": 3} for record in read(first.read_text())]
    regrade(write(tmp_path / "damaged.jsonl", damaged), BENCHMARKS["gsm8k"], second)
    assert second.read_bytes() == first.read_bytes()


GOOD = json.dumps(OUTPUTS[0]).encode() + b"\n"
BAD_FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("o.jsonl", None, "cannot be read: .*No such file"),
    "empty": ("o.jsonl", b"", "expected stored outputs, one JSON object per line, found none"),
    "blank lines": ("o.jsonl", b"\n\n" + GOOD + b"\n{\n", "line 5: expected a JSON object"),
    "not JSON": ("o.jsonl", GOOD + b"{\n", "line 2: expected a JSON object, found .*"),
    "torn": ("o.jsonl", GOOD + GOOD[:20], "line 2: expected a JSON object, found .*"),
    "no UTF-8": ("o.jsonl", b'{"idx": "\xff"}\n', "line 1: expected a JSON object, found .*"),
    "endless nesting": ("o.jsonl", b"[" * 10**6, "line 1: expected a JSON object, found .*"),
    "a list": ("o.jsonl", b"[1]\n", "line 1: expected a JSON object"),
    "a field missing": (
        "o.jsonl",
        GOOD + b'{"idx": 1}\n',
        "line 2: expected a field `gold`, found idx",
    ),
    "no output": (
        "o.jsonl",
        b'{"idx": 1, "gold": "1", "raw_output": null}\n',
        "line 1: expected `raw_output` to be str, found NoneType",
    ),
    "no gold": (
        "o.jsonl",
        b'{"idx": 1, "gold": null, "raw_output": "1"}\n',
        "line 1: expected `gold` to be str or int or float or bool, found NoneType",
    ),
    "a changed line": (
        "o.jsonl",
        to_line(OUTPUTS[0]).replace("= 8", "= 9").encode(),
        "line 1: expected content that matches its own checksum, found other content",
    ),
    "truncated gzip": ("o.jsonl.gz", gzip.compress(GOOD * 9)[:-12], "cannot be read: "),
    "damaged gzip": ("o.jsonl.gz", gzip.compress(GOOD)[:12] + b"\xff" * 40, "cannot be read: "),
    "no gzip": ("o.jsonl.gz", GOOD, "cannot be read: Not a gzipped file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_regrade_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file_name, content, said = BAD_FILES[name]
    if content is not None:
        (tmp_path / file_name).write_bytes(content)
    output = tmp_path / "graded.jsonl"
    output.write_text("as it was")
    argv = ["--regrade", str(tmp_path / file_name), "--benchmark", "gsm8k"]
    assert evaluate_math.main([*argv, "--output", str(output)]) == 2
    printed, complained = capsys.readouterr()
    assert printed == ""
    assert complained.count("\n") == 1
    assert file_name in complained
    with pytest.raises(ValueError, match=said):
        regrade(tmp_path / file_name, BENCHMARKS["gsm8k"], None)
    assert output.read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} <= {file_name, "graded.jsonl"}


def test_regrade_refuses_when_the_output_is_no_file(tmp_path: Path) -> None:
    file = write(tmp_path / "o.jsonl", OUTPUTS[:1])
    for output in (tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="expected a file, found something else: give another"):
            regrade(file, BENCHMARKS["gsm8k"], output)
    assert Path("/dev/null").is_char_device()
    # Before any output is graded.
    with pytest.raises(ValueError, match=r"--output .*: .*o\.jsonl is a file, not a directory"):
        regrade(tmp_path / "none.jsonl", BENCHMARKS["gsm8k"], file / "graded.jsonl")


@pytest.mark.slow
@pytest.mark.usefixtures("inline")
def test_regrade_agrees_with_the_harness(tmp_path: Path, shared_dir: Path) -> None:
    ids = {"minerva_math": "math", "sat_math": "sat"}
    cases: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(shared_dir / "data" / "grading" / "cases.jsonl.gz", "rt") as lines:
        for number, line in enumerate(lines):
            case = json.loads(line)
            if number % 60 == 0 and case["rule"] != "eq.timeout":  # those take seconds
                asked = {"idx": number, "gold": case["gold"], "raw_output": case["raw_output"]}
                expected = {"of_harness": [case["prediction"], case["correct"]]}
                cases[ids.get(case["benchmark"], case["benchmark"])].append(asked | expected)
    assert len(cases) >= 8
    for name, each in cases.items():
        output = tmp_path / f"{name}.jsonl"
        regrade(write(tmp_path / f"{name}.jsonl.gz", each), BENCHMARKS[name], output)
        for record in read(output.read_text()):
            assert [record["prediction"], record["correct"]] == record["of_harness"], record
