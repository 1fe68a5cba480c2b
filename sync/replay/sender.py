"""Sends records through lanes, and knows up to which row everything was accepted."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self
from zlib import crc32

from llmtrack.sync.sink import Record, Sink, TrackerRun
from llmtrack.writer.errors import TooLargeError

from .cursor import Mark
from .patience import Patience

_WAITING_BATCHES: Final = 2  # per lane: enough that a lane never idles, and a bound on memory
_INTERRUPTED_S: Final = 2.0  # how long a request under way is waited for after Ctrl-C


@dataclass
class _Batch:
    """Records of one call of `put` that have not been accepted yet."""

    segment: int
    mark: Mark
    outstanding: int


class _Lane:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.of: list[_Batch] = []  # for each record the batch it came with
        self.has_cut = False
        self.queue: queue.Queue[tuple[list[Record], list[_Batch]] | None] = queue.Queue(_WAITING_BATCHES)


class Sender:
    """Sends the records of one run in the tracker; a context manager, which waits for all of them.

    Records of one key go through one lane in order: what a tracker keeps as the newest value of a key is then never
    overtaken by an older one. `accepted` holds, by segment, the last mark before which nothing is outstanding.

    Args:
        sink: Whose `append` is called, from one thread per lane.
        run: The run in the tracker.
        patience: What to do about a tracker that does not answer.
        on_accepted: Called with a number of points, from any lane.
        flush: Called at the end: when it returns, everything is accepted.
    """

    def __init__(
        self,
        sink: Sink,
        run: TrackerRun,
        patience: Patience,
        on_accepted: Callable[[int], None],
        flush: Callable[[], None],
    ) -> None:
        self._sink = sink
        self._run = run
        self._patience = patience
        self._on_accepted = on_accepted
        self._flush = flush
        self._is_accepted = sink.repeats  # what `append` took
        self._at_most = sink.batch_records
        self._batches: deque[_Batch] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._lanes = [_Lane() for _ in range(sink.lanes)]
        self._lane_of: dict[str, _Lane] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), daemon=True, name=f"llmtrack-lane-{number}")
            for number, lane in enumerate(self._lanes)
        ]
        self.accepted: dict[int, Mark] = {}

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        if error is None and not any(lane.has_cut for lane in self._lanes):
            self._merge()
        for lane in self._lanes:
            while lane.records and error is None:
                self._cut(lane)
            if error is not None:
                _empty(lane.queue)  # so that the end finds room even when the lane is stuck in a request
            lane.queue.put(None)
        interrupted = error is not None and not isinstance(error, Exception)
        for thread in self._threads:
            thread.join(_INTERRUPTED_S if interrupted else None)
        if error is None:
            self._check()
            self._patience.call(self._flush)
            self._is_accepted = True
        self._settle()

    def put(self, segment: int, mark: Mark, records: Iterable[Record]) -> None:
        """Send records; waits while the lanes are full.

        Args:
            segment: The segment they are from.
            mark: What holds for the segment once these records, and all before, are accepted.
            records: In the order of their rows.

        Raises:
            SinkError: A lane has failed; what it says holds for this run.
        """
        batch = _Batch(segment, mark, 0)
        touched: dict[int, _Lane] = {}
        for record in records:
            lane = self._lane_of.get(record.key) or self._choose(record.key)
            lane.records.append(record)
            lane.of.append(batch)
            batch.outstanding += 1
            if len(lane.records) >= self._sink.batch_records:
                touched[id(lane)] = lane
        with self._lock:
            self._batches.append(batch)
        for lane in touched.values():
            while len(lane.records) >= self._sink.batch_records:
                self._cut(lane)
        self._settle()
        self._check()

    def _choose(self, key: str) -> _Lane:
        lane = self._lanes[crc32(key.encode()) % len(self._lanes)]
        self._lane_of[key] = lane
        return lane

    def _merge(self) -> None:
        """Put everything into the first lane: as long as no batch is full, one request does."""
        first, *others = self._lanes
        for lane in others:
            first.records += lane.records
            first.of += lane.of
            lane.records, lane.of = [], []

    def _cut(self, lane: _Lane) -> None:
        lane.has_cut = True
        size = self._sink.batch_records
        lane.queue.put((lane.records[:size], lane.of[:size]))
        del lane.records[:size], lane.of[:size]

    def _settle(self) -> None:
        with self._lock:
            while self._is_accepted and self._batches and not self._batches[0].outstanding:
                batch = self._batches.popleft()
                self.accepted[batch.segment] = batch.mark

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, lane: _Lane) -> None:
        while (item := lane.queue.get()) is not None:
            records, of = item
            if self._error is not None:
                continue  # keep taking, so that nobody waits for room
            try:
                self._append(records)
            except BaseException as error:  # noqa: BLE001 - the end of a thread: whoever calls put() gets to see it
                self._fail(error)
                continue
            with self._lock:
                for batch in of:
                    batch.outstanding -= 1
            self._on_accepted(sum(record.points for record in records))

    def _append(self, records: list[Record]) -> None:
        """Append records in as few requests as the tracker takes; one that is too large for it becomes two."""
        at = 0
        while at < len(records):
            some = records[at : at + self._at_most]
            try:
                self._patience.call(lambda some=some: self._sink.append(self._run, some))  # type: ignore[misc]
            except TooLargeError:
                if len(some) == 1:
                    raise
                self._at_most = min(self._at_most, -(-len(some) // 2))  # of all lanes, and from now on
            else:
                at += len(some)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._patience.stop()


def _empty(lane: queue.Queue[tuple[list[Record], list[_Batch]] | None]) -> None:
    try:
        while True:
            lane.get_nowait()
    except queue.Empty:
        return
