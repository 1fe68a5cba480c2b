"""What becomes of open runs when the process ends, is told to end, or forks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final, Protocol

from .errors import UsageError
from .log.buffer import Exit

_SIGNAL_TIMEOUT_S: Final = 20.0  # Slurm's default between SIGTERM and SIGKILL is 30 s


class _Ending(Protocol):
    def finish(self, exit: Exit, detail: str | None, timeout: float) -> None: ...  # noqa: A002  # the column's name

    def disown(self) -> None: ...


_open_runs: set[_Ending] = set()


def keep_until_exit(run: _Ending) -> None:
    """Finish the run when the interpreter exits, if nobody did; disown it in forked children."""
    _open_runs.add(run)


def forget(run: _Ending) -> None:
    """Keep the run no longer: it was finished."""
    _open_runs.discard(run)


def end_on_signal(run: _Ending, number: int) -> None:
    """When the signal comes, finish the run as preempted, then do what was installed for the signal before.

    Raises:
        UsageError: Not called on the main thread, where alone Python lets signals be handled.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "preempt_signal needs the main thread", hint="call open_run there, or leave preempt_signal out"
        )
    before = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        run.finish("preempted", signal.Signals(received).name, _SIGNAL_TIMEOUT_S)
        if callable(before):
            before(received, frame)
        elif before != signal.SIG_IGN:
            signal.signal(received, signal.SIG_DFL)
            os.kill(os.getpid(), received)

    signal.signal(number, handle)


def _finish_all() -> None:
    """End what nobody finished: whether the training came to its end is not known, so it counts as failed."""
    error = getattr(sys, "last_value", None)
    detail = "the process ended without finish()" if error is None else f"{type(error).__name__}: {error}"
    for run in list(_open_runs):
        run.finish("failed", detail, _SIGNAL_TIMEOUT_S)


def _disown_all() -> None:
    for run in list(_open_runs):
        run.disown()
    _open_runs.clear()


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_disown_all)
