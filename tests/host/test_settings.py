"""Lists of what differs between two sets of settings."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from vocagnolm import io as versions
from vocagnolm.host.settings import check_same, differences


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": [1, 2]}, {"a": (1, 2)}, []),
        ({"a": 1, "old": 2}, {"a": 1}, []),  # not known yet
        ({"a": 1}, {"b": 2, "a": None}, ["a was 1, now None", "b was None, now 2"]),
        ({"a": {"x": 1}}, {"a": {"x": 2}}, ["a was {'x': 1}, now {'x': 2}"]),
    ],
)
def test_differences_are_those_in_json(
    before: dict[str, object], now: dict[str, object], expected: list[str]
) -> None:
    assert differences(before, now) == expected
    assert differences(before, now, prefix="--") == [f"--{change}" for change in expected]


def test_check_same_lists_every_difference(tmp_path: Path) -> None:
    check_same([], "nothing", "to do")
    with pytest.raises(
        ValueError, match=r"^S holds another store \(a was 1; b was 2\): delete it$"
    ):
        check_same(["a was 1", "b was 2"], "S holds another store", "delete it")


def test_versions_doctest_runs() -> None:
    results = doctest.testmod(versions)
    assert results.attempted
    assert not results.failed
