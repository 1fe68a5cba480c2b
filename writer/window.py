"""The metrics of one group since its last log step, added up on the device of this rank."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Final, SupportsFloat

import torch
from torch import Tensor

from .errors import UsageError

ENTRY: Final = 3  # doubles a metric: its hash, and the two halves of its value
_DEPTH: Final = 32  # values of one mean that wait on the device to be added up together
_HASH_BITS: Final = 52  # exact in a double


class Kind(Enum):
    """How the values of a metric become one; beside it the two halves that a rank sends."""

    MEAN = "mean"  # sum of weight * value, sum of weights
    SUM = "sum"  # sum of values, number of values
    MIN = "min"  # smallest value, number of values
    MAX = "max"  # largest value, number of values
    LAST = "last"  # newest value, number of values
    NORM = "norm"  # |norm of a shard| ** p, number of values


EMPTY: Final = {Kind.MIN: math.inf, Kind.MAX: -math.inf}  # any other first half begins at 0


class Metric:
    """One metric of a window.

    Attributes:
        window: Where it is added up.
        name: What it is logged as.
        kind: How.
        order: p of a norm.
        hash: Of its name and kind, as a double.
        names_rank: Whether the rank that had the extreme is logged too.
        first: Part of the first half that came as Python numbers.
        second: Part of the second half that this rank knows without asking the device.
        extreme: Of the Python numbers given to a minimum or maximum; None without any.
        was_given: In this window, be it as None.
    """

    __slots__ = (
        "_device_first",
        "_values",
        "_weights",
        "extreme",
        "first",
        "hash",
        "is_on_device",
        "kind",
        "name",
        "names_rank",
        "order",
        "second",
        "slot",
        "waiting",
        "was_given",
        "window",
    )

    def __init__(self, window: Window, name: str, kind: Kind, slot: int, order: float) -> None:
        self.window = window
        self.name = name
        self.kind = kind
        self.order = order
        self.slot = slot
        self.names_rank = False
        text = str(self).encode()
        self.hash = float(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - _HASH_BITS))
        # Taken apart once: each time that would cost more than the addition.
        self._device_first = window.sums[slot, 0]
        self._values = window.values[slot].unbind()
        self._weights = window.weights[slot].unbind()
        self.begin()

    def __str__(self) -> str:
        order = f" of order {self.order}" if self.kind is Kind.NORM else ""
        return f"{self.kind.value}{order} {self.name!r}"

    def begin(self) -> None:
        """Forget what this rank was given, apart from what is on the device."""
        self.first = self.second = 0.0
        self.extreme: float | None = None
        self.was_given = self.is_on_device = False
        self.waiting = 0

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add to a mean or a sum; not added up at once, because one copy on the device costs least."""
        at = self.waiting
        if at == _DEPTH:
            self.window.fold()
            at = 0
        if isinstance(weight, Tensor):
            self._weights[at].copy_(self._scalar(weight), True)
            self.window.has_weights = True
        elif weight:
            self.window.host_weights[self.slot * _DEPTH + at] = weight
            self.second += weight
        else:  # a micro-batch without tokens has a loss of 0/0 and no say
            return
        self.waiting = at + 1
        if isinstance(value, Tensor):
            self._values[at].copy_(self._scalar(value), True)  # on a GPU without a wait
        else:
            self._values[at].fill_(value)

    def add_number(self, value: float, weight: float) -> None:
        """Add a Python number to a mean or a sum."""
        if weight:
            self.first += value * weight
            self.second += weight

    def keep(self, value: Tensor | float) -> None:
        """Replace what is kept by a newer value."""
        self.second = 1.0
        if isinstance(value, Tensor):
            self.first, self.is_on_device = 0.0, True
            self._device_first.copy_(self._scalar(value), True)
        elif self.is_on_device:
            self._device_first.fill_(value)
        else:
            self.first = float(value)

    def take(self, value: Tensor | float) -> None:
        """Take a value into a minimum or a maximum; NaN wins."""
        self.second += 1.0
        if isinstance(value, Tensor):
            scalar = self._scalar(value).to(self.window.device, non_blocking=True)
            pick = torch.minimum if self.kind is Kind.MIN else torch.maximum
            pick(self._device_first, scalar, out=self._device_first)
        elif self.extreme is None or math.isnan(value):
            self.extreme = float(value)
        elif not math.isnan(self.extreme):
            self.extreme = min(self.extreme, value) if self.kind is Kind.MIN else max(self.extreme, value)

    def settle(self) -> None:
        """Bring the extreme of the Python numbers to the device."""
        if self.extreme is not None:
            pick = {"max": self.extreme} if self.kind is Kind.MIN else {"min": self.extreme}
            self._device_first.clamp_(**pick)
            self.extreme = None

    def _scalar(self, value: Tensor) -> Tensor:
        """Return a value without its graph, as one number."""
        if type(value) is not Tensor and hasattr(value, "to_local"):
            shards: Any = value  # a DTensor, without the import of what it is
            if not all(placement.is_replicate() for placement in shards.placements):
                raise UsageError(
                    f"{self.name!r} is a DTensor placed as {shards.placements}: each rank has a part of it",
                    hint="give .full_tensor(), or to grad_norm what clip_grad_norm_ returned",
                )
            value = shards.to_local()
        if value.dim():
            if value.numel() != 1:
                raise UsageError(f"{self.name!r} is a tensor of shape {tuple(value.shape)}", hint="reduce it first")
            value = value.reshape(())
        return value.detach() if value.requires_grad else value


