"""What a report says, read from the log: runs, curves, marks and tables, as plain rows."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import duckdb

from llmtrack.query.draw import curves
from llmtrack.query.draw.curves import Line
from llmtrack.query.draw.marks import ALERTS, CHECKPOINTS, EVALS, fetch, read_losses
from llmtrack.query.runs.describe import RunDescription, describe_run

from .differences import Change, Flat, changes, settings

POINTS: Final = 250_000  # of all curves together: about ten bytes each in the file
CURVE_POINTS: Final = 8_000  # of one: several for each pixel, and enough to zoom in tenfold
PANELS: Final = 1_500
CURVES: Final = 15_000  # metrics times runs: each has some points at least
EVAL_PANELS: Final = 300
SEGMENTS: Final = 2_000  # rows of that table
ROWS: Final = 500  # of a table, of all runs together
SETTINGS: Final = 5_000  # keys that are listed, of all runs together

HEADLINE: Final = "train/loss"
THROUGHPUT: Final = "throughput/tokens_per_s"

_LAST: Final = """
    SELECT name, arg_max(value, (tokens, seq)) AS value
    FROM live
    WHERE run_id = ? AND name IN (?, ?) AND NOT isnan(value)
    GROUP BY name
"""
_ALERTS: Final = f"""
    SELECT r.*, c.tokens AS cleared_tokens,
           coalesce(r.batch_ids, b.batch_ids) AS ids, coalesce(r.batch_hash, b.batch_hash) AS hash
    FROM ({ALERTS}) r
    LEFT JOIN (
        SELECT run_id, segment, alert_id, min(tokens) AS tokens
        FROM alerts
        WHERE phase = 'cleared'
        GROUP BY run_id, segment, alert_id
    ) c ON c.run_id = r.run_id AND c.segment = r.segment AND c.alert_id = r.alert_id
    LEFT JOIN (
        SELECT run_id, segment, step, first(batch_ids) AS batch_ids, first(batch_hash) AS batch_hash
        FROM batches
        GROUP BY run_id, segment, step
    ) b ON b.run_id = r.run_id AND b.segment = r.segment AND b.step = r.step
    WHERE r.phase = 'raised'
    ORDER BY r.time, r.seq
"""
_EVALS: Final = f"""
    SELECT e.run_id, e.segment, e.task, e.metric, e.value, e.stderr, e.tokens, e.step, e.time, e.ckpt_id,
           e.superseded_by, e.harness, e.harness_version, e.details, e.source_run, p.path
    FROM ({EVALS}) e
    LEFT JOIN (SELECT ckpt_id, run_id, max(path) AS path FROM checkpoints GROUP BY ckpt_id, run_id) p
           ON p.ckpt_id = e.ckpt_id AND p.run_id = e.run_id
    ORDER BY e.task, e.metric, e.tokens, e.time, e.seq
"""
_UNMATCHED: Final = """
    SELECT run_id, task, metric, value, stderr, tokens, step, ckpt_id, harness, harness_version, NULL AS path
    FROM evals
    WHERE NOT matched AND (run_id IS NULL OR list_contains($runs, run_id))
    ORDER BY run_id NULLS LAST, ckpt_id, task, metric, time, seq
"""
_CHECKPOINTS: Final = f"""
    SELECT segment, tokens, step, time, ckpt_id, path, bytes, superseded_by, source_run
    FROM ({CHECKPOINTS}) c
    WHERE superseded_by IS NULL
    ORDER BY tokens
