"""What `llmtrack ls` and `llmtrack show` say of runs, as plain rows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import duckdb

from llmtrack.query.read.ahead import ahead
from llmtrack.query.read.files import folder_bytes
from llmtrack.writer.format import run_folder

from .latest import last_values
from .select import select_runs

LOSS: Final = "train/loss"

# Clocks of different hosts differ by less.
_OVERLAP_S: Final = 10.0

_LIST: Final = """
    SELECT r.*, coalesce(a.alerts, 0) AS alerts, coalesce(g.points, 0) AS points_lost,
           coalesce(d.damages, 0) AS damages, r.segments - 1 AS restarts, h.tokens_per_s
    FROM runs r
    LEFT JOIN (
        SELECT s.run_id, (s.last_tokens - s.start_tokens) / nullif(g.running_s, 0) AS tokens_per_s
        FROM segments s
        JOIN log.heads h ON h.run_id = s.run_id AND h.segment = s.segment
        JOIN goodput g ON g.run_id = s.run_id AND g.segment = s.segment
    ) h ON h.run_id = r.run_id
    LEFT JOIN (
        SELECT run_id, CAST(count(*) AS BIGINT) AS alerts
        FROM alerts
        WHERE superseded_by IS NULL AND phase = 'raised'
        GROUP BY run_id
    ) a ON a.run_id = r.run_id
    LEFT JOIN (SELECT run_id, CAST(sum(points) AS BIGINT) AS points FROM gaps GROUP BY run_id) g ON g.run_id = r.run_id
    LEFT JOIN (SELECT run_id, count(*) AS damages FROM damages GROUP BY run_id) d ON d.run_id = r.run_id
    ORDER BY r.last_time DESC NULLS LAST, r.run_id
"""
_SEGMENTS: Final = """
    SELECT s.*, g.tokens_kept, g.tokens_superseded, g.running_s, g.waiting_s, g.gpu_hours, g.gpu_hours_lost,
           coalesce(c.checkpoints, 0) AS checkpoints, c.last_checkpoint
    FROM segments s
    LEFT JOIN goodput g ON g.run_id = s.run_id AND g.segment = s.segment
    LEFT JOIN (
        SELECT run_id, segment, count(*) AS checkpoints, max(tokens) AS last_checkpoint
        FROM checkpoints
        GROUP BY run_id, segment
    ) c ON c.run_id = s.run_id AND c.segment = s.segment
    WHERE s.run_id = ?
    ORDER BY s.segment
"""
_SUPERSEDED: Final = """
    SELECT s.segment, greatest(s.lo, g.start_tokens) AS from_tokens, least(s.hi, g.last_tokens) AS to_tokens,
           s.superseded_by
    FROM log.stretches s
    JOIN segments g ON g.run_id = s.run_id AND g.segment = s.segment
    WHERE s.run_id = ? AND s.superseded_by IS NOT NULL AND s.superseded_by <> s.segment
      AND least(s.hi, g.last_tokens) > greatest(s.lo, g.start_tokens)
    ORDER BY s.segment, s.lo
"""
_GAPS: Final = """
    SELECT segment, first_tokens, last_tokens, points, reason, errno
    FROM gaps
    WHERE run_id = ?
    ORDER BY segment, seq
"""
_DAMAGES: Final = """
    SELECT segment, path, first_byte, end_byte, reason
    FROM damages
    WHERE run_id = ?
    ORDER BY path, first_byte
"""
_CHILDREN: Final = """
    SELECT s.from_segment AS segment, r.run_id, r.fork_tokens, r.fork_reason, r.status, s.recipe_diff
    FROM runs r
    JOIN (
        SELECT run_id, from_run, from_segment, start_tokens, min(recipe_diff) AS recipe_diff
        FROM segments
        GROUP BY run_id, from_run, from_segment, start_tokens
    ) s ON s.run_id = r.run_id AND s.from_run = r.parent_run AND s.start_tokens = r.fork_tokens
    WHERE r.parent_run = ?
    ORDER BY r.fork_tokens, r.run_id
