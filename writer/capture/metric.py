"""One metric of the reducer: how its values become one, and where they wait on this rank."""

from __future__ import annotations

import hashlib
import math
from array import array
from enum import Enum
from typing import Final, Protocol

import torch
from torch import Tensor

DEPTH: Final = 32  # values of one metric that wait on the device to be added up together
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


class Memory(Protocol):
    """Where the tensors of metrics are added up, on their device; see `Window`."""

    device: torch.device
    sums: Tensor
    values: Tensor
    weights: Tensor
    host_weights: array[float]
    has_weights: bool
    is_on_device: bool

    def fold(self) -> None:
        """Add up the values that wait."""


class Metric:
    """One metric of a window. Numbers are added up here, and 0-d tensors on their device.

    Args:
        memory: Where its tensors are added up.
        name: What it is logged as.
        kind: How its values become one.
        slot: Its row there.
        order: p of a norm.

    Attributes:
        hash: Of name and kind, as a double.
        names_rank: Whether the rank that had the extreme is logged too.
        first: Part of the first half that came as numbers.
        second: Part of the second half that this rank knows without asking the device.
        extreme: Of the numbers given to a minimum or maximum; None without any.
        was_given: In this window, be it as None.
        waiting: Values on the device that are not added up yet.
    """

    __slots__ = (
        "_cell",
        "_is_on_device",
        "_memory",
        "_needs_no_wait",
        "_values",
        "_weights",
        "extreme",
        "first",
        "hash",
        "kind",
        "name",
        "names_rank",
        "order",
        "second",
        "slot",
        "waiting",
        "was_given",
    )

    def __init__(self, memory: Memory, name: str, kind: Kind, slot: int, order: float) -> None:
        self._memory = memory
        self.name = name
        self.kind = kind
        self.slot = slot
        self.order = order
        self.names_rank = False
        text = str(self).encode()
        self.hash = float(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - _HASH_BITS))
        # To the CPU (gloo, and values on a GPU) a copy is waited for: it would be read before it has arrived.
        self._needs_no_wait = memory.device.type != "cpu"
        # Taken apart once: each time that would cost more than the addition.
        self._cell = memory.sums[slot, 0]
        self._values = memory.values[slot].unbind()
        self._weights = memory.weights[slot].unbind()
        self.begin()

    def __str__(self) -> str:
        order = f" of order {self.order}" if self.kind is Kind.NORM else ""
        return f"{self.kind.value}{order} {self.name!r}"

    def begin(self) -> None:
        """Forget what this rank was given, apart from what is on the device."""
        self.first = self.second = 0.0
        self.extreme: float | None = None
        self.was_given = self._is_on_device = False
        self.waiting = 0

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add to a mean or a sum.

        On the device a value is not added up at once, because one copy costs least there.
        """
        if type(value) is float and type(weight) is float:  # isinstance takes longer: torch is asked
            if weight:  # a micro-batch without tokens has a loss of 0/0 and no say
                self.first += value * weight
                self.second += weight
            return
        if not isinstance(weight, Tensor) and not weight:
            return
        at = self.waiting
        if at == DEPTH:
            self._memory.fold()
            at = 0
        self.waiting = at + 1
        memory = self._memory
        memory.is_on_device = True
        if isinstance(weight, Tensor):
            self._weights[at].copy_(weight, self._needs_no_wait)
            memory.has_weights = True
        else:
            memory.host_weights[self.slot * DEPTH + at] = weight
            self.second += weight
        if isinstance(value, Tensor):
            self._values[at].copy_(value, self._needs_no_wait)
        else:
            self._values[at].fill_(value)

    def keep(self, value: Tensor | float) -> None:
        """Replace what is kept by a newer value."""
        self.second = 1.0
        if isinstance(value, Tensor):
            self.first, self._is_on_device = 0.0, True
            self._memory.is_on_device = True
            self._cell.copy_(value, self._needs_no_wait)
        elif self._is_on_device:
            self._cell.fill_(value)
        else:
            self.first = value

    def take(self, value: Tensor | float) -> None:
        """Take a value into a minimum or a maximum; NaN wins."""
        self.second += 1.0
        if isinstance(value, Tensor):
            self._memory.is_on_device = True
            pick = torch.minimum if self.kind is Kind.MIN else torch.maximum
            pick(self._cell, value.to(self._memory.device, non_blocking=self._needs_no_wait), out=self._cell)
        elif self.extreme is None or math.isnan(value):
            self.extreme = value
        elif not math.isnan(self.extreme):
            self.extreme = min(self.extreme, value) if self.kind is Kind.MIN else max(self.extreme, value)

    def settle(self) -> None:
        """Bring the numbers given to a minimum or maximum to where they are sent from."""
        if self.extreme is None:
            return
        if self._memory.is_on_device:
            pick = {"max": self.extreme} if self.kind is Kind.MIN else {"min": self.extreme}
            self._cell.clamp_(**pick)
        else:
            self.first = self.extreme
        self.extreme = None
