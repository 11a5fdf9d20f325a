"""Columns in Weights & Biases: in the training run or one of its own, with whatever models say."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.evaluation.tracking import Tracker, summary

HOSTILE = ["lone \ud83d surrogate", "NUL \x00 and \x1b", "数学 😀", "", "x" * 10_000]
RESULTS: dict[str, Any] = {
    "model": {"name": "runs/student", "revision": "sha256:aa"},
    "grader": "the harness",
    "benchmarks": {
        "gsm8k": {
            "rounded": 36.2,
            "interval": [33.0, 39.0],
            "n": 5,
            "unanswered": 0.2,
            "math_verify": {"rounded": 35.1},
            "marked": ["partial"],
        }
    },
    "averages": {"AVG": {"rounded": 30.1, "marked": []}},
    "marks": ["partial: 5 of 1319 items"],
}
RECORDS = [
    {
        "idx": idx,
        "raw_output": text,
        "prediction": text or None,
        "gold": "3",
        "correct": idx == 2,
        "decided_by": "string",
        "finish_reason": "stop",
        "math_verify": None if idx % 2 else False,
    }
    for idx, text in enumerate(HOSTILE)
]


class Recorder(SimpleNamespace):
    """As much of wandb as is used, which remembers what it is told."""

    class Error(Exception):
        pass

    def __init__(self, *, failing: bool = False, key: str | None = "key") -> None:
        super().__init__(api=SimpleNamespace(api_key=key), summary={}, logged={}, given={})
        self.failing = failing

    def init(self, **given: Any) -> Recorder:
        self.given = given
        return self

    def __enter__(self) -> Recorder:
        if self.failing:
            raise self.Error("the entity\nis unknown")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]

    def log(self, values: dict[str, Any]) -> None:
        self.logged |= values


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")


def install(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    return recorder


def test_report_goes_to_the_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"id": "abc123", "project": "students", "entity": "lab"}
    (tmp_path / "wandb_run.json").write_text(json.dumps(place))
    recorder = install(monkeypatch, Recorder())
    Tracker(str(tmp_path)).report(RESULTS, {"gsm8k": RECORDS})
    assert recorder.given.items() >= {**place, "resume": "allow", "name": None}.items()
    assert recorder.given["mode"] is None
    assert recorder.summary == dict(summary(RESULTS))
    (table,) = recorder.logged.values()
    assert list(recorder.logged) == ["evaluation/gsm8k/partial/wrong_answers"]
    assert [row["idx"] for row in table] == [0, 1, 3, 4]
    assert table[0]["raw_output"] == r"lone \ud83d surrogate"
    assert table[1]["raw_output"] == HOSTILE[1]


def test_report_goes_to_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install(monkeypatch, Recorder(key=None))
    Tracker("org/model").report(RESULTS, {"gsm8k": RECORDS})
    expected = {
        "id": None,
        "entity": None,
        "resume": None,
        "project": "vocagnolm",
        "name": "evaluation of runs/student",
        "mode": "offline",
    }
    assert recorder.given == expected
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "online")
    Tracker("org/model").report(RESULTS, {})
    assert (recorder.given["project"], recorder.given["mode"]) == ("mine", None)


def test_summary_says_what_is_marked_when_it_is() -> None:
    assert dict(summary(RESULTS)) == {
        "evaluation/gsm8k/partial/accuracy": 36.2,
        "evaluation/gsm8k/partial/interval_low": 33.0,
        "evaluation/gsm8k/partial/interval_high": 39.0,
        "evaluation/gsm8k/partial/n": 5,
        "evaluation/gsm8k/partial/unanswered": 0.2,
        "evaluation/gsm8k/partial/math_verify_accuracy": 35.1,
        "evaluation/AVG": 30.1,
        "evaluation/marks": "partial: 5 of 1319 items",
        "evaluation/grader": "the harness",
    }


def test_failure_is_a_sentence_when_wandb_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Recorder(failing=True))
    with pytest.raises(ValueError, match="the results are written, but wandb says: the entity"):
        Tracker("org/model").report(RESULTS, {})


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"id": 3}', b"\xff"])
def test_file_of_the_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    install(monkeypatch, Recorder())
    (tmp_path / "wandb_run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"wandb_run\.json.* expected .*: delete the file"):
        Tracker(str(tmp_path))


@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["nothing", "wandb's own files"])
def test_missing_wandb_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", found)
    argv = ["--model", "no/such", "--benchmarks", "demo", "--report_to", "wandb"]
    assert evaluate_math.main(argv) == 2
    complained = capsys.readouterr().err
    assert complained.count("\n") == 1
    assert "needs the package wandb, which is not installed: `pip install wandb`" in complained


def stored_messages(path: Path) -> Iterator[bytes]:
    """The messages in a file of wandb: a log as LevelDB writes it, behind seven bytes."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # no header fits into the rest of a block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            return  # half written
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield message
            message = b""


def stored_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run, which wandb's own process may still be writing."""
    from wandb.proto import wandb_internal_pb2

    messages: list[Any] = []
    deadline = time.monotonic() + 30
    while not any(message.HasField("exit") for message in messages):
        assert time.monotonic() < deadline, "wandb does not finish its file"
        time.sleep(0.1)
        stored = list(stored_messages(path))
        messages = [wandb_internal_pb2.Record.FromString(data) for data in stored]
    items = [item for message in messages for item in message.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_summary_and_table_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "wandb_run.json").write_text('{"id": "abc123", "project": "p", "entity": ""}')
    Tracker(str(tmp_path)).report(RESULTS, {"gsm8k": RECORDS})
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert run.name.endswith("-abc123")
    stored = stored_summary(run / "run-abc123.wandb")
    assert stored.items() >= dict(summary(RESULTS)).items()
    (table,) = run.glob("files/media/table/**/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:2] == ["idx", "raw_output"]
    assert [row[1] for row in content["data"]] == [
        r"lone \ud83d surrogate",
        *(text for idx, text in enumerate(HOSTILE) if idx not in (0, 2)),
    ]
