"""Which rows stay when a run is thinned out for a tracker that does not take all of them.

Of each so many steps stay the rows in which a metric has its least, its greatest or its last value, or one that is not
finite. Windows also end at each checkpoint, so that what is settled never depends on what comes later: a thinned curve
only grows, as a whole one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb


def kept(where: str) -> str:
    """Return a condition on `seq` that holds for the rows that stay.

    Args:
        where: Which points of `metrics` are thinned; its parameters and those of `parameters` are to be given.
    """
    return f"""
 AND seq IN (
    SELECT unnest([
        arg_min(seq, (value, seq)) FILTER (isfinite(value)), arg_max(seq, (value, seq)) FILTER (isfinite(value)),
        max(seq), min(seq) FILTER (NOT isfinite(value))
    ])
    FROM (SELECT seq, step, tokens, name, value FROM metrics WHERE {where}) p
    ASOF LEFT JOIN (SELECT unnest($cuts) AS cut) c ON p.tokens > c.cut
    GROUP BY name, step // $every, cut
)"""


def parameters(con: duckdb.DuckDBPyConnection, run_id: str, segment: int, every: int) -> dict[str, Any]:
    """Return the parameters of the condition.

    Args:
        con: From `llmtrack.query.connect`.
        run_id: The run.
        segment: Number of the segment whose points are thinned.
        every: Steps of one window.
    """
    found = con.execute(
        "SELECT DISTINCT tokens FROM checkpoints WHERE run_id = ? AND segment = ? ORDER BY tokens", [run_id, segment]
    )
    return {"every": every, "cuts": [tokens for (tokens,) in found.fetchall()]}
