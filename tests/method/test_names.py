"""Names that are not paths: quick errors if the hub cannot have them or is unreachable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import serving
from huggingface_hub import constants

from vocagnolm.shell import hub
from vocagnolm.shell.hub import check_name

NOWHERE = "http://127.0.0.1:9"  # a port on which nobody answers


@pytest.fixture(autouse=True)
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Go online as outside of the tests, with an empty cache and an unreachable hub."""
    for name, value in {"OFFLINE": False, "CACHE": str(tmp_path / "hub")}.items():
        monkeypatch.setattr(constants, f"HF_HUB_{name}", value)
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    asked = hub._unreachable
    asked.cache_clear()
    hub._warn_once.cache_clear()
    yield
    asked.cache_clear()


@pytest.mark.parametrize(
    "name", ["./foo/bar/baz", "foo/bar/baz", "a b", "/no/model", "~/m", "../m"]
)
def test_name_that_the_hub_cannot_have_is_not_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_unreachable", None)
    with pytest.raises(ValueError, match=f"^--teacher {name}: no such directory$"):
        check_name("--teacher", name)


def test_hub_that_is_away_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=f"--teacher org/model: .*{NOWHERE} cannot.*OFFLINE=1"):
        check_name("--teacher", "org/model")
    assert not caplog.messages


def test_look_up_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        time.sleep(20)
        raise OSError

    monkeypatch.setattr(hub, "get_session", hang)
    monkeypatch.setattr(hub, "_WAIT_S", 0.1)
    with pytest.raises(ValueError, match=r"cannot be reached \(no answer in 0\.1 s\)"):
        check_name("--student", "org/model")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("model", "hub/models--org--name/snapshots"),
        ("dataset", "hub/datasets--org--name/snapshots"),
    ],
)
def test_cache_is_read_with_a_warning_where_the_hub_is_away(
    kind: hub.Kind, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / place).mkdir(parents=True)
    check_name("--student", "org/name", kind)
    check_name("--teacher", "org/name", kind)
    (line,) = caplog.messages
    assert "set HF_HUB_OFFLINE=1" in line
    other: hub.Kind = "dataset" if kind == "model" else "model"
    with pytest.raises(ValueError, match="cannot be reached"):
        check_name("--student", "org/name", other)


def test_nothing_is_told_where_the_hub_answers_or_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_name("--student", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_name("--student", "org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as stand_in:
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        check_name("--student", "org/model")
        check_name("--teacher", "org/model")
        # Once, even if the answer is that there is nothing.
        assert len(stand_in.requests) == 1
    assert not caplog.messages
