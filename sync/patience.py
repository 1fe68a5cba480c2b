"""How long a tracker that does not answer is waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from llmtrack.writer.errors import RetryableSinkError

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 15.0

T = TypeVar("T")


class Patience:
    """Calls again what failed for the moment, until nothing has succeeded for a given time.

    One object serves all threads: while one of them gets through, the others go on waiting.

    Args:
        timeout_s: Seconds without any success after which the last error is raised.
        tell: Called with the error before each wait, from the waiting thread.
    """

    def __init__(self, timeout_s: float, tell: Callable[[RetryableSinkError, float], None]) -> None:
        self._timeout_s = timeout_s
        self._tell = tell
        self._last_success = time.monotonic()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self._stopped.set()

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function returns at last.

        Raises:
            RetryableSinkError: Nothing has succeeded for `timeout_s`, or `stop` was called.
        """
        started = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                result = function()
            except RetryableSinkError as error:
                left_s = max(started, self._last_success) + self._timeout_s - time.monotonic()
                if left_s <= 0 or self._stopped.is_set():
                    raise
                pause_s = min(wait_s * random.uniform(0.5, 1.0), left_s)  # noqa: S311 - spreads clients out, no secret
                self._tell(error, pause_s)
                self._stopped.wait(pause_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self._last_success = time.monotonic()
                return result
