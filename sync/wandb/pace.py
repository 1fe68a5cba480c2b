"""Holds rows back so that no more than so many go to a tracker in a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

# docs.wandb.ai/guides/track/limits, multi-tenant cloud: 1,000 rows a minute
CLOUD_ROWS_PER_MINUTE: Final = 1000
_BURST_S: Final = 5.0  # how much of an unused allowance is kept


class Pace:
    """An allowance that grows with time, for all runs together.

    Args:
        rows_per_minute: None for no bound.
        clock: Seconds that only grow.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        rows_per_minute: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._per_s = rows_per_minute / 60 if rows_per_minute else None
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next = clock()

    def take(self) -> None:
        """Wait until one more row may go."""
        if self._per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._next = max(self._next, now - _BURST_S) + 1 / self._per_s
            wait_s = self._next - now
        if wait_s > 0:
            self._sleep(wait_s)
