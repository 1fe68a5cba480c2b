"""Metrics of one run in the terminal: the curve, what restarts left behind, and where segments start."""

from __future__ import annotations

import datetime as dt
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final

import duckdb

from llmtrack.writer.errors import UsageError

from . import layout
from .canvas import COLUMNS, ROWS, Canvas

_COLUMNS: Final = (
    *("run_id", "source_run", "segment", "seq", "time", "step", "tokens"),
    *("name", "value", "superseded_by", "settled"),
)
_POINTS: Final = """
    SELECT run_id, source_run, segment, seq, time, step, tokens, name, value, CAST(NULL AS BIGINT) AS superseded_by,
           settled
    FROM history
    WHERE run_id = $run AND name = $name
    UNION ALL
    SELECT run_id, run_id, segment, seq, time, step, tokens, name, value, superseded_by, settled
    FROM metrics
    WHERE run_id = $run AND name = $name AND superseded_by IS NOT NULL
    ORDER BY source_run, segment, tokens, seq
"""
_NAMES: Final = (
    "SELECT DISTINCT name FROM metrics WHERE run_id = $run UNION SELECT name FROM history WHERE run_id = $run"
)
_STARTS: Final = """
    SELECT segment, start_tokens AS tokens, start_step AS step, start_time AS time
    FROM segments
    WHERE run_id = $run AND started AND from_run IS NOT NULL
    ORDER BY segment
"""
_COLOURS: Final = {"line": "36", "superseded": "90", "border": "2", "odd": "31", "title": "1"}
_SHOWN_NAMES: Final = 8
_Y_LABELS: Final = 5
_X_LABEL_WIDTH: Final = 22
_SHORT_S: Final = 3_600 * 6  # a span of time whose minutes are not enough to tell its places apart


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        run_id: The run whose curve it is.
        name: The metric.
        points: Rows as `rows` has them; those on the path first by segment, in order.
        starts: Number and place of each segment of the run that starts from somewhere.
    """

    run_id: str
    name: str
    points: list[tuple[Any, ...]]
    starts: list[dict[str, Any]]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the points with the columns of `history` and `superseded_by`."""
        for point in self.points:
            yield dict(zip(_COLUMNS, point, strict=True))


def read_curves(con: duckdb.DuckDBPyConnection, run_id: str, names: Iterable[str]) -> list[Curve]:
    """Read metrics of a run, parents and superseded points included.

    Args:
        con: Made by `connect`.
        run_id: The run.
        names: Names of metrics, or globs.

    Raises:
        UsageError: The run has no metric of that name.
    """
    known = sorted(row[0] for row in con.execute(_NAMES, {"run": run_id}).fetchall())
    cursor = con.execute(_STARTS, {"run": run_id})
    columns = [column[0] for column in cursor.description or ()]
    starts = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    wanted = dict.fromkeys(match for name in names for match in _matching(known, name, run_id))
    return [
        Curve(run_id, name, con.execute(_POINTS, {"run": run_id, "name": name}).fetchall(), starts) for name in wanted
    ]


