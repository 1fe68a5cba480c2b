"""A report: runs as one HTML file that needs no network, no server and nothing of ours to be opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.publish import publish

from . import data
from .page import page as make_page


@dataclass(frozen=True)
class Written:
    """What was written: where, how large, and how many points are drawn of how many."""

    path: Path
    bytes: int
    runs: int
    metrics: int
    points: int
    points_drawn: int


def write_report(
    con: duckdb.DuckDBPyConnection,
    all_runs: duckdb.DuckDBPyConnection,
    run_ids: Sequence[str],
    path: Path,
    *,
    root: Path,
    metrics: Sequence[str] = (),
    axis: str = "tokens",
) -> Written:
    """Write the report of some runs; it appears whole or not at all, and takes the place of an earlier one.

    Args:
        con: Has the runs with their points.
        all_runs: Has all runs of the root, without points.
        run_ids: The runs, in the order of their colours.
        path: Of the file.
        root: Where the runs are, as the report is to name it.
        metrics: Names or globs; none given: all.
        axis: The one to begin with: tokens, step, time or elapsed.

    Raises:
        UsageError: The file cannot be written, or there is no such metric.
    """
    check_place(path)
    report = data.read_report(con, all_runs, run_ids, root=root, metrics=metrics)
    content = make_page(report, axis=axis).encode("utf-8", "replace")
    write_whole(path, content)
    drawn = sum(len(line.rows) for run in report.runs for line in run.lines)
    return Written(path, len(content), len(report.runs), len(report.metrics), report.points, drawn)


def check_place(path: Path) -> None:
    """Refuse a place where no file can appear, before any work is done.

    Raises:
        UsageError: There is no such folder, it cannot be written to, or a folder has that name.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder", hint="make it, or name another")
    if path.is_dir():
        raise UsageError(
            f"cannot write {path}: it is a folder", hint=f"name a file in it, e.g. -o {path / 'report.html'}"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: the folder is not yours to write to", hint="name another")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by a temporary name and a rename.

    Raises:
        UsageError: The storage refused.
    """
    try:
        publish(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error
