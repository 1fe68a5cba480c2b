"""Replays runs of a root into a tracker, once; one run's failure is its own.

`sync` may be called again and again with one connection and one open sink: then it reads only what is new.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from llmtrack.query.read.log import Log
from llmtrack.query.sql.views import refresh
from llmtrack.writer.errors import LlmtrackError, RejectedError, RetryableSinkError, SinkError, UsageError

from . import story
from .kinds import CANONICAL
from .replay import classify, cursor, describe
from .replay.classify import LoggedRun
from .replay.intact import Unread, set_damaged_aside, unread
from .replay.jobs import work_off
from .replay.patience import Patience
from .replay.replay import Options, Progress, Replay, Report
from .sink import Sink, TrackerRun

if TYPE_CHECKING:
    import duckdb


_INTERRUPTED_S: Final = 3.0  # how long a request under way is waited for after Ctrl-C


class Listener(Protocol):
    """Hears of the runs as they are replayed, several at once, and of what the tracker makes us wait for."""

    def started(self, run: LoggedRun, points: int) -> Progress:
        """Hear that a run is next and how many points may have to be sent, and say who hears of it from now on."""
        ...

    def ended(self, report: Report) -> None:
        """Hear what was done for the run."""
        ...

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear that the tracker does not answer and is tried again after a pause."""
        ...


class Stop:
    """Ends a sync from outside: what was accepted is in the cursors, and the next one goes on there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], None]] = []
        self._is_set = False

    def __call__(self) -> None:
        """Begin nothing more, and wait for no tracker; a signal handler's work is to start a thread that calls this."""
        with self._lock:
            self._is_set = True
            hooks = list(self._hooks)
        for hook in hooks:
            hook()

    def __bool__(self) -> bool:
        return self._is_set

    @contextmanager
    def calling(self, hook: Callable[[], None]) -> Iterator[None]:
        """Call a function when the end comes within this context, or came before."""
        with self._lock:
            self._hooks.append(hook)
            is_set = self._is_set
        if is_set:
            hook()
        try:
            yield
        finally:
            with self._lock:
                self._hooks.remove(hook)


@dataclass(frozen=True)
class Job:
    """One log, one tracker, and how the one is to be brought into the other.

    Attributes:
        root: The folder of the runs.
        con: From `llmtrack.query.connect` of it.
        sink: Closed or open; it is left open.
        state: The folder of the cursors.
        options: What to send.
        timeout_s: Seconds without any success after which the tracker counts as not reachable.
        jobs: How many runs at once.
        stop: Called, it ends whatever is under way, and what is begun later.
        states: What a watcher knows better than the log by itself: `LoggedRun.state` by run id.
        patience: Shared by jobs that ask one tracker at a time; None: this one is alone.
    """

    root: Path
    con: duckdb.DuckDBPyConnection
    sink: Sink
    state: Path
    options: Options
    timeout_s: float
    jobs: int = 1
    stop: Stop = field(default_factory=Stop)
    states: Mapping[str, str] = field(default_factory=dict)
    patience: Patience | None = None

    def cursor_path(self, run: LoggedRun) -> Path:
        """Return where the cursor of a run lies."""
        return cursor.cursor_path(self.state, self.sink.name, self.sink.tracker, run.run_id)


@dataclass
class Outcome:
    """What one sync did.

    Attributes:
        reports: Of every run that was looked at.
        stopped_by: What ended the sync before all runs were looked at: no tracker, or not for us. After `Job.stop` it
            is None although runs may be missing.
        held: What of the log belongs to no run as yet, in words; empty when there is nothing.
    """

    reports: list[Report] = field(default_factory=list)
    stopped_by: SinkError | None = None
    held: str = ""


def sync(job: Job, listener: Listener, only: Collection[str] | None = None) -> Outcome:
    """Bring what is new in the log into the tracker; called again with the same job it reads only that.

    Args:
        job: From where to where; the connection is kept open between calls, and so is the sink.
        listener: Hears of it all.
        only: Ids of the runs in which something may be new, as a watcher knows; None: look at all.

    Raises:
        UsageError: The state folder cannot be used.
    """
    there = set(Log(job.root).run_ids())
    refresh(job.con, None if only is None else there.intersection(only))
    runs, known = select(job, None, only)
    return replay_all(job, runs, known, listener)


