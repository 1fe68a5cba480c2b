"""The drain thread: takes rows and records out of the buffer and writes them, in order, to storage that may fail."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Final, Protocol

import pyarrow as pa

from llmtrack.writer.errors import LlmtrackError
from llmtrack.writer.format import HEARTBEAT, SCHEMAS
from llmtrack.writer.settings import Settings

from .appender import Appender, SyncMark
from .arrays import one, record_batch
from .buffer import Barrier, Buffer, End, Gap, Item, LateRow, Record, Row
from .flag import Flag
from .ids import Mark, Pause, StepIds
from .publish import sync_folder
from .rows import RowEncoder
from .seal import seal_part, seal_segment
from .stream import encode_batch, fsync_named
from .worker import Worker

_log = logging.getLogger("llmtrack")

_INT64_MAX: Final = (1 << 63) - 1
_HEARTBEAT_BYTES: Final = 512  # always the same length, so that one write in place leaves nothing of the last one
_LATE_ROWS_S: Final = 5.0  # once the run ends: a rank that is gone never sends, and one that lives has sent long ago
# What Python and Arrow raise for a name that is no string or a value that is no number.
_UNSTORABLE: Final = (TypeError, ValueError, OverflowError, RuntimeError, struct.error, pa.ArrowException)


class Observer(Protocol):
    """Looks at the rows on the drain thread; what it returns is recorded behind them."""

    def look(self, items: Sequence[Row | Mark]) -> list[Record]:
        """Look at what was logged; called in every turn, also with nothing."""
        ...

    def note(self, record: Record) -> list[Record]:
        """Complete an alert of the caller's own before it is written, and return what belongs behind it."""
        ...

    def end(self) -> list[Record]:
        """Return what is to be recorded before the end record."""
        ...


@dataclass
class _Sync:
    """One round of making written data durable: what is fsynced, what waits for it, and what failed."""

    marks: list[SyncMark]
    folders: set[Path]  # with names that are not durable yet
    heartbeat: bytes
    waiting: list[Callable[[], None]]
    errors: list[OSError] = field(default_factory=list)
    failed: list[tuple[SyncMark, OSError]] = field(default_factory=list)


