"""The claims at their tiniest size, the runner, and the harness."""

from __future__ import annotations

import os
import signal
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as runner
from benchmarks import claims, harness, page
from benchmarks.claims import alignment

pytestmark = pytest.mark.processes

CLAIMS = claims.load()
# Counted, so that they hold at any size.
COUNTED = {("alignment", "wrong"), ("grading", "differ")}
# They need TRL, a GPU, several processes or pretrained models; `make bench` runs them.
NOT_HERE = {"trl", "gpu", "processes", "real", "real_evaluation"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*claims.NAMES} - NOT_HERE))
def test_claims_are_measured_at_their_tiniest_size(name: str) -> None:
    module = CLAIMS[name]
    found = module.measure(module.TINY)
    assert not found.broken
    assert found.values.keys() == {claim.name for claim in module.CLAIMS}
    for claim in module.CLAIMS:
        value = found.values[claim.name]
        assert value >= 0
        assert claim.holds(value) or (name, claim.name) not in COUNTED, (claim.name, value)


@pytest.mark.parametrize(
    ("speed", "wrong", "broken", "verdicts"),
    [
        (1000, 0, "", ["yes", "yes"]),
        (999, 0, "", ["NO", "yes"]),
        (float("nan"), 1, "", ["NO", "NO"]),
        (1e4, 0, "(3 differ)", ["NO (3 differ)", "NO (3 differ)"]),
    ],
)
def test_claim_holds_within_its_limit(
    speed: float, wrong: int, broken: str, verdicts: list[str]
) -> None:
    found = page.Page(None)
    measured = harness.Measured({"speed": speed, "wrong": wrong}, broken=broken)
    found.add("alignment", CLAIMS["alignment"].CLAIMS, measured)
    assert [row[3] for row in found.rows] == verdicts
    assert found.failed == (verdicts != ["yes", "yes"])


def test_runner_measures_the_others_when_one_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VOCAGNOLM_TEST_MODELS", raising=False)
    monkeypatch.setattr(CLAIMS["steps"], "measure", lambda size: 1 // 0)
    found = harness.Measured({"speed": 1e4, "wrong": 0})
    monkeypatch.setattr(CLAIMS["alignment"], "measure", lambda size: found)
    assert runner.main(["alignment"]) == 0
    assert runner.main(["steps", "real", "alignment", "gpu"]) == 1
    out = capsys.readouterr().out
    assert "maps every token" in out
    for name, state in (("steps", "failed"), ("real", "skipped"), ("gpu", "skipped")):
        assert f"- {name} {state}: " in out


def test_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}\nstale\n{page.END}\nafter\n")
    page.Page(path, lines=["it is fast"]).write()
    text = path.read_text()
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    assert "it is fast" in text
    assert "stale" not in text


def test_ways_apart_hold_no_memory_of_others() -> None:
    def grow(mebibytes: int) -> harness.Way:
        return harness.Way(lambda turn: b"1" * (mebibytes * 2**20))

    ways = harness.take_turns_apart({str(n): partial(grow, n) for n in (1, 64)}, 3, memory=2)
    added = {name: statistics.median(way.added_bytes) / 2**20 for name, way in ways.items()}
    assert added["64"] == pytest.approx(64, abs=4)
    assert added["1"] < 8


def test_way_apart_says_that_it_was_killed() -> None:
    def end(turn: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="bad: its process"):
        harness.take_turns_apart({"bad": lambda: harness.Way(end)}, 1)


def test_dynamic_programming_equals_a_hand_count() -> None:
    assert alignment.dynamic_programming("abcxd", "abyd") == [0, 1, None, 2, 3]
