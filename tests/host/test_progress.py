"""Progress without a terminal: nothing of what is soon done, else lines at intervals."""

from __future__ import annotations

import time

import datasets
import pytest
from datasets.utils import tqdm

from vocagnolm.host import progress


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(tqdm, "display", tqdm.display)
    # Another test of the same process may have run a benchmark, which shows none.
    datasets.enable_progress_bars()
    notes: list[str] = []
    progress.tell_datasets_progress(notes.append)
    return notes


def test_datasets_progress_is_lines_at_intervals(
    said: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    rows = datasets.Dataset.from_dict({"a": range(6)})
    rows.map(lambda row: time.sleep(0.15), desc="Aligning documents, part 1 of 2")
    assert len(said) >= 2
    assert said[-1].startswith("aligning documents, part 1 of 2: 6 of 6, ")
    assert capfd.readouterr() == ("", "")


def test_datasets_progress_says_nothing_when_soon_done(
    said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in tqdm(range(3), desc="Reading files"):
        time.sleep(0.11)
    assert said == []
    assert capfd.readouterr() == ("", "")


def test_work_is_told_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with progress.telling("loading", said.append):
        pass
    assert said == []
    monkeypatch.setattr(progress, "_FIRST_S", 0.01)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)

    def fail() -> None:
        with progress.telling("loading", said.append):
            while len(said) < 2:
                time.sleep(0.01)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    count = len(said)
    time.sleep(0.05)
    assert said[:2] == ["loading ... (0 s)"] * 2
    assert len(said) == count