class Drain:
    """Owns every file of one segment.

    All writes happen on its thread, in the order of the buffer; fsync and sealing have threads of their own. When the
    storage refuses, nothing more is taken from the buffer until it accepts again: the buffer is the bound on memory,
    and it counts what does not fit.

    Args:
        folder: The segment's folder, claimed by this process.
        buffer: What the training thread fills.
        start: The segment's start record, without `seq`; written again if the folder vanishes.
        settings: Limits.
        observer: Looks at every row that is written; None for nobody.

    Attributes:
        durable: Set when the end record and everything before it is durable.
        ended: Set when the thread does nothing more.
    """

    def __init__(
        self, folder: Path, buffer: Buffer, start: Record, settings: Settings, observer: Observer | None = None
    ) -> None:
        self._folder = folder
        self._buffer = buffer
        self._start = start
        self._settings = settings
        self._observer = observer
        self._unobserved: list[Row | Mark] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._main, name="llmtrack-drain", daemon=True)
        self._syncer = Worker("llmtrack-sync")
        self._sealer = Worker("llmtrack-seal")
        self._appenders: dict[str, Appender] = {}
        self._encoder = RowEncoder()
        self._taken: deque[Item] = deque()
        self._ready: deque[Callable[[], None]] = deque()
        self._seq = 0
        self._step, self._tokens = (int(str(start.values[place])) for place in ("step", "tokens"))  # of the newest row
        self._dropped_points = 0
        self._unstorable: Gap | None = None  # not in the log yet
        self._unstorable_points = 0  # of the whole segment
        self._counted_at_s = monotonic()
        self._wants_sync: list[Callable[[], None]] = []
        self._sync_running = False
        self._new_names = {folder, *folder.parents[:2]}  # folders with names that are not durable yet
        self._sync_results: SimpleQueue[_Sync] = SimpleQueue()
        self._synced_at_s = monotonic()
        self._warned: set[str] = set()
        self._refused = False  # by the storage, in the last turn
        self._has_more = False  # than one turn takes
        self._is_held_up = False  # by a row whose values have not arrived
        self._end: End | None = None
        self._give_up_at_s = self._give_rows_up_at_s = float("inf")
        self.durable = Flag()
        self.ended = Flag()

    def open(self) -> None:
        """Write the start record durably, then start the thread; called once, on the thread that opens the run.

        Raises:
            OSError: The storage refused.
        """
        try:
            self._append_record(self._start)
            self._appenders["segments"].sync()
            self._sync_names()
            self._write_heartbeat(self._heartbeat())
        except OSError:
            for appender in self._appenders.values():
                appender.give_up_part()
            raise
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at the buffer now. Safe in a signal handler: `SimpleQueue.put` is reentrant."""
        if self._wakes.empty():
            self._wakes.put(None)

    def give_up_at(self, deadline_s: float) -> None:
        """End the thread at `time.monotonic() == deadline_s` even if the storage has not taken everything.

        Values that are still on their way from a GPU or another rank get a part of that time.
        """
        now_s = monotonic()
        self._give_rows_up_at_s = now_s + min(_LATE_ROWS_S, (deadline_s - now_s) / 2)
        self._give_up_at_s = deadline_s

    # What follows runs on the drain thread, unless it says otherwise.

    def _main(self) -> None:
        try:
            while not self.durable.is_set() and monotonic() < self._give_up_at_s:
                if self._refused or self._is_held_up or self._is_behind() or not self._has_more:
                    self._wait()
                self._turn()
            if self.durable.is_set():
                self._seal_all()
        except Exception:  # noqa: BLE001  # a defect here must not reach the training loop: it is said and the log ends
            _log.exception("llmtrack: the log in %s stopped; what is logged from now on is lost", self._folder)
        self._buffer.refuse()
        self._syncer.stop(0)
        self._sealer.stop(0)
        self.ended.set()
        for appender in self._appenders.values():  # open still where the storage took not everything; may hang
            appender.give_up_part()

    def _wait(self) -> None:
        """Wait until somebody wakes the thread, or for the next flush; once the storage has refused, for that alone."""
        if self._refused:
            sleep(self._settings.flush_interval_s)
        try:
            self._wakes.get(timeout=0.0 if self._refused else self._settings.flush_interval_s)
            while True:
                self._wakes.get_nowait()
        except Empty:
            return

    def _turn(self) -> None:
        """Write some of what waits, and have it made durable when that is due."""
        self._refused = False
        try:
            self._take_sync_results()
            self._write_some()
            self._buffer.errno = None
            if self._end is not None:
                self._end_all()
            else:
                self._sync_if_due()
        except OSError as error:
            self._refused = True
            self._buffer.errno = error.errno
            self._warn_of_storage(error)

    def _write_some(self) -> None:
        for appender in self._appenders.values():
            appender.flush()
        while self._ready:
            self._ready.popleft()()
        if self._unstorable is not None and monotonic() - self._counted_at_s >= self._settings.fsync_interval_s:
            gap, self._unstorable, self._counted_at_s = self._unstorable, None, monotonic()
            self._append_gap(gap)
        if not (self._taken or self._is_behind()):
            self._taken.extend(self._buffer.take(self._settings.batch_points))
            self._has_more = bool(self._buffer.items)
        self._is_held_up = False
        self._observe()
        while self._taken and not self._is_held_up:
            self._write_next()
            self._seal_if_full()
        self._restore_start()

    def _unsynced_bytes(self) -> int:
        return sum(appender.unsynced_bytes for appender in self._appenders.values())

    def _is_behind(self) -> bool:
        return self._unsynced_bytes() >= self._settings.unsynced_bytes

    def _write_next(self) -> None:
        rows = self._take_rows()
        if rows:
            self._append_rows(rows)
        elif self._unobserved:
            self._observe()
        elif self._taken and not self._is_held_up:
            self._write_item(self._taken.popleft())

    def _take_rows(self) -> list[Row]:
        """Return the rows up to what is no row, or is one whose values have not arrived."""
        rows: list[Row] = []
        while self._taken and not self._is_held_up:
            item = self._taken[0]
            if isinstance(item, tuple):
                rows.append(item)
                self._unobserved.append(item)
                self._taken.popleft()
            elif isinstance(item, StepIds | Pause):
                self._unobserved.append(item)
                self._taken.popleft()
            elif isinstance(item, LateRow):
                self._is_held_up = not self._settle_late(item)
            else:
                break
        return rows

    def _write_item(self, item: Item) -> None:
        if isinstance(item, Barrier | End) and self._unstorable is not None:
            gap, self._unstorable = self._unstorable, None
            self._taken.appendleft(item)
            self._append_gap(gap)
        elif isinstance(item, Barrier):
            self._wants_sync.append(item.durable.set)
        elif isinstance(item, Gap):
            self._append_gap(item)
        elif isinstance(item, End) and self._observer is not None:
            observer, self._observer = self._observer, None
            self._taken.appendleft(item)
            self._put_first(self._ask(observer.end))
        elif isinstance(item, End):
            self._end = item
            place = {"step": self._step, "tokens": self._tokens, "dropped": self._dropped_points}
            self._append_record(Record("segments", {**item.values, **place}))
        elif isinstance(item, Record) and item.after_sync:
            self._wants_sync.append(lambda: self._append_durably(item))
        elif isinstance(item, Record):
            if item.table == "alerts" and self._observer is not None:
                observer = self._observer
                self._put_first(self._ask(lambda: observer.note(item)))
            self._append_durably(item)

    def _observe(self) -> None:
        """Have the rows looked at; what is to be recorded comes next, whatever becomes of the rows meanwhile."""
        items, self._unobserved = self._unobserved, []
        if self._observer is not None:
            observer = self._observer
            self._put_first(self._ask(lambda: observer.look(items)))

    def _ask(self, question: Callable[[], list[Record]]) -> list[Record]:
        try:
            return question()
        except BaseException:  # noqa: BLE001  # whatever is wrong with it, if it exits too: the log goes on without it
            self._observer = None
            _log.exception("llmtrack: nothing looks at what is logged any more; the log itself goes on")
            return []

    def _put_first(self, records: list[Record]) -> None:
        self._taken.extendleft(reversed(records))

    def _settle_late(self, row: LateRow) -> bool:
        """Put the values of a row whose turn it is in its place; return False while they are on their way."""
        late = row.values
        try:
            if not late.is_ready():
                if monotonic() < self._give_rows_up_at_s:
                    return False
                raise RuntimeError("they had not arrived when the run ended")
            values = late.resolve()
        except _UNSTORABLE as error:
            self._taken.popleft()
            self._count_unstorable(row.step, row.tokens, len(late))
            self._warn("late_row", f"points that were on their way are lost, and counted as dropped: {error}")
            return True
        self._taken.popleft()
        if late.lost_points:
            self._count_unstorable(row.step, row.tokens, late.lost_points)
        if values:
            self._taken.appendleft((row.time_ns, row.step, row.tokens, values))
        return True

    def _append_rows(self, rows: list[Row]) -> None:
        try:
            batch = self._encoder.encode(rows, self._seq + 1)
        except _UNSTORABLE as error:
            rows = self._storable(rows, error)
            if not rows:
                return
            batch = self._encoder.encode(rows, self._seq + 1)
        first = self._seq + 1
        self._seq += len(rows)
        _, self._step, self._tokens, _ = rows[-1]
        self._observe()
        self._append("metrics", encode_batch(batch, first, self._seq))

    def _storable(self, rows: list[Row], why: Exception) -> list[Row]:
        """Return the rows without the points that cannot be stored, which are counted as dropped."""
        kept: list[Row] = []
        for time_ns, step, tokens, values in rows:
            good = {
                name: float(value)
                for name, value in values.items()
                if self._can_store((time_ns, step, tokens, {name: value}))
            }
            if good:
                kept.append((time_ns, step, tokens, good))
            if len(good) < len(values):
                self._count_unstorable(min(step, _INT64_MAX), tokens, len(values) - len(good))
        self._warn("bad_value", f"some points could not be stored and are counted as dropped: {why}")
        return kept

    def _can_store(self, row: Row) -> bool:
        try:
            self._encoder.check(row)
        except _UNSTORABLE:
            return False
        return True

    def _count_unstorable(self, step: int, tokens: int, points: int) -> None:
        """Count points in one gap, which is recorded now and then: a metric of a wrong kind comes with every row."""
        self._unstorable_points += points
        if self._unstorable is None:
            self._unstorable = Gap(tokens, tokens, step, points, "bad_value", None)
        else:
            self._unstorable.points += points
            self._unstorable.last_tokens, self._unstorable.step = tokens, step

    def _append_gap(self, gap: Gap) -> None:
        self._dropped_points += gap.points
        now_ms = _now_ms()
        # Points that could not be stored stood among others that could: no row goes back behind those.
        step, tokens = max((gap.last_tokens, gap.step), (self._tokens, self._step))[::-1]
        # First in the queue, then in the file: an append that fails must not take it along.
        self._taken.appendleft((now_ms * 1_000_000, step, tokens, {"tracker/dropped": float(self._dropped_points)}))
        self._append_durably(
            Record(
                "gaps",
                {
                    "time": now_ms,
                    "step": step,
                    "tokens": tokens,
                    "first_tokens": gap.first_tokens,
                    "last_tokens": gap.last_tokens,
                    "points": gap.points,
                    "reason": gap.reason,
                    "errno": gap.errno,
                },
            )
        )

    def _append_durably(self, record: Record) -> None:
        self._wants_sync.append(record.durable.set)
        self._append_record(record)

    def _append_record(self, record: Record) -> None:
        self._seq += 1
        row = {**record.values, "seq": self._seq}
        try:
            batch = record_batch(row, SCHEMAS[record.table])
        except _UNSTORABLE as error:
            batch = record_batch(_storable_record(row, SCHEMAS[record.table]), SCHEMAS[record.table])
            self._warn("bad_record", f"a record of {record.table} is stored with what could be kept of it: {error}")
        self._append(record.table, encode_batch(batch, self._seq, self._seq))

    def _append(self, table: str, message: bytes) -> None:
        appender = self._appenders.get(table)
        if appender is None:
            appender = self._appenders[table] = Appender(self._folder, table)
        appender.append(message)

    def _restore_start(self) -> bool:
        """Say again where the segment starts if its folder was removed: without that no reader can place it."""
        if not any(appender.made_folder for appender in self._appenders.values()):
            return False
        for appender in self._appenders.values():
            appender.made_folder = False
        self._new_names.update(self._folder.parents[:2])
        self._warn("folder", f"{self._folder} was removed while it was written to; what had been in it is lost")
        self._append_record(self._start)
        return True

    def _seal_if_full(self) -> None:
        metrics = self._appenders.get("metrics")
        if metrics is None or (
            metrics.part_bytes < self._settings.part_bytes and metrics.part_batches < self._settings.part_batches
        ):
            return
        if self._sync_running:
            return  # an error is told once: to that fsync, and then not to the one that ends the part
        path = metrics.end_part()
        if path is not None:
            self._sealer.submit(lambda: self._seal(path))

    def _seal(self, path: Path) -> None:
        """Seal one part; on the seal thread."""
        try:
            seal_part(path)
        except (OSError, LlmtrackError, pa.ArrowException) as error:
            self._warn("seal", f"{path} stays open: {error}")
        pa.default_memory_pool().release_unused()  # half a gigabyte, which the trainer may need

    def _seal_all(self) -> None:
        """Seal what is left at the end; what cannot be sealed stays readable as it is."""
        self._sealer.stop(self._give_up_at_s - monotonic())
        try:
            seal_segment(self._folder)
        except (OSError, LlmtrackError, pa.ArrowException) as error:
            self._warn("seal", f"parts of {self._folder} stay open: {error}")

    def _sync_if_due(self) -> None:
        due = (
            self._wants_sync
            or monotonic() - self._synced_at_s >= self._settings.fsync_interval_s
            or self._unsynced_bytes() >= min(self._settings.fsync_bytes, self._settings.unsynced_bytes)
        )
        if self._sync_running or not due:
            return
        sync = _Sync(self._marks(), self._take_new_names(), self._heartbeat(), self._wants_sync)
        self._wants_sync = []
        self._synced_at_s = monotonic()
        self._sync_running = True
        self._syncer.submit(lambda: self._run_sync(sync))

    def _marks(self) -> list[SyncMark]:
        marks: list[SyncMark] = []
        try:
            marks.extend(mark for appender in self._appenders.values() if (mark := appender.mark()))
        except OSError:  # the process may have no more descriptors
            for mark in marks:
                os.close(mark.fd)
            raise
        return marks

    def _take_new_names(self) -> set[Path]:
        """Return the folders with names that are not durable yet, and count on the caller to make them so."""
        for appender in self._appenders.values():
            if appender.opened_part:
                self._new_names.add(self._folder)
                appender.opened_part = False
        folders, self._new_names = self._new_names, set()
        return folders

    def _sync_names(self) -> None:
        """Make every name durable before returning."""
        folders = self._take_new_names()
        try:
            for folder in folders:
                sync_folder(folder)
        except OSError:
            self._new_names |= folders
            raise

    def _run_sync(self, sync: _Sync) -> None:
        """Do what was asked for; on the sync thread."""
        for mark in sync.marks:
            try:
                try:
                    fsync_named(mark.fd)
                finally:
                    os.close(mark.fd)  # may say, on NFS, what fsync did not
            except OSError as error:
                sync.errors.append(error)
                sync.failed.append((mark, error))
        try:
            for folder in sync.folders:
                sync_folder(folder)
        except OSError as error:
            sync.errors.append(error)
        self._try_heartbeat(sync.heartbeat)
        self._sync_results.put(sync)
        self.wake()

    def _take_sync_results(self) -> None:
        while not self._sync_results.empty():
            sync = self._sync_results.get()
            self._sync_running = False
            failed = [mark for mark, _ in sync.failed]
            for mark in sync.marks:
                if mark not in failed:
                    mark.appender.synced(mark)
            for mark, error in sync.failed:
                mark.appender.sync_failed(mark, error)
            if sync.errors:
                self._wants_sync = sync.waiting + self._wants_sync
                self._new_names |= sync.folders
                raise sync.errors[0]
            self._ready.extend(sync.waiting)

    def _end_all(self) -> None:
        """Make everything durable and close every part."""
        if self._sync_running:
            return  # its result wakes the thread
        while self._wants_sync or self._ready:
            for appender in self._appenders.values():
                appender.sync()
            self._sync_names()
            self._ready.extend(self._wants_sync)
            self._wants_sync = []
            while self._ready:
                self._ready.popleft()()
        for appender in self._appenders.values():
            appender.end_part()
        if self._restore_start():
            return  # and end that part in the next turn
        with suppress(FileNotFoundError):  # somebody removed what was durable
            self._sync_names()
        self._try_heartbeat(self._heartbeat())
        self.durable.set()

    def _heartbeat(self) -> bytes:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return json.dumps(
            {
                "time": now,
                "seq": self._seq,
                "step": self._step,
                "tokens": self._tokens,
                "dropped": self._buffer.dropped_points + self._unstorable_points,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
        ).encode()

    def _try_heartbeat(self, heartbeat: bytes) -> None:
        """Write a sign of life; no data waits for that."""
        try:
            self._write_heartbeat(heartbeat)
        except OSError as error:
            self._warn_of_storage(error)

    def _write_heartbeat(self, heartbeat: bytes) -> None:
        fd = os.open(self._folder / HEARTBEAT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(fd, heartbeat.ljust(_HEARTBEAT_BYTES - 1) + b"\n", 0)
        finally:
            os.close(fd)

    def _warn_of_storage(self, error: OSError) -> None:
        self._warn(f"{error.strerror}", f"cannot write to {self._folder}: {error.strerror}; trying again")

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            _log.warning("llmtrack: %s", message)


def _storable_record(row: dict[str, object], schema: pa.Schema) -> dict[str, object]:
    """Return a record with null or a similar text where a value is not of the column's type."""
    return {field.name: _storable_value(row.get(field.name), field.type) for field in schema}


def _storable_value(value: object, kind: pa.DataType) -> object:
    try:
        one(value, kind)
    except _UNSTORABLE:
        if pa.types.is_string(kind):
            return str(value).encode("utf-8", "backslashreplace").decode()
        if pa.types.is_list(kind) and isinstance(value, list | tuple):
            return [_storable_value(item, kind.value_type) for item in value]
        return None
    return value


def _now_ms() -> int:
    return int(datetime.now(UTC).timestamp() * 1000)
