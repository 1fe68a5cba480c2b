"""One window on its way from all ranks to the host of rank 0: one all-gather, and no thread that trains waits for it.

An all-gather and no all-reduce, because sums, minima and "which rank" would need one each, and because it shows which
rank sent something else than the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.pending import PendingRow

from .metric import Kind, Metric
from .window import ENTRY, Window, host_tensor, to_device

_PATIENCE_S: Final = 30.0  # of the training thread, with ranks that are more than a log step behind
_PAUSE_S: Final = 0.0005

# The head of a vector: what one rank may know, and what must be the same on all ranks.
_HEAD: Final = 3  # the step of an alert, plus one; the step; how the reducer was set up
_PER_WINDOW: Final = 2  # number of metrics; 1 where one of them is new or missing

_VERDICT: Final = 2  # doubles that say whether the ranks fit together
_FEW_NUMBERS: Final = 10_000

# The name that torch 2.13 has deprecated is the only one that earlier versions have.
all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def is_distributed() -> bool:
    """Return whether there are other ranks to reduce over."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Ranks:
    """The ranks that reduce together.

    Attributes:
        group: Theirs; None for all.
        numbers: The rank of each in the whole job.
        is_alone: There is no process group, and so no collective.
    """

    group: dist.ProcessGroup | None
    numbers: tuple[int, ...]
    is_alone: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of a group.

        Raises:
            UsageError: This rank is not one of them.
        """
        if not is_distributed():
            return cls(None, (0,), is_alone=True)
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError("this rank is not in the group that it reduces over", hint="make no Reducer on it")
        return cls(group, tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))

    def __len__(self) -> int:
        return len(self.numbers)


class _Reduced(NamedTuple):
    """A metric over all ranks, in every way at once."""

    total: float
    present: float
    low: float
    low_rank: float
    high: float
    high_rank: float
    newest: float
    is_same: float

    def value(self, metric: Metric) -> float:
        if metric.kind is Kind.MEAN:
            return self.total / self.present
        if metric.kind is Kind.NORM:
            return math.pow(self.total, 1.0 / metric.order)
        return {Kind.SUM: self.total, Kind.MIN: self.low, Kind.MAX: self.high, Kind.LAST: self.newest}[metric.kind]


class Reduction(PendingRow):
    """What all ranks have sent for one log step.

    Args:
        windows: What is sent, in the same order on every rank.
        ranks: Who takes part.
        stream: Where to work beside the training; None on the CPU.
        step: The log step.
        setup: A number for how the reducer was set up, which must be the same everywhere.
        is_full: Whether the windows end at their log step, or at a checkpoint before it.
        alert: A step at which there was an alert, plus one; 0 when this rank knows of none.

    Attributes:
        out_of_place: In words, what this rank has and the others had not, or the other way round.

    Raises:
        RuntimeError: The collective could not be started.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        ranks: Ranks,
        stream: torch.cuda.Stream | None,
        *,
        step: int,
        setup: float,
        is_full: bool,
        alert: int,
    ) -> None:
        self.step = step
        self._windows = tuple(windows)
        words = [window.out_of_place(is_full=is_full) for window in windows]
        self.out_of_place = ", ".join(filter(None, words))
        self._ranks = ranks
        self._metrics = [window.sorted() for window in windows]
        self._rooms = [window.room for window in windows]
        self._missing = {str(metric) for metrics in self._metrics for metric in metrics if not metric.was_given}
        self._points = sum(1 + metric.names_rank for metrics in self._metrics for metric in metrics)
        self._is_full = is_full
        self._alert = alert
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._gathered: Any = None  # a tensor, once there is one
        self._head = _HEAD + _PER_WINDOW * len(windows)
        numbers = [float(alert), float(step), setup]
        for window, word in zip(windows, words, strict=True):
            numbers += (float(len(window.metrics)), float(bool(word)))
        for window in windows:
            numbers += window.numbers()
        self._numbers = numbers
        if not ranks.is_alone or stream is not None or any(window.is_on_device for window in windows):
            self._start(self._to_vector(), stream)

    def _to_vector(self) -> Tensor:
        """Return what this rank sends, on its device."""
        vector = to_device(host_tensor(self._numbers, torch.float64), self._windows[0].device)
        first = self._head
        for window, room in zip(self._windows, self._rooms, strict=True):
            end = first + room * ENTRY
            if window.is_on_device:
                window.add_to(vector[first:end])
            first = end
        return vector

    def _start(self, vector: Tensor, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            self._work = self._gather(vector)
            return
        stream.wait_stream(torch.cuda.current_stream(vector.device))
        vector.record_stream(stream)
        with torch.cuda.stream(stream):  # memory that is allocated here goes back to this stream, too
            work = self._gather(vector)
            if work is not None:
                work.wait()  # the stream waits, not this thread
            result = torch.cat([self._verdict(), self._reduced().flatten()])
            self._host = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=True)
            self._host.copy_(result, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied.record(stream)

    def _gather(self, vector: Tensor) -> dist.Work | None:
        if self._ranks.is_alone:
            self._gathered = vector.unsqueeze(0)
            return None
        self._gathered = vector.new_empty(len(self._ranks), len(vector))
        work: dist.Work | None = all_gather(self._gathered.view(-1), vector, group=self._ranks.group, async_op=True)
        return work

    # What comes back.

    def is_ready(self) -> bool:
        """Return whether all ranks have sent, or one is known to be gone."""
        if self._copied is not None:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]  # torch's own
        return self._work is None or self._work.is_completed()

    def __len__(self) -> int:
        """Return how many points it has at most."""
        return self._points

    def resolve(self) -> dict[str, float]:
        """Return the reduced metrics, but for those that no rank had a value for; on any thread.

        What ranks disagree about would be a wrong number: it is lost, and counted.

        Raises:
            RuntimeError: A rank is gone.
        """
        self._join()
        table = self._host[_VERDICT:].view(len(_Reduced._fields), -1) if self._copied is not None else self._reduced()
        columns = [_Reduced(*column) for column in zip(*table.tolist(), strict=True)]
        reduced: list[tuple[Metric, _Reduced]] = []
        first = 0
        for metrics, room in zip(self._metrics, self._rooms, strict=True):
            reduced += zip(metrics, columns[first : first + len(metrics)], strict=True)
            first += room
        self.lost_points = sum(not column.is_same for _, column in reduced)
        row: dict[str, float] = {}
        for metric, column in reduced:
            if column.is_same and column.present:
                row[metric.name] = column.value(metric)
                if metric.names_rank:
                    rank = column.low_rank if metric.kind is Kind.MIN else column.high_rank
                    row[f"{metric.name}_rank"] = float(self._ranks.numbers[int(rank)])
        return row

    def wait(self) -> None:
        """Wait until it is ready; for the training thread, one log step later.

        Then it is ready, and nothing is waited for, unless another rank is more than a log step behind.

        Raises:
            RuntimeError: It is not, after a long time.
        """
        if len(self._ranks) == 1:
            return  # a GPU has nothing to say that this rank does not know
        deadline_s = monotonic() + _PATIENCE_S
        while not self.is_ready():
            if monotonic() > deadline_s:
                raise RuntimeError(f"a rank has not come to step {self.step}")
            sleep(_PAUSE_S)

    def alert(self) -> int:
        """Return the step of an alert that a rank knows of, plus one; 0 for none. Once it is ready.

        Raises:
            RuntimeError: A rank is gone.
            UsageError: Ranks, or log steps, gave different metrics; raised on every rank.
        """
        differs, alert = self._look()
        if differs or self.out_of_place:
            raise UsageError(
                self._explain(),
                hint="give the same metrics in every window on every rank, None where there is no value; log what "
                "comes rarely with run.log on rank 0",
            )
        return int(alert)

    def _look(self) -> tuple[float, float]:
        """Return whether ranks sent what differs, and the newest alert."""
        if len(self._ranks) == 1:
            return False, self._alert
        self._join()
        if self._copied is not None or self._gathered.numel() > _FEW_NUMBERS:
            differs, alert = (self._host[:_VERDICT] if self._copied is not None else self._verdict()).tolist()
            return differs, alert
        rows: list[list[float]] = self._gathered.tolist()  # for a few ranks a tenth of what ten calls of torch take
        fixed = [(row[1 : self._head], row[self._head :: ENTRY]) for row in rows]
        return any(one != fixed[0] for one in fixed), max(row[0] for row in rows)

    def agree(self) -> None:
        """Let the windows know that all ranks have their metrics; once that is sure."""
        for window, metrics in zip(self._windows, self._metrics, strict=True):
            if not window.is_agreed and (metrics or self._is_full):
                window.agree({metric.name for metric in metrics})

    def _join(self) -> None:
        """Take note of how the collective ended, which it has; where there was none, this rank's vector is all."""
        if self._work is not None:
            self._work.wait()
        elif self._gathered is None:
            self._gathered = host_tensor([self._numbers], torch.float64)

    def _entries_of_ranks(self) -> Tensor:
        """Return what the ranks sent for each metric, ``[ranks, metrics, ENTRY]``."""
        entries: Tensor = self._gathered[:, self._head :].view(len(self._ranks), -1, ENTRY)
        return entries

    def _verdict(self) -> Tensor:
        """Return ``[_VERDICT]`` on the device: whether ranks sent what differs, and the newest alert."""
        fixed, hashes = self._gathered[:, 1 : self._head], self._entries_of_ranks()[..., 0]
        differs = (fixed != fixed[0]).any() | (hashes != hashes[0]).any()
        return torch.stack([differs.to(torch.float64), self._gathered[:, 0].amax()])

    def _reduced(self) -> Tensor:
        """Reduce over ranks on the device: ``[fields of _Reduced, metrics]``."""
        entries = self._entries_of_ranks()
        hashes, first, second = entries.unbind(2)
        is_present = second != 0
        low, low_rank = torch.where(is_present, first, math.inf).min(0)
        high, high_rank = torch.where(is_present, first, -math.inf).max(0)
        ranks = torch.arange(len(entries), device=entries.device).unsqueeze(1).expand_as(first)
        lowest = torch.where(is_present, ranks, len(entries) - 1).min(0).values
        newest = first.gather(0, lowest.unsqueeze(0)).squeeze(0)
        total = torch.where(is_present, first, 0.0).sum(0)
        setups = self._gathered[:, 1:_HEAD]  # at another step, or set up otherwise, nothing is the same
        is_same = (hashes == hashes[0]).all(0) & (setups == setups[0]).all()
        return torch.stack([total, second.sum(0), low, low_rank, high, high_rank, newest, is_same])

    def _explain(self) -> str:
        """Ask every rank what it sent, and say how they differ; every rank is here, since all have seen the same.

        Raises:
            RuntimeError: A rank is gone.
        """
        given = {str(metric) for metrics in self._metrics for metric in metrics} - self._missing
        sent = [(self.step, given, self.out_of_place)]
        if len(self._ranks) > 1:
            sent *= len(self._ranks)
            dist.all_gather_object(sent, sent[0], group=self._ranks.group)
        everything = set().union(*(metrics for _, metrics, _ in sent))
        problems = []
        for rank, (step, metrics, out_of_place) in zip(self._ranks.numbers, sent, strict=True):
            lacks = ", ".join(sorted(everything - metrics))
            words = [
                f"is at step {step}" if step != self.step else "",
                f"lacks {lacks}" if lacks else "",
                f"says that {out_of_place}" if out_of_place else "",
            ]
            problems += [f"rank {rank} {word}" for word in words if word]
        what = "; ".join(problems) or "they were made with different every, max_metrics or cadence"
        return f"the reducers of the ranks do not fit together at step {self.step}: {what}"
