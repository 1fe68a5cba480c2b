"""What a watch says while it goes on: bars and lines on a terminal, lines elsewhere, JSON lines for programs.

A run that trains is synced every second or so. Of that a line a minute is said, so that a month is not a log of
gigabytes; failures, outages and what happens to runs are said at once.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TextIO

from llmtrack.query.text.console import plain
from llmtrack.sync.replay.classify import LoggedRun
from llmtrack.sync.replay.replay import Report
from llmtrack.writer.errors import RetryableSinkError

from . import record
from .notify import Happening

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Style = Literal["lines", "json", "quiet"]

_SENT_S: Final = 60.0  # between two lines about points of one run
_OUTAGE_S: Final = 600.0  # between two lines about one outage
_KEYS: Final = 10_000
_BAR_POINTS: Final = 5_000  # fewer are there before anybody has seen a bar


class Journal:
    """Says what happens; a context manager, used from all threads.

    Args:
        style: lines on stderr, JSON lines on stdout, or errors alone on stderr.
        verbose: Say every sync and every wait.
        tracker: Address of the tracker, without credentials.
    """

    def __init__(self, style: Style, *, verbose: bool, tracker: str) -> None:
        self._style = style
        self._verbose = verbose
        self._tracker = tracker
        self._lock = threading.RLock()
        self._bars: Bars | None = None
        self._keys: dict[str, None] = {}
        self._shown: dict[str, _RunBar] = {}
        self._unsaid: dict[str, dict[str, int]] = {}  # points by kind, by run
        self._said_s: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._unreadable: dict[str, bool] = {}  # whether it was said, by what it is
        self._outage_s: float | None = None  # when it was last said
        self._outage_began_s = 0.0
        self.reports: dict[str, Report] = {}  # the last one of each run, with what was sent since the beginning

    def __enter__(self) -> Self:
        if self._style == "lines" and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for run_id in list(self._unsaid):
                self._say_sent(run_id)
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def say(self, event: str, text: str, *, level: str = "info", **facts: Any) -> None:
        """Say one thing.

        Args:
            event: What kind of thing, in one word.
            text: For people, in one line.
            level: info, warn or error; when all are quiet, errors are said.
            facts: For programs.
        """
        with self._lock:
            if self._style == "json":
                row = {"time": record.now(), "event": event, "level": level, **facts, "text": text}
                self._write(sys.stdout, json.dumps({key: plain(value) for key, value in row.items()}))
            elif self._style == "lines" or level == "error":
                line = f"{record.now()} {text}"
                if self._bars is not None and self._bars.live.is_started:
                    self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
                else:
                    self._write(sys.stderr, line)

    def is_new(self, key: str) -> bool:
        """Return whether a key is asked for the first time; the last ten thousand are remembered."""
        with self._lock:
            if key in self._keys:
                return False
            self._keys[key] = None
            if len(self._keys) > _KEYS:
                del self._keys[next(iter(self._keys))]
            return True

    def happened(self, happening: Happening) -> None:
        """Say what happened to a run."""
        facts = {"run_id": happening.run_id, "happened": happening.time, **happening.facts}
        self.say(happening.kind, happening.text, level=happening.level, **facts)

    def started(self, run: LoggedRun, points: int) -> _RunBar:
        """Hear that a run is next."""
        bar = _RunBar(self, run.run_id, points)
        with self._lock:
            self._shown[run.run_id] = bar
        return bar

    def ended(self, report: Report) -> None:
        """Hear what was done for a run."""
        with self._lock:
            bar = self._shown.pop(report.run_id, None)
            if bar is not None and bar.bar is not None:
                self.remove_bar(bar.bar)
            before = self.reports.get(report.run_id)
            total = dict(before.sent) if before is not None else {}
            for kind, points in report.sent.items():
                total[kind] = total.get(kind, 0) + points
            deleted = report.deleted + (before.deleted if before is not None else 0)
            self.reports[report.run_id] = replace(report, sent=total, deleted=deleted)
            unsaid = self._unsaid.setdefault(report.run_id, {})
            for kind, points in report.sent.items():
                unsaid[kind] = unsaid.get(kind, 0) + points
            now = time.monotonic()
            if self._verbose or now - self._said_s.get(report.run_id, -_SENT_S) >= _SENT_S:
                self._say_sent(report.run_id)

    def failed(self, run_id: str, error: str) -> None:
        """Hear why a run is incomplete; the same reason is said once until it is overcome."""
        with self._lock:
            if error != self._errors.get(run_id):
                self._errors[run_id] = error
                text = error.replace("\n", " ")
                self.say("failed", f"{run_id}: incomplete: {text}", level="error", run_id=run_id, error=error)

    def unreadable(self, reasons: Mapping[str, str]) -> None:
        """Hear what could not be read at the last look, and why; what lasts is said once, and that it is over.

        Args:
            reasons: By run; the root as a whole is called root.
        """
        with self._lock:
            for run_id, why in reasons.items():
                is_said = self._unreadable.get(run_id)
                if is_said is False:  # a moment's failure is overcome at the next look
                    text = f"{run_id}: incomplete: cannot be read: {why}"
                    self.say("failed", text, level="error", run_id=run_id, error=f"cannot be read: {why}")
                self._unreadable[run_id] = is_said is not None
            for run_id in self._unreadable.keys() - reasons.keys():
                if self._unreadable.pop(run_id):
                    self.say("recovered", f"{run_id}: can be read again", run_id=run_id)

    def recovered(self, what: str) -> None:
        """Hear that what failed is well again; what did not is of no interest."""
        with self._lock:
            if self._errors.pop(what, None) is not None:
                self.say("recovered", f"{what}: complete again", run_id=what)

    def succeeded(self, run_id: str) -> None:
        """Hear that the tracker has everything of a run."""
        with self._lock:
            self.recovered(run_id)
            if self._outage_s is not None:
                seconds = time.monotonic() - self._outage_began_s
                self._outage_s = None
                self.say("reachable", f"{self._tracker} answers again, after {seconds:.0f} s", seconds=seconds)

    def waiting(self, error: RetryableSinkError, pause_s: float) -> None:
        """Hear that the tracker does not answer."""
        with self._lock:
            now = time.monotonic()
            if self._outage_s is None:
                self._outage_began_s = now
            if self._outage_s is None or self._verbose or now - self._outage_s >= _OUTAGE_S:
                self._outage_s = now
                text = str(error).partition("\n")[0]
                self.say("waiting", f"{text}; it is tried again until it answers", level="warn", pause_s=pause_s)

    def forget(self, run_id: str) -> None:
        """Hear that a run is gone."""
        with self._lock:
            for kept in (self._unsaid, self._said_s, self._errors):
                kept.pop(run_id, None)

    def _say_sent(self, run_id: str) -> None:
        sent = {kind: points for kind, points in self._unsaid.pop(run_id, {}).items() if points}
        if not sent:
            return
        self._said_s[run_id] = time.monotonic()
        parts = ", ".join(f"{points} {_WORDS.get(kind, kind)}" for kind, points in sent.items())
        total = sum(sent.values())
        facts: dict[str, Any] = {_WORDS.get(kind, kind): points for kind, points in sent.items()}
        self.say("sent", f"{run_id}: sent {total} points ({parts})", run_id=run_id, points=total, **facts)

    def _write(self, stream: TextIO, line: str) -> None:
        with suppress(BrokenPipeError, ValueError):  # nobody reads it any more; the sync goes on
            stream.write(line + "\n")
            stream.flush()

    def add_bar(self, run_id: str, points: int) -> TaskID | None:
        """Show a bar for a run."""
        with self._lock:
            if self._bars is None:
                return None
            if not self._bars.live.is_started:
                self._bars.start()
            return self._bars.add_task(run_id, total=points)

    def move_bar(self, bar: TaskID, points: int, description: str | None = None) -> None:
        """Let a bar grow."""
        with self._lock:
            if self._bars is not None:
                self._bars.update(bar, advance=points, description=description)

    def remove_bar(self, bar: TaskID) -> None:
        """Take a bar away."""
        with self._lock:
            if self._bars is not None:
                with suppress(KeyError):
                    self._bars.remove_task(bar)
                if not self._bars.tasks and self._bars.live.is_started:
                    self._bars.stop()


_WORDS: Final = {"canonical": "settled"}


class _RunBar:
    """The progress of one sync of one run: a bar once there is something to see."""

    def __init__(self, journal: Journal, run_id: str, points: int) -> None:
        self._journal = journal
        self._run_id = run_id
        self.bar = journal.add_bar(run_id, points) if points >= _BAR_POINTS else None

    def sent(self, points: int) -> None:
        """Hear that so many more points were accepted."""
        if self.bar is not None:
            self._journal.move_bar(self.bar, points)

    def read(self, records: int) -> None:
        """Hear that so many more records were read back."""
        if self.bar is not None and records:
            self._journal.move_bar(self.bar, 0, f"{self._run_id}: reading back")
