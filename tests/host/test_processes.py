"""What one process decides for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vocagnolm import dist as processes


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_first_process_decides(is_main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[str] = []
    state = SimpleNamespace(is_main_process=is_main)
    monkeypatch.setattr(processes, "PartialState", lambda: state)
    monkeypatch.setattr(processes, "gather_object", lambda found: found)
    sent = {True: lambda answer: answer, False: lambda answer: ["the first one's"]}
    monkeypatch.setattr(processes, "broadcast_object_list", sent[is_main])

    def decide() -> str:
        decisions.append("one")
        return "mine"

    assert processes.decided_by_one(decide) == ("mine" if is_main else "the first one's")
    assert len(decisions) == is_main
