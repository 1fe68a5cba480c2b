"""What the small tables of a root say of its runs, kept up to date at the cost of what changed, and without a database.

The path rules are not here: a watch needs to know which run is at work, which one is whose child, and what happened.
What belongs into a tracker is asked of the views, run by run, when it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llmtrack.query.read.log import Log, News
from llmtrack.sync.replay.describe import tokens as in_words
from llmtrack.writer.errors import LlmtrackError, UsageError

from .notify import Happening, level_of
from .stalls import Place, Sign, Verdict, Written, read_newest_seq, read_sign, read_written

_CLOSED: Final = frozenset({"finished", "abandoned"})  # ends that nothing usually follows
_SEGMENT_COLUMNS: Final = ("run_id", "segment", "phase", "seq", "time", "step", "tokens", "project", "from_run", "exit")
_ALERT_COLUMNS: Final = (
    "run_id", "segment", "time", "step", "tokens", "alert_id", "rule", "level", "metric", "value", "baseline", "score",
    "message", "batch_hash", "phase",
)  # fmt: skip


@dataclass
class Lifetime:
    """One segment, by its records.

    Attributes:
        start: Its start record, as far as it is of interest; None when it cannot be read.
        end: Its end record likewise; None while there is none.
    """

    start: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None


@dataclass
class RunFacts:
    """One run, by the records of its segments."""

    run_id: str
    segments: dict[int, Lifetime] = field(default_factory=dict)

    @property
    def head(self) -> int:
        """The newest segment; 0 when there is none."""
        return max(self.segments, default=0)

    @property
    def exit(self) -> str | None:
        """How the newest segment ended; None while it has not."""
        end = self.segments[self.head].end if self.segments else None
        return None if end is None else end["exit"]

    @property
    def is_open(self) -> bool:
        """Whether the newest segment has started and has not ended."""
        return bool(self.segments) and self.segments[self.head].end is None

    @property
    def project(self) -> str | None:
        """What the newest start record that can be read says."""
        return next((s.start["project"] for _, s in sorted(self.segments.items(), reverse=True) if s.start), None)

    @property
    def parents(self) -> set[str]:
        """The runs that its segments start from."""
        found = (segment.start["from_run"] for segment in self.segments.values() if segment.start)
        return {run_id for run_id in found if run_id not in {None, self.run_id}}


class Ledger:
    """Reads the small tables of a root.

    Args:
        root: The folder of the runs.

    Attributes:
        runs: All runs that have a segment.

    Raises:
        UsageError: There is no such folder, or it is the folder of a run.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._log = Log(root)
        self.runs: dict[str, RunFacts] = {}

    def refresh(self, changed: Collection[str] | None = None) -> list[Happening]:
        """Take in what is new.

        Args:
            changed: The runs in which something may be new; None: all.

        Returns:
            What happened in the segments in which anything did: much of it is known already.
        """
        try:
            return self._take(self._log.read(None, changed=changed))
        except OSError:  # of one of them: the others do not suffer
            happened = []
            for run_id in changed if changed is not None else self._log.run_ids():
                with contextlib.suppress(OSError):  # the scanner says so, and the run is read when it can be
                    happened += self._take(self._log.read(None, changed=[run_id]))
            return happened

    def reread(self, run_id: str) -> list[Happening]:
        """Take in what came late to segments that had ended, which `refresh` looks at no more.

        Args:
            run_id: The run; one that is gone is left alone.
        """
        with contextlib.suppress(UsageError, OSError):
            return self._take(Log(self._root).read([run_id]))
        return []

    def _take(self, news: News) -> list[Happening]:
        for run_id, number in news.gone:
            if run_id in self.runs:
                self.runs[run_id].segments.pop(number, None)
                if not self.runs[run_id].segments:
                    del self.runs[run_id]
        for run_id, number in self._log.segments():
            if number > 0:
                self.runs.setdefault(run_id, RunFacts(run_id)).segments.setdefault(number, Lifetime())
        touched = set()
        for row in _rows(news, "segments", _SEGMENT_COLUMNS):
            if row["segment"] > 0 and row["run_id"] in self.runs:
                lifetime = self.runs[row["run_id"]].segments.setdefault(row["segment"], Lifetime())
                if row["phase"] in {"start", "end"}:
                    setattr(lifetime, row["phase"], row)
                touched.add((row["run_id"], row["segment"]))
        happened = [one for key in sorted(touched) for one in self._of_segment(*key)]
        return happened + [_of_alert(row) for row in _rows(news, "alerts", _ALERT_COLUMNS) if row["phase"] != "context"]

    def ended(self) -> set[tuple[str, int]]:
        """Return the segments that have an end record."""
        return {
            (run.run_id, number)
            for run in self.runs.values()
            for number, segment in run.segments.items()
            if segment.end is not None
        }

    def resting(self) -> set[str]:
        """Return the runs that nothing is expected of any more."""
        return {run.run_id for run in self.runs.values() if run.exit in _CLOSED}

    def damages(self) -> dict[str, str]:
        """Return what could not be read, by file, and why."""
        return {f"{d.path}: bytes {d.first_byte} to {d.end_byte}": d.reason for _, d in self._log.damages()}

    def sign(self, run_id: str) -> Sign:
        """Return what a run that has not ended shows of itself now; reads its heartbeat."""
        run = self.runs[run_id]
        start = run.segments[run.head].start
        place = Place(run.head, 0, 0, 0) if start is None else Place(run.head, 0, start["step"], start["tokens"])
        last = Sign(place, None if start is None else start["time"])
        return read_sign(self._root, run_id, run.head, last)

    def written(self, run_id: str) -> Written:
        """Return how much the newest segment of a run holds."""
        return read_written(self._root, run_id, self.runs[run_id].head)

    def newest_seq(self, run_id: str, segment: int) -> int:
        """Return the newest `seq` of a segment."""
        return read_newest_seq(self._root, run_id, segment)

    def longest_pause_s(self, run_id: str, segment: int) -> float:
        """Return the longest time between two of the newest thousand rows of a segment; 0 when it has none."""
        import duckdb

        from llmtrack.query import connect

        try:
            with contextlib.closing(connect(self._root, runs=[run_id], check=False)) as con:
                found = con.execute(
                    "SELECT max(pause) FROM (SELECT epoch_ms(time) - lag(epoch_ms(time)) OVER (ORDER BY seq) AS pause"
                    " FROM (SELECT DISTINCT seq, time FROM metrics WHERE run_id = ? AND segment = ?"
                    " ORDER BY seq DESC LIMIT 1000))",
                    [run_id, segment],
                ).fetchone()
        except (LlmtrackError, duckdb.Error, OSError):  # it is gone or damaged: then it has no rhythm
            return 0.0
        return 0.0 if found is None or found[0] is None else float(found[0]) / 1000

    def _of_segment(self, run_id: str, number: int) -> Iterator[Happening]:
        segment = self.runs[run_id].segments[number]
        key = f"{run_id}/{number}"
        earlier = self.runs[run_id].segments.get(number - 1)
        if segment.start is not None and earlier is not None:
            start = segment.start
            how = "it did not end" if earlier.end is None else f"it ended {earlier.end['exit']}"
            yield Happening(
                key=f"{key}/restarted",
                kind="restarted",
                level="info",
                run_id=run_id,
                time=start["time"],
                text=f"{run_id}: restarted at {in_words(start['tokens'])} tokens as segment {number}"
                f" after segment {number - 1}, {how.removeprefix('it ')}",
                facts=_place(start),
            )
        if segment.end is not None:
            end = segment.end
            kind, level = {"finished": ("finished", "info"), "failed": ("crashed", "error")}.get(
                end["exit"], (str(end["exit"]), "warn")
            )
            yield Happening(
                key=f"{key}/{kind}",
                kind=kind,
                level=level,
                run_id=run_id,
                time=end["time"],
                text=f"{run_id}: {kind} at {in_words(end['tokens'])} tokens (segment {number})",
                facts=_place(end),
            )


