"""What is marked on a curve: where segments start, alerts, evaluations, forks, and where points are missing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb

_STARTS: Final = """
    SELECT segment, start_tokens AS tokens, start_step AS step, start_time AS time, from_run
    FROM segments
    WHERE run_id = $run AND started AND from_run IS NOT NULL
    ORDER BY segment
"""
# Of the run itself, left behind or not, and of those that it was forked from what is on its path: that counts as
# current, whatever became of it there.
ALERTS: Final = """
    SELECT *, CAST(NULL AS VARCHAR) AS source_run
    FROM alerts
    WHERE run_id = $run
    UNION ALL BY NAME
    SELECT a.*, CAST(NULL AS BIGINT) AS superseded_by, a.tokens <= h.settled_to AS settled, a.run_id AS source_run
    FROM log.alerts a
    JOIN log.spans h ON h.source_run = a.run_id AND h.segment = a.segment AND a.tokens > h.lo AND a.tokens <= h.hi
    WHERE h.run_id = $run AND h.source_run <> $run
"""
CHECKPOINTS: Final = """
    SELECT *, CAST(NULL AS VARCHAR) AS source_run
    FROM checkpoints
    WHERE run_id = $run
    UNION ALL BY NAME
    SELECT c.*, CAST(NULL AS BIGINT) AS superseded_by, c.tokens <= h.settled_to AS settled, c.run_id AS source_run
    FROM log.checkpoints c
    JOIN log.spans h ON h.source_run = c.run_id AND h.segment = c.segment AND c.tokens > h.lo AND c.tokens <= h.hi
    WHERE h.run_id = $run AND h.source_run <> $run
"""
EVALS: Final = """
    SELECT *, CAST(NULL AS VARCHAR) AS source_run
    FROM evals
    WHERE run_id = $run AND matched
    UNION ALL BY NAME
    SELECT e.* EXCLUDE (superseded_by), CAST(NULL AS BIGINT) AS superseded_by, e.run_id AS source_run
    FROM evals e
    JOIN log.spans h ON h.source_run = e.run_id AND h.segment = e.segment AND e.tokens > h.lo AND e.tokens <= h.hi
    WHERE h.run_id = $run AND h.source_run <> $run AND e.matched
"""
_ALERTS: Final = f"""
    SELECT tokens, step, time, metric, level, rule, message, superseded_by, source_run
    FROM ({ALERTS}) a
    WHERE phase = 'raised'
    ORDER BY time, seq
"""
_EVALS: Final = f"""
    SELECT c.tokens, c.step, c.time, c.ckpt_id, c.superseded_by, c.source_run
    FROM ({CHECKPOINTS}) c
    WHERE EXISTS (SELECT 1 FROM evals e WHERE e.run_id = c.run_id AND e.ckpt_id = c.ckpt_id)
    ORDER BY c.tokens, c.segment
"""
_FORKS: Final = """
    SELECT s.run_id, s.start_tokens AS tokens, s.start_step AS step, s.start_time AS time, s.fork_reason
    FROM segments s
    WHERE s.from_run = $run AND s.run_id <> $run
    ORDER BY s.start_tokens, s.run_id
"""
# What a curve consists of: the run's own segments, left behind or not, and those of its ancestors that are on its path.
_SEGMENTS: Final = """
    SELECT run_id, segment FROM segments WHERE run_id = $run
    UNION SELECT source_run, segment FROM log.spans WHERE run_id = $run
"""
_GAPS: Final = f"""
    SELECT g.run_id, g.segment, g.first_tokens, g.last_tokens, g.points, g.reason, g.errno
    FROM gaps g
    JOIN ({_SEGMENTS}) s ON s.run_id = g.run_id AND s.segment = g.segment
    ORDER BY g.run_id, g.segment, g.seq
"""
_DAMAGED: Final = f"""
    SELECT DISTINCT d.run_id, d.segment
    FROM damages d
    JOIN ({_SEGMENTS}) s ON s.run_id = d.run_id AND s.segment = d.segment
    ORDER BY d.run_id, d.segment
