"""Save a checkpoint when a signal asks the run to stop, in all processes at one step."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import TrainerCallback, TrainerControl, TrainerState

from vocagnolm.cli import Exit

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption(TrainerCallback):
    """Stops a run after the step in which a signal came, with everything saved.

    SIGTERM and SIGUSR1 may come to any process, and any number of times. A first SIGINT asks too; a
    second one stops at once. All processes learn of it in the reduction that
    `StepGuard` makes before every update, so they stop at one step.

    Attributes:
        is_asked: this process was asked to stop.
        is_agreed: all processes know.
        must_save: the run is about to end with something that no checkpoint holds.
    """

    def __init__(self) -> None:
        self.is_asked = self.is_agreed = self.must_save = False
        self._saved_step = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside; outside of the main thread, where nobody can, none."""
        self.is_asked = self.is_agreed = self.must_save = False
        with handling(SCHEDULERS, self._ask), handling((signal.SIGINT,), self._interrupt):
            yield

    def _ask(self, name: str, more: str = "") -> None:
        if not (self.is_asked or self.is_agreed):
            _warn(f"{name}: the run stops when this step is done and saved{more}")
        self.is_asked = True

    def agree(self) -> None:
        """Take note that a process was asked to stop, this one or another."""
        if not self.is_asked:
            _warn("a signal to another process: the run stops when this step is done and saved")
        self.is_agreed = True

    def _interrupt(self, name: str) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self._ask(name, "; once more stops at once, without saving")

    def on_save(self, args: object, state: TrainerState, *rest: object, **kwargs: object) -> None:
        """Remember the saved step."""
        self._saved_step, self.must_save = state.global_step, False

    def on_epoch_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask for a checkpoint, if there is none of this state; this event follows every stop."""
        if not self.is_agreed:
            return
        # A stop inside an epoch leaves its end's log and evaluation to the run that resumes.
        if state.epoch is None or not float(state.epoch).is_integer():
            control.should_log = control.should_evaluate = control.should_save = False
        is_saved = self._saved_step == state.global_step
        self.must_save = control.should_log or control.should_evaluate or not is_saved
        # Where only the best is saved, this is passed over, and `must_save` is not.
        control.should_save = self.must_save


@contextmanager
def handling(signals: Sequence[signal.Signals], handle: Callable[[str], object]) -> Iterator[None]:
    """Call a function with the name of each signal that comes, inside and in the main thread only.

    Processes that are forked inside pass over the signals, which schedulers send to all, but for
    SIGTERM, by which pools end them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def receive(number: int, frame: object) -> None:
        if os.getpid() == process:
            handle(signal.Signals(number).name)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, receive) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_at_once(name: str) -> None:
    """Handle a signal while there is nothing to save."""
    _warn(f"{name}: stopped where nothing had to be saved; the same command starts again")
    raise SystemExit(Exit.STOPPED)


def finish_first(name: str) -> None:
    """Handle a signal after the last step: a run cut off here would be done again from it."""
    _warn(f"{name}: the last step is done; finishing the run")


def _warn(text: str) -> None:
    # Once on a machine: launchers pass a signal on to all processes.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # Safe inside a signal handler, where a buffered stream is not.
        os.write(2, f"{text}\n".encode())
