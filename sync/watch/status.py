"""``llmtrack-sync status``: how far each tracker is, from the log and what syncs remember; no tracker is asked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmtrack.query import connect
from llmtrack.query.text.console import EXIT_OK, to_json
from llmtrack.sync.kinds import PROVISIONAL, SUPERSEDED
from llmtrack.sync.replay import classify, cursor
from llmtrack.writer.errors import UsageError

from . import record
from .lock import read_owner, root_key

if TYPE_CHECKING:
    import duckdb


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  llmtrack-sync status runs\n  llmtrack-sync status runs --run 'pretrain-*' --json\n\n"
    "\b\nExit status: 0, whatever the state; 1 wrong usage.",
)
@click.argument("root", type=click.Path(path_type=Path), envvar="LLMTRACK_DIR")
@click.option("--to", "sink", metavar="TRACKER", help="Only this tracker: mlflow.")
@click.option("--run", "pattern", metavar="GLOB", help="Only runs whose id matches.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    envvar="LLMTRACK_SYNC_STATE",
    show_default="~/.local/state/llmtrack",
    help="Where syncs keep their state.",
)
@click.option("--json", "as_json", is_flag=True, help="Print an array with one row per run and tracker.")
def command(*, root: Path, sink: str | None, pattern: str | None, state: Path | None, as_json: bool) -> int:
    """Say how far the runs in ROOT are in each tracker that a sync of this user and state folder went to."""
    if not root.is_dir():
        raise UsageError(
            f"there is no folder {root}", hint="llmtrack-sync status ROOT, the folder of the run_id=... folders"
        )
    found = list(statuses(root, state or cursor.default_state(), sink=sink, pattern=pattern))
    if as_json:
        click.echo(to_json(found))
        return EXIT_OK
    place = ""
    for row in found:
        title = f"{root} into {row['tracker']}" if row["tracker"] else f"{root}: no sync has been here"
        title += f"; {row['watched_by']}" if row["watched_by"] else ""
        if title != place:
            click.echo(("\n" if place else "") + title)
            place = title
        click.echo(in_words(row))
    if not found:
        click.echo(f"there are no runs in {root}" if pattern is None else f"no run in {root} matches {pattern!r}")
    return EXIT_OK


def statuses(root: Path, state: Path, *, sink: str | None, pattern: str | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each run in each tracker; with no tracker at all, one for each run.

    Args:
        root: The folder of the runs.
        state: The state folder.
        sink: Only trackers of this kind.
        pattern: Only runs whose id matches.
    """
    paths = sorted(state.glob(f"*/root-{root_key(root)}.json"))
    records = [(path, there) for path in paths if (there := record.load(path)) is not None]
    records = [(path, there) for path, there in records if sink in {None, there.sink}]
    with closing(connect(root, check=False)) as con:
        runs = [run for run in classify.read_runs(con) if pattern is None or fnmatchcase(run.run_id, pattern)]
        words = dict(con.execute("SELECT run_id, status FROM runs").fetchall())
        gaps = _counts(con, "SELECT run_id, count(*), CAST(sum(points) AS BIGINT) FROM gaps GROUP BY run_id")
        damages = _counts(con, "SELECT run_id, count(*), 0 FROM damages GROUP BY run_id")
    nobody = record.RootRecord(str(root), sink or "", "")
    for path, there in records or [(state / "none", nobody)]:
        owner = read_owner(path.with_suffix(".owner"))
        is_watched = owner is not None and owner.lives() is not False
        for run in runs:
            remembered = there.runs.get(run.run_id, record.RunRecord())
            points, waiting = _waiting(state, there, run)
            rate = remembered.points_per_s
            yield {
                "sink": there.sink or None,
                "tracker": there.tracker or None,
                "watched_by": f"watched by {owner}" if is_watched else None,
                "run_id": run.run_id,
                "project": run.project,
                "status": words.get(run.run_id, run.status),
                "points": points,
                "sent": points - waiting,
                "waiting": waiting,
                "provisional": run.points(PROVISIONAL),
                "superseded": run.points(SUPERSEDED),
                "gaps": gaps.get(run.run_id, (0, 0))[0],
                "points_dropped": gaps.get(run.run_id, (0, 0))[1],
                "damaged": damages.get(run.run_id, (0, 0))[0],
                "last_success": remembered.last_success,
                "last_error": remembered.last_error or None,
                "error_time": remembered.error_time,
                "points_sent_ever": remembered.points_sent,
                "points_per_s": rate,
                "to_go_s": waiting / rate if waiting and rate else (0.0 if not waiting else None),
                "url": remembered.url or None,
            }


def in_words(row: dict[str, Any]) -> str:
    """Return a row of `statuses` for people."""
    text = f"{row['run_id']}  {row['status']}  {row['sent']} of {row['points']} points sent"
    if row["waiting"]:
        text += f", {row['waiting']} waiting"
        text += f" (about {row['to_go_s']:.0f} s at {row['points_per_s']:.0f} points/s)" if row["to_go_s"] else ""
    kinds = [f"{row[kind]} {kind}" for kind in ("provisional", "superseded") if row[kind]]
    text += f"; {', '.join(kinds)}" if kinds else ""
    text += f"; complete {_ago(row['last_success'])}" if row["last_success"] else ""
    lines = [text + (f"  {row['url']}" if row["url"] else "")]
    if row["gaps"]:
        lines.append(f"    gaps: {row['gaps']}, {row['points_dropped']} points were dropped by the writer")
    if row["damaged"]:
        lines.append(f"    damaged: {row['damaged']} places; llmtrack verify says where")
    if row["last_error"]:
        lines.append(f"    last error, {_ago(row['error_time'])}: {row['last_error']}")
    return "\n".join(lines)


def _waiting(state: Path, there: record.RootRecord, run: classify.LoggedRun) -> tuple[int, int]:
    """Return how many points of a run belong into a tracker, and how many of them it has not accepted."""
    left_out = {PROVISIONAL} if there.options.get("tail") == "hold" else set()
    left_out |= {SUPERSEDED} if there.options.get("superseded") == "drop" else set()
    path = cursor.cursor_path(state, there.sink, there.tracker, run.run_id)
    held = cursor.load(path).runs.values() if there.tracker else []
    points = waiting = 0
    for kind, part in run.parts.items():
        if kind in left_out:
            continue
        for number, stretch in part.items():
            accepted = [one.marks[number].points for one in held if one.kind == kind and number in one.marks]
            points += stretch.points
            waiting += max(0, stretch.points - max(accepted, default=0))
    return points, waiting


def _counts(con: duckdb.DuckDBPyConnection, statement: str) -> dict[str, tuple[int, int]]:
    return {run_id: (number, points) for run_id, number, points in con.execute(statement).fetchall()}


def _ago(time: str | None) -> str:
    if time is None:
        return "at an unknown time"
    seconds = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(time)).total_seconds()
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"
