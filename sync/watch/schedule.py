"""Which run is synced next: live before backlog, parents before children, a fair share for each, failures aside.

Pure bookkeeping with a clock that the caller reads; it starts nothing and waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

BATCH_RUNS: Final = 50  # rechecked together: what costs is opening them, not looking at them
SMALL_RUNS: Final = 16  # likewise, of small runs that nobody trains

_PACE_S: Final = (
    2.0  # at least between two syncs of one run, each a third of a second of CPU; what comes in between goes together
)
_LONGEST_PACE_S: Final = 30.0
_FIRST_PAUSE_S: Final = 5.0  # after a failure
_LONGEST_PAUSE_S: Final = 600.0
_REFUSED_S: Final = 3600.0  # what was refused for good is tried again after it, or sooner when the run has changed
_SLICE_S: Final = 10.0  # how long a sync may go on while others wait and no thread is free
_WAITED_S: Final = 2.0


class Urgency(IntEnum):
    """How much of a hurry a run is in."""

    LIVE = 0
    NEWS = 1
    RECHECK = 2


@dataclass
class _Entry:
    urgency: Urgency
    parents: frozenset[str] = frozenset()
    is_dirty: bool = False
    dirty_s: float = 0.0
    task: int | None = None  # of which it is a part now
    is_dirty_again: bool = False
    not_before_s: float = 0.0
    retry_s: float = math.inf  # when it is tried again though nothing changed
    failures: int = 0
    served_s: float = -math.inf  # when it last had its turn
    was_synced: bool = False
    is_small: bool = False
    is_gone: bool = False

    def is_due(self, now: float) -> bool:
        """Whether it has something to sync, and its time has come."""
        return self.is_dirty and self.task is None and self.not_before_s <= now


@dataclass
class Schedule:
    """The runs that have something to sync.

    Attributes:
        jobs: How many syncs may be under way at once.
    """

    jobs: int
    _runs: dict[str, _Entry] = field(default_factory=dict)
    _tasks: int = 0

    def mark(
        self, run_id: str, urgency: Urgency, now: float, parents: Collection[str] = (), *, is_small: bool = False
    ) -> None:
        """Hear that a run has, or may have, something to sync."""
        entry = self._runs.setdefault(run_id, _Entry(urgency))
        entry.is_gone = False
        entry.urgency = min(urgency, entry.urgency) if entry.is_dirty else urgency
        entry.parents, entry.is_small = frozenset(parents), is_small
        if entry.task is not None:
            entry.is_dirty_again = True
        elif not entry.is_dirty:
            entry.is_dirty, entry.dirty_s = True, now

    def forget(self, run_id: str) -> None:
        """Hear that a run is gone; one that is under way is known until that ends, so that it is not begun twice."""
        entry = self._runs.get(run_id)
        if entry is not None and entry.task is not None:
            entry.is_gone, entry.is_dirty_again = True, False
        else:
            self._runs.pop(run_id, None)

    def take(self, now: float) -> list[str]:
        """Return what is to be synced next, and count it as under way; nothing when nothing is ready.

        One run, or several that are small, or only rechecked.
        """
        busy = [entry for entry in self._runs.values() if entry.task is not None]
        if len({entry.task for entry in busy}) >= self.jobs:
            return []
        ready = [(run_id, entry) for run_id, entry in self._runs.items() if self._is_ready(entry, now)]
        if not ready and not busy:  # parents in a circle, which only damage can make
            ready = [(run_id, entry) for run_id, entry in self._runs.items() if entry.is_due(now)]
        # One thread is left for what is being trained.
        others = len({entry.task for entry in busy if entry.urgency != Urgency.LIVE})
        if others >= max(1, self.jobs - 1):
            ready = [(run_id, entry) for run_id, entry in ready if entry.urgency == Urgency.LIVE]
        if not ready:
            return []
        ready.sort(key=lambda pair: (pair[1].urgency, pair[1].served_s, pair[1].dirty_s, pair[0]))
        first = ready[0][1]
        chosen = ready[:1]
        if first.urgency == Urgency.RECHECK:
            chosen = ready[:BATCH_RUNS]
        elif first.urgency == Urgency.NEWS and first.is_small and not first.failures:
            alike = [(r, e) for r, e in ready if e.urgency == Urgency.NEWS and e.is_small and not e.failures]
            chosen = alike[:SMALL_RUNS]
        self._tasks += 1
        for _, entry in chosen:
            entry.is_dirty, entry.task, entry.served_s = False, self._tasks, now
        return [run_id for run_id, _ in chosen]

    def done(self, run_id: str, now: float) -> None:
        """Hear that the tracker has everything of a run."""
        entry = self._end(run_id, now)
        if entry is None:
            return
        took_s = now - entry.served_s
        entry.not_before_s = now + min(max(_PACE_S, took_s), _LONGEST_PACE_S)
        entry.failures, entry.retry_s, entry.was_synced = 0, math.inf, True

    def stopped(self, run_id: str, now: float) -> None:
        """Hear that a sync was ended before it was done, for the sake of others."""
        entry = self._end(run_id, now)
        if entry is None:
            return
        if not entry.is_dirty:
            entry.is_dirty, entry.dirty_s = True, now

    def postpone(self, run_id: str, now: float, pause_s: float) -> None:
        """Hear that the tracker did not answer, which is nobody's fault: the run is tried again after a pause."""
        self.stopped(run_id, now)
        if run_id in self._runs:
            self._runs[run_id].not_before_s = now + pause_s

    def hold(self, run_id: str, until_s: float) -> None:
        """Hear that a run need not be looked at before some time."""
        if run_id in self._runs:
            self._runs[run_id].not_before_s = until_s

    def failed(self, run_id: str, now: float, *, for_good: bool) -> None:
        """Hear that a run could not be synced.

        Args:
            run_id: The run.
            now: Seconds.
            for_good: The tracker refused, and would again: only a change of the run, or an hour, lets it try.
        """
        entry = self._end(run_id, now)
        if entry is None:
            return
        entry.failures += 1
        entry.was_synced = True  # its children must not wait for it for ever
        pause_s = min(_FIRST_PAUSE_S * 2 ** min(entry.failures - 1, 20), _LONGEST_PAUSE_S)
        entry.not_before_s = now + pause_s
        entry.retry_s = now + (_REFUSED_S if for_good else pause_s)
        if not for_good and not entry.is_dirty:
            entry.is_dirty, entry.dirty_s = True, now

    def overdue(self, now: float) -> str | None:
        """Return the run whose sync should make room, because others wait and no thread is free for them."""
        busy = {run_id: entry for run_id, entry in self._runs.items() if entry.task is not None}
        waiting = [entry for entry in self._runs.values() if self._is_ready(entry, now)]
        waiting = [entry for entry in waiting if now - max(entry.dirty_s, entry.not_before_s) > _WAITED_S]
        if not waiting or len({entry.task for entry in busy.values()}) < self.jobs:
            return None
        best = min(entry.urgency for entry in waiting)
        long = [(entry.served_s, run_id) for run_id, entry in busy.items() if entry.urgency >= best]
        since_s, run_id = min(long, default=(now, ""))
        return run_id if now - since_s > _SLICE_S else None

    def due_s(self, now: float) -> float:
        """Return in how many seconds something may become ready that is not now."""
        times = [e.not_before_s for e in self._runs.values() if e.is_dirty and e.task is None and e.not_before_s > now]
        times += [e.retry_s for e in self._runs.values() if not e.is_dirty and e.task is None]
        return max(0.0, min(times, default=math.inf) - now)

    def pending(self) -> list[str]:
        """Return the runs that have something to sync or are being synced."""
        return [run_id for run_id, e in self._runs.items() if e.is_dirty or e.task is not None]

    def retry(self, now: float) -> None:
        """Count as changed what was refused long ago."""
        for entry in self._runs.values():
            if entry.retry_s <= now and not entry.is_dirty and entry.task is None:
                entry.is_dirty, entry.dirty_s, entry.retry_s = True, now, math.inf

    def hurry(self, run_ids: Iterable[str]) -> None:
        """Let runs be tried at once: what they waited for is over."""
        for run_id in run_ids:
            if run_id in self._runs:
                self._runs[run_id].not_before_s = 0.0

    def _is_ready(self, entry: _Entry, now: float) -> bool:
        if not entry.is_due(now):
            return False
        parents = (self._runs[run_id] for run_id in entry.parents if run_id in self._runs)
        # A parent that is on its way goes first, once; later the two do not wait for each other.
        return entry.was_synced or all(
            parent is entry or parent.was_synced or not (parent.is_dirty or parent.task is not None)
            for parent in parents
        )

    def _end(self, run_id: str, now: float) -> _Entry | None:
        """Return what is known of a run whose sync has ended; None when it is gone."""
        entry = self._runs.get(run_id)
        if entry is None:
            return None
        entry.task = None
        if entry.is_gone:
            del self._runs[run_id]
            return None
        if entry.is_dirty_again:
            entry.is_dirty, entry.dirty_s, entry.is_dirty_again = True, now, False
        return entry
