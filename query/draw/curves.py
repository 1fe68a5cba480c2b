"""Curves of runs with as many points as a picture needs: the highest, the lowest, and what is no number stay.

A curve is thinned out stretch by stretch, in the order in which it was logged, so that a spike of one step in a million
is in every picture. Points are taken, never made: each one that is left stands in the log.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import duckdb

from llmtrack.writer.errors import UsageError

_SHOWN_NAMES: Final = 8
_KEPT: Final = 4  # of a stretch: first, last, lowest and highest

# What a run's curve consists of, its parents' part included, and beside it what was left behind of the run itself.
_POINTS: Final = """
    SELECT source_run, segment, seq, time, step, tokens, name, value, CAST(NULL AS BIGINT) AS superseded_by, settled
    FROM history
    WHERE run_id = $run AND name IN (SELECT name FROM wanted)
    UNION ALL
    SELECT run_id, segment, seq, time, step, tokens, name, value, superseded_by, settled
    FROM metrics
    WHERE run_id = $run AND superseded_by IS NOT NULL AND name IN (SELECT name FROM wanted)
"""
_COUNT: Final = f"""
    SELECT name, source_run, segment, superseded_by, CAST(count(*) AS BIGINT), min(seq), max(seq),
           count(*) FILTER (NOT isfinite(value)), count(*) FILTER (isfinite(value) AND value <= 0)
    FROM ({_POINTS})
    GROUP BY name, source_run, segment, superseded_by
    ORDER BY name, superseded_by NULLS FIRST, min(tokens), source_run, segment
"""
_STRETCHES: Final = f"""
    SELECT l.line, (p.seq - l.first_seq) * l.stretches // (l.last_seq - l.first_seq + 1) AS stretch, l.stretches,
           p.seq, p.time, p.step, p.tokens, p.value, p.settled
    FROM ({_POINTS}) p
    JOIN lines l ON l.name = p.name AND l.source_run = p.source_run AND l.segment = p.segment
                AND l.superseded_by = coalesce(p.superseded_by, -1)
"""
# The sequence numbers first, and the rows in a second pass: neither pass holds more than what is kept.
_SUMMARY: Final = f"""
    SELECT line, stretch, min(seq), max(seq), arg_min(seq, value) FILTER (isfinite(value)),
           arg_max(seq, value) FILTER (isfinite(value)), min(seq) FILTER (isnan(value)),
           min(seq) FILTER (value = 'infinity'), min(seq) FILTER (value = '-infinity'),
           CAST(count(*) FILTER (isfinite(value)) AS BIGINT), avg(value) FILTER (isfinite(value))
    FROM ({_STRETCHES}) s
    WHERE stretches > 0
    GROUP BY line, stretch
    ORDER BY line, stretch
"""
_ROWS: Final = f"""
    SELECT line, seq, epoch_ms(time), step, tokens, value, coalesce(settled, false)
    FROM ({_STRETCHES}) s
    WHERE stretches = 0 OR (line, seq) IN (SELECT line, seq FROM kept)
    ORDER BY line, seq
"""


class Row(NamedTuple):
    """One point of a line; `time` in milliseconds since 1970."""

    seq: int
    time: int
    step: int
    tokens: int
    value: float
    settled: bool


class Stretch(NamedTuple):
    """Some neighbours of which a few are kept: how many of those, how many numbers there were, and their mean."""

    kept: int
    numbers: int
    mean: float | None


@dataclass
class Line:
    """Points of one metric that one segment logged, and that are all on the run's path, or were left behind together.

    Attributes:
        run_id: The run whose curve it belongs to.
        name: The metric.
        source_run: Where it was logged: the run itself, or one that it was forked from.
        segment: Of that run.
        superseded_by: The segment that left it behind; None on the run's path.
        count: How many points the log has.
        odd: How many of these are NaN or infinite.
        not_positive: How many are zero or less, and have no place on a logarithmic axis.
        rows: The points that are kept, in the order of the log.
        stretches: What they stand for; empty when all are kept.
    """

    run_id: str
    name: str
    source_run: str
    segment: int
    superseded_by: int | None
    count: int
    odd: int
    not_positive: int
    rows: list[Row] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    first_seq: int = 0
    last_seq: int = 0


def metric_names(con: duckdb.DuckDBPyConnection, run_id: str) -> list[str]:
    """Return the names of all metrics on a run's curve or left behind by it, sorted."""
    query = "SELECT DISTINCT name FROM metrics WHERE run_id = $run UNION SELECT name FROM history WHERE run_id = $run"
    return sorted(row[0] for row in con.execute(query, {"run": run_id}).fetchall())


def select_metrics(known: Sequence[str], wanted: Iterable[str], run_id: str) -> list[str]:
    """Return the metrics that are meant, each once, in the order in which they were named.

    Args:
        known: All there are.
        wanted: Names or globs.
        run_id: Whose metrics these are, for the message.

    Raises:
        UsageError: There is none of that name.
    """
    return list(dict.fromkeys(match for name in wanted for match in _matching(known, name, run_id)))


