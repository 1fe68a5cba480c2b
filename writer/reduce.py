"""Metrics of all ranks -> one row on rank 0: accumulated on the device, one collective a log step, no wait.

Every rank adds up on its device. At a log step it packs what it has into one vector of doubles, and one all-gather
brings the vectors of all ranks to each. What is reduced from them goes to the host by a copy that only the drain
thread waits for. An all-gather and no all-reduce, because sums, minima and "which rank" would need one each, and
because it shows which rank sent something else than the others.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .errors import UsageError
from .run import Run
from .tensors import PendingValue

_HEADER: Final = 2  # doubles before the metrics: how many there are; hash of one that is out of place, or 0
_SLOT: Final = 3  # doubles a metric: its hash, and the two halves of its value
_HASH_BITS: Final = 52  # exact in a double
_PATIENCE: Final = timedelta(seconds=60)  # of the drain thread, for a collective that a dead rank never joins


# The name that torch 2.13 has deprecated is the only one that earlier versions have.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Kind(Enum):
    """How the values of a metric become one; beside it the two halves that a rank sends."""

    MEAN = "mean"  # sum of weight * value, sum of weights
    SUM = "sum"  # sum of values, number of values
    MIN = "min"  # smallest value, number of values
    MAX = "max"  # largest value, number of values
    LAST = "last"  # newest value, number of values
    NORM = "norm"  # |norm of a shard| ** p, number of values


_EMPTY: Final = {_Kind.MIN: math.inf, _Kind.MAX: -math.inf}  # any other first half begins at 0


@dataclass
class _Metric:
    """One metric of one rank, in the window since the last log step."""

    name: str
    kind: _Kind
    slot: int
    order: float = 2.0  # p of a norm
    names_rank: bool = False
    first: float = 0.0  # what came as Python numbers
    second: float = 0.0
    was_given: bool = False

    @property
    def hash(self) -> float:
        text = f"{self.kind.value} {self.order} {self.name}".encode()
        return float(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - _HASH_BITS))

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name!r}"


class Reducer:
    """Reduces metrics over micro-batches and ranks, and logs them at every `every`-th step.

    Every rank of the group makes one, and gives the same metrics in every window; a rank that has no value for one (a
    loss that only the last pipeline stage knows) gives None. Values stay on their device: no call waits for it.

    Args:
        run: What `open_run` returned on this rank.
        every: Log at steps divisible by this.
        group: The ranks to reduce over; rank 0 of the run must be in it. Default: all.
        device: Where to add up; default: the current CUDA device where the group can use it, else the CPU.
        max_metrics: Most metrics that a window may have; the first log step, when the ranks do not know yet that they
            agree, sends room for so many.

    Raises:
        UsageError: `every` or `max_metrics` below 1.
    """

    def __init__(
        self,
        run: Run,
        every: int = 10,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        max_metrics: int = 256,
    ) -> None:
        if every < 1 or max_metrics < 1:
            raise UsageError(f"every={every}, max_metrics={max_metrics}", hint="both are at least 1")
        self.every = every
        self._run = run
        self._group = group
        self._device = torch.device(device) if device is not None else _default_device(group)
        self._metrics: dict[str, _Metric] = {}
        self._max_metrics = max_metrics
        self._sums = torch.zeros(max_metrics, 2, dtype=torch.float64, device=self._device)
        self._empty = self._sums.clone()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._agreed = False
        self._stray: _Metric | None = None  # given though it is not one of those agreed on
        self._reduction: _Reduction | None = None
        self._steps = 0  # in the window

    def mean(self, name: str, value: Tensor | float | None, weight: Tensor | float = 1.0) -> None:
        """Add a value to a mean over micro-batches and ranks, weighted: sum of weight * value over sum of weights.

        Args:
            name: The metric.
            value: 0-d tensor of any dtype on any device, or a number; None when this rank has none.
            weight: For a loss that is a mean over tokens, the number of those tokens.

        Raises:
            UsageError: The name was given with another kind before, or there is no room for it.
        """
        metric = self._metric(name, _Kind.MEAN)
        if value is None:
            return
        if isinstance(value, Tensor) or isinstance(weight, Tensor):
            first, second = self._sums[metric.slot]
            if isinstance(weight, Tensor):
                wide = self._local(weight).to(torch.float64)
                second.add_(wide)
                # A micro-batch without tokens has a loss of 0/0 and no say.
                product = wide * (self._local(value) if isinstance(value, Tensor) else value)
                first.add_(torch.where(wide == 0, 0.0, product))
            elif weight:
                first.add_(self._local(value), alpha=weight)  # type: ignore[arg-type]  # it is the tensor of the two
                metric.second += weight
        elif weight:
            metric.first += value * weight
            metric.second += weight

    def sum(self, name: str, value: Tensor | float | None) -> None:
        """Add a value to a sum over micro-batches and ranks.

        Raises:
            UsageError: As `mean`.
        """
        metric = self._metric(name, _Kind.SUM)
        if isinstance(value, Tensor):
            self._sums[metric.slot, 0].add_(self._local(value))
        elif value is not None:
            metric.first += value
        metric.second += value is not None

    def min(self, name: str, value: Tensor | float | None, *, names_rank: bool = True) -> None:
        """Take a value into a minimum over micro-batches and ranks; NaN wins.

        Args:
            name: The metric; ``<name>_rank`` is the rank that had it.
            value: 0-d tensor, number, or None when this rank has none.
            names_rank: Log the rank too.

        Raises:
            UsageError: As `mean`.
        """
        self._extreme(_Kind.MIN, name, value, names_rank=names_rank)

    def max(self, name: str, value: Tensor | float | None, *, names_rank: bool = True) -> None:
        """Take a value into a maximum over micro-batches and ranks; see `min`."""
        self._extreme(_Kind.MAX, name, value, names_rank=names_rank)

    def last(self, name: str, value: Tensor | float | None) -> None:
        """Keep the newest value of one that is the same on all ranks already; the lowest rank that has one is asked.

        Raises:
            UsageError: As `mean`.
        """
        metric = self._metric(name, _Kind.LAST)
        if value is not None:
            slot = self._sums[metric.slot, 0]
            _ = slot.copy_(self._local(value)) if isinstance(value, Tensor) else slot.fill_(value)
            metric.second = 1.0

    def grad_norm(self, value: Tensor | float | None, name: str = "train/grad_norm") -> None:
        """Keep what `clip_grad_norm_` returned: the global norm before clipping, whatever the parallelism.

        Under FSDP2 that is a DTensor which holds the norm of this rank's shards; they are put together with the other
        metrics, without a collective of their own.

        Args:
            value: A plain tensor or number that is global already, or a DTensor.
            name: The metric.

        Raises:
            UsageError: As `mean`, or a DTensor whose placement is no norm.
        """
        if not isinstance(value, DTensor):
            self.last(name, value)
            return
        partial = [placement for placement in value.placements if placement.is_partial()]
        if not partial:
            self.last(name, value.to_local())
            return
        order = getattr(partial[0], "norm_type", None)
        if order is None:
            raise UsageError(
                f"{name} is a DTensor placed as {value.placements}", hint="give what clip_grad_norm_ returned"
            )
        order = float(order)
        # Where the norm is replicated along a dimension of the mesh, the first of its copies speaks for all.
        coordinate = tuple(value.device_mesh.get_coordinate() or ())
        speaks = all(
            at == 0 or placement.is_partial() for at, placement in zip(coordinate, value.placements, strict=True)
        )
        local = value.to_local().detach()
        if math.isinf(order):
            self.max(name, local if speaks else None, names_rank=False)
            return
        metric = self._metric(name, _Kind.NORM, order)
        if speaks:
            self._sums[metric.slot, 0].copy_(local.to(torch.float64).abs().pow(order))
            metric.second = 1.0

    def step(self, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """End a step on every rank; at a log step reduce the window and log it.

        Args:
            step: The optimiser step that ended.
            tokens: Tokens seen by the run, this step included.

        Raises:
            UsageError: Ranks, or log steps, have given different metrics; raised on every rank, where not now, then
                at the next log step.
        """
        self._steps += 1
        if int(step) % self.every == 0:
            self._reduce(step, tokens)

    def flush(self, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Reduce and log a window that is not full, on every rank; before a checkpoint, so that none straddles it.

        Raises:
            UsageError: As `step`.
        """
        if self._steps:
            self._reduce(step, tokens)

    def _reduce(self, step: SupportsIndex, tokens: SupportsIndex) -> None:
        self._check_last()
        stray, missing = self._stray, self._missing()
        reduction = self._reduction = self._start_reduction()
        self._begin_window()
        if stray is not None or missing is not None:
            raise UsageError(
                f"{stray or missing} is {'new' if stray else 'missing'} in the window that ends at step {int(step)}",
                hint="give the same metrics in every window on every rank, None where there is no value; "
                "log what comes rarely with run.log on rank 0",
            )
        self._run.log(dict(reduction.rows()), step, tokens)

    def _check_last(self) -> None:
        """Take note of the last reduction, which ended long ago; raise what it showed."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.check()
            self._agreed = True

    def _missing(self) -> _Metric | None:
        """Return a metric that the windows before had and this one has not."""
        given = (metric for metric in self._metrics.values() if not metric.was_given)
        return next(given, None) if self._agreed else None

    def _start_reduction(self) -> _Reduction:
        """Pack the window and send it off; nothing here waits."""
        metrics = sorted((metric for metric in self._metrics.values() if metric is not self._stray), key=str)
        out_of_place = self._stray if self._stray is not None else self._missing()
        room = len(metrics) if self._agreed else self._max_metrics
        packed = [float(len(metrics)), 0.0 if out_of_place is None else out_of_place.hash]
        for metric in metrics:
            packed += (metric.hash, metric.first, metric.second)
        packed += [0.0] * (_HEADER + room * _SLOT - len(packed))
        vector = self._to_device(packed)
        slots = self._to_device([metric.slot for metric in metrics])
        vector[_HEADER:].view(room, _SLOT)[: len(metrics), 1:] += self._sums[slots]
        return _Reduction(vector, metrics, self._group, self._stream)

    def _begin_window(self) -> None:
        self._sums.copy_(self._empty)
        self._steps = 0
        if self._stray is not None:
            del self._metrics[self._stray.name]
            self._stray = None
        for metric in self._metrics.values():
            metric.first = metric.second = 0.0
            metric.was_given = False

    def _metric(self, name: str, kind: _Kind, order: float = 2.0) -> _Metric:
        metric = self._metrics.get(name)
        if metric is None:
            slot = len(self._metrics)
            if slot >= self._max_metrics:
                raise UsageError(f"no room for metric {name!r}", hint=f"give max_metrics={2 * self._max_metrics}")
            metric = self._metrics[name] = _Metric(name, kind, slot, order)
            empty = _EMPTY.get(kind, 0.0)
            for values in (self._empty, self._sums):
                values[slot, 0].fill_(empty)
                values[slot, 1].fill_(0.0)
            if self._agreed and self._stray is None:
                self._stray = metric
        if metric.kind is not kind:
            raise UsageError(f"{name!r} is a {metric.kind.value} and now a {kind.value}", hint="give it another name")
        metric.was_given = True
        return metric

    def _extreme(self, kind: _Kind, name: str, value: Tensor | float | None, *, names_rank: bool) -> None:
        metric = self._metric(name, kind)
        metric.names_rank = names_rank
        if value is None:
            return
        slot = self._sums[metric.slot, 0]
        if isinstance(value, Tensor):
            wide = self._local(value).to(torch.float64)
            slot.copy_(torch.minimum(slot, wide) if kind is _Kind.MIN else torch.maximum(slot, wide))
        elif kind is _Kind.MIN:
            slot.clamp_(max=value)
        else:
            slot.clamp_(min=value)
        metric.second += 1.0

    def _local(self, value: Tensor) -> Tensor:
        """Return a value without its graph, as one number on the device of the sums."""
        if isinstance(value, DTensor):
            value = value.to_local()
        return value.detach().to(self._device, non_blocking=True).reshape(())

    def _to_device(self, numbers: list[float] | list[int]) -> Tensor:
        dtype = torch.int64 if numbers and isinstance(numbers[0], int) else torch.float64
        host = torch.tensor(numbers, dtype=dtype)
        if self._stream is None:
            return host.to(self._device)
        return host.pin_memory().to(self._device, non_blocking=True)  # from pageable memory the copy would wait


class _Reduction:
    """One window on its way from all ranks to the host.

    Args:
        vector: What this rank sends, on its device.
        metrics: What is in it, in order.
        group: The ranks.
        stream: Where to work beside the training; None on the CPU.
    """

    def __init__(
        self, vector: Tensor, metrics: list[_Metric], group: dist.ProcessGroup | None, stream: torch.cuda.Stream | None
    ) -> None:
        # The window goes on to change; what it was is kept here.
        self._metrics = [(str(metric), metric.name, metric.kind, metric.order, metric.names_rank) for metric in metrics]
        self._hashes = {metric.hash: str(metric) for metric in metrics}
        self._group = group
        self._lock = threading.Lock()
        self._values: list[list[float]] | None = None
        self._failure: RuntimeError | None = None
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._gathered = vector.new_empty(ranks, len(vector))
        if stream is None:
            self._work = self._gather(vector)
            return
        stream.wait_stream(torch.cuda.current_stream(vector.device))
        with torch.cuda.stream(stream):
            vector.record_stream(stream)
            work = self._gather(vector)
            if work is not None:
                work.wait()  # the stream waits, not this thread
            reduced = self._reduced()
            self._host = torch.empty(reduced.shape, dtype=reduced.dtype, pin_memory=True)
            self._host.copy_(reduced, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied.record(stream)

    def _gather(self, vector: Tensor) -> dist.Work | None:
        if len(self._gathered) == 1:
            self._gathered[0].copy_(vector)
            return None
        work: dist.Work | None = _all_gather(self._gathered.view(-1), vector, group=self._group, async_op=True)
        return work

    def rows(self) -> Iterator[tuple[str, _ReducedValue]]:
        """Yield each metric's name and the number that it will have."""
        for index, (_, name, kind, _, names_rank) in enumerate(self._metrics):
            yield name, _ReducedValue(self, index)
            if kind in _EMPTY and names_rank:
                yield f"{name}_rank", _ReducedValue(self, index, is_rank=True)

    def value(self, index: int) -> float:
        """Wait for the reduction, and return what a metric has become; NaN when no rank had a value.

        Raises:
            RuntimeError: A rank is gone.
        """
        total, count, low, _, high, _, newest, _ = (row[index] for row in self.wait())
        _, _, kind, order, _ = self._metrics[index]
        if count == 0.0:
            return math.nan
        if kind is _Kind.MEAN:
            return total / count
        if kind is _Kind.NORM:
            return math.pow(total, 1.0 / order)
        return {_Kind.SUM: total, _Kind.MIN: low, _Kind.MAX: high, _Kind.LAST: newest}[kind]

    def rank(self, index: int) -> float:
        """Wait for the reduction, and return which rank had a metric's extreme; NaN when none had a value."""
        rows = self.wait()
        if rows[1][index] == 0.0:
            return math.nan
        at = int(rows[3 if self._metrics[index][2] is _Kind.MIN else 5][index])
        return float(at if self._group is None else dist.get_global_rank(self._group, at))

    def wait(self) -> list[list[float]]:
        """Wait, and return the reduced rows; only the first call works, on whatever thread.

        Raises:
            RuntimeError: A rank is gone.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._values is None:
                try:
                    self._values = self._finish().tolist()
                except RuntimeError as error:
                    self._failure = error
                    raise
            return self._values

    def _finish(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
            return self._host
        if self._work is not None:
            self._work.wait(_PATIENCE)
        return self._reduced()

    def _body(self) -> Tensor:
        """Return what the ranks sent for each metric, ``[ranks, metrics, 3]``."""
        body = self._gathered[:, _HEADER:]
        return body.reshape(len(body), -1, _SLOT)[:, : len(self._metrics)]

    def _reduced(self) -> Tensor:
        """Reduce over ranks on the device: ``[8, metrics]``, the last row 1 where all ranks sent the same metric."""
        body = self._body()
        first, second = body[..., 1], body[..., 2]
        present = second != 0
        low, low_rank = torch.where(present, first, math.inf).min(0)
        high, high_rank = torch.where(present, first, -math.inf).max(0)
        ranks = torch.arange(len(body), device=body.device).unsqueeze(1).expand_as(first)
        lowest = torch.where(present, ranks, len(body) - 1).min(0).values
        newest = first.gather(0, lowest.unsqueeze(0)).squeeze(0)
        header = self._gathered[:, :_HEADER]
        same = (
            (body[..., 0] == body[0, :, 0]).all(0)
            & (header[:, 0] == len(self._metrics)).all()
            & (header[:, 1] == 0).all()
        )
        total = torch.where(present, first, 0.0).sum(0)
        return torch.stack([total, second.sum(0), low, low_rank, high, high_rank, newest, same])

    def check(self) -> None:
        """Raise if the ranks did not send the same metrics, naming those that this rank knows.

        Raises:
            UsageError: They did not.
        """
        try:
            agrees = all(self.wait()[7])
        except RuntimeError:
            return  # a rank is gone: the trainer's own collectives say so
        if agrees:
            return
        problems = []
        for rank, row in enumerate(self._gathered.tolist()):
            count, stray = int(row[0]), row[1]
            theirs = set(row[_HEADER::_SLOT][:count])
            lacks = [text for hash_, text in self._hashes.items() if hash_ not in theirs]
            more = len(theirs - self._hashes.keys())
            if stray:
                problems.append(f"rank {rank} changed {self._hashes.get(stray, 'a metric that this rank has not')}")
            if lacks:
                problems.append(f"rank {rank} lacks {', '.join(lacks)}")
            if more:
                problems.append(f"rank {rank} has {more} that this rank has not")
        raise UsageError(
            f"ranks gave different metrics to the reducer: {'; '.join(problems)}",
            hint="give the same metrics in every window on every rank, None where there is no value",
        )


class _ReducedValue(PendingValue):
    """A metric of a reduction that may still be under way."""

    __slots__ = ("_index", "_is_rank", "_reduction")

    def __init__(self, reduction: _Reduction, index: int, *, is_rank: bool = False) -> None:
        self._reduction = reduction
        self._index = index
        self._is_rank = is_rank

    def __float__(self) -> float:
        return self._reduction.rank(self._index) if self._is_rank else self._reduction.value(self._index)


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in str(dist.get_backend(group))):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
