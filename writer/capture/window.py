"""The metrics of one group since its last log step, added up on this rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import torch
from torch import Tensor

from llmtrack.writer.errors import UsageError

from .metric import DEPTH, EMPTY, Kind, Metric

ENTRY: Final = 3  # doubles that a rank sends for a metric: its hash, and the two halves of its value
_DOUBLE_BYTES: Final = 8


class Window:
    """The metrics of one group of a cadence since its last log step.

    What comes as numbers is added up by the metrics. What comes as tensors waits in rows of `values`, and `fold` adds
    up all rows with a handful of operations: a value costs one copy on the device then, and adding it with its weight
    at once would cost three times as much.

    Args:
        group: Name of the group; None for metrics without one.
        limit: Most metrics.
        device: Of the tensors.

    Attributes:
        sums: ``[limit + 1, 2]``, float64: the halves of each metric; the last row takes what has no business here.
        values: ``[limit + 1, DEPTH]``, float64: what waits to be added up.
        weights: ``[limit + 1, DEPTH]``, float64: its weights, where they are tensors.
        host_weights: The others, of all rows.
        has_weights: Whether any are tensors.
        is_on_device: Whether this window has been given any tensor.
        is_agreed: Whether the ranks know that they have the same metrics: from then on there are no other ones.
        strays: Given although they are not among those.
        began_at: How many steps there had been when it began.
    """

    def __init__(self, group: str | None, limit: int, device: torch.device) -> None:
        self.group = group
        self.limit = limit
        self.device = device
        self.metrics: dict[str, Metric] = {}
        self.strays: dict[str, Metric] = {}
        self.is_agreed = self.is_on_device = self.has_weights = False
        self.began_at = 0
        self.host_weights = array("d", bytes(_DOUBLE_BYTES * (limit + 1) * DEPTH))
        with torch.inference_mode(False):  # else they could not be changed outside of it
            self.sums = torch.zeros(limit + 1, 2, dtype=torch.float64, device=device)
            self.values = torch.zeros(limit + 1, DEPTH, dtype=torch.float64, device=device)
            self.weights = torch.zeros_like(self.values)
            self._empty = self.sums.clone()
        self._sorted: tuple[Metric, ...] | None = None
        self._slots: Tensor | None = None

    def metric(self, name: str, kind: Kind, order: float) -> Metric:
        """Return a metric that the window has not got yet: one more, or a stray once the ranks agreed.

        Raises:
            UsageError: There is no room for it.
        """
        if self.is_agreed:
            return self.strays.setdefault(name, Metric(self, name, kind, self.limit, order))
        slot = len(self.metrics)
        if slot >= self.limit:
            raise UsageError(f"no room for metric {name!r}", hint=f"give max_metrics={2 * self.limit}")
        if kind in EMPTY:
            self._empty[slot, 0].fill_(EMPTY[kind])
            self.sums[slot, 0].fill_(EMPTY[kind])
        metric = self.metrics[name] = Metric(self, name, kind, slot, order)
        self._sorted = None
        return metric

    def agree(self, names: AbstractSet[str]) -> None:
        """Know that all ranks have these metrics; what came up since is a stray."""
        for name in [name for name in self.metrics if name not in names]:
            self.strays[name] = self.metrics.pop(name)
        self._sorted = None
        self.is_agreed = True

    @property
    def room(self) -> int:
        """Metrics that a rank sends room for: while the ranks do not know that they agree, the most there may be."""
        return len(self.metrics) if self.is_agreed else self.limit

    def sorted(self) -> tuple[Metric, ...]:
        """Return the metrics in the order in which every rank sends them."""
        if self._sorted is None:
            self._sorted = tuple(sorted(self.metrics.values(), key=str))
            self._slots = None
        return self._sorted

    def out_of_place(self, *, is_full: bool) -> str:
        """Return in words what this window has and the others had not, or has not and the others had; "" if nothing.

        Args:
            is_full: Whether it ends at its log step; before, what is given once in a while may be missing.
        """
        words = [f"{metric} is new" for metric in self.strays.values()]
        if self.is_agreed and is_full:
            words += [f"{metric} is missing" for metric in self.metrics.values() if not metric.was_given]
        return ", ".join(words)

    def numbers(self) -> list[float]:
        """Return the part of the vector to send that this rank knows without asking the device: ``[room * ENTRY]``."""
        numbers: list[float] = []
        for metric in self.sorted():
            metric.settle()
            numbers += (metric.hash if metric.was_given else 0.0, metric.first, metric.second)
        return numbers + [0.0] * (self.room * ENTRY - len(numbers))

    def add_to(self, entries: Tensor) -> None:
        """Add what is on the device to the part of the vector that is there already: ``[room * ENTRY]``."""
        self.fold()
        metrics = self.sorted()
        if self._slots is None:
            self._slots = to_device(host_tensor([metric.slot for metric in metrics], torch.int64), self.device)
        entries.view(-1, ENTRY)[: len(metrics), 1:] += self.sums[self._slots]

    def fold(self) -> None:
        """Add up the values that wait."""
        waits = [metric for metric in self.metrics.values() if metric.waiting]
        if not waits:
            return
        for metric in waits:
            metric.waiting = 0
        rows = len(self.metrics)
        values = self.values[:rows]
        host = torch.frombuffer(self.host_weights, dtype=torch.float64, count=rows * DEPTH)
        weights = to_device(host, self.device).view(rows, DEPTH)
        if self.has_weights:
            self.sums[:rows, 1] += self.weights[:rows].sum(1)
            weights = weights + self.weights[:rows]
            # A micro-batch without tokens has a loss of 0/0 and no say.
            values = torch.where(weights == 0, 0.0, values)
            self.weights.zero_()
            self.has_weights = False
        self.sums[:rows, 0] += (values * weights).sum(1)
        self.values[:rows].zero_()  # a NaN that is not used again would still make one of the next sum
        memoryview(self.host_weights)[: rows * DEPTH] = array("d", bytes(_DOUBLE_BYTES * rows * DEPTH))

    def begin(self, at: int) -> None:
        """Begin a new window after so many steps."""
        if self.is_on_device:
            self.sums.copy_(self._empty)
            self.is_on_device = False
        self.began_at = at
        self.strays.clear()
        for metric in self.metrics.values():
            metric.begin()


def host_tensor(numbers: Sequence[object], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on the CPU, whatever device the trainer has made torch's default."""
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on the device, without a wait."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait
