"""The loop of ``llmtrack-sync --watch``: what changed, what is next, who is told, until somebody says enough.

One thread decides. It reads the small tables, keeps the schedule, judges silences and offers news to the relay; other
threads sync, one run at a time, each with a connection of its own that sees that run and its ancestors, so that
neither the number of runs nor the size of others matters to any of them, and nobody's failure is anybody else's.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from llmtrack.query import connect
from llmtrack.query.sql.views import LOST_AFTER_S, STALLED_AFTER_S
from llmtrack.query.text.console import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, plain, say
from llmtrack.sync import once, show
from llmtrack.sync.replay import cursor
from llmtrack.sync.replay.patience import Patience
from llmtrack.sync.replay.replay import Options, Report
from llmtrack.sync.sink import Sink
from llmtrack.writer.errors import LlmtrackError, RetryableSinkError, SinkError, UsageError

from . import record, renew
from .changes import ROOT, Events, Scanner, Trust, choose
from .journal import Journal, Style
from .ledger import Ledger, of_verdict
from .lock import SyncLock
from .notify import Happening, Receiver, Relay
from .schedule import Schedule, Urgency
from .stalls import Silence, Stalls

if TYPE_CHECKING:
    import duckdb

POLL_S: Final = 10.0  # where events are not known to come

_SAFETY_S: Final = 30.0  # between two scans where they are
_GATHER_S: Final = 0.3  # events within it are taken in together: a flush is several
_SAVE_S: Final = 5.0
_IDLE_S: Final = 600.0  # after it the connection of a run is closed
_OPEN_RUNS: Final = 64  # connections kept open for runs that train
_SMALL_BYTES: Final = 256 << 10  # of files: such a run is sent in a second or two
_THREADS: Final = 2  # of DuckDB, for each connection: sorting a run's rows is little beside sending them
_TIDY_S: Final = 60.0
_REST_S: Final = 60.0  # without anything sent, after which a watch may begin anew
_FEW_BYTES: Final = 200 << 20  # of memory, when no run trains
_MANY_BYTES: Final = 2 << 30  # likewise when some do: what has grown to this has a leak
_END_S: Final = 8.0  # how long syncs under way are waited for at the end; their requests have time-outs of their own
_DELIVER_S: Final = 2.0  # likewise messages
_OUTAGE_S: Final = 5.0  # before a run is tried again whose tracker did not answer for the whole time-out
_CLOCKS_S: Final = 60.0  # between two looks whether a lost run is lost by its own clock too
_REFUSED_S: Final = 300.0  # likewise when the tracker does not let us in any more
_FRESH_S: Final = 86_400.0  # what happened longer ago is not said


@dataclass(frozen=True)
class Settings:
    """What a watch is asked to do.

    Attributes:
        root: The folder of the runs.
        pattern: Shell pattern of run ids; None: all.
        state: The state folder.
        options: What to send.
        timeout_s: Seconds without any success after which one sync ends; the watch then tries again.
        jobs: How many runs at once.
        poll_s: Seconds between two looks; None: events where they come, and `POLL_S` elsewhere.
        stalled_s: Silence after which a run is stalled; None: as the views of the log have it.
        lost_s: Silence after which it is lost; None: likewise.
        min_level: Of what is relayed.
    """

    root: Path
    pattern: str | None
    state: Path
    options: Options
    timeout_s: float
    jobs: int
    poll_s: float | None
    stalled_s: float | None
    lost_s: float | None
    min_level: str


@dataclass
class _Lane:
    """One run, or several that are only looked at, on their way into the tracker.

    Attributes:
        run_ids: Which.
        con: Sees them and their ancestors; None: it is opened by the thread that syncs.
        fingerprints: Of their files before they were read.
        used_s: When it was last used.
        stop: Ends the sync under way.
    """

    run_ids: list[str]
    con: duckdb.DuckDBPyConnection | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    used_s: float = 0.0
    stop: once.Stop = field(default_factory=once.Stop)


@dataclass(frozen=True)
class _Event:
    run_id: str


@dataclass(frozen=True)
class _Signal:
    number: int


@dataclass(frozen=True)
class _Done:
    """What became of a sync."""

    lane: _Lane
    outcome: once.Outcome
    error: Exception | None
    took_s: float


class Service:
    """Watches a root until a signal comes.

    Args:
        settings: What to do.
        sink: The tracker, not open yet.
        receivers: Who is told of alerts and the like.
        journal: Says what happens; entered already.

    Raises:
        UsageError: The root or the state folder cannot be used, or another sync is at work.
    """

    def __init__(self, settings: Settings, sink: Sink, receivers: Collection[Receiver], journal: Journal) -> None:
        self._settings = settings
        self._sink = sink
        self._receivers = list(receivers)
        self._journal = journal
        self._inbox: SimpleQueue[_Event | _Signal | _Done] = SimpleQueue()
        self._folder = cursor.cursor_path(settings.state, sink.name, sink.tracker, "any").parent
        self._schedule = Schedule(settings.jobs)
        self._patience = Patience(settings.timeout_s, journal.waiting, at_once=sink.lanes)
        self._lanes: dict[str, _Lane] = {}  # kept for runs that train
        self._busy: dict[str, _Lane] = {}
        self._opening = threading.Lock()
        self._is_open = False
        self._threads: set[threading.Thread] = set()
        self._touched: set[str] = set()  # by events, since the small tables were last read
        self._touched_s = 0.0
        self._trust = Trust()
        self._events: Events | None = None
        self._ended_by: int | None = None
        self._fatal: BaseException | None = None
        self._had_success = False
        self._has_sent = False
        self._sent_s = 0.0
        self._refused_until_s = 0.0
        self._said_damages: set[str] = set()
        self._record = record.RootRecord(str(settings.root), sink.name, sink.tracker, asdict(settings.options))
        self._has_unsaved = False
        self._scanner: Scanner
        self._ledger: Ledger
        self._stalls: Stalls
        self._relay: Relay
        self._lock: SyncLock

    @property
    def reports(self) -> list[Report]:
        """What was done, by run."""
        return [self._journal.reports[run_id] for run_id in sorted(self._journal.reports)]

    def run(self) -> int:
        """Watch, and return the number of the signal that ended it.

        Raises:
            LlmtrackError: The tracker does not let us in, or the state folder cannot be used, before anything was sent.
        """
        settings = self._settings
        with ExitStack() as stack:
            self._lock = stack.enter_context(SyncLock(self._folder, settings.root, "watch"))
            stack.enter_context(_signals(self._inbox))
            self._journal.reports |= renew.remembered()
            self._relay = Relay(
                record.record_path(self._folder, settings.root).with_suffix(".relay"),
                self._receivers,
                settings.min_level,
                lambda text: self._journal.say("relay", text, level="warn"),
            )
            stack.callback(self._relay.stop, _DELIVER_S)
            self._begin()
            stack.callback(self._save, force=True)
            stack.callback(self._close)
            self._loop()
        if self._fatal is not None:
            raise self._fatal
        return self._ended_by or signal.SIGTERM

    def is_stuck(self) -> bool:
        """Return whether a request is still under way that did not end in time."""
        return any(thread.is_alive() for thread in self._threads)

    # Beginning and end.

    def _begin(self) -> None:
        settings = self._settings
        why = self._watch_files()
        how = "as events come" if self._events is not None else f"every {self._interval_s:g} s ({why})"
        self._scanner = Scanner(settings.root)
        self._scanner.scan()
        self._ledger = Ledger(settings.root)
        # Between two looks a run is silent for us, whatever it does.
        stalled_s = STALLED_AFTER_S if settings.stalled_s is None else settings.stalled_s
        if self._events is None:
            stalled_s = max(stalled_s, 3 * self._interval_s)
        lost_s = LOST_AFTER_S if settings.lost_s is None else settings.lost_s
        self._stalls = Stalls(stalled_s, lost_s, self._ledger.longest_pause_s, self._ledger.newest_seq)
        happened = self._ledger.refresh(self._scanner.readable())
        for one in happened:
            self._journal.is_new(one.key)
        for run_id in self._ledger.runs:
            self._note_written(run_id)
        earlier = record.load(record.record_path(self._folder, settings.root))
        if earlier is not None:
            self._take_over(earlier)
        ids = [run_id for run_id in self._ledger.runs if self._is_chosen(run_id)]
        self._journal.say(
            "watching",
            f"watching {settings.root} {how}: {len(ids)} run{'s' * (len(ids) != 1)}, into {self._sink.tracker}",
            root=str(settings.root),
            runs=len(ids),
            tracker=self._sink.tracker,
            interval_s=self._interval_s,
            mode="events" if self._events is not None else "polling",
            why=why,
        )
        now = time.monotonic()
        for run_id in ids:
            fingerprint = self._scanner.fingerprint(run_id)
            there = self._record.runs.get(run_id)
            is_known = there is not None and there.complete != "" and there.complete == fingerprint
            self._mark(run_id, now, Urgency.RECHECK if is_known else None)
        self._scanner.set_state(self._ledger.ended(), self._ledger.resting())
        self._relay.offer([one for one in happened if self._is_chosen(one.run_id)], ids)

    def _take_over(self, earlier: record.RootRecord) -> None:
        """Go on with what an earlier watch remembered."""
        self._record.runs = earlier.runs
        for run_id, there in earlier.runs.items():
            if earlier.options != self._record.options:
                there.complete = ""
            if there.silence is not None and (silence := Silence.read(there.silence)) is not None:
                self._stalls.remember(run_id, silence)

    def _watch_files(self) -> str:
        """Start events where they come; returns why not, otherwise."""
        settings = self._settings
        self._events, why = choose(settings.root, settings.poll_s, lambda run_id: self._inbox.put(_Event(run_id)))
        self._interval_s = _SAFETY_S if self._events is not None else settings.poll_s or POLL_S
        return why

    def _close(self) -> None:
        """End what is under way, and keep what was accepted."""
        if self._events is not None:
            self._events.stop()
        for lane in list(self._busy.values()):
            lane.stop()
        deadline_s = time.monotonic() + _END_S
        while self._busy and (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(Empty):
                message = self._inbox.get(timeout=left_s)
                if isinstance(message, _Done):
                    self._take_done(message, time.monotonic())
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for run_id in list(self._lanes):
            self._close_lane(run_id)
        if not self.is_stuck():
            self._sink.close()

    # The loop.

    def _loop(self) -> None:
        now = time.monotonic()
        scan_s, look_s, save_s, tidy_s = now + self._interval_s, now, now + _SAVE_S, now + _TIDY_S
        while self._ended_by is None and self._fatal is None:
            now = time.monotonic()
            self._schedule.retry(now)
            self._dispatch(now)
            wakes = [scan_s, look_s, now + self._schedule.due_s(now)]
            wakes += [self._touched_s + _GATHER_S] if self._touched else []
            wakes += [save_s] if self._has_unsaved else []
            wakes += [now + 1.0] if self._busy and self._schedule.pending() else []
            self._receive(max(0.0, min(wakes) - now))
            now = time.monotonic()
            try:
                if self._touched and (now >= self._touched_s + _GATHER_S or now >= look_s):  # none is judged unheard
                    touched, self._touched = self._touched, set()
                    self._take_in(touched, now)
                if now >= scan_s:
                    scan_s = now + self._interval_s
                    self._scan(now)
                if now >= look_s:
                    look_s = now + min(self._stalls.interval_s, self._interval_s)
                    self._look(now)
            except OSError as error:  # storage that fails: it is looked at again in a while
                self._journal.unreadable(self._unreadable() | {"root": str(error)})
            if now >= save_s:
                self._lock.beat()
                self._save()
                save_s = now + _SAVE_S
            if now >= tidy_s:
                self._tidy(now)
                self._renew(now)
                tidy_s = now + _TIDY_S
            slow = self._schedule.overdue(now)
            if slow is not None and slow in self._busy:
                self._busy[slow].stop()

    def _receive(self, timeout_s: float) -> None:
        """Wait for what comes in, and take all of it."""
        try:
            message = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
        except Empty:
            return
        while True:
            now = time.monotonic()
            if isinstance(message, _Event):
                self._trust.hear(message.run_id)
                if not self._touched:
                    self._touched_s = now
                self._touched.add(message.run_id)
            elif isinstance(message, _Signal):
                self._ended_by = message.number
            else:
                self._take_done(message, now)
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return

    def _scan(self, now: float) -> None:
        changed = self._scanner.scan()
        for run_id in self._scanner.late:
            if run_id not in self._busy:
                self._close_lane(run_id)  # its connection believes that nothing comes any more
        for run_id in sorted(self._scanner.late):
            self._offer(self._ledger.reread(run_id))
        self._scanner.late.clear()
        self._journal.unreadable(self._unreadable())
        if self._events is not None and not (self._trust.compare(changed) and self._events.is_alive()):
            self._events.stop()
            self._events = None
            self._interval_s = self._settings.poll_s or POLL_S
            self._journal.say(
                "polling",
                f"changes came without an event: looking every {self._interval_s:g} s from now on",
                level="warn",
            )
        # What was away for a moment when the small tables were read is there again.
        changed |= self._scanner.readable() - self._ledger.runs.keys()
        self._take_in(changed, now)

    def _unreadable(self) -> dict[str, str]:
        return {run_id or "root": why for run_id, why in self._scanner.unreadable.items()}

    def _take_in(self, changed: Collection[str], now: float) -> None:
        """Read the small tables of runs that changed, and let them be synced."""
        if not changed or not self._settings.root.is_dir():  # away, which is not the same as empty
            return
        before = set(self._ledger.runs)
        happened = self._ledger.refresh(set(changed) - {ROOT})
        for run_id in changed:
            if run_id in self._ledger.runs:
                self._note_written(run_id)
                self._mark(run_id, now)
        if ROOT in changed:  # evaluations of whichever run: looking is cheap where there is nothing
            for run_id in self._ledger.runs:
                self._mark(run_id, now, Urgency.RECHECK)
        gone = before - self._ledger.runs.keys()
        for run_id in gone:
            self._schedule.forget(run_id)
            self._stalls.forget(run_id)
            self._record.runs.pop(run_id, None)
            self._journal.forget(run_id)
            if run_id not in self._busy:
                self._close_lane(run_id)
        self._relay.forget(gone)
        self._scanner.set_state(self._ledger.ended(), self._ledger.resting())
        self._offer(happened, [run_id for run_id in changed if run_id in self._ledger.runs])
        for where, why in self._ledger.damages().items():
            if where not in self._said_damages:
                self._said_damages.add(where)
                self._journal.say("damaged", f"damaged: {where}: {why}", level="error", where=where, reason=why)

    def _note_written(self, run_id: str) -> None:
        """Let a change count as progress when the run itself has written more."""
        if self._ledger.runs[run_id].is_open and self._is_chosen(run_id):
            self._stalls.written(run_id, self._ledger.written(run_id))

    def _offer(self, happened: list[Happening], run_ids: Collection[str] = ()) -> None:
        chosen = [one for one in happened if self._is_chosen(one.run_id)]
        self._relay.offer(chosen, [run_id for run_id in run_ids if self._is_chosen(run_id)])
        for one in chosen:
            if self._journal.is_new(one.key) and _age_s(one.time) < _FRESH_S:
                self._journal.happened(one)

    def _look(self, now: float) -> None:
        """Judge the silence of the runs that have not ended."""
        for run_id, run in self._ledger.runs.items():
            if not run.is_open or not self._is_chosen(run_id):
                self._stalls.forget(run_id)
                self._remember(run_id, None)
                continue
            if not self._stalls.needs_look(run_id):
                continue
            verdict = self._stalls.look(run_id, self._ledger.sign(run_id))
            if verdict is not None:
                happening = of_verdict(run, verdict)
                self._mark(run_id, now)
                self._offer([happening], [run_id])
                self._remember(run_id, Silence.of(verdict))

    def _remember(self, run_id: str, silence: Silence | None) -> None:
        """Write down whether a run is silent: the next watch begins with that."""
        there = self._record.runs.get(run_id)
        if silence is not None or (there is not None and there.silence is not None):
            self._record.of_run(run_id).silence = None if silence is None else silence.content()
            self._save(force=True)

    # Syncing.

    def _is_chosen(self, run_id: str) -> bool:
        return self._settings.pattern is None or fnmatchcase(run_id, self._settings.pattern)

    def _mark(self, run_id: str, now: float, urgency: Urgency | None = None) -> None:
        if not self._is_chosen(run_id):
            return
        run = self._ledger.runs[run_id]
        if urgency is None:
            is_live = run.is_open and self._stalls.status(run_id) == "running"
            urgency = Urgency.LIVE if is_live else Urgency.NEWS
        is_small = self._scanner.size_bytes(run_id) < _SMALL_BYTES
        self._schedule.mark(run_id, urgency, now, run.parents, is_small=is_small)
        if urgency != Urgency.RECHECK and run_id in self._record.runs:
            self._record.runs[run_id].complete = ""

    def _dispatch(self, now: float) -> None:
        """Start syncs for which there is room."""
        if now < self._refused_until_s:
            return
        while run_ids := self._schedule.take(now):
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            kept = self._lanes.pop(run_ids[0], None) if len(run_ids) == 1 else None
            lane = _Lane(run_ids, kept.con if kept is not None else None)
            lane.fingerprints = {run_id: self._scanner.fingerprint(run_id) for run_id in run_ids}
            for run_id in run_ids:
                self._busy[run_id] = lane
            thread = threading.Thread(target=self._sync, args=(lane,), name=f"llmtrack-run-{run_ids[0]}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _sync(self, lane: _Lane) -> None:
        """Sync what a lane is for; the work of a thread of its own."""
        began_s = time.monotonic()
        outcome, error = once.Outcome(), None
        try:
            outcome = self._try_sync(lane)
        except Exception as raised:  # noqa: BLE001 - the end of a thread: whatever it is, it concerns these runs alone
            error = raised
        self._inbox.put(_Done(lane, outcome, error, time.monotonic() - began_s))

    def _try_sync(self, lane: _Lane) -> once.Outcome:
        settings = self._settings
        patience = self._patience.fork()
        with lane.stop.calling(patience.stop), self._opening:
            if not self._is_open:  # several threads would open it several times
                try:
                    patience.call(self._sink.open)
                except SinkError as error:
                    return once.Outcome(stopped_by=None if lane.stop else error)
                self._is_open = True
        if lane.con is None:
            lane.con = connect(
                settings.root, runs=lane.run_ids, stalled_after_s=settings.stalled_s, lost_after_s=settings.lost_s
            )
            lane.con.execute(f"SET threads = {_THREADS}")
        job = once.Job(
            settings.root,
            lane.con,
            self._sink,
            settings.state,
            settings.options,
            settings.timeout_s,
            stop=lane.stop,
            states={run_id: state for run_id in lane.run_ids if (state := self._stalls.status(run_id)) != "running"},
            patience=self._patience,
        )
        return once.sync(job, self._journal, set(lane.run_ids))

    def _take_done(self, done: _Done, now: float) -> None:
        """Take account of what became of a sync."""
        lane, outcome = done.lane, done.outcome
        lane.used_s = now
        for run_id in lane.run_ids:
            del self._busy[run_id]
        reports = {report.run_id: report for report in outcome.reports}
        for run_id in lane.run_ids:
            report = reports.get(run_id)
            if report is not None and not report.error:
                self._succeed(lane, report, now, done.took_s)
            elif not (self._settings.root / f"run_id={run_id}").exists():  # deleted meanwhile
                self._schedule.done(run_id, now)
            elif done.error is not None or outcome.stopped_by is not None or lane.stop or report is not None:
                self._fail(lane, run_id, report, now, done)
            else:  # nothing of it can be read yet, or nothing any more
                self._schedule.done(run_id, now)
        if outcome.stopped_by is not None:
            self._take_outage(outcome.stopped_by, now)
        if isinstance(done.error, UsageError) and not self._had_success and self._is_there(lane):
            self._fatal = done.error
        run = self._ledger.runs.get(lane.run_ids[0])
        keep = len(lane.run_ids) == 1 and run is not None and run.is_open and done.error is None
        self._close_lane(lane.run_ids[0])
        if keep and self._ended_by is None:
            self._lanes[lane.run_ids[0]] = lane
        elif lane.con is not None:
            lane.con.close()
        self._has_unsaved = True

    def _succeed(self, lane: _Lane, report: Report, now: float, took_s: float) -> None:
        self._had_success = True
        self._schedule.done(report.run_id, now)
        self._journal.succeeded(report.run_id)
        if self._stalls.status(report.run_id) == "lost" and report.status == "running":
            # By the times in the log it is not lost yet: its clock is before ours.
            self._mark(report.run_id, now)
            self._schedule.hold(report.run_id, now + _CLOCKS_S)
        there = self._record.of_run(report.run_id)
        there.complete = lane.fingerprints[report.run_id]
        there.last_success, there.last_error, there.url = record.now(), "", report.url
        if points := sum(report.sent.values()):
            self._has_sent, self._sent_s = True, now
            there.points_sent += points
            there.points_per_s = points / max(took_s, 1e-3)

    def _fail(self, lane: _Lane, run_id: str, report: Report | None, now: float, done: _Done) -> None:
        there = self._record.of_run(run_id)
        there.complete = ""
        if report is not None:
            there.points_sent += sum(report.sent.values())
        if lane.stop:
            self._schedule.stopped(run_id, now)
            return
        if done.outcome.stopped_by is not None:
            self._schedule.postpone(run_id, now, _OUTAGE_S)
            error = str(done.outcome.stopped_by)
        else:
            self._schedule.failed(run_id, now, for_good=report is not None and report.is_refused)
            error = report.error if report is not None else _in_words(done.error)
            if len(lane.run_ids) > 1:
                return  # whatever was wrong with one of several: it is said when it fails alone
            if run_id in self._ledger.runs:
                self._journal.failed(run_id, error)
        there.last_error, there.error_time = error.partition("\n")[0], record.now()

    def _take_outage(self, error: SinkError, now: float) -> None:
        """The tracker did not answer for the whole time-out, or does not let us in."""
        if isinstance(error, RetryableSinkError):
            self._journal.waiting(error, _OUTAGE_S)
        elif not self._had_success:
            self._fatal = error
        else:
            self._refused_until_s = now + _REFUSED_S
            text = str(error).replace("\n", " ")
            self._journal.say("refused", f"{text}; next try in {_REFUSED_S:.0f} s", level="error", error=text)

    def _is_there(self, lane: _Lane) -> bool:
        return any(run_id in self._ledger.runs for run_id in lane.run_ids)

    def _close_lane(self, run_id: str) -> None:
        lane = self._lanes.pop(run_id, None)
        if lane is not None and lane.con is not None:
            lane.con.close()

    def _tidy(self, now: float) -> None:
        """Close connections that nobody used for long, and the oldest where there are too many."""
        by_age = sorted(self._lanes.values(), key=lambda lane: lane.used_s)
        too_many = max(0, len(by_age) - _OPEN_RUNS)
        for number, lane in enumerate(by_age):
            if number < too_many or now - lane.used_s > _IDLE_S:
                self._close_lane(lane.run_ids[0])

    def _renew(self, now: float) -> None:
        """Give back the memory of the tracker's library once there is nothing to send."""
        if not self._has_sent or self._busy or self._schedule.pending() or now - self._sent_s < _REST_S:
            return
        used = renew.used_bytes()
        if used < (_MANY_BYTES if self._lanes else _FEW_BYTES) or self._relay.waiting() or not _is_main():
            return
        self._save(force=True)
        self._journal.say("renewed", f"at rest, and beginning anew for the sake of memory ({used >> 20} MB)", used=used)
        if self._events is not None:
            self._events.stop()
        renew.renew(record.record_path(self._folder, self._settings.root).with_suffix(".renew"), self._journal.reports)
        self._has_sent = False  # it was not possible: not again and again
        self._watch_files()

    def _save(self, *, force: bool = False) -> None:
        """Write down what is remembered."""
        if not (self._has_unsaved or force):
            return
        try:
            self._record.save(record.record_path(self._folder, self._settings.root))
            self._has_unsaved = False
            self._journal.recovered("state")
        except OSError as error:
            self._journal.failed("state", f"{self._folder} cannot be written: {error.strerror}")


