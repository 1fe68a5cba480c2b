"""The bounded queue between the training loop and the drain thread: it never blocks, and counts what it dropped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import time_ns
from typing import Final, Literal

from .flag import Flag
from .ids import Mark, Pause, StepIds
from .pending import PendingRow

# One row of one `log` call: time in ns since the epoch, step, tokens, {name: value}. A tuple: the cheapest to make.
Row = tuple[int, int, int, dict[str, float]]

Exit = Literal["finished", "preempted", "failed", "abandoned"]

_NOTHING_FITS: Final = -1


@dataclass(frozen=True)
class Record:
    """A row of a rare table; never dropped, and never overtakes what was logged before it.

    Attributes:
        table: One of `SCHEMAS`.
        values: Column -> value, without `seq`.
        after_sync: Written only when everything before it is durable: a checkpoint says that it is.
        durable: Set when the record is durable itself.
    """

    table: str
    values: dict[str, object]
    after_sync: bool = False
    durable: Flag = field(default_factory=Flag)


@dataclass(frozen=True)
class Barrier:
    """Set when everything put before it is durable."""

    durable: Flag = field(default_factory=Flag)


@dataclass(frozen=True)
class End:
    """The last item: the segment's end record."""

    values: dict[str, object]


@dataclass(frozen=True)
class LateRow:
    """A row whose values are not known yet, in its place; what a `Row` has beside them."""

    time_ns: int
    step: int
    tokens: int
    values: PendingRow


@dataclass
class Gap:
    """Points that could not be kept, between two rows that were."""

    first_tokens: int
    last_tokens: int
    step: int
    points: int
    reason: str
    errno: int | None


Item = Row | LateRow | Record | Barrier | End | Gap | Mark


class Buffer:
    """A first-in-first-out queue of rows and rare records, without a lock.

    `deque.append` and `popleft` are atomic, and each counter has one side that writes it, so a training thread never
    waits for the drain thread, and a signal handler that interrupts `log` can log too. When several threads log at the
    same moment a count may come out low by a row until the queue is next found empty; no row is lost by that.

    A gap stands in the queue where its rows would have stood: the producer that is refused opens it, the next one that
    is not refused puts it before its own row.

    Args:
        limit_points: Points that may wait.
        tokens: Where the segment starts.
    """

    def __init__(self, limit_points: int, tokens: int = 0) -> None:
        self.limit_points = limit_points
        self.items: deque[Item] = deque()
        # written by producers
        self.put_points = 0
        self.tokens = tokens
        self.gap: Gap | None = None
        self.dropped_points = 0
        # written by the drain thread, which should be woken once `put_points` is beyond `easy_points`
        self.allowed_points = limit_points
        self.easy_points = limit_points // 4
        self.errno: int | None = None

    def put(self, step: int, tokens: int, values: dict[str, float] | PendingRow) -> None:
        """Append a row, or count it as dropped when it does not fit."""
        points = self.put_points + len(values)
        if points > self.allowed_points:
            self.drop(step, tokens, len(values))
            return
        self.close_gap()
        self.put_points = points
        if isinstance(values, PendingRow):
            self.items.append(LateRow(time_ns(), step, tokens, values))
        else:
            self.items.append((time_ns(), step, tokens, values))

    def put_item(self, item: Record | Barrier | End) -> None:
        """Append a record or a barrier, whatever waits before it."""
        self.close_gap()
        self.items.append(item)

    def put_mark(self, mark: Mark) -> bool:
        """Append what belongs to the next row if there is room, and return whether there was."""
        points = self.put_points + len(mark)
        if points > self.allowed_points:
            return False
        self.put_points = points
        self.items.append(mark)
        return True

    def drop(self, step: int, tokens: int, points: int) -> None:
        """Count points as dropped, in the gap that is open or in a new one."""
        self.dropped_points += points
        gap = self.gap
        if gap is None:
            reason = "queue_full" if self.errno is None else "io_error"
            self.gap = Gap(tokens, tokens, step, points, reason, self.errno)
        else:
            gap.points += points
            gap.last_tokens = tokens
            gap.step = step

    def close_gap(self) -> None:
        """Put the open gap, if there is one, where its rows would have stood."""
        gap, self.gap = self.gap, None
        if gap is not None:
            self.items.append(gap)

    def take(self, limit_points: int) -> list[Item]:
        """Take what waits, in order, up to about `limit_points`; called by the drain thread only."""
        put_points = self.put_points
        items: list[Item] = []
        points = 0
        while self.items and points < limit_points:
            item = self.items.popleft()
            if isinstance(item, tuple):
                points += len(item[3])
            elif isinstance(item, LateRow):
                points += len(item.values)
            elif isinstance(item, StepIds | Pause):
                points += len(item)
            items.append(item)
        if self.allowed_points != _NOTHING_FITS:
            # An empty queue is the moment at which both counts are known to be equal.
            taken = put_points if not self.items else self.allowed_points - self.limit_points + points
            self.allowed_points = taken + self.limit_points
            self.easy_points = taken + self.limit_points // 4
        return items

    def waiting_points(self) -> int:
        """Return about how many points wait; what the drain thread has taken and not written does not count."""
        return sum(len(item[3]) for item in list(self.items) if isinstance(item, tuple))

    def refuse(self) -> None:
        """Refuse every row from now on: the run has ended, or this is a forked child."""
        self.allowed_points = self.easy_points = _NOTHING_FITS