def of_verdict(run: RunFacts, verdict: Verdict) -> Happening:
    """Return what a change of a run's status is for a person."""
    for_how_long = _duration(verdict.silent_s)
    if verdict.status == "running":
        text, kind, level = f"goes on, it was {verdict.before}", "resumed", "info"
    elif verdict.status == "lost":
        text, kind, level = f"lost: no sign of life for {for_how_long}", "lost", "error"
    elif verdict.is_alive:
        text, kind, level = f"stalled: its process lives, and has logged nothing for {for_how_long}", "stalled", "error"
    elif verdict.beat_s is not None:
        text = f"stalled: no row for {for_how_long}, last heartbeat {_duration(verdict.beat_s)} ago"
        kind, level = "stalled", "error"
    else:
        text, kind, level = f"stalled: no sign of life for {for_how_long}", "stalled", "error"
    place = verdict.place
    return Happening(
        # The same silence is the same thing after a restart of the sync, and the next one is another.
        key=f"{run.run_id}/{place.segment}/{kind}/{verdict.seq}",
        kind=kind,
        level=level,
        run_id=run.run_id,
        time=verdict.since,
        text=f"{run.run_id}: {text} (segment {place.segment}, {in_words(place.tokens)} tokens)",
        facts={"segment": place.segment, "step": place.step, "tokens": place.tokens, "silent_s": verdict.silent_s},
    )


def _of_alert(row: Mapping[str, Any]) -> Happening:
    is_raised = row["phase"] != "cleared"
    level = level_of(row["level"] or "warn") if is_raised else "info"
    message = row["message"] or row["rule"]
    return Happening(
        key=f"{row['run_id']}/{row['segment']}/{row['alert_id']}/{row['phase']}",
        kind="alert" if is_raised else "cleared",
        level=level,
        run_id=row["run_id"],
        time=row["time"],
        text=f"{row['run_id']}: {'' if is_raised else 'over: '}{row['rule']}: {message}"
        f" (step {row['step']}, {in_words(row['tokens'])} tokens)",
        facts={
            **_place(row),
            **{name: row[name] for name in ("rule", "metric", "value", "baseline", "score", "message", "batch_hash")},
        },
    )


def _place(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"segment": row["segment"], "step": row["step"], "tokens": row["tokens"]}


def _rows(news: News, table: str, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    for rows in news.rows.get(table, ()):
        yield from rows.select(list(columns)).to_pylist()


def _duration(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
