"""Follow a run while it is written: its rows, and what happens to it, at the cost of what is new."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import duckdb

from llmtrack.query.sql.views import refresh
from llmtrack.query.text.layout import tokens, visible

POLL_S: Final = 1.0  # how often is looked for something new; the writer flushes as often
LINES: Final = 10
ENDS: Final = frozenset({"finished", "abandoned"})  # after these nothing comes

_LAST_ROWS: Final = """
    SELECT source_run, segment, seq
    FROM history
    WHERE run_id = $run
    GROUP BY source_run, segment, seq
    ORDER BY min(tokens) DESC, seq DESC
    LIMIT $lines
"""
_ROW_COLUMNS: Final = "run_id, segment, seq, time, step, tokens, list(name ORDER BY name), list(value ORDER BY name)"
_ROWS_OF: Final = f"""
    SELECT {_ROW_COLUMNS}
    FROM log.points
    WHERE run_id = $run AND segment = $segment AND seq >= $first AND seq <= $last
    GROUP BY run_id, segment, seq, time, step, tokens
    ORDER BY seq
"""
_STARTS: Final = """
    SELECT s.segment, s.started, s.start_time, s.start_tokens, s.start_step, s.from_run, s.from_segment, s.host,
           s.world_size, s.exit, s.detail, s.end_time, s.end_tokens, s.end_step, s.dropped
    FROM segments s
    WHERE s.run_id = $run
    ORDER BY s.segment
"""
_REACHED: Final = """
    SELECT segment, last_time, last_step, last_tokens, exit FROM segments WHERE run_id = $run ORDER BY segment
"""
_RECORDS: Final = {
    "alert": "SELECT segment, seq, time, step, tokens, level, rule, message, phase FROM alerts WHERE run_id = $run",
    "checkpoint": "SELECT segment, seq, time, step, tokens, ckpt_id, path FROM checkpoints WHERE run_id = $run",
    "gap": "SELECT segment, seq, time, step, tokens, first_tokens, last_tokens, points, reason, errno FROM gaps "
    "WHERE run_id = $run",
}

Event = dict[str, Any]


@dataclass
class Follower:
    """Tells what is new in a run, in order: rows and events, each once.

    An event has `kind` (row, start, end, alert, checkpoint, gap, damage, status), `run_id`, `segment`, `time`, `step`,
    `tokens`, and what belongs to its kind; a row has `values`, by the names of the metrics.

    Args:
        con: Made by `connect` for this run, with points.
        run_id: The run.
        metrics: Names or globs; none given: all.
    """

    con: duckdb.DuckDBPyConnection
    run_id: str
    metrics: Sequence[str] = ()
    _seen: dict[int, int] = field(default_factory=dict)  # segment: the last row that was told
    _told: set[tuple[Any, ...]] = field(default_factory=set)
    _reached: dict[int, list[Any]] = field(default_factory=dict)  # segment: how far it was when it was asked last
    _status: str = ""

    def last(self, lines: int) -> Iterator[Event]:
        """Yield the last rows on the run's path, and take all that is there for told."""
        with self.con.cursor() as cursor:
            found = cursor.execute(_LAST_ROWS, {"run": self.run_id, "lines": lines}).fetchall() if lines else []
            for source, segment in dict.fromkeys((row[0], row[1]) for row in reversed(found)):
                seqs = [row[2] for row in found if row[:2] == (source, segment)]
                wanted = set(seqs)
                for row in self._rows(cursor, source, segment, min(seqs), max(seqs)):
                    if row["seq"] in wanted:
                        yield row
            for segment, seq in cursor.execute(
                "SELECT segment, max(seq) FROM log.points WHERE run_id = ? GROUP BY segment", [self.run_id]
            ).fetchall():
                self._seen[segment] = seq
        for _ in self._happened():
            pass
        self._status = self.status()

    def news(self) -> Iterator[Event]:
        """Take in what was written since, and yield it: what happened first, and rows in the order of the log."""
        refresh(self.con, [self.run_id])
        events = list(self._happened())
        with self.con.cursor() as cursor:
            for segment, *reached in cursor.execute(_REACHED, {"run": self.run_id}).fetchall():
                if self._reached.get(segment) == reached:  # nothing new in it
                    continue
                self._reached[segment] = reached
                for row in self._rows(cursor, self.run_id, segment, self._seen.get(segment, -1) + 1, None):
                    self._seen[segment] = row["seq"]
                    events.append(row)
        order = {"start": 0, "end": 2}
        yield from sorted(
            events, key=lambda event: (event["segment"] or 0, order.get(event["kind"], 1), event.get("seq") or 0)
        )
        status = self.status()
        if status != self._status:
            self._status = status
            yield self.event("status", None, status=status)

    def status(self) -> str:
        """Return the run's status as it is known now."""
        found = self.con.execute("SELECT status FROM runs WHERE run_id = ?", [self.run_id]).fetchone()
        return str(found[0]) if found else "lost"

    def _rows(
        self, cursor: duckdb.DuckDBPyConnection, run_id: str, segment: int, first: int, last: int | None
    ) -> Iterator[Event]:
        end = (1 << 63) - 1 if last is None else last
        found = cursor.execute(_ROWS_OF, {"run": run_id, "segment": segment, "first": first, "last": end}).fetchall()
        for source, number, seq, time, step, count, names, values in found:
            pairs = {name: value for name, value in zip(names, values, strict=True) if self._is_wanted(name)}
            if pairs:
                yield {
                    "kind": "row", "run_id": source, "segment": number, "seq": seq, "time": time, "step": step,
                    "tokens": count, "values": pairs,
                }  # fmt: skip

    def _is_wanted(self, name: str) -> bool:
        return not self.metrics or any(fnmatchcase(name, metric) for metric in self.metrics)

    def _happened(self) -> Iterator[Event]:
        """Yield what happened and was not told yet."""
        with self.con.cursor() as cursor:
            cursor.execute(_STARTS, {"run": self.run_id})
            columns = [column[0] for column in cursor.description or ()]
            for row in (dict(zip(columns, values, strict=True)) for values in cursor.fetchall()):
                number = row["segment"]
                if row["started"] and self._is_new("start", number):
                    place = {"time": row["start_time"], "step": row["start_step"], "tokens": row["start_tokens"]}
                    origin = {name: row[name] for name in ("from_run", "from_segment", "host", "world_size")}
                    yield self.event("start", number, **place, **origin)
                if row["exit"] and self._is_new("end", number):
                    place = {"time": row["end_time"], "step": row["end_step"], "tokens": row["end_tokens"]}
                    yield self.event(
                        "end", number, **place, exit=row["exit"], detail=row["detail"], dropped=row["dropped"]
                    )
            for kind, query in _RECORDS.items():
                cursor.execute(f"{query} ORDER BY segment, seq", {"run": self.run_id})
                columns = [column[0] for column in cursor.description or ()]
                for values in cursor.fetchall():
                    row = dict(zip(columns, values, strict=True))
                    if self._is_new(kind, row["segment"], row["seq"]):
                        yield self.event(kind, **row)
            damages = cursor.execute(
                "SELECT segment, path, first_byte, end_byte, reason FROM damages WHERE run_id = ?", [self.run_id]
            ).fetchall()
            for segment, path, first, end, reason in damages:
                if self._is_new("damage", path, first):
                    yield self.event("damage", segment, path=path, first_byte=first, end_byte=end, reason=reason)

    def _is_new(self, *key: Any) -> bool:
        is_new = key not in self._told
        self._told.add(key)
        return is_new

    def event(self, kind: str, segment: int | None, **more: Any) -> Event:
        """Return an event of the run."""
        return {
            "kind": kind,
            "run_id": self.run_id,
            "segment": segment,
            "time": None,
            "step": None,
            "tokens": None,
            **more,
        }


