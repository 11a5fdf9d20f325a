"""The claims at their tiniest size, the runner, and the harness."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import claims, generated, harness, page
from benchmarks.claims import alignment, evaluation, real, real_evaluation
from benchmarks.models import llama

pytestmark = pytest.mark.processes

CLAIMS = claims.load()
# Counted, so that they hold at any size.
COUNTED = {("alignment", "wrong"), ("grading", "differ")}


def check_tiny(name: str) -> None:
    module = CLAIMS[name]
    found = module.measure(module.TINY)
    assert not found.broken
    assert found.values.keys() == {claim.name for claim in module.CLAIMS}
    for claim in module.CLAIMS:
        value = found.values[claim.name]
        assert value >= 0
        assert claim.holds(value) or (name, claim.name) not in COUNTED, (claim.name, value)


@pytest.mark.slow
# Other tests cover several processes: test_distributed.py, test_runner.py. The claims about
# pretrained models have a test below, with random models in their place.
@pytest.mark.parametrize(
    "name",
    sorted({*claims.NAMES} - {"trl", "gpu", "processes", "real", "real_evaluation"}),
)
def test_claims_are_measured_at_their_tiniest_size(name: str) -> None:
    check_tiny(name)


@pytest.mark.slow
def test_steps_are_measured_beside_trl() -> None:
    if not importlib.util.find_spec("trl"):
        pytest.skip("needs TRL, which only the extra `bench` brings")
    check_tiny("trl")


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory of models too small to learn anything, and `texts.jsonl`."""
    path = tmp_path_factory.mktemp("models")
    for name, kind in (("student", "tiny-gpt2"), ("teacher", "tiny-qwen")):
        reader = generated.tokenizer(kind)
        reader.save_pretrained(path / name)
        llama(len(reader), 64, 1, 1, max_position_embeddings=4096).save_pretrained(path / name)
    lines = [json.dumps({"text": text}) + "\n" for text in generated.make_texts(600)]
    (path / "texts.jsonl").write_text("".join(lines))
    return path


@pytest.mark.slow
def test_real_steps_are_measured_beside_trl(random_models: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL, which only the extra `bench` brings")
    size = replace(
        real.TINY,
        models=str(random_models),
        student="student",
        teacher="teacher",
        corpus=str(random_models / "texts.jsonl"),
        rows=2,
    )
    found = real.measure(size)
    assert found.values.keys() == {claim.name for claim in real.CLAIMS}
    assert all(value > 0 for value in found.values.values())


@pytest.mark.slow
def test_real_answers_are_those_of_the_harness(
    random_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval, which only the extra `bench` brings")
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(1319)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    size = replace(
        real_evaluation.TINY, models=str(random_models), model="student", data_dir=str(tmp_path)
    )
    found = real_evaluation.measure(size)
    assert found.values["differ"] == 0
    # A text that differs is counted.
    monkeypatch.setattr(
        evaluation, "shared_prefix", lambda model, reader, prompts, size: {0: "?", 1: "!"}
    )
    assert real_evaluation.measure(size).values["differ"] == 2


@pytest.mark.parametrize("name", ["real", "real_evaluation"])
def test_real_claims_are_skipped_without_models(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VOCAGNOLM_TEST_MODELS", raising=False)
    assert runner.main([name]) == 0
    reason = "set VOCAGNOLM_TEST_MODELS to a directory that has smollm2-135m"
    assert f"- {name} skipped: {reason}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        (harness.Measured({"speed": 1000, "wrong": 0}), 0, ["yes", "yes"]),
        (harness.Measured({"speed": 999, "wrong": 0}), 1, ["NO", "yes"]),
        (harness.Measured({"speed": float("nan"), "wrong": 1}), 1, ["NO", "NO"]),
        (
            harness.Measured({"speed": 1e4, "wrong": 0}, broken="(3 differ)"),
            1,
            ["NO (3 differ)"] * 2,
        ),
    ],
)
def test_runner_fails_when_a_claim_does_not_hold(
    found: harness.Measured,
    status: int,
    verdict: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(CLAIMS["alignment"], "measure", lambda size: found)
    assert runner.main(["alignment"]) == status
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    assert [row[4].strip() for row in rows[2:]] == verdict


def test_runner_measures_the_others_when_one_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(CLAIMS["steps"], "measure", lambda size: 1 // 0)
    found = harness.Measured({"speed": 1e4, "wrong": 0})
    monkeypatch.setattr(CLAIMS["alignment"], "measure", lambda size: found)
    assert runner.main(["steps", "alignment", "gpu"]) == 1
    out = capsys.readouterr().out
    assert "alignment maps every token right" in out
    assert "- steps failed: ZeroDivisionError: " in out
    assert "- gpu skipped: it needs a GPU" in out


def test_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}\nstale\n{page.END}\nafter\n")
    found = page.Page(path)
    claims = [harness.Claim("one", "it is fast", at_most=1), harness.Claim("two", "it", at_most=1)]
    found.add("speed", claims, harness.Measured({"one": 2.0, "two": 0.5}))
    found.write()
    text = path.read_text()
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    assert "| it is fast | at most 1 x | 2 x      | NO    | speed " in text
    assert "stale" not in text


def test_ways_apart_hold_no_memory_of_others() -> None:
    def grow(mebibytes: int) -> harness.Way:
        return harness.Way(lambda turn: b"1" * (mebibytes * 2**20))

    ways = harness.take_turns_apart({str(n): partial(grow, n) for n in (1, 64)}, 3, memory=2)
    added = {name: statistics.median(way.added_bytes) / 2**20 for name, way in ways.items()}
    assert added["64"] == pytest.approx(64, abs=4)
    assert added["1"] < 8
    taken = [(len(way.seconds), len(way.added_bytes)) for way in ways.values()]
    assert taken == [(3, 2), (3, 2)]


def test_ways_apart_say_what_failed_and_which_was_killed() -> None:
    def end(turn: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    good = harness.Way(lambda turn: None)
    wrong = {"wrong": lambda: harness.Way(lambda turn: 1 // 0)}
    with pytest.raises(RuntimeError, match=r"(?s)wrong: .*ZeroDivisionError"):
        harness.take_turns_apart(wrong, 1)
    with pytest.raises(RuntimeError, match="bad: its process was ended"):
        harness.take_turns_apart({"good": lambda: good, "bad": lambda: harness.Way(end)}, 1)


def test_dynamic_programming_equals_a_hand_count() -> None:
    assert alignment.dynamic_programming("abcxd", "abyd") == [0, 1, None, 2, 3]