def select(
    job: Job, pattern: str | None, only: Collection[str] | None = None
) -> tuple[list[LoggedRun], dict[str, LoggedRun]]:
    """Return the runs to replay, parents first, and all runs by id, those others without their points.

    Sealed parts of runs that have something to send are compared with their checksums, and left out if they fail.

    Args:
        job: From where to where.
        pattern: Shell pattern of run ids; None for all.
        only: Ids of runs; None for all.
    """

    def read() -> tuple[list[LoggedRun], dict[str, LoggedRun]]:
        runs = classify.read_runs(job.con, only)
        chosen = [
            replace(run, state=job.states.get(run.run_id, run.state))
            for run in runs
            if (pattern is None or fnmatchcase(run.run_id, pattern)) and (only is None or run.run_id in only)
        ]
        return chosen, {run.run_id: run for run in runs}

    import duckdb

    try:
        chosen, known = read()
    except duckdb.Error:
        if not set_damaged_aside(job.con, job.root):
            raise
        return read()
    if set_damaged_aside(job.con, job.root, [run.run_id for run in chosen if _has_news(job, run)]):
        return read()
    return chosen, known


def _pending(job: Job, run: LoggedRun) -> int:
    """Return how many points may have to be sent, by the cursor alone."""
    held = cursor.load(job.cursor_path(run)).runs.values()
    return sum(
        max(0, stretch.points - max((t.marks[s].points for t in held if t.kind == kind and s in t.marks), default=0))
        for kind, part in run.parts.items()
        if not job.options.leaves_out(kind)
        for s, stretch in part.items()
    )


def _has_news(job: Job, run: LoggedRun) -> bool:
    """Return whether the cursor says that the tracker lacks something, or cannot tell."""
    held = cursor.load(job.cursor_path(run)).runs.values()
    return not all(
        any(there.kind == kind and there.newest is not None and stretch.is_held(there.marks.get(s)) for there in held)
        for kind, part in run.parts.items()
        if not job.options.leaves_out(kind)
        for s, stretch in part.items()
    )


def plan(job: Job, runs: list[LoggedRun]) -> Outcome:
    """Return what would be sent, as far as the log and the cursors tell: no tracker is asked, nothing is written."""
    outcome = Outcome()
    for run in runs:
        report = Report(run.run_id, run.project, run.status, {kind: run.points(kind) for kind in run.parts})
        held = cursor.load(job.cursor_path(run)).runs.values()
        for kind, part in run.parts.items():
            if job.options.leaves_out(kind):
                report.held[kind] = describe.held_reason(run, kind)
                continue
            for segment, stretch in part.items():
                marks = [there.marks[segment] for there in held if there.kind == kind and segment in there.marks]
                counted = [
                    mark.points
                    for mark in marks
                    if classify.agrees(job.con, run.run_id, kind, {segment: stretch}, {segment: mark})
                ]
                report.sent[kind] = report.sent.get(kind, 0) + stretch.points - max(counted, default=0)
        outcome.reports.append(report)
    return outcome


def replay_all(job: Job, runs: list[LoggedRun], known: dict[str, LoggedRun], listener: Listener) -> Outcome:
    """Replay runs, several at once, and go on with the others when one fails.

    Args:
        job: From where to where.
        runs: Parents before their children.
        known: All runs of the root by id, to find parents that are not replayed themselves.
        listener: Hears of it all.

    Raises:
        UsageError: The state folder cannot be used.
    """
    outcome = Outcome()
    if not runs:
        return outcome  # and no database is made
    classify.bound_memory(job.con)
    shared = job.patience or Patience(job.timeout_s, listener.waiting, at_once=job.sink.lanes)
    patience = shared.fork()
    with job.stop.calling(patience.stop):
        try:
            patience.call(job.sink.open)
            there = _list_there(job, runs, known, patience)
        except SinkError as error:
            outcome.stopped_by = None if job.stop else error
            return outcome
        stories = story.read_stories(job.con)
        outcome.held = describe.held_evaluations(stories.unplaced)
        with _young_garbage_only():
            _Replays(job, listener, patience, stories=stories, there=there, outcome=outcome).execute(runs)
    return outcome


@contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Keep the collector off what is there already.

    A tracker's library is a million objects, and each pass over them costs more than what is being done: with MLflow,
    reading back takes 9 microseconds per value instead of 27, and sending 58 instead of 88.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Replays:
    """Replays runs, as many at once as the job says."""

    def __init__(
        self,
        job: Job,
        listener: Listener,
        patience: Patience,
        *,
        stories: story.Stories,
        there: Mapping[str, list[TrackerRun] | RejectedError],
        outcome: Outcome,
    ) -> None:
        self._job = job
        self._listener = listener
        self._patience = patience
        self._stories = stories
        self._there = there
        self._refs = _canonical_refs(there)
        self._newer = [file for file in unread(job.con) if file.is_newer]
        self._outcome = outcome
        self._lock = threading.Lock()

    def execute(self, runs: Sequence[LoggedRun]) -> None:
        """Do it all; reports are in the order of the runs.

        Raises:
            UsageError: The state folder cannot be used.
        """
        place = {run.run_id: number for number, run in enumerate(runs)}
        try:
            work_off(runs, self._job.jobs, self._replay, end=self._patience.stop, wait_s=_INTERRUPTED_S)
        finally:
            self._outcome.reports.sort(key=lambda report: place[report.run_id])

    def _replay(self, run: LoggedRun) -> bool:
        """Replay one run, and return whether to go on with others."""
        if self._job.stop:
            return False
        report = Report(run.run_id, run.project, run.status, {kind: run.points(kind) for kind in run.parts})
        progress = self._listener.started(run, _pending(self._job, run))
        stop: SinkError | None = None
        try:
            self._try(run, report, progress)
        except UsageError:
            raise
        except RetryableSinkError as error:
            report.error, stop = "the tracker does not answer any more", error
            if self._job.stop:
                report.error = "stopped before it was done"
        except RejectedError as error:
            report.error, stop = str(error), error if error.run_id is None else None
            report.is_refused = True
        except Exception as error:  # noqa: BLE001 - one run's failure is its own, whatever it is
            report.error = str(error) if isinstance(error, LlmtrackError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self._refs[run.run_id] = report.ref or self._refs.get(run.run_id, "")
            self._outcome.reports.append(report)
            if stop is not None and not self._job.stop:
                self._outcome.stopped_by = self._outcome.stopped_by or stop
        if stop is not None:
            self._patience.stop()
        self._listener.ended(report)
        return stop is None

    def _try(self, run: LoggedRun, report: Report, progress: Progress) -> None:
        there = self._there[run.project]
        if isinstance(there, RejectedError):
            raise there
        newer = [file for file in self._newer if file.run_id == run.run_id]
        if not run.segments and newer:
            raise _written_by_newer(newer)
        if not run.segments:
            raise LlmtrackError(
                "no start record of this run can be read, so neither its project nor its path is known",
                hint=f"llmtrack verify --root {self._job.root}",
            )
        path = self._job.cursor_path(run)
        with self._lock:
            parent = self._refs.get(run.parent_run or "") or None
        with cursor.lock(path) as is_ours, closing(self._job.con.cursor()) as con:
            if not is_ours:
                raise LlmtrackError(
                    "another llmtrack-sync on this host is replaying this run", hint="wait for it to end"
                )
            replay = Replay(
                con,
                self._job.sink,
                run,
                self._stories.of_run(run.run_id),
                cursor.load(path),
                report=report,
                options=self._job.options,
                patience=self._patience.fork(),
                progress=progress,
                parent=parent,
            )
            replay.execute([found for found in there if found.run_id == run.run_id])
        if newer:
            raise _written_by_newer(newer)


def _written_by_newer(files: Sequence[Unread]) -> LlmtrackError:
    more = f" and {len(files) - 1} other files" if len(files) > 1 else ""
    return LlmtrackError(
        f"a newer llmtrack wrote {files[0].path}{more} ({files[0].reason}): what is in there was not sent",
        hint="upgrade llmtrack on this host, then sync again: pip install --upgrade 'llmtrack-log[mlflow]'",
    )


def _canonical_refs(there: Mapping[str, list[TrackerRun] | RejectedError]) -> dict[str, str]:
    refs: dict[str, str] = {}
    for found in there.values():
        if not isinstance(found, RejectedError):
            refs |= {r.run_id: r.ref for r in sorted(found, key=lambda r: r.generation) if r.kind == CANONICAL}
    return refs


def _list_there(
    job: Job, runs: list[LoggedRun], known: dict[str, LoggedRun], patience: Patience
) -> dict[str, list[TrackerRun] | RejectedError]:
    """Return what the tracker has for these runs and their parents, by project, or why it does not tell."""
    projects: dict[str, set[str]] = {}
    for run in runs:
        projects.setdefault(run.project, set()).add(run.run_id)
        if run.parent_run in known:
            projects.setdefault(known[run.parent_run].project, set()).add(run.parent_run)
    there: dict[str, list[TrackerRun] | RejectedError] = {}
    for project, run_ids in projects.items():
        try:
            there[project] = patience.call(lambda p=project, r=run_ids: job.sink.list_runs(p, sorted(r)))  # type: ignore[misc]
        except RejectedError as error:
            if error.run_id is None:
                raise
            there[project] = error
    return there
