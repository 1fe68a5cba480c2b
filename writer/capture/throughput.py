"""How fast training is: tokens per second, time of a step and of waiting for data, memory, and utilisation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from .flops import Flops

TOKENS_PER_S: Final = "throughput/tokens_per_s"
SLOWEST_TOKENS_PER_S: Final = "throughput/tokens_per_s_min"
STEP_TIME_S: Final = "throughput/step_time_s"
DATA_WAIT_S: Final = "throughput/data_wait_s"
MFU: Final = "throughput/mfu"
MAX_MEMORY_BYTES: Final = "memory/max_bytes"
MEASURED: Final = frozenset({TOKENS_PER_S, SLOWEST_TOKENS_PER_S, STEP_TIME_S, DATA_WAIT_S, MFU, MAX_MEMORY_BYTES})


@dataclass(frozen=True)
class Speed:
    """What one rank measured since the last log step; None where there is nothing to say.

    Attributes:
        tokens_per_s: Of all ranks together.
        own_tokens_per_s: Of this rank, if each has an equal share.
        step_time_s: Of a step, in the mean.
        data_wait_s: Of waiting for data in a step, in the mean.
        mfu: Share of the devices' peak.
        max_memory_bytes: Most that torch's allocator has given out on this rank's GPU since the process started.
    """

    tokens_per_s: float | None = None
    own_tokens_per_s: float | None = None
    step_time_s: float | None = None
    data_wait_s: float | None = None
    mfu: float | None = None
    max_memory_bytes: float | None = None


class Throughput:
    """Measures one rank's speed with the host's clock, for a `Reducer` to log.

    Over some steps the host is as fast as its GPU: it cannot run ahead for long. The first step of a process is not
    measured: it compiles and allocates. Where nothing was seen since, nothing is logged.

    Args:
        flops: For the utilisation; None for none.
        clock: Seconds.
    """

    def __init__(self, flops: Flops | None = None, *, clock: Callable[[], float] = perf_counter) -> None:
        self.flops: Final = flops
        self._clock = clock
        self._since_s: float | None = None  # the end of the last step that was measured
        self._since_tokens = 0
        self._steps = 0
        self._data_wait_s = self._paused_s = 0.0

    def end_step(self, tokens: int) -> None:
        """Take note of the end of a step."""
        if self._since_s is None:
            self._begin(self._clock(), tokens)
        else:
            self._steps += 1

    def measure(self, tokens: int, ranks: int) -> Speed:
        """Return the speed since this was last called, at the end of a step.

        Args:
            tokens: Seen by the run.
            ranks: How many train together.
        """
        now_s = self._clock()
        elapsed_s = now_s - (self._since_s or 0.0) - self._paused_s
        if not self._steps or elapsed_s <= 0:
            return Speed(max_memory_bytes=_max_memory_bytes())
        tokens_per_s = (tokens - self._since_tokens) / elapsed_s
        speed = Speed(
            tokens_per_s=tokens_per_s,
            own_tokens_per_s=tokens_per_s / ranks,
            step_time_s=elapsed_s / self._steps,
            data_wait_s=self._data_wait_s / self._steps,
            mfu=None if self.flops is None else self.flops.mfu(tokens_per_s),
            max_memory_bytes=_max_memory_bytes(),
        )
        self._begin(now_s, tokens)
        return speed

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the time in the block as waiting for data."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._data_wait_s += self._clock() - began_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time in the block out: an evaluation, a checkpoint."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began_s

    def _begin(self, now_s: float, tokens: int) -> None:
        self._since_s, self._since_tokens = now_s, tokens
        self._steps = 0
        self._data_wait_s = self._paused_s = 0.0


def _max_memory_bytes() -> float | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.max_memory_allocated())
