"""An event that a signal handler may wait for, whatever the thread that it interrupts was doing with it."""

from __future__ import annotations

from _thread import allocate_lock
from threading import TIMEOUT_MAX


class Flag:
    """Set once, and waited for by any number of threads.

    `threading.Event` takes a lock in Python code to wait: a signal handler that comes then and waits for the same event
    never gets it, and neither does the thread that would set it. Here the one lock is only ever held in C.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = allocate_lock()
        self._lock.acquire()  # released when the flag is set

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it; one thread may do that, as often as it likes."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for at most `timeout` seconds, and return whether it is."""
        if not self._is_set and self._lock.acquire(timeout=min(max(timeout, 0.0), TIMEOUT_MAX)):
            self._lock.release()  # whoever waits beside us goes on too
        return self._is_set