"""
# Every row of a segment, of whatever table, has the next number: where one is missing, it was lost with its bytes.
_HOLES: Final = """
    WITH rows AS (
        SELECT DISTINCT seq, tokens FROM log.points WHERE run_id = $run AND segment = $segment
        UNION SELECT seq, tokens FROM log.records WHERE run_id = $run AND segment = $segment
        UNION SELECT seq, tokens FROM log.checkpoints WHERE run_id = $run AND segment = $segment
        UNION SELECT seq, tokens FROM log.alerts WHERE run_id = $run AND segment = $segment
        UNION SELECT seq, tokens FROM log.batches WHERE run_id = $run AND segment = $segment
        UNION SELECT seq, tokens FROM log.gaps WHERE run_id = $run AND segment = $segment
    )
    SELECT CAST($run AS VARCHAR) AS run_id, CAST($segment AS BIGINT) AS segment, first_tokens, last_tokens, missing
    FROM (
        SELECT lag(tokens) OVER w AS first_tokens, tokens AS last_tokens, seq - lag(seq) OVER w - 1 AS missing
        FROM rows
        WINDOW w AS (ORDER BY seq)
    ) h
    WHERE missing > 0 AND last_tokens >= first_tokens
    ORDER BY first_tokens
"""

Row = dict[str, Any]


@dataclass
class Marks:
    """The marks of one run.

    Attributes:
        starts: Number and place of each segment that starts from somewhere, and the run it starts from.
        alerts: Those raised, `source_run` being the one it was forked from where that raised it.
        evals: The checkpoints that were evaluated, those of the runs that it was forked from included.
        forks: Runs that start from this one.
        gaps: Points of its curve, or left behind by it, that could not be kept: by whom, from and to which tokens.
        holes: The same of rows whose bytes are damaged: between which tokens they stood.
    """

    starts: list[Row] = field(default_factory=list)
    alerts: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    forks: list[Row] = field(default_factory=list)
    gaps: list[Row] = field(default_factory=list)
    holes: list[Row] = field(default_factory=list)


def read_marks(
    con: duckdb.DuckDBPyConnection, run_id: str, *, all_runs: duckdb.DuckDBPyConnection | None = None
) -> Marks:
    """Read the marks of a run.

    Args:
        con: Has the run with its points.
        run_id: The run.
        all_runs: Has all runs, for those that were forked from it; None: forks are left out.
    """
    marks = Marks(
        starts=fetch(con, _STARTS, run=run_id),
        alerts=fetch(con, _ALERTS, run=run_id),
        evals=fetch(con, _EVALS, run=run_id),
        forks=[] if all_runs is None else fetch(all_runs, _FORKS, run=run_id),
    )
    marks.gaps, marks.holes = read_losses(con, run_id)
    return marks


def read_losses(con: duckdb.DuckDBPyConnection, run_id: str) -> tuple[list[Row], list[Row]]:
    """Return the gaps of a run's curve, and where rows of it are damaged.

    A gap has `run_id`, `segment`, `first_tokens`, `last_tokens`, `points`, `reason` and `errno`; damage has `missing`
    (rows) instead of the last three. Both may be of a run that this one was forked from.
    """
    holes: list[Row] = []
    for one in fetch(con, _DAMAGED, run=run_id):
        holes += fetch(con, _HOLES, run=one["run_id"], segment=one["segment"])
    return fetch(con, _GAPS, run=run_id), holes


def fetch(con: duckdb.DuckDBPyConnection, query: str, **parameters: object) -> list[Row]:
    """Return the rows of a query by the names of their columns."""
    cursor = con.execute(query, parameters)
    columns = [column[0] for column in cursor.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def number(place: Any) -> float:
    """Return a place on any axis as a number: seconds since 1970 for a time."""
    return place.timestamp() if isinstance(place, dt.datetime) else place


def at_tokens(rows: Iterable[Mapping[str, Any]], tokens: int, axis: str) -> float | None:
    """Return where on an axis some tokens lie, by the nearest of a segment's points; None when it has none."""
    if axis == "tokens":
        return tokens
    near = min(rows, key=lambda row: abs(row["tokens"] - tokens), default=None)
    return None if near is None else number(near[axis])
