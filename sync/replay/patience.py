"""How long a tracker that does not answer is waited for, and how much is asked of it at once."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from llmtrack.writer.errors import RetryableSinkError

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 15.0

T = TypeVar("T")


class StoppedError(RetryableSinkError):
    """The sync was told to stop: the tracker was not asked any more."""

    def __init__(self) -> None:
        super().__init__("stopped", sink="")


class _Tracker:
    """What all threads know of one tracker."""

    def __init__(self, at_once: int | None) -> None:
        self.last_success = time.monotonic()
        self.slots = threading.Semaphore(at_once) if at_once else None


class Patience:
    """Calls again what failed for the moment, until nothing has succeeded for a given time.

    One object, and those forked from it, serve all threads: while one of them gets through, the others go on waiting.

    Args:
        timeout_s: Seconds without any success after which the last error is raised.
        tell: Called with the error before each wait, from the waiting thread.
        at_once: How many calls may be under way; None: any number.
    """

    def __init__(
        self, timeout_s: float, tell: Callable[[RetryableSinkError, float], None], *, at_once: int | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._tell = tell
        self._tracker = _Tracker(at_once)
        self._stopped = threading.Event()
        self._forks: weakref.WeakSet[Patience] = weakref.WeakSet()

    def fork(self) -> Patience:
        """Return patience with the same tracker that can be stopped by itself, and is stopped with this one."""
        fork = Patience(self._timeout_s, self._tell)
        fork._tracker = self._tracker
        self._forks.add(fork)
        if self._stopped.is_set():
            fork.stop()
        return fork

    def stop(self) -> None:
        """Let nobody wait or begin any more."""
        self._stopped.set()
        for fork in list(self._forks):
            fork.stop()

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function returns at last.

        Raises:
            RetryableSinkError: Nothing has succeeded for `timeout_s`, or `stop` was called.
        """
        started = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while True:
            if self._stopped.is_set():
                raise StoppedError
            try:
                result = self._try(function)
            except RetryableSinkError as error:
                left_s = max(started, self._tracker.last_success) + self._timeout_s - time.monotonic()
                if left_s <= 0 or self._stopped.is_set():
                    raise
                pause_s = max(wait_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)  # noqa: S311 - no secret
                pause_s = min(pause_s, left_s)
                self._tell(error, pause_s)
                self._stopped.wait(pause_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self._tracker.last_success = time.monotonic()
                return result

    def _try(self, function: Callable[[], T]) -> T:
        if self._tracker.slots is None:
            return function()
        with self._tracker.slots:
            return function()
