"""`vocagnolm prepare` does the first work of a run ahead of it, and the run finds it."""

from __future__ import annotations

import pytest
from world import World

import vocagnolm.data
from vocagnolm.run import parser, prepare


def test_run_finds_what_was_prepared(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = world.argv("run", use_cpu="True")
    assert prepare.main(argv) == 0
    prepared = capfd.readouterr().out.splitlines()
    assert prepared[-1].startswith("evaluated  ")
    assert not (world.root / "run").exists()

    def align_again(*_: object) -> None:
        pytest.fail("a document is aligned again")

    monkeypatch.setattr(vocagnolm.data._Aligner, "align_batch", align_again)
    assert parser.main([*argv, "--dry_run"]) == 0
    assert set(prepared) <= set(capfd.readouterr().out.splitlines())