class Window:
    """The metrics of one group of a cadence since its last log step.

    Means and sums: values wait in rows of `values`, and `fold` adds up all rows with a handful of operations. A value
    costs one copy on the device then; adding it with its weight costs three times as much.

    Args:
        group: Name of the group; None for metrics without one.
        limit: Most metrics.
        device: Where to add up.

    Attributes:
        sums: ``[limit + 1, 2]``, float64: the halves of each metric; the last row takes what has no business here.
        is_agreed: Whether the ranks know that they have the same metrics: from then on there are no other ones.
        strays: Given although they are not among those.
        steps: In the window.
    """

    def __init__(self, group: str | None, limit: int, device: torch.device) -> None:
        self.group = group
        self.limit = limit
        self.device = device
        self.metrics: dict[str, Metric] = {}
        self.strays: dict[str, Metric] = {}
        self.is_agreed = False
        self.steps = 0
        self.sums = torch.zeros(limit + 1, 2, dtype=torch.float64, device=device)
        self._empty = self.sums.clone()
        self.values = torch.zeros(limit + 1, _DEPTH, dtype=torch.float64, device=device)
        self.weights = torch.zeros_like(self.values)
        self.host_weights = array("d", bytes(8 * self.weights.numel()))
        self.has_weights = False
        self._sorted: tuple[Metric, ...] = ()
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
        empty = EMPTY.get(kind, 0.0)
        self._empty[slot, 0].fill_(empty)
        self.sums[slot, 0].fill_(empty)
        metric = self.metrics[name] = Metric(self, name, kind, slot, order)
        self._slots = None
        return metric

    def agree(self, names: AbstractSet[str]) -> None:
        """Know that all ranks have these metrics; what came up since is a stray."""
        for name in [name for name in self.metrics if name not in names]:
            self.strays[name] = self.metrics.pop(name)
        self._slots = None
        self.is_agreed = True

    @property
    def room(self) -> int:
        """Metrics that a rank sends room for: while the ranks do not know that they agree, the most there may be."""
        return len(self.metrics) if self.is_agreed else self.limit

    def sorted(self) -> tuple[Metric, ...]:
        """Return the metrics in the order in which every rank sends them."""
        if self._slots is None:
            self._sorted = tuple(sorted(self.metrics.values(), key=str))
            slots = torch.tensor([metric.slot for metric in self._sorted], dtype=torch.int64)
            self._slots = to_device(slots, self.device)
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
            numbers += (metric.hash if metric.was_given else 0.0, metric.first, metric.second)
        return numbers + [0.0] * (self.room * ENTRY - len(numbers))

    def add_to(self, entries: Tensor) -> None:
        """Add what is on the device to the part of the vector that is there already: ``[room * ENTRY]``."""
        self.fold()
        metrics = self.sorted()
        for metric in metrics:
            metric.settle()
        if metrics:
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
        host = torch.frombuffer(self.host_weights, dtype=torch.float64, count=rows * _DEPTH)
        weights = to_device(host, self.device).view(rows, _DEPTH)
        if self.has_weights:
            self.sums[:rows, 1] += self.weights[:rows].sum(1)
            weights = weights + self.weights[:rows]
            # A micro-batch without tokens has a loss of 0/0 and no say.
            values = torch.where(weights == 0, 0.0, values)
            self.weights.zero_()
            self.has_weights = False
        self.sums[:rows, 0] += (values * weights).sum(1)
        self.values[:rows].zero_()  # a NaN that is not used again would still make one of the next sum
        memoryview(self.host_weights)[: rows * _DEPTH] = array("d", bytes(8 * rows * _DEPTH))

    def begin(self) -> None:
        """Begin a new window."""
        self.sums.copy_(self._empty)
        self.steps = 0
        self.strays.clear()
        for metric in self.metrics.values():
            metric.begin()


def number(name: str, value: SupportsFloat) -> float:
    """Return a number as a float.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise UsageError(f"{name!r} is {value!r}, which is no number", hint="give a number, a 0-d tensor, or None")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on the device, without a wait."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait
