"""How a sync looks to a person: bars on a terminal, plain lines elsewhere, one line per run at the end."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

from llmtrack.writer.errors import RetryableSinkError

from .kinds import CANONICAL, PROVISIONAL, SUPERSEDED
from .once import Outcome
from .replay.classify import LoggedRun
from .replay.replay import Report

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

_EVERY_S: Final = 10.0  # between plain lines
_WORDS: Final = {CANONICAL: "settled", PROVISIONAL: "provisional", SUPERSEDED: "superseded"}


class Console:
    """Tells on stderr what is going on; a context manager.

    Args:
        quiet: Say nothing but errors.
        verbose: Say also when a run is done, and every wait.
        tell_errors: Say why a run is incomplete, because no summary will.
        tracker: Address of the tracker, without credentials.
        runs: How many there are.
    """

    def __init__(self, *, quiet: bool, verbose: bool, tell_errors: bool, tracker: str, runs: int = 1) -> None:
        self._tell_errors = tell_errors
        self._quiet = quiet
        self._verbose = verbose
        self._tracker = tracker
        self._runs = runs
        self._bars: Bars | None = None
        self._opening: Any = None
        self._lock = threading.Lock()
        self._under_way: dict[str, _Line] = {}
        self._done = self._sent = 0
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Terminal(stderr=True), transient=True)
            self._bars.start()
            self._opening = self._bars.add_task(f"opening {self._tracker}", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def started(self, run: LoggedRun, points: int) -> _Line:
        """Hear that a run is next."""
        with self._lock:
            bar = None
            if self._bars is not None:
                self._bars.update(self._opening, visible=False)
                bar = self._bars.add_task(run.run_id, total=points or None)
            if not self._under_way:
                self._told = time.monotonic()
            line = self._under_way[run.run_id] = _Line(self, run.run_id, points, bar)
            return line

    def heard(self, line: _Line, sent: int, read: int) -> None:
        """Hear what became of one run meanwhile."""
        with self._lock:
            line.sent_points += sent
            line.read_back += read
            self._sent += sent
            if self._bars is not None:
                self._bars.advance(line.bar, sent)
                if read:
                    self._bars.update(line.bar, description=f"{line.run_id}: reading back")
                return
            others = f"{self._done} of {self._runs} runs done, " if self._runs > 1 else ""
            rate = self._sent / max(time.monotonic() - self._began, 1e-9)
            self._tell_now_and_then(
                f"{others}run {line.run_id}: "
                + (f"{line.read_back} values read back" if read else f"{line.sent_points} of {line.total} points")
                + (f" ({rate:.0f} points/s)" if self._sent else "")
            )

    def ended(self, report: Report) -> None:
        """Hear what was done for the run."""
        with self._lock:
            self._done += 1
            line = self._under_way.pop(report.run_id)
            if self._bars is not None:
                self._bars.remove_task(line.bar)
            if report.error and self._tell_errors:
                self._say(f"run {report.run_id}: {report.error}", always=True)
            elif self._verbose:
                self._say(f"run {report.run_id}: done in {time.monotonic() - line.began:.1f} s")

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear that the tracker does not answer."""
        with self._lock:
            if self._verbose:
                self._say(f"{error}; next try in {pause_s:.1f} s")
            else:
                self._tell_now_and_then(f"{self._tracker} does not answer, next try in {pause_s:.0f} s (-v says why)")

    def _tell_now_and_then(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _EVERY_S:
            self._told = now
            self._say(text)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self._quiet and not always:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)


class _Line:
    """One run under way: a bar, or what a plain line says."""

    def __init__(self, console: Console, run_id: str, total: int, bar: Any) -> None:
        self._console = console
        self.run_id = run_id
        self.total = total
        self.bar = bar
        self.sent_points = 0
        self.read_back = 0
        self.began = time.monotonic()

    def sent(self, points: int) -> None:
        """Hear that so many more points were accepted."""
        self._console.heard(self, points, 0)

    def read(self, records: int) -> None:
        """Hear that so many more records were read back."""
        self._console.heard(self, 0, records)


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


def summary(outcome: Outcome, seconds: float | None, look: str, *, would: bool, verified: str) -> str:
    """Return what a sync comes to.

    Args:
        outcome: What it did.
        seconds: How long that took; None: of one that goes on it says nothing.
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
        took = "" if seconds is None else f" in {seconds:.1f} s ({points / seconds:.0f} points/s)"
        lines.append(f"{of}: {points} points sent{took}, {verified}")
    elif not outcome.stopped_by and not any(report.error for report in outcome.reports):
        took = "" if seconds is None else f" ({seconds:.1f} s)"
        lines.append(f"{of}: nothing to send, the tracker has everything{took}")
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