def no_such_metric(known: Sequence[str], name: str, whose: str) -> UsageError:
    """Return the error for a metric that is not there, with those that may have been meant."""
    shown = difflib.get_close_matches(name, known, _SHOWN_NAMES, 0.3) or known[:_SHOWN_NAMES]
    hint = f"one of {', '.join(shown)}" if shown else "nothing was logged yet"
    return UsageError(f"{whose} has {'a' if whose.startswith('none') else 'no'} metric {name!r}", hint=hint)


def count_lines(con: duckdb.DuckDBPyConnection, run_id: str, names: Sequence[str]) -> list[Line]:
    """Return the lines of a run's metrics without their points, on the path first and in its order."""
    with con.cursor() as cursor:
        _want(cursor, names)
        found = cursor.execute(_COUNT, {"run": run_id}).fetchall()
    return [
        Line(run_id, name, source, segment, by, count, odd, low, first_seq=first, last_seq=last)
        for name, source, segment, by, count, first, last, odd, low in found
    ]


def read_points(con: duckdb.DuckDBPyConnection, lines: Sequence[Line], *, at_most: int) -> None:
    """Read the points of lines, and thin each curve out to about as many as asked for.

    Args:
        con: Made by `connect`.
        lines: Of one run, from `count_lines`; their `rows` and `stretches` are filled.
        at_most: Points of one metric of the run, what was left behind counted with it. Each line keeps a few at least.
    """
    if not lines:
        return
    totals: dict[str, int] = defaultdict(int)
    for line in lines:
        totals[line.name] += line.count
    with con.cursor() as cursor:
        cursor.execute("BEGIN")  # both passes see the same
        _want(cursor, list(totals))
        cursor.execute(
            "CREATE TEMP TABLE lines (line BIGINT, name VARCHAR, source_run VARCHAR, segment BIGINT, "
            "superseded_by BIGINT, first_seq BIGINT, last_seq BIGINT, stretches BIGINT)"
        )
        _fill(
            cursor,
            "lines",
            [
                (index, line.name, line.source_run, line.segment, _by(line), line.first_seq, line.last_seq, stretches)
                for index, line in enumerate(lines)
                for stretches in [_stretches(line, totals[line.name], at_most)]
            ],
        )
        run = {"run": lines[0].run_id}
        summary = cursor.execute(_SUMMARY, run).fetchall()
        kept = {(row[0], seq): row[1] for row in summary for seq in row[2:9] if seq is not None}
        cursor.execute("CREATE TEMP TABLE kept (line BIGINT, seq BIGINT)")
        _fill(cursor, "kept", list(kept))
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for line_index, *point in cursor.execute(_ROWS, run).fetchall():
            lines[line_index].rows.append(Row(*point))
            if (line_index, point[0]) in kept:
                counts[line_index, kept[line_index, point[0]]] += 1
        cursor.execute("DROP TABLE lines; DROP TABLE kept; DROP TABLE wanted; COMMIT")
    for line_index, stretch, *_, count, mean in summary:
        lines[line_index].stretches.append(Stretch(counts[line_index, stretch], count, mean))


def share(counts: Mapping[object, int], budget: int) -> int:
    """Return how many points each curve may have so that all together have no more than the budget.

    Args:
        counts: How many each has.
        budget: Of all.
    """
    left = budget
    waiting = len(counts)
    for count in sorted(counts.values()):
        if count * waiting > left:
            return max(left // waiting, 2 * _KEPT)
        left -= count
        waiting -= 1
    return max(counts.values(), default=0)


def _stretches(line: Line, total: int, at_most: int) -> int:
    """Return into how many stretches a line is divided; 0: it is kept whole."""
    if total <= at_most or line.count <= _KEPT:
        return 0
    wanted = max(1, at_most * line.count // (total * _KEPT))
    return 0 if wanted * _KEPT >= line.count else wanted


def _by(line: Line) -> int:
    return -1 if line.superseded_by is None else line.superseded_by


def _want(cursor: duckdb.DuckDBPyConnection, names: Sequence[str]) -> None:
    cursor.execute("CREATE OR REPLACE TEMP TABLE wanted (name VARCHAR)")
    _fill(cursor, "wanted", [(name,) for name in names])


def _fill(cursor: duckdb.DuckDBPyConnection, table: str, rows: Sequence[Sequence[object]]) -> None:
    """Insert rows, column by column: one by one they would take DuckDB a millisecond each."""
    if not rows:
        return
    columns = [list(column) for column in zip(*rows, strict=True)]
    unnested = ", ".join(f"unnest(${index})" for index in range(1, len(columns) + 1))
    cursor.execute(f"INSERT INTO {table} SELECT {unnested}", columns)


def _matching(known: Sequence[str], name: str, run_id: str) -> list[str]:
    if name in known:
        return [name]
    found = [other for other in known if fnmatchcase(other, name)]
    if not found:
        raise no_such_metric(known, name, f"run {run_id}")
    return found