"""

Row = dict[str, Any]


@dataclass
class RunDescription:
    """One run with all that is worth saying of it.

    Attributes:
        run: Its row of the view `runs`.
        segments: The rows of `segments`, with the columns of `goodput`, the number of checkpoints, and lists of rows:
            `superseded` (from_tokens, to_tokens, superseded_by), `gaps`, `damages`, `children`, `at_once_with`.
        damages: Of the run as a whole.
        children: Runs that were forked from it at a segment that is not there.
    """

    run: Row
    segments: list[Row]
    damages: list[Row] = field(default_factory=list)
    children: list[Row] = field(default_factory=list)


def list_runs(con: duckdb.DuckDBPyConnection, root: Path, names: Sequence[str] = ()) -> list[Row]:
    """Return the runs, the latest first.

    Their rows of the view `runs`, and `alerts` that are live, `points_lost`, `damages`, `restarts`, `tokens_per_s` (of
    the newest segment, from its start to its last sign of life), `loss` (the last `train/loss` of the curve),
    `loss_tokens`, and `size_bytes` (of all files).

    Args:
        con: Made by `connect`, of that root; points are not needed.
        root: The folder that holds the runs.
        names: Ids, beginnings of ids, or globs; none: all runs.

    Raises:
        UsageError: A name is nobody's.
    """
    rows = _fetch(con, _LIST)
    if names:
        wanted = set(select_runs([row["run_id"] for row in rows], names))
        rows = [row for row in rows if row["run_id"] in wanted]
    losses = last_values(con, LOSS, {row["run_id"] for row in rows})
    sizes = ahead(folder_bytes, [str(run_folder(root, row["run_id"])) for row in rows])
    for row, row["size_bytes"] in zip(rows, sizes, strict=True):
        last = losses.get(row["run_id"])
        row["loss_tokens"], row["loss"] = (last.tokens, last.value) if last else (None, None)
        if last and (row["tokens"] is None or last.tokens > row["tokens"]):
            row["tokens"], row["step"] = last.tokens, last.step  # the heartbeat of an open part is up to 30 s old
    return rows


def describe_run(con: duckdb.DuckDBPyConnection, all_runs: duckdb.DuckDBPyConnection, run_id: str) -> RunDescription:
    """Return what there is to say of one run.

    Args:
        con: Has the run with its points.
        all_runs: Has all runs, for the children.
        run_id: The run.
    """
    found = _fetch(con, "SELECT * FROM runs WHERE run_id = ?", run_id)
    segments = _fetch(con, _SEGMENTS, run_id)
    more: dict[str, dict[int, list[Row]]] = {}
    for name, rows in (
        ("superseded", _fetch(con, _SUPERSEDED, run_id)),
        ("gaps", _fetch(con, _GAPS, run_id)),
        ("damages", _fetch(con, _DAMAGES, run_id)),
        ("children", _fetch(all_runs, _CHILDREN, run_id)),
    ):
        more[name] = defaultdict(list)
        for row in rows:
            more[name][row.pop("segment") or 0].append(row)
    for segment in segments:
        for name, by_segment in more.items():
            segment[name] = by_segment.pop(segment["segment"], [])
        segment["at_once_with"] = _at_once(segment, segments)
    left = {name: [row for rows in by_segment.values() for row in rows] for name, by_segment in more.items()}
    run = found[0] if found else {"run_id": run_id, "status": "lost", "segments": len(segments)}
    return RunDescription(run, segments, left["damages"], left["children"])


def changed_keys(recipe_diff: str | None) -> list[str]:
    """Return what a recipe fork changed, as ``key: before -> after``."""
    try:
        diff = json.loads(recipe_diff or "{}")
        return [f"{key}: {_short(before)} -> {_short(after)}" for key, (before, after) in diff.items()]
    except (ValueError, TypeError, AttributeError):
        return [str(recipe_diff)]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"  # noqa: PLR2004 - a word of a line


def _at_once(segment: Row, segments: list[Row]) -> list[int]:
    """Return the later segments that began while this one went on: two writers for one run."""
    if segment["last_time"] is None:
        return []
    return [
        other["segment"]
        for other in segments
        if other["segment"] > segment["segment"]
        and other["start_time"] is not None
        and (segment["last_time"] - other["start_time"]).total_seconds() > _OVERLAP_S
    ]


def _fetch(con: duckdb.DuckDBPyConnection, query: str, *parameters: object) -> list[Row]:
    cursor = con.execute(query, list(parameters))
    columns = [column[0] for column in cursor.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
