"""Replays all runs of a root into a tracker, once; one run's failure is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmtrack.writer.errors import LlmtrackError, RejectedError, RetryableSinkError, SinkError, UsageError

from . import classify, cursor, describe
from .classify import LoggedRun
from .patience import Patience
from .replay import Options, Progress, Replay, Report
from .sink import Sink, TrackerRun

if TYPE_CHECKING:
    import duckdb


class Listener(Progress, Protocol):
    """Hears of the runs as they are replayed, and of what the tracker makes us wait for."""

    def started(self, run: LoggedRun, points: int) -> None:
        """Hear that a run is next, and how many points may have to be sent."""
        ...

    def ended(self, report: Report) -> None:
        """Hear what was done for the run."""
        ...

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear that the tracker does not answer and is tried again after a pause."""
        ...


@dataclass
class Outcome:
    """What one sync did.

    Attributes:
        reports: Of every run that was looked at.
        stopped_by: What ended the sync before all runs were looked at: no tracker, or not for us.
    """

    reports: list[Report] = field(default_factory=list)
    stopped_by: SinkError | None = None


def select(con: duckdb.DuckDBPyConnection, pattern: str | None) -> tuple[list[LoggedRun], dict[str, LoggedRun]]:
    """Return the runs to replay, parents first, and all runs by id.

    Args:
        con: From `llmtrack.query.connect`.
        pattern: Shell pattern of run ids; None for all.

    Raises:
        UsageError: No run matches.
    """
    runs = classify.read_runs(con)
    chosen = [run for run in runs if pattern is None or fnmatchcase(run.run_id, pattern)]
    if pattern is not None and not chosen:
        raise UsageError(f"no run matches {pattern!r}", hint="llmtrack ls shows the runs of a root")
    return chosen, {run.run_id: run for run in runs}


def plan(runs: list[LoggedRun], sink: Sink, state: Path, con: duckdb.DuckDBPyConnection, options: Options) -> Outcome:
    """Return what would be sent, as far as the log and the cursors tell: no tracker is asked, nothing is written."""
    outcome = Outcome()
    for run in runs:
        report = Report(run.run_id, run.project, run.status, {kind: run.points(kind) for kind in run.parts})
        held = cursor.load(cursor.cursor_path(state, sink.name, sink.tracker, run.run_id)).runs.values()
        for kind, part in run.parts.items():
            if options.leaves_out(kind):
                report.held[kind] = describe.held_reason(run, kind)
                continue
            for segment, stretch in part.items():
                marks = (there.marks.get(segment) for there in held if there.kind == kind)
                done = max(
                    (
                        mark.points
                        for mark in marks
                        if mark is not None
                        and classify.agrees(con, run.run_id, kind, {segment: stretch}, {segment: mark})
                    ),
                    default=0,
                )
                report.sent[kind] = report.sent.get(kind, 0) + stretch.points - done
        outcome.reports.append(report)
    return outcome


def replay_all(
    con: duckdb.DuckDBPyConnection,
    runs: list[LoggedRun],
    known: dict[str, LoggedRun],
    sink: Sink,
    *,
    state: Path,
    options: Options,
    timeout_s: float,
    listener: Listener,
) -> Outcome:
    """Replay runs, and go on to the next one when one fails.

    Args:
        con: From `llmtrack.query.connect`.
        runs: Parents before their children.
        known: All runs of the root by id, to find parents that are not replayed themselves.
        sink: Closed or open; it is left open.
        state: The folder of the cursors.
        options: What to send.
        timeout_s: Seconds without any success after which the tracker counts as not reachable.
        listener: Hears of it all.
    """
    outcome = Outcome()
    try:
        Patience(timeout_s, listener.waiting).call(sink.open)
        there = _list_there(sink, runs, known, lambda: Patience(timeout_s, listener.waiting))
    except SinkError as error:
        outcome.stopped_by = error
        return outcome
    refs: dict[str, str] = {
        run_id: max(canonical, key=lambda run: run.generation).ref
        for run_id, found in there.items()
        if (canonical := [run for run in found if run.segment is None])
    }
    classify.bound_memory(con)
    for run in runs:
        report = Report(run.run_id, run.project, run.status, {kind: run.points(kind) for kind in run.parts})
        listener.started(run, sum(n for kind, n in report.points.items() if not options.leaves_out(kind)))
        path = cursor.cursor_path(state, sink.name, sink.tracker, run.run_id)
        try:
            with cursor.lock(path) as is_ours:
                if not is_ours:
                    raise LlmtrackError(  # noqa: TRY301 - ends this run like any other reason
                        "another llmtrack-sync on this host is replaying this run", hint="wait for it to end"
                    )
                replay = Replay(
                    con,
                    sink,
                    run,
                    cursor.load(path),
                    options=options,
                    patience=Patience(timeout_s, listener.waiting),
                    progress=listener,
                    parent=refs.get(run.parent_run or ""),
                )
                report = replay.report
                replay.execute(there.get(run.run_id, []))
                refs[run.run_id] = report.ref
        except UsageError:
            raise  # the state folder: the same for every run
        except Exception as error:  # noqa: BLE001 - the end of the loop over runs: the others must not suffer
            report.error = _reason(error)
            outcome.reports.append(report)
            listener.ended(report)
            if isinstance(error, RetryableSinkError) or (isinstance(error, RejectedError) and error.run_id is None):
                outcome.stopped_by = error
                break
            continue
        outcome.reports.append(report)
        listener.ended(report)
    return outcome


def _list_there(
    sink: Sink, runs: list[LoggedRun], known: dict[str, LoggedRun], patience: Callable[[], Patience]
) -> dict[str, list[TrackerRun]]:
    """Return what the tracker has for these runs and their parents, asking once per project."""
    projects: dict[str, set[str]] = {}
    for run in runs:
        projects.setdefault(run.project, set()).add(run.run_id)
        if run.parent_run in known:
            projects.setdefault(known[run.parent_run].project, set()).add(run.parent_run)
    there: dict[str, list[TrackerRun]] = {}
    for project, run_ids in projects.items():
        for found in patience().call(lambda p=project, r=run_ids: sink.list_runs(p, sorted(r))):  # type: ignore[misc]
            there.setdefault(found.run_id, []).append(found)
    return there


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, LlmtrackError) else f"{type(error).__name__}: {error}"
