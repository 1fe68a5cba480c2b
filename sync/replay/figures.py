"""What is said of each metric of a run as a whole: a tracker's own figures know only what it was sent last."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llmtrack.sync.kinds import PART_SQL

if TYPE_CHECKING:
    import duckdb


class Figures(NamedTuple):
    """The finite values of one metric in one run of a tracker, or None where there is none."""

    name: str
    last: float | None
    min: float | None
    max: float | None


def read_figures(con: duckdb.DuckDBPyConnection, run_id: str, kind: str, segments: list[int]) -> list[Figures]:
    """Return the figures of every metric that some segments have in one part.

    Args:
        con: From `llmtrack.query.connect`.
        run_id: The run.
        kind: `CANONICAL`, `PROVISIONAL` or `SUPERSEDED`.
        segments: Numbers of segments.
    """
    found = con.execute(
        "SELECT name, arg_max(value, (segment, seq)) FILTER (isfinite(value)), min(value) FILTER (isfinite(value)),"
        f" max(value) FILTER (isfinite(value)) FROM metrics WHERE run_id = $run AND {PART_SQL} = $kind"
        " AND segment IN (SELECT unnest($s)) GROUP BY name ORDER BY name",
        {"run": run_id, "kind": kind, "s": segments},
    )
    return [Figures(*row) for row in found.fetchall()]
