"""Names and places in trackers: one name for each entry, and a run that begins without a server."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vocagnolm.host import trackers
from vocagnolm.host.trackers import TRACKED_NAMES, Tracking, log_name, offline_reason, tracked_name
from vocagnolm.run.throughput import TIMING_KEYS

SECTIONS = {"train", "guidance", "teacher", "speed", "memory", "eval"}


def test_names_are_unique_and_found_back() -> None:
    assert len(set(TRACKED_NAMES.values())) == len(TRACKED_NAMES)
    for entry, name in TRACKED_NAMES.items():
        assert (tracked_name(entry), log_name(name)) == (name, entry)
        assert name.partition("/")[0] in SECTIONS
    results = doctest.testmod(trackers)
    assert results.attempted
    assert not results.failed


def test_timings_are_what_depends_on_the_machine() -> None:
    timed = {"tokens_per_s", "student_mfu", "eval_runtime", "memory_resident_gib"}
    timed |= {"teacher_time_fraction"}
    assert timed <= set(TIMING_KEYS)
    assert {"loss", "total_flos", "teacher_loss_nats"}.isdisjoint(TIMING_KEYS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"project": "p"}, {"project": "p"}),
        ({"project": "lab/p"}, {"project": "p", "entity": "lab"}),
        ({"tags": ["", "org-m/" + "x" * 64, "y"]}, {"tags": ["x" * 64, "y"]}),
        ({"group": "g", "name": "g/n"}, {"group": "g", "name": "g/n", "tags": None}),
    ],
)
def test_place_is_what_wandb_takes(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert Tracking(**given).place().items() >= expected.items()


class RefusedError(Exception):
    """Stands for wandb's AuthenticationError."""


@pytest.mark.parametrize(
    ("mode", "answer", "expected"),
    [
        (None, True, ""),
        (None, False, r"there is no key \(`wandb login` asks for it\)"),
        (
            None,
            RefusedError("Failed to execute API request: no answer"),
            "its server does not answer",
        ),
        ("online", False, r"there is no key \(`wandb login` asks for it\)"),
        ("shared", False, r"there is no key \(`wandb login` asks for it\)"),
        ("offline", None, ""),
        ("disabled", None, ""),
    ],
)
def test_reason_to_begin_offline_is_said(
    monkeypatch: pytest.MonkeyPatch,
    offline: Path,
    mode: str | None,
    answer: Any,
    expected: str,
) -> None:
    stand_in(monkeypatch, answer)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert offline_reason() == expected.replace("\\", "")


def test_place_is_continued_when_kept(tmp_path: Path) -> None:
    settings = SimpleNamespace(id="i", project="p", entity="", offline=False, url="u")
    assert trackers.read_place(tmp_path) == {}
    trackers.write_place(tmp_path, SimpleNamespace(run=settings), {"project": "x", "name": "n"})  # type: ignore[arg-type]
    expected = {"id": "i", "project": "p", "entity": None, "name": "n", "resume": "allow"}
    assert trackers.read_place(tmp_path) == expected
    for name, wrong in (("id", 5), ("project", 5), ("tags", "x"), ("tags", [5]), ("config", [])):
        (tmp_path / trackers.TRACKER_FILE).write_text(json.dumps({**expected, name: wrong}))
        with pytest.raises(
            ValueError, match=rf"wandb_run.json: {name} must be .*: delete the file$"
        ):
            trackers.read_place(tmp_path)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"disabled": True}, "wandb      disabled, as WANDB_MODE says"),
        ({"offline": False}, "wandb      https://server/run"),
        ({"offline": True}, "wandb      offline; `wandb sync wandb/offline-run-x` sends it"),
    ],
)
def test_place_of_a_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, offline: Path, said: dict[str, bool], line: str
) -> None:
    stand_in(monkeypatch, answer=True)
    monkeypatch.chdir(offline.parent)
    settings = SimpleNamespace(sync_dir=str(offline / "offline-run-x"))
    run = {"disabled": False, "offline": True, "url": "https://server/run", "settings": settings}
    fake: Any = SimpleNamespace(init=lambda mode: SimpleNamespace(**run | said), Error=OSError)
    assert trackers.begin_run(fake, {}) == line


def test_refused_run_begins_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hours of alignment lie behind it, and no training is lost for a wrong project."""
    settings = SimpleNamespace(sync_dir=str(tmp_path))

    def init(mode: str | None, project: str) -> Any:
        if mode != "offline":
            raise RefusedError(f"entity of {project} not\nfound")
        return SimpleNamespace(disabled=False, offline=True, settings=settings)

    monkeypatch.setattr(trackers, "offline_reason", lambda: "")
    fake: Any = SimpleNamespace(init=init, Error=RefusedError)
    assert trackers.begin_run(fake, {"project": "p"}) == (
        f"wandb      offline: entity of p not found; `wandb sync {tmp_path}` sends it"
    )
    monkeypatch.setattr(trackers, "offline_reason", lambda: "no key")
    fake.init = lambda **_: init(None, "p")
    with pytest.raises(RefusedError):
        trackers.begin_run(fake, {"project": "p"})


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """A `wandb` whose login answers so; asked where it must not be, it fails."""

    def login(*, prompt: bool) -> bool:
        assert answer is not None
        assert not prompt
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    errors = SimpleNamespace(AuthenticationError=RefusedError)
    fake = SimpleNamespace(init=None, login=login, errors=errors)
    monkeypatch.setitem(sys.modules, "wandb", fake)


def test_refused_key_is_one_line(monkeypatch: pytest.MonkeyPatch, offline: Path) -> None:
    stand_in(monkeypatch, RefusedError("user is not\nlogged in"))
    expected = "--report_to wandb: user is not logged in: `wandb login --relogin`, or set"
    with pytest.raises(ValueError, match=expected):
        offline_reason()
