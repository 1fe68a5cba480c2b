"""One metric of several runs at equal tokens: the values side by side, and how far each is from the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from llmtrack.writer.errors import UsageError

from . import curves

GRID: Final = 12  # places that are compared unless others are named
_PICTURE_GRID: Final = 400
_CURVE_POINTS: Final = 8_000

_EXTENT: Final = """
    SELECT run_id, min(tokens), max(tokens)
    FROM history
    WHERE name = $name AND list_contains($runs, run_id) AND NOT isnan(value)
    GROUP BY run_id
"""
# The last value at or below each place: the last one between it and the place before, or else that one's.
_AT: Final = """
    WITH grid AS (SELECT unnest($grid) AS place),
    lasts AS (
        SELECT h.run_id, g.place,
               arg_max(struct_pack(t := h.tokens, v := h.value, s := h.segment), (h.tokens, h.seq)) AS p
        FROM (SELECT * FROM history WHERE name = $name AND list_contains($runs, run_id)) h
        ASOF JOIN grid g ON h.tokens <= g.place
        GROUP BY h.run_id, g.place
    )
    SELECT run_id, place, p.t, p.v, p.s
    FROM (
        SELECT r.run_id, g.place, last_value(l.p IGNORE NULLS) OVER (
                   PARTITION BY r.run_id ORDER BY g.place ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
               ) AS p
        FROM (SELECT unnest($runs) AS run_id) r
        CROSS JOIN grid g
        LEFT JOIN lasts l ON l.run_id = r.run_id AND l.place = g.place
    ) f
    WHERE p IS NOT NULL
"""
# The mean of what was logged in (place - window, place].
_MEANS: Final = """
    SELECT h.run_id, g.place, avg(h.value) FILTER (isfinite(h.value))
    FROM (SELECT * FROM history WHERE name = $name AND list_contains($runs, run_id)) h
    JOIN (SELECT unnest($grid) AS place) g ON h.tokens <= g.place AND h.tokens > g.place - $window
    GROUP BY h.run_id, g.place
"""

# A segment has one way back: two curves that have one in common are the same up to there.
_SHARED: Final = """
    SELECT b.run_id, max(least(a.hi, b.hi))
    FROM log.spans a
    JOIN log.spans b ON b.source_run = a.source_run AND b.segment = a.segment AND NOT b.yields
    WHERE NOT a.yields AND a.run_id = $first AND list_contains($runs, b.run_id) AND b.run_id <> $first
    GROUP BY b.run_id
"""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        name: The metric.
        runs: The runs that have it, the one that the others are compared with first.
        without: Those that do not.
        grid: The places, in tokens.
        rows: One for each place and run: `tokens`, `run_id`, `value`, `value_tokens` (where that value was logged),
            `segment`, `difference` (to the first run, null where one of the two has no value).
        shared: Up to which tokens the curve of a run is that of the first one, because one was forked from the other,
            or both from a third; runs that have nothing in common with it are not in it.
    """

    name: str
    runs: list[str]
    without: list[str]
    grid: list[int]
    rows: list[dict[str, Any]]
    shared: dict[str, int]


def compare(
    con: duckdb.DuckDBPyConnection,
    name: str,
    runs: Sequence[str],
    *,
    at: Sequence[int] = (),
    places: int = GRID,
    mean_over: int = 0,
) -> Comparison:
    """Compare one metric of runs at equal tokens.

    Nothing is interpolated: a run's value at some tokens is the last one that it logged at or below them, on its own
    curve, that of its parents included. A run that has not come so far has no value there.

    Args:
        con: Made by `connect`, with the runs.
        name: The metric.
        runs: In the order in which they are shown; the others are compared with the first one.
        at: The places, in tokens; none given: evenly from where all runs have begun, or the first one of several that
            were one parts, to where the last one ends, and where the first one ends: as far as all can be compared.
        places: How many, when `at` names none.
        mean_over: Compare means over so many tokens up to each place instead of single values; 0: values as logged.

    Raises:
        UsageError: None of the runs has the metric.
    """
    extent = {
        run_id: (first, last)
        for run_id, first, last in con.execute(_EXTENT, {"name": name, "runs": list(runs)}).fetchall()
    }
    found = [run_id for run_id in runs if run_id in extent]
    if not found:
        known = sorted({metric for run_id in runs for metric in curves.metric_names(con, run_id)})
        if name in known:
            raise UsageError(f"{name} is NaN everywhere", hint="llmtrack plot shows where")
        raise curves.no_such_metric(known, name, f"none of {len(runs)} runs" if len(runs) > 1 else f"run {runs[0]}")
    ends = [extent[run][1] for run in found]
    shared = dict(con.execute(_SHARED, {"first": found[0], "runs": found}).fetchall())
    begin = max(extent[run][0] for run in found)
    if len(shared) == len(found) - 1 > 0:
        begin = max(begin, min(shared.values()))
    grid = sorted(set(at)) or _grid(begin, min(ends), max(ends), places)
    parameters = {"name": name, "runs": found, "grid": grid}
    values = {
        (run_id, place): (at, value, segment)
        for run_id, place, at, value, segment in con.execute(_AT, parameters).fetchall()
        if place <= extent[run_id][1]
    }
    if mean_over:
        means = con.execute(_MEANS, {**parameters, "window": mean_over}).fetchall()
        mean = {(run_id, place): value for run_id, place, value in means}
        values = {key: (at, mean.get(key), segment) for key, (at, _, segment) in values.items()}
    rows = []
    for place in grid:
        base = values.get((found[0], place), (None, None, None))[1]
        for run_id in found:
            last, value, segment = values.get((run_id, place), (None, None, None))
            difference = None if value is None or base is None else value - base
            rows.append(
                {"tokens": place, "run_id": run_id, "value": value, "value_tokens": last, "segment": segment}
                | {"difference": difference}
            )
    return Comparison(name, found, [run_id for run_id in runs if run_id not in extent], grid, rows, shared)


def read_picture(
    con: duckdb.DuckDBPyConnection, found: Comparison, *, mean_over: int = 0
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[tuple[int, float]]]]:
    """Return the curves of a comparison, and the differences at many places: tokens and value of each."""
    points: dict[str, list[tuple[int, float]]] = {}
    for run_id in found.runs:
        lines = [line for line in curves.count_lines(con, run_id, [found.name]) if line.superseded_by is None]
        curves.read_points(con, lines, at_most=_CURVE_POINTS)
        points[run_id] = [(row.tokens, row.value) for line in lines for row in line.rows]
    fine = compare(con, found.name, found.runs, places=_PICTURE_GRID, mean_over=mean_over)
    differences: dict[str, list[tuple[int, float]]] = {run_id: [] for run_id in found.runs}
    for row in fine.rows:
        if row["difference"] is not None:
            differences[row["run_id"]].append((row["tokens"], row["difference"]))
    return points, differences


def _grid(first: int, shared: int, last: int, places: int) -> list[int]:
    """Return places from the first to the last, as even as integers are, and the last one that all runs reached."""
    steps = max(places - 1, 1)
    even = {first + max(last - first, 0) * step // steps for step in range(steps + 1)}
    return sorted(even | {max(first, shared)})