"""
Row = dict[str, Any]


@dataclass
class RunData:
    """One run of a report.

    Attributes:
        described: The run, its segments, and what happened to each.
        lines: Its curves, thinned out.
        last: The last value of the headline metric and of the throughput, by name.
        alerts: Those raised, with the batches they were raised on; here and in the next two `source_run` is the run
            that it was forked from and that has the record, or None.
        evals: Evaluations of its checkpoints.
        checkpoints: Those on its path.
        gaps: Points of its curve that could not be kept, those of the runs it was forked from included.
        holes: The same of rows that are missing because their bytes are damaged.
        steps: From each segment to the next, or from the parent's: what changed.
        settings: Of its newest segment.
    """

    described: RunDescription
    lines: list[Line] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    alerts: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    checkpoints: list[Row] = field(default_factory=list)
    gaps: list[Row] = field(default_factory=list)
    holes: list[Row] = field(default_factory=list)
    steps: list[tuple[str, list[Change]]] = field(default_factory=list)
    settings: Flat = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return str(self.described.run["run_id"])

    @property
    def first_time(self) -> dt.datetime | None:
        """When its first segment, or the first point on its curve, began."""
        times = [row["start_time"] for row in self.described.segments if row["start_time"] is not None]
        return min(times, default=None)


@dataclass
class ReportData:
    """All of a report.

    Attributes:
        root: Where the runs are.
        runs: In the order in which they were named.
        metrics: Names of the metrics, the headline first.
        left_out: How many metrics there are beside these.
        unmatched: Evaluations of checkpoints that no run has recorded, those included that name no run.
        damages: What cannot be read, of these runs and of those they were forked from.
        points: How many points of these metrics the log has.
    """

    root: Path
    runs: list[RunData]
    metrics: list[str]
    left_out: int
    unmatched: list[Row]
    damages: list[Row]
    points: int

    @property
    def headline(self) -> str | None:
        """The metric that is shown first and large."""
        return self.metrics[0] if self.metrics else None


def read_report(
    con: duckdb.DuckDBPyConnection, all_runs: duckdb.DuckDBPyConnection, run_ids: Sequence[str], *, root: Path,
    metrics: Sequence[str] = (), points: int = POINTS, panels: int = CURVES,
) -> ReportData:  # fmt: skip
    """Read what a report needs.

    Args:
        con: Has the runs with their points.
        all_runs: Has all runs of the root, for the children.
        run_ids: The runs.
        root: Where they are, as it is to be named.
        metrics: Names or globs; none given: all.
        points: How many points all curves together may have.
        panels: How many curves there may be, metrics times runs.

    Raises:
        UsageError: None of the runs has a metric of one of the names.
    """
    known = {run_id: curves.metric_names(con, run_id) for run_id in run_ids}
    everything = sorted({name for names in known.values() for name in names})
    chosen = curves.select_metrics(everything, metrics, ", ".join(run_ids)) if metrics else everything
    names = _headline_first(chosen)
    shown = names[: max(1, min(PANELS, panels // max(len(run_ids), 1)))]
    runs = [RunData(describe_run(con, all_runs, run_id)) for run_id in run_ids]
    for run in runs:
        run.lines = curves.count_lines(con, run.run_id, shown)
    counts: dict[object, int] = {}
    for line in (line for run in runs for line in run.lines):
        counts[line.run_id, line.name] = counts.get((line.run_id, line.name), 0) + line.count
    at_most = min(curves.share(counts, points), CURVE_POINTS)
    for run in runs:
        curves.read_points(con, run.lines, at_most=at_most)
        _read_records(con, run, shown[0] if shown else HEADLINE)
    return ReportData(
        root, runs, shown, len(names) - len(shown),
        fetch(all_runs, _UNMATCHED, runs=list(run_ids)),  # a run that is not in the report may have recorded it
        fetch(con, "SELECT * FROM damages ORDER BY path, first_byte"), sum(counts.values()),
    )  # fmt: skip


def is_lower_better(row: Row) -> bool:
    """Return whether less is better in an evaluation: as its harness said, or else as its name tells."""
    try:
        task = json.loads(row["details"] or "{}").get("task")
        said = task.get("higher_is_better") if isinstance(task, dict) else None
    except (ValueError, AttributeError, RecursionError):
        said = None
    if isinstance(said, bool):
        return not said
    name = str(row["metric"]).lower()
    return any(word in name for word in ("loss", "perplexity", "ppl", "bits_per_byte", "bpb", "nll", "error", "wer"))


def error_text(number: int | None) -> str:
    """Return what an errno says."""
    return "" if number is None else os.strerror(number)


def _headline_first(names: Sequence[str]) -> list[str]:
    """Put the loss in front: the training loss, or what else is called a loss."""
    first = next((name for name in names if name == HEADLINE), None)
    first = first or next((name for name in names if "loss" in name.lower()), None)
    return list(names) if first is None else [first, *(name for name in names if name != first)]


def _read_records(con: duckdb.DuckDBPyConnection, run: RunData, headline: str) -> None:
    run.last = dict(con.execute(_LAST, [run.run_id, headline, THROUGHPUT]).fetchall())
    run.alerts = fetch(con, _ALERTS, run=run.run_id)
    run.evals = fetch(con, _EVALS, run=run.run_id)
    run.checkpoints = fetch(con, _CHECKPOINTS, run=run.run_id)
    run.gaps, run.holes = read_losses(con, run.run_id)
    before: tuple[str, Flat] | None = None
    for segment in run.described.segments:
        if not segment["started"]:
            continue
        now = settings(segment)
        name = f"segment {segment['segment']}"
        origin = (segment["from_run"], segment["from_segment"])
        if segment["from_run"] not in (None, run.run_id):
            parent = fetch(
                con,
                "SELECT * FROM segments WHERE run_id = $run AND segment = $segment",
                run=origin[0],
                segment=origin[1],
            )
            before = (f"{origin[0]}, segment {origin[1]}", settings(parent[0])) if parent else None
        if before is not None and (changed := changes(before[1], now)):
            run.steps.append((f"{before[0]} → {name}", changed))
        before = name, now
    run.settings = before[1] if before else {}
