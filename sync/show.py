"""How a sync looks to a person: bars on a terminal, plain lines elsewhere, one line per run at the end."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

from llmtrack.writer.errors import RetryableSinkError

from .classify import LoggedRun
from .once import Outcome
from .replay import Report
from .sink import CANONICAL, PROVISIONAL, SUPERSEDED

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

_EVERY_S: Final = 10.0  # between plain lines about one run
_WORDS: Final = {CANONICAL: "settled", PROVISIONAL: "provisional", SUPERSEDED: "superseded"}


class Console:
    """Tells on stderr what is going on; a context manager.

    Args:
        quiet: Say nothing but errors.
        verbose: Say also when a run is done, and every wait.
        tell_errors: Say why a run is incomplete, because no summary will.
        tracker: Address of the tracker, without credentials.
    """

    def __init__(self, *, quiet: bool, verbose: bool, tell_errors: bool, tracker: str) -> None:
        self._tell_errors = tell_errors
        self._quiet = quiet
        self._verbose = verbose
        self._tracker = tracker
        self._bars: Bars | None = None
        self._bar: Any = None
        self._lock = threading.Lock()
        self._run = ""
        self._sent = self._read = self._total = 0
        self._began = self._told = 0.0

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Terminal(stderr=True), transient=True)
            self._bars.start()
            self._bar = self._bars.add_task(f"opening {self._tracker}", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def started(self, run: LoggedRun, points: int) -> None:
        """Hear that a run is next."""
        with self._lock:
            self._run, self._total, self._sent, self._read = run.run_id, points, 0, 0
            self._began = self._told = time.monotonic()
            if self._bars is not None:
                self._bars.remove_task(self._bar)
                self._bar = self._bars.add_task(run.run_id, total=points or None)

    def sent(self, points: int) -> None:
        """Hear that so many more points were accepted."""
        with self._lock:
            self._sent += points
            if self._bars is not None:
                self._bars.advance(self._bar, points)
            else:
                self._tell_now_and_then(f"{self._sent} of {self._total} points")

    def read(self, records: int) -> None:
        """Hear that so many more records were read back."""
        with self._lock:
            self._read += records
            if self._bars is not None:
                self._bars.update(self._bar, description=f"{self._run}: reading back")
            else:
                self._tell_now_and_then(f"{self._read} values read back")

    def ended(self, report: Report) -> None:
        """Hear what was done for the run."""
        if report.error and self._tell_errors:
            self._say(f"run {report.run_id}: {report.error}", always=True)
        elif self._verbose:
            self._say(f"run {report.run_id}: done in {time.monotonic() - self._began:.1f} s")

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear that the tracker does not answer."""
        if self._verbose:
            self._say(f"{error}; next try in {pause_s:.1f} s")
            return
        with self._lock:
            self._tell_now_and_then(f"{self._tracker} does not answer, next try in {pause_s:.0f} s (-v says why)")

    def _tell_now_and_then(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _EVERY_S:
            self._told = now
            self._say(f"run {self._run}: {text}" if self._run else text)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self._quiet and not always:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)


def describe(report: Report, *, would: bool = False) -> str:
    """Return one run's line, and its notes below it."""
    sent = {kind: number for kind, number in report.sent.items() if number}
    there = sum(number for kind, number in report.points.items() if kind not in report.held)
    if sent:
        parts = ", ".join(f"{number} {_WORDS.get(kind, kind)}" for kind, number in sent.items())
        text = f"{'would send' if would else 'sent'} {sum(sent.values())} points ({parts})"
    elif report.error:
        text = "sent nothing"
    else:
        text = f"nothing new, {there} points there"
    if report.deleted:
        text += f", {report.deleted} side run{'s' * (report.deleted > 1)} deleted"
    lines = [f"{report.run_id}  {report.status}  {text}" + (f"  {report.url}" if report.url else "")]
    lines += [f"    held back: {report.points[kind]} points ({why})" for kind, why in report.held.items()]
    lines += [f"    note: {note}" for note in report.notes]
    if report.error:
        lines.append("    INCOMPLETE: " + report.error.replace("\n", "\n    "))
    return "\n".join(lines)


def summary(outcome: Outcome, seconds: float, look: str, *, would: bool, verified: str) -> str:
    """Return what a sync comes to.

    Args:
        outcome: What it did.
        seconds: How long that took.
        look: How a person gets to see it.
        would: It was a dry run.
        verified: How sure it is, for people.
    """
    lines = [describe(report, would=would) for report in outcome.reports]
    points = sum(sum(report.sent.values()) for report in outcome.reports)
    runs = len(outcome.reports)
    of = f"{runs} run{'s' * (runs != 1)}"
    if would:
        lines.append(f"{of}: {points} points would be sent; nothing was contacted or written")
    elif points:
        lines.append(f"{of}: {points} points sent in {seconds:.1f} s ({points / seconds:.0f}/s), {verified}")
    elif not outcome.stopped_by and not any(report.error for report in outcome.reports):
        lines.append(f"{of}: nothing to send, the tracker has everything ({seconds:.1f} s)")
    if not would and outcome.reports:
        lines.append(f"look at it: {look}")
    return "\n".join(lines)


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the same as rows for ``--json``."""
    return [
        {
            "run_id": report.run_id,
            "project": report.project,
            "status": report.status,
            "points": sum(report.points.values()),
            "points_sent": sum(report.sent.values()),
            **{f"{_WORDS[kind]}_sent": report.sent.get(kind, 0) for kind in _WORDS},
            "points_held": sum(report.points.get(kind, 0) for kind in report.held),
            "held": "; ".join(report.held.values()),
            "side_runs_deleted": report.deleted,
            "tracker_run": report.ref,
            "url": report.url,
            "notes": report.notes,
            "error": report.error,
        }
        for report in outcome.reports
    ]
