"""Metrics of one run in the terminal: the curve, what restarts left behind, and where segments start."""

from __future__ import annotations

import datetime as dt
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import duckdb

from llmtrack.query.read.columns import EPOCH
from llmtrack.query.text import layout

from . import curves
from .canvas import COLUMNS, ROWS, Canvas
from .curves import Line
from .marks import Marks, at_tokens, number, read_marks

POINTS: Final = 20_000  # of one curve: many for each column of a wide screen, and for each pixel of a picture

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
_COLOURS: Final = {
    "line": "36",
    "superseded": "90",
    "border": "2",
    "odd": "31",
    "title": "1",
    "alert": "31",
    "eval": "33",
    "fork": "35",
    "gap": "33",
    "hole": "31",
}
_FETCHED: Final = 4096  # rows at a time
_Y_LABELS: Final = 5
_X_LABEL_WIDTH: Final = 22
_FLOAT_POWER: Final = 300  # beyond it a label may be no number, though the value is one
_SHORT_S: Final = 3_600 * 6  # a span of time whose minutes are not enough to tell its places apart
_ASIDE: Final = (0, 1, -1, 2, -2)  # columns in which a mark may stand whose own has another one


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        run_id: The run whose curve it is.
        name: The metric.
        points: Rows as `rows` has them; those on the path first by segment, in order.
        starts: Number and place of each segment of the run that starts from somewhere.
        lines: What the points were taken from, and how many the log has; none: the points are all there are.
        marks: What else happened.
    """

    run_id: str
    name: str
    points: list[tuple[Any, ...]]
    starts: list[dict[str, Any]]
    lines: list[Line] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the points with the columns of `history` and `superseded_by`."""
        for point in self.points:
            yield dict(zip(_COLUMNS, point, strict=True))

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many points the log has: all, superseded ones, those not finite, and those zero or less."""
        if self.lines:
            superseded = sum(line.count for line in self.lines if line.superseded_by is not None)
            odd, low = sum(line.odd for line in self.lines), sum(line.not_positive for line in self.lines)
            return sum(line.count for line in self.lines), superseded, odd, low
        rows = list(self.rows())
        finite = [row["value"] for row in rows if math.isfinite(row["value"])]
        superseded = sum(row["superseded_by"] is not None for row in rows)
        return len(rows), superseded, len(rows) - len(finite), sum(value <= 0 for value in finite)


def read_curves(
    con: duckdb.DuckDBPyConnection,
    run_id: str,
    names: Iterable[str],
    *,
    all_runs: duckdb.DuckDBPyConnection | None = None,
    points: int = POINTS,
) -> list[Curve]:
    """Read metrics of a run, parents and superseded points included, with as many points as a picture needs.

    Args:
        con: Made by `connect`.
        run_id: The run.
        names: Names of metrics, or globs.
        all_runs: Has all runs, so that forks are marked; None: they are not.
        points: Of each curve; one that has more is thinned out, and keeps what is highest and lowest.

    Raises:
        UsageError: The run has no metric of that name.
    """
    wanted = curves.select_metrics(curves.metric_names(con, run_id), names, run_id)
    lines = curves.count_lines(con, run_id, wanted)
    curves.read_points(con, lines, at_most=points)
    marks = read_marks(con, run_id, all_runs=all_runs)
    return [_curve(run_id, name, [line for line in lines if line.name == name], marks) for name in wanted]


def read_rows(con: duckdb.DuckDBPyConnection, run_id: str, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield every point of some metrics of a run, parents and superseded points included, none left out.

    Raises:
        UsageError: The run has no metric of that name.
    """
    for name in curves.select_metrics(curves.metric_names(con, run_id), names, run_id):
        with con.cursor() as cursor:
            cursor.execute(_POINTS, {"run": run_id, "name": name})
            while some := cursor.fetchmany(_FETCHED):
                yield from (dict(zip(_COLUMNS, point, strict=True)) for point in some)