def draw(
    curve: Curve,
    *,
    axis: str = "tokens",
    width: int = 100,
    height: int = 20,
    log_y: bool = False,
    colours: bool = False,
) -> str:
    """Draw one curve.

    Args:
        curve: From `read_curves`.
        axis: tokens, step or time.
        width: Of the whole picture, in characters.
        height: Of it, in rows.
        log_y: Put the values on a logarithmic axis; what is not positive is left out and counted.
        colours: Use ANSI colours; without them superseded points differ by their character alone.
    """
    rows = list(curve.rows())
    drawn = [row for row in rows if math.isfinite(row["value"]) and (row["value"] > 0 or not log_y)]
    title = f"{curve.name}  {curve.run_id}"
    if not drawn:
        return f"{title}: {len(rows)} points, and none that can be drawn"
    scale = _Scale.of(rows, drawn, axis, log_y=log_y)
    labels = [scale.y_label(part / (_Y_LABELS - 1)) for part in range(_Y_LABELS)]
    margin = max(map(len, labels)) + 1
    canvas = Canvas(max(width - margin - 1, 2 * COLUMNS), max(height - 5, _Y_LABELS), _COLOURS if colours else {})
    _draw_points(canvas, scale, rows, drawn, axis)
    _draw_borders(canvas, scale, curve.starts, axis)

    picture = canvas.rows()
    lines = [canvas.painted(title, "title"), _border_numbers(canvas, scale, curve.starts, axis, margin)]
    at_row = {round((1 - part / (_Y_LABELS - 1)) * (canvas.height - 1)): labels[part] for part in range(_Y_LABELS)}
    lines += [f"{at_row.get(index, ''):>{margin}}┤{row}" for index, row in enumerate(picture)]
    lines += [" " * margin + "└" + _base(canvas, scale, rows, axis), " " * (margin + 1) + scale.x_labels(canvas.width)]
    lines.append(" " * (margin + 1) + _legend(canvas, rows, drawn, axis))
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class _Scale:
    """Where a place lies between the ends of both axes, from 0 to 1."""

    axis: str
    first_x: float
    last_x: float
    low: float
    high: float
    log_y: bool

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], drawn: Sequence[dict[str, Any]], axis: str, *, log_y: bool) -> _Scale:
        places = [_number(row[axis]) for row in rows]
        values = [math.log10(row["value"]) if log_y else row["value"] for row in drawn]
        low, high = min(values), max(values)
        if low == high:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        return cls(axis, min(places), max(places), low, high, log_y)

    def x(self, place: float) -> float:
        return (place - self.first_x) / ((self.last_x - self.first_x) or 1)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log_y else value
        half = self.high / 2 - self.low / 2
        return (value / 2 - self.low / 2) / half

    def y_label(self, part: float) -> str:
        value = self.low * (1 - part) + self.high * part  # the difference of the two may be no number
        return f"{10**value if self.log_y else value:.4g}"

    def x_label(self, part: float) -> str:
        place = self.first_x + (self.last_x - self.first_x) * part
        if self.axis == "time":
            time = dt.datetime.fromtimestamp(place, dt.UTC)
            return layout.moment(time) if self.last_x - self.first_x > _SHORT_S else f"{time:%H:%M:%S}"
        return layout.tokens(round(place)) if self.axis == "tokens" else f"{place:.0f}"

    def x_labels(self, width: int) -> str:
        count = max(2, min(6, width // _X_LABEL_WIDTH + 1))
        line = [" "] * width
        for index in range(count):
            text = self.x_label(index / (count - 1))[:width]
            at = round(index / (count - 1) * (width - 1)) - len(text) * index // (count - 1)
            at = max(0, min(at, width - len(text)))
            line[at : at + len(text)] = text
        unit = "UTC" if self.axis == "time" else self.axis
        return f"{''.join(line).rstrip()} {unit}"


def _draw_points(
    canvas: Canvas, scale: _Scale, rows: Sequence[dict[str, Any]], drawn: Sequence[dict[str, Any]], axis: str
) -> None:
    def place(row: dict[str, Any]) -> tuple[int, int]:
        x = round(scale.x(_number(row[axis])) * (canvas.width * COLUMNS - 1))
        return x, round((1 - scale.y(row["value"])) * (canvas.height * ROWS - 1))

    live = sorted((row for row in drawn if row["superseded_by"] is None), key=lambda row: (row[axis], row["seq"]))
    places = [place(row) for row in live]
    for one in places[:1]:
        canvas.dot(*one)
    for one, other in pairwise(places):
        canvas.line(*one, *other)
    for row in rows:
        if not math.isfinite(row["value"]):
            x = round(scale.x(_number(row[axis])) * (canvas.width * COLUMNS - 1))
            canvas.character(x, canvas.height * ROWS - 1, "✗", "odd")
    for row in drawn:
        if row["superseded_by"] is not None:
            canvas.character(*place(row), "·", "superseded")


def _draw_borders(canvas: Canvas, scale: _Scale, starts: Iterable[dict[str, Any]], axis: str) -> None:
    for start in starts:
        x = _border(canvas, scale, start, axis)
        for y in range(0, canvas.height * ROWS, ROWS):
            canvas.character(x, y, "┊", "border")


def _base(canvas: Canvas, scale: _Scale, rows: Iterable[dict[str, Any]], axis: str) -> str:
    """Return the axis, shaded where something was superseded: a run that resumed exactly draws over what it left."""
    stretches: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["superseded_by"] is not None:
            stretch = row["source_run"], row["segment"], row["superseded_by"]
            stretches.setdefault(stretch, []).append(scale.x(_number(row[axis])))
    line = ["─"] * canvas.width
    for places in stretches.values():
        first, last = (round(x * (canvas.width * COLUMNS - 1)) // COLUMNS for x in (min(places), max(places)))
        line[first : last + 1] = [canvas.painted("▒", "superseded")] * (last + 1 - first)
    return "".join(line)


def _border_numbers(canvas: Canvas, scale: _Scale, starts: Iterable[dict[str, Any]], axis: str, margin: int) -> str:
    """Return the line above the picture, with the numbers of the segments where there is room for them."""
    line = ""
    for start in sorted(starts, key=lambda start: _number(start[axis])):
        at = _border(canvas, scale, start, axis) // COLUMNS
        if len(line) <= at < canvas.width:
            line = line.ljust(at) + f"{start['segment']} "
    return " " * (margin + 1) + canvas.painted(line.rstrip(), "border")


def _border(canvas: Canvas, scale: _Scale, start: dict[str, Any], axis: str) -> int:
    return round(scale.x(_number(start[axis])) * (canvas.width * COLUMNS - 1))


def _legend(canvas: Canvas, rows: Sequence[dict[str, Any]], drawn: Sequence[dict[str, Any]], axis: str) -> str:
    parts = [canvas.painted("━━", "line") + " current"]
    superseded = sum(row["superseded_by"] is not None for row in rows)
    if superseded:
        parts.append(canvas.painted("··▒", "superseded") + f" superseded ({superseded:,} points)")
    parts.append(canvas.painted("┊", "border") + " start of a segment")
    odd = [row for row in rows if not math.isfinite(row["value"])]
    if odd:
        first = _Scale(axis, _number(odd[0][axis]), _number(odd[0][axis]), 0, 1, log_y=False).x_label(0)
        parts.append(canvas.painted("✗", "odd") + f" not finite ({len(odd):,}, the first at {first})")
    if left_out := len(rows) - len(drawn) - len(odd):
        parts.append(f"{left_out:,} not positive, not on this axis")
    return "   ".join(parts)


def _matching(known: Sequence[str], name: str, run_id: str) -> list[str]:
    if name in known:
        return [name]
    found = [other for other in known if fnmatchcase(other, name)]
    if not found:
        shown = difflib.get_close_matches(name, known, _SHOWN_NAMES, 0.3) or known[:_SHOWN_NAMES]
        hint = f"one of {', '.join(shown)}" if shown else "nothing was logged yet"
        raise UsageError(f"run {run_id} has no metric {name!r}", hint=hint)
    return found


def _number(place: Any) -> float:
    return place.timestamp() if isinstance(place, dt.datetime) else place