def follow(follower: Follower, *, lines: int = LINES, wait: Callable[[], object]) -> Iterator[Event]:
    """Yield the last rows of a run, and then everything new until it has finished.

    Args:
        follower: Of the run.
        lines: How many rows come first.
        wait: Called between two looks.
    """
    yield from follower.last(lines)
    status = follower.status()
    yield follower.event("status", None, status=status)
    while status not in ENDS:
        wait()
        yield from follower.news()
        status = follower.status()


def line(event: Event, *, shown: int | None = None) -> str:
    """Return an event as a line, whatever is in the names and messages.

    Args:
        event: From a `Follower`.
        shown: How many values of a row are written out; None: all.
    """
    return visible(_text(event, shown))


def _text(event: Event, shown: int | None) -> str:  # noqa: PLR0911 - a table of what each kind says
    match event["kind"]:
        case "row":
            pairs = [f"{name}={value:.6g}" for name, value in _loss_first(event["values"])]
            more = f"  +{len(pairs) - shown}" if shown is not None and len(pairs) > shown else ""
            return f"{_when(event)}  step {event['step']}  {tokens(event['tokens'])}  {'  '.join(pairs[:shown])}{more}"
        case "start":
            whose = "" if event["from_run"] in (None, event["run_id"]) else f"{event['from_run']}, "
            origin = "nothing" if event["from_segment"] is None else f"{whose}segment {event['from_segment']}"
            ranks = f", {event['world_size']:,} ranks" if event["world_size"] else ""
            where = f" on {event['host']}{ranks}" if event["host"] else ""
            verb = "starts" if event["segment"] == 1 else "restarts"
            return _said(event, f"{verb} from {origin} at {tokens(event['tokens'])} tokens{where}")
        case "end":
            detail = f": {_one_line(event['detail'])}" if event["detail"] else ""
            return _said(event, f"{event['exit']} at {tokens(event['tokens'])} tokens{detail}")
        case "alert":
            text = _one_line(event["message"] or "")
            return _said(event, f"alert {event['phase']}: {event['level'] or ''} {event['rule'] or ''}: {text}")
        case "checkpoint":
            return _said(
                event,
                f"checkpoint {event['ckpt_id']} at {tokens(event['tokens'])} tokens  {event['path'] or ''}".rstrip(),
            )
        case "gap":
            why = ", ".join(filter(None, (event["reason"], os.strerror(event["errno"]) if event["errno"] else "")))
            span_ = f"{tokens(event['first_tokens'])} to {tokens(event['last_tokens'])}"
            return _said(event, f"gap: {event['points']:,} points lost at {span_} ({why})")
        case "damage":
            return _said(
                event,
                f"damaged: {event['path']}: bytes {event['first_byte']} to {event['end_byte']}: {event['reason']}",
            )
        case _:
            return f"--- {event['run_id']} is {event['status']}"


def _said(event: Event, text: str) -> str:
    return (
        f"--- {_when(event)}  segment {event['segment']}: {text}"
        if event["time"]
        else f"--- segment {event['segment']}: {text}"
    )


def _when(event: Event) -> str:
    time: dt.datetime | None = event["time"]
    return "" if time is None else f"{time.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S}"


def _loss_first(values: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda pair: ("loss" not in pair[0], pair[0]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