@contextmanager
def _signals(inbox: SimpleQueue[_Event | _Signal | _Done]) -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP end the watch, and the second one the process, at once."""
    if not _is_main():
        yield
        return
    seen: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if seen:
            os._exit(EXIT_INTERRUPTED)  # without a word: threads may hold the locks of what would say it
        seen.append(number)
        inbox.put(_Signal(number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup; otherwise the terminal was closed
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    renew.welcome()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _age_s(time_: dt.datetime) -> float:
    return (dt.datetime.now(dt.UTC) - time_).total_seconds()


def _in_words(error: BaseException | None) -> str:
    return str(error) if isinstance(error, LlmtrackError) else f"{type(error).__name__}: {error}"


def watch(
    settings: Settings, sink: Sink, receivers: Collection[Receiver], *, as_json: bool, quiet: bool, verbose: bool
) -> int:
    """Watch until a signal comes, say what was done, and return the exit status.

    Raises:
        UsageError: The root or the state folder cannot be used, or another sync is at work.
    """
    style: Style = "json" if as_json else "quiet" if quiet else "lines"
    with Journal(style, verbose=verbose, tracker=sink.tracker) as journal:
        service = Service(settings, sink, receivers, journal)
        try:
            number = service.run()
        except SinkError as error:
            say(f"error: {error}")
            return EXIT_USAGE
    reports = service.reports
    worth = [report for report in reports if report.sent or report.error or report.held or report.deleted]
    outcome = once.Outcome(worth)
    if as_json:
        for row in show.rows(outcome):
            click.echo(json.dumps({"event": "summary", **{key: plain(value) for key, value in row.items()}}))
    elif not worth and not quiet:
        click.echo(f"{len(reports)} run{'s' * (len(reports) != 1)}: there was nothing to send")
    elif not quiet:
        how = f"each sync verified as --verify {settings.options.verify} says"
        click.echo(show.summary(outcome, None, sink.look, would=False, verified=how))
    status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_OK
    if service.is_stuck():  # the end of the interpreter would pull the ground away from under its thread
        sys.stdout.flush()
        os._exit(status)
    return status
