"""Signals reach who is meant by them."""

from __future__ import annotations

import os
import signal

import pytest

from vocagnolm.run.preemption import SCHEDULERS, Preemption, handling


def end_of_child(number: signal.Signals, told: list[str]) -> int:
    """How a forked process ends that gets a signal: 0 if it passed over it."""
    child = os.fork()
    if child == 0:
        signal.raise_signal(number)
        os._exit(len(told))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_ignore_signals_for_their_parent() -> None:
    told: list[str] = []
    with handling(SCHEDULERS, told.append):
        assert end_of_child(signal.SIGUSR1, told) == 0
        assert end_of_child(signal.SIGTERM, told) == -signal.SIGTERM  # by which pools end them
        signal.raise_signal(signal.SIGUSR1)
    assert told == ["SIGUSR1"]


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)])
def test_stop_is_told_once_on_a_machine(
    asked: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher passes a signal on to all processes, a scheduler may send it to any one."""
    for rank, is_asked in enumerate(asked):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        process = Preemption()
        with process.listening():
            if is_asked:
                signal.raise_signal(signal.SIGTERM)
            process.agree()
            signal.raise_signal(signal.SIGTERM)  # a late one
        assert process.is_agreed
    assert capfd.readouterr().err.count("the run stops when this step is done and saved\n") == 1
