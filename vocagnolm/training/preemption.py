"""Stops a run when a signal asks for it, with everything saved."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerState


class Preemption(TrainerCallback):
    """Stop after the current step when any process gets SIGTERM, SIGUSR1 or a first Ctrl-C.

    All processes learn about it in the reduction that `StepGuard` makes before every update.

    Attributes:
        is_asked: this process was asked to stop.
        is_agreed: all processes stop after this step, or have stopped with everything saved.
        saved_step: the step of the newest checkpoint of this process; -1 while there is none.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.is_agreed = False
        self.saved_step = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside. Only the main thread can."""
        # A trainer may train again after it was stopped, and then begins without a request.
        self.is_asked = False
        self.is_agreed = False
        # Python lets only the main thread set handlers. In another thread, the job runs without
        # them.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if is_main else ()
        handlers = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                # None means a handler that was not set from Python, which Python cannot restore.
                signal.signal(number, handler or signal.SIG_DFL)

    def _ask(self, number: int, frame: object) -> None:
        # A first Ctrl-C waits for the end of the step. A second one means that the user will not.
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Launchers pass a signal on to all processes of a machine.
        if not self.is_asked and os.environ.get("LOCAL_RANK", "0") == "0":
            # This is safe inside a signal handler, where a buffered stream is not.
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())
        # The next reduction does the rest, because a handler may run in the middle of any code.
        self.is_asked = True

    def on_epoch_end(self, args: object, state: TrainerState, control: Any, **_: object) -> None:
        """Ask for a checkpoint if this state has none. This event follows every stop."""
        if not self.is_agreed:
            return
        # After a stop inside an epoch, the resumed run does the log and evaluation of its end.
        if state.epoch is None or not float(state.epoch).is_integer():
            control.should_log = control.should_evaluate = False
        # A checkpoint of this step that was saved before its log or evaluation lacks their entries,
        # so save it again after them.
        is_saved = self.saved_step == state.global_step
        control.should_save = control.should_log or control.should_evaluate or not is_saved