def _curve(run_id: str, name: str, lines: list[Line], marks: Marks) -> Curve:
    points = [
        (
            *(run_id, line.source_run, line.segment, row.seq, EPOCH + dt.timedelta(milliseconds=row.time)),
            *(row.step, row.tokens, name, row.value, line.superseded_by, row.settled),
        )
        for line in sorted(lines, key=lambda line: (line.source_run, line.segment))
        for row in line.rows
    ]
    return Curve(run_id, name, points, marks.starts, lines, marks)


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
    title = f"{layout.visible(curve.name)}  {curve.run_id}"
    if not drawn:
        return f"{title}: {curve.counts()[0]} points, and none that can be drawn"
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
    lines.append(" " * margin + "└" + _base(canvas, scale, rows, axis))
    marked, keys = _marks(canvas, scale, curve.marks, rows, axis)
    if marked:
        lines.append(" " * (margin + 1) + marked)
    lines.append(" " * (margin + 1) + scale.x_labels(canvas.width))
    lines.append(" " * (margin + 1) + "   ".join([*_legend(canvas, curve, rows, axis, log_y=log_y), *keys]))
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
        places = [number(row[axis]) for row in rows]
        values = [math.log10(row["value"]) if log_y else row["value"] for row in drawn]
        low, high = min(values), max(values)
        if low == high:
            around = 0.5 if log_y else (abs(low) or 1.0) / 2
            low, high = max(low - around, -sys.float_info.max), min(high + around, sys.float_info.max)
        return cls(axis, min(places), max(places), low, high, log_y)

    def x(self, place: float) -> float:
        return (place - self.first_x) / ((self.last_x - self.first_x) or 1)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log_y else value
        half = self.high / 2 - self.low / 2
        return (value / 2 - self.low / 2) / half

    def y_label(self, part: float) -> str:
        value = self.low * (1 - part) + self.high * part  # the difference of the two may be no number
        if not self.log_y:
            return f"{value:.4g}"
        power = math.floor(value)
        if abs(power) < _FLOAT_POWER:
            return f"{10**value:.4g}"
        return f"{10 ** (value - power):.4g}e{power:+d}"

    def x_label(self, part: float) -> str:
        place = self.first_x + (self.last_x - self.first_x) * part
        if self.axis == "time":
            time = dt.datetime.fromtimestamp(place, dt.UTC)
            return layout.moment(time) if self.last_x - self.first_x > _SHORT_S else f"{time:%H:%M:%S}"
        if self.axis == "step":
            return f"{place:.0f}"
        return layout.tokens(round(place), layout.digits_between(self.first_x, self.last_x))

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
        x = round(scale.x(number(row[axis])) * (canvas.width * COLUMNS - 1))
        return x, round((1 - scale.y(row["value"])) * (canvas.height * ROWS - 1))

    live = sorted((row for row in drawn if row["superseded_by"] is None), key=lambda row: (row[axis], row["seq"]))
    places = [place(row) for row in live]
    for one in places[:1]:
        canvas.dot(*one)
    for one, other in pairwise(places):
        canvas.line(*one, *other)
    for row in rows:
        if not math.isfinite(row["value"]):
            x = round(scale.x(number(row[axis])) * (canvas.width * COLUMNS - 1))
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
            stretches.setdefault(stretch, []).append(scale.x(number(row[axis])))
    line = ["─"] * canvas.width
    for places in stretches.values():
        first, last = (round(x * (canvas.width * COLUMNS - 1)) // COLUMNS for x in (min(places), max(places)))
        line[first : last + 1] = [canvas.painted("▒", "superseded")] * (last + 1 - first)
    return "".join(line)


def _border_numbers(canvas: Canvas, scale: _Scale, starts: Iterable[dict[str, Any]], axis: str, margin: int) -> str:
    """Return the line above the picture, with the numbers of the segments where there is room for them."""
    line = ""
    for start in sorted(starts, key=lambda start: number(start[axis])):
        at = _border(canvas, scale, start, axis) // COLUMNS
        if len(line) <= at < canvas.width:
            line = line.ljust(at) + f"{start['segment']} "
    return " " * (margin + 1) + canvas.painted(line.rstrip(), "border")


def _border(canvas: Canvas, scale: _Scale, start: dict[str, Any], axis: str) -> int:
    return round(scale.x(number(start[axis])) * (canvas.width * COLUMNS - 1))


def _legend(canvas: Canvas, curve: Curve, rows: Sequence[dict[str, Any]], axis: str, *, log_y: bool) -> list[str]:
    _, superseded, odd, not_positive = curve.counts()
    parts = [canvas.painted("━━", "line") + " current"]
    if superseded:
        parts.append(canvas.painted("··▒", "superseded") + f" superseded ({superseded:,} points)")
    parts.append(canvas.painted("┊", "border") + " start of a segment")
    if odd:
        places = [number(row[axis]) for row in rows if not math.isfinite(row["value"])]
        first = _Scale(axis, places[0], places[0], 0, 1, log_y=False).x_label(0)
        parts.append(canvas.painted("✗", "odd") + f" not finite ({odd:,}, the first at {first})")
    if log_y and not_positive:
        parts.append(f"{not_positive:,} not positive, not on this axis")
    return parts


def _marks(
    canvas: Canvas, scale: _Scale, marks: Marks, rows: Sequence[dict[str, Any]], axis: str
) -> tuple[str, list[str]]:
    """Return the line of marks below the axis, empty when there are none, and what they mean."""
    own = {
        key: [row for row in rows if (row["source_run"], row["segment"]) == key]
        for key in {(gap["run_id"], gap["segment"]) for gap in (*marks.gaps, *marks.holes)}
    }
    line = [" "] * canvas.width
    keys = []

    def put(character: str, style: str, spans: Iterable[tuple[float | None, float | None]], meaning: str) -> None:
        spans = list(spans)
        for first, last in spans:
            if first is None or last is None:
                continue
            ends = [round(scale.x(place) * (canvas.width - 1)) for place in (first, last)]
            if first == last:  # a fork starts from the checkpoint that was evaluated: both are to be seen
                beside = [ends[0] + aside for aside in _ASIDE if 0 <= ends[0] + aside < canvas.width]
                mark = canvas.painted(character, style)
                ends[:] = [next((column for column in beside if line[column] in (" ", mark)), ends[0])] * 2
            for column in range(max(ends[0], 0), min(ends[1], canvas.width - 1) + 1):
                line[column] = canvas.painted(character, style)
        if spans:
            keys.append(f"{canvas.painted(character, style)} {meaning} ({len(spans):,})")

    def spans(gaps: Sequence[dict[str, Any]]) -> Iterator[tuple[float | None, float | None]]:
        for gap in gaps:
            points = own[gap["run_id"], gap["segment"]]
            yield at_tokens(points, gap["first_tokens"], axis), at_tokens(points, gap["last_tokens"], axis)

    def places(found: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
        yield from ((number(row[axis]), number(row[axis])) for row in found)

    forked = [start for start in marks.starts if start["from_run"] != (rows[0]["run_id"] if rows else None)]
    put("Y", "fork", places([*marks.forks, *forked]), "fork")
    put("◆", "eval", places(marks.evals), "evaluated")
    put("░", "gap", spans(marks.gaps), "gap: points lost")  # over the others: what is missing must be seen
    put("▚", "hole", spans(marks.holes), "damaged: rows unreadable")
    put("▲", "alert", places(marks.alerts), "alert")
    return "".join(line).rstrip(), keys
