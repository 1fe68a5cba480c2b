"""What the log says of each run: its facts, and which of its points belong to which run in a tracker.

The path rules are not here: they are in the views of `query`, and this module only asks them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from llmtrack.sync.kinds import PART_SQL

from . import thin
from .cursor import Mark

if TYPE_CHECKING:
    import duckdb

_BATCH_ROWS: Final = 2048  # DuckDB's own unit; after a crash as many are sent again
_THREADS: Final = 2
_MEMORY: Final = "64MB"  # beyond it DuckDB sorts on disk: 4 million points then take no more memory than one

# What a run's status means to a tracker. A lost run has no end record and no heartbeat: killed, as far as anyone knows.
_STATUS: Final = {"running": "running", "stalled": "running", "finished": "finished", "failed": "failed"}


@dataclass(frozen=True)
class Stretch:
    """The points of one segment that belong to one run in a tracker."""

    segment: int
    points: int
    seq_sum: int
    last_seq: int
    first_tokens: int
    last_tokens: int
    last_ms: int
    superseded_by: tuple[int, ...]

    def mark(self) -> Mark:
        """Return the mark that says that all of it was accepted."""
        return Mark(self.last_seq, self.last_tokens, self.points, self.seq_sum)

    def is_held(self, mark: Mark | None) -> bool:
        """Return whether a mark says that all of it was accepted."""
        return mark is not None and (mark.points, mark.seq_sum) == (self.points, self.seq_sum)


@dataclass(frozen=True)
class Segment:
    """One process lifetime, as far as a tracker is told of it."""

    segment: int
    start_tokens: int | None
    start_ms: int | None
    end_ms: int | None
    exit: str | None
    host: str | None
    world_size: int | None


@dataclass(frozen=True)
class LoggedRun:
    """One run of the log.

    Attributes:
        status: running, finished, failed or killed.
        fork: What its first segment starts from, by name: `segment`, `tokens`, `ckpt`, `reason`, `recipe_diff`.
        settled_to: Tokens of the newest checkpoint on the path, or of the head's start if that is higher.
        segments: Those whose start record can be read.
        parts: By kind and segment.
        state: running, stalled, finished, preempted, failed or lost: more exact than a tracker's own status.
    """

    run_id: str
    project: str
    name: str
    status: str
    parent_run: str | None
    fork: dict[str, str]
    settled_to: int | None
    start_ms: int
    end_ms: int | None
    git_commit: str | None
    config: dict[str, Any]
    recipe: dict[str, Any]
    segments: list[Segment]
    parts: dict[str, dict[int, Stretch]] = field(default_factory=dict)
    state: str = ""

    def points(self, kind: str) -> int:
        """Return how many points of a kind the run has."""
        return sum(stretch.points for stretch in self.parts.get(kind, {}).values())


def bound_memory(con: duckdb.DuckDBPyConnection) -> None:
    """Let DuckDB sort on disk what does not fit into a little memory, and use few threads, each of which needs some."""
    con.execute(f"SET memory_limit = '{_MEMORY}'")
    con.execute(f"SET threads = {_THREADS}")


def read_runs(con: duckdb.DuckDBPyConnection, only: Collection[str] | None = None) -> list[LoggedRun]:
    """Return all runs, parents before their children.

    Args:
        con: From `llmtrack.query.connect`.
        only: Runs whose points are looked at; those of all others are left out. None: of all.
    """
    parts = _parts(con, only)
    segments = _segments(con)
    unread = {run_id for (run_id,) in con.execute("SELECT DISTINCT run_id FROM damages").fetchall()}
    settled_to = dict(
        con.execute(
            "SELECT run_id, max(tokens) FROM checkpoints WHERE superseded_by IS NULL GROUP BY run_id"
        ).fetchall()
    )
    runs = {}
    # It takes memory for the lineage, not for points: 80 MB where it has 150 segments. Whoever sends binds anew.
    con.execute("RESET memory_limit")
    for run_id, project, name, parent, reason, status, first_ms, last_ms in con.execute(
        "SELECT run_id, project, run_name, parent_run, fork_reason, status, epoch_ms(first_time), epoch_ms(last_time)"
        " FROM runs ORDER BY run_id"
    ).fetchall():
        rows = [row for row in segments.get(run_id, []) if row["start_ms"] is not None]
        if not rows and run_id not in parts and run_id not in unread:
            continue  # a folder that was claimed a moment ago
        first: dict[str, Any] = rows[0] if rows else {}
        head_start = rows[-1]["start_tokens"] if rows else None
        forked: dict[str, Any] = next((row for row in rows if parent is not None and row["from_run"] == parent), {})
        fork = {
            "reason": reason,
            "segment": forked.get("from_segment"),
            "tokens": forked.get("start_tokens"),
            "ckpt": forked.get("from_ckpt"),
            "recipe_diff": forked.get("recipe_diff"),
        }
        shown = _STATUS.get(status, "killed")
        runs[run_id] = LoggedRun(
            run_id=run_id,
            project=project or "llmtrack",
            name=name or run_id,
            status=shown,
            state=status,
            parent_run=parent,
            fork={key: str(value) for key, value in fork.items() if value is not None},
            settled_to=max((n for n in (settled_to.get(run_id), head_start) if n is not None), default=None),
            start_ms=first.get("start_ms") or first_ms or 0,
            end_ms=None if shown == "running" else last_ms,
            git_commit=first.get("git_commit"),
            config=_json(first.get("config")),
            recipe=_json(first.get("recipe")),
            segments=[Segment(**{key: row[key] for key in Segment.__annotations__}) for row in rows],
            parts=parts.get(run_id, {}),
        )
    return _parents_first(runs)


def read_part(
    con: duckdb.DuckDBPyConnection,
    run_id: str,
    kind: str,
    segment: int,
    *,
    from_tokens: int | None = None,
    every: int = 1,
) -> Iterator[pa.RecordBatch]:
    """Read the points of one part of one segment in the order of their `seq`, a few thousand at a time.

    Args:
        con: From `llmtrack.query.connect`.
        run_id: The run.
        kind: `CANONICAL`, `PROVISIONAL` or `SUPERSEDED`.
        segment: Number of the segment.
        from_tokens: Leave out what has fewer tokens.
        every: Thin out: of each so many steps keep the rows that `thin.kept` tells.
    """
    where = f"run_id = $run AND segment = $segment AND {PART_SQL} = $kind AND ($tokens IS NULL OR tokens >= $tokens)"
    with closing(con.cursor()) as reading:  # of its own, so that one which is dropped half-read hinders nobody
        rows = reading.sql(
            "SELECT seq, epoch_ms(time) AS time_ms, step, tokens, name, value FROM metrics"
            f" WHERE {where}{thin.kept(where) if every > 1 else ''} ORDER BY seq",
            params={"run": run_id, "segment": segment, "kind": kind, "tokens": from_tokens}
            | (thin.parameters(con, run_id, segment, every) if every > 1 else {}),
        )
        read = getattr(rows, "to_arrow_reader", None) or getattr(rows, "fetch_arrow_reader")  # noqa: B009 - DuckDB 1
        yield from read(_BATCH_ROWS)


def names(con: duckdb.DuckDBPyConnection, run_id: str, kind: str, segments: list[int]) -> list[str]:
    """Return the names of the metrics that some segments have in one part."""
    return [
        name
        for (name,) in con.execute(
            f"SELECT DISTINCT name FROM metrics WHERE run_id = $run AND {PART_SQL} = $kind"
            " AND segment IN (SELECT unnest($s)) ORDER BY name",
            {"run": run_id, "kind": kind, "s": segments},
        ).fetchall()
    ]


def agrees(
    con: duckdb.DuckDBPyConnection, run_id: str, kind: str, stretches: dict[int, Stretch], marks: dict[int, Mark]
) -> bool:
    """Return whether the log still has, up to each mark, exactly the points that the mark counted."""
    for segment, mark in marks.items():
        stretch = stretches.get(segment)
        if stretch is None:
            if mark.points:
                return False
        elif not stretch.is_held(mark):
            found = con.execute(
                "SELECT count(*), coalesce(sum(seq), 0) FROM metrics"
                f" WHERE run_id = $run AND segment = $segment AND {PART_SQL} = $kind AND seq <= $seq",
                {"run": run_id, "segment": segment, "kind": kind, "seq": mark.seq},
            ).fetchall()
            if found != [(mark.points, mark.seq_sum)]:
                return False
    return True


def _parts(con: duckdb.DuckDBPyConnection, only: Collection[str] | None) -> dict[str, dict[str, dict[int, Stretch]]]:
    if only is not None and not only:
        return {}
    # Named one by one, DuckDB opens the files of these runs alone.
    where = "" if only is None else f" WHERE run_id IN ({', '.join('?' * len(only))})"
    parts: dict[str, dict[str, dict[int, Stretch]]] = {}
    for run_id, kind, segment, points, seq_sum, last_seq, first, last, last_ms, superseded_by in con.execute(
        f"SELECT run_id, {PART_SQL} AS part, segment, count(*), sum(seq), max(seq), min(tokens), max(tokens),"
        " max(epoch_ms(time)), list(DISTINCT superseded_by)"
        f" FROM metrics{where} GROUP BY run_id, part, segment ORDER BY segment",
        sorted(only or ()),
    ).fetchall():
        by = tuple(sorted(n for n in superseded_by or () if n is not None))
        stretch = Stretch(segment, points, seq_sum, last_seq, first, last, last_ms, by)
        parts.setdefault(run_id, {}).setdefault(kind, {})[segment] = stretch
    return parts


def _segments(con: duckdb.DuckDBPyConnection) -> dict[str, list[dict[str, Any]]]:
    columns = (
        "run_id", "segment", "start_tokens", "start_ms", "end_ms", "exit", "host", "world_size", "from_run",
        "from_segment", "from_ckpt", "recipe_diff", "git_commit", "config", "recipe",
    )  # fmt: skip
    segments: dict[str, list[dict[str, Any]]] = {}
    for row in con.execute(
        "SELECT run_id, segment, start_tokens, epoch_ms(start_time), epoch_ms(end_time), exit, host, world_size,"
        " from_run, from_segment, from_ckpt, recipe_diff, git_commit, config, recipe"
        " FROM segments ORDER BY run_id, segment"
    ).fetchall():
        segments.setdefault(row[0], []).append(dict(zip(columns, row, strict=True)))
    return segments


def _json(text: str | None) -> dict[str, Any]:
    content = json.loads(text) if text else {}
    return content if isinstance(content, dict) else {"value": content}


def _parents_first(runs: dict[str, LoggedRun]) -> list[LoggedRun]:
    ordered: dict[str, LoggedRun] = {}
    for run in runs.values():
        line: dict[str, LoggedRun] = {}
        ancestor: LoggedRun | None = run
        while ancestor is not None and ancestor.run_id not in ordered and ancestor.run_id not in line:
            line[ancestor.run_id] = ancestor
            ancestor = runs.get(ancestor.parent_run or "")
        ordered.update(reversed(line.items()))
    return list(ordered.values())
