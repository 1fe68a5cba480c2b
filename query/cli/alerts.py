"""The command ``llmtrack alerts``: what was raised, what it has in common, and which batches to skip."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import duckdb

from llmtrack.query.runs.select import select_runs
from llmtrack.query.runs.verdict import Row, Verdict, find_verdicts, list_alerts, place_of_rank
from llmtrack.query.text import layout
from llmtrack.query.text.console import plain, say, to_json
from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.publish import publish

from .options import example, json_option, report_damages, root_option

_LEVELS: Final = ("info", "warn", "error")
_STYLES: Final = {"error": "31", "warn": "33"}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PLACE: Final = ("alert_id", "run_id", "segment", "step", "tokens", "rule", "level", "message")
_SHOWN_IDS: Final = 12
_SHOWN_NEXT: Final = 8
_NEXT: Final = {  # what docs/ALERTS.md says in more words
    "same_batch": "the same batch did it again: look at that data, and go on without it: {skip}",
    "over": "it came back by itself: nothing to do unless it comes again",
    "nonfinite": "it stays: see that its batches can be read, go back to a checkpoint and skip them: {skip}",
    "skipped_step": "with loss scaling it is a skipped step, and nothing to do; without, as for NaN: {skip}",
    "loss_spike": "if it does not come back within some steps, go back some hundred and skip the batches: {skip}",
    "grad_norm_spike": "watch the loss; if that follows and stays, go back some hundred steps and skip: {skip}",
    "divergence": "it does not heal by itself: go back to before it rose, with a lower rate or other data",
    "throughput_drop": "look for a slow GPU, link or storage; an alert slow_rank names it where ranks are measured",
    "slow_rank": "{where} holds all others up: look at its clocks, heat and links, or take it out",
    "mfu": "no device does that: check the terms of the formula, the peak, and the number of devices",
}
_WRITTEN_STEPS: Final = 1024  # more than the writer keeps

_BATCHES: Final = """
    SELECT run_id, segment, step, tokens, batch_hash, batch_ids, position, rank
    FROM batches
    WHERE run_id = ? AND segment = ? AND step BETWEEN ? AND ?
    ORDER BY step, rank
"""


@click.command(
    "alerts",
    epilog=example(
        "llmtrack alerts",
        "llmtrack alerts pretrain-7b --since 12h --level error",
        "llmtrack alerts pretrain-7b --alert pretrain-7b-1-4 --skip-batches skip.json",
    ),
)
@click.argument("names", nargs=-1, metavar="[RUN]...")
@root_option
@click.option(
    "--since", metavar="WHEN", help="Only those raised since: 30m, 12h, 2d ago, or a time as 2026-01-31T12:00."
)
@click.option(
    "--level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Only those at least so bad."
)
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="Only those of a rule, such as loss_spike.")
@click.option("--alert", "wanted", multiple=True, metavar="ID", help="Only the alert of this id.")
@click.option(
    "--skip-batches",
    "skip",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the batches around these alerts as JSON, for a trainer to skip.",
)
@click.option(
    "--around",
    type=click.IntRange(0),
    metavar="STEPS",
    help="With --skip-batches: only batches so many steps before and after. Default: all that the log has.",
)
@json_option
def alerts(
    *,
    names: Sequence[str],
    root: Path,
    since: str | None,
    level: str,
    rules: Sequence[str],
    wanted: Sequence[str],
    skip: Path | None,
    around: int | None,
    as_json: bool,
) -> int:
    """List alerts, and say what those of one lineage have in common.

    RUN is an id, the beginning of one, or a glob. A verdict compares the alerts of all segments, forks and parents of a
    run: the same batch again after going back: the data; another one: the optimiser's state or the hardware; the same
    slow node: that node. Its rule and its evidence are printed. Exit status 4 when something of these runs cannot be
    read.
    """
    from llmtrack.query.read.log import Log
    from llmtrack.query.sql.views import connect

    run_ids = select_runs(Log(root).run_ids(), names) if names else None
    begin = None if since is None else parse_since(since)
    with connect(root, points=False) as con:
        everything = list_alerts(con)
        rows = [
            row
            for row in everything
            if (run_ids is None or row["run_id"] in run_ids)
            and (begin is None or row["time"] >= begin)
            and (row["level"] not in _LEVELS or _LEVELS.index(row["level"]) >= _LEVELS.index(level))
            and (not rules or row["rule"] in rules)
            and (not wanted or row["alert_id"] in wanted)
        ]
        chosen = {row["alert_id"] for row in rows}
        if unknown := sorted(set(wanted) - {row["alert_id"] for row in everything}):
            raise UsageError(f"there is no alert {unknown[0]!r}", hint="llmtrack alerts --json lists their ids")
        verdicts = [one for one in find_verdicts(con, everything) if chosen & set(one.alerts)]
        if as_json:
            click.echo(to_json(with_verdicts(rows, verdicts)))
        elif rows:
            _print_alerts(rows)
            if wanted:
                _print_details(rows)
            _print_verdicts(verdicts)
            _print_next(con, rows, verdicts)
        else:
            say("there are no such alerts" if everything else f"there are no alerts in {root}")
        if skip is not None:
            _write_skip(con, rows, skip, around)
        return report_damages(con, run_ids)


def parse_since(text: str, now: dt.datetime | None = None) -> dt.datetime:
    """Return the moment that a person means, in UTC.

    Args:
        text: So long ago, such as ``90s``, ``30m``, ``12h``, ``2d``, ``1w``; or a time in ISO 8601, in UTC unless it
            says otherwise.
        now: Instead of the clock.

    Raises:
        UsageError: It is neither.
    """
    ago = _AGO.fullmatch(text.strip())
    try:
        if ago is not None:
            return (now or dt.datetime.now(dt.UTC)) - dt.timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
        moment = dt.datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r} is no time", hint="give 30m, 12h or 2d, or a time such as 2026-01-31T12:00"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def with_verdicts(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Row]:
    """Return alerts with the verdicts on each, as plain rows: `suspect`, `rule`, `summary` and `evidence`."""
    return [
        {
            **row,
            "verdicts": [
                {
                    "suspect": one.suspect,
                    "rule": one.rule,
                    "summary": one.summary,
                    "evidence": one.evidence,
                    "alerts": one.alerts,
                }
                for one in verdicts
                if row["alert_id"] in one.alerts
            ],
        }
        for row in rows
    ]


def batches_to_skip(con: duckdb.DuckDBPyConnection, rows: Sequence[Row], around: int | None = None) -> dict[str, Any]:
    """Return the batches around alerts, for a trainer to skip.

    Args:
        con: Made by `connect`.
        rows: From `list_alerts`.
        around: Steps before and after an alert; None for all that were written around it.

    Returns:
        `batch_ids` and `positions`, each once and in order, and `alerts`: where they come from.
    """
    found = [
        {name: plain(row[name]) for name in _PLACE}
        | {
            "batches": _together(_near(con, row, _WRITTEN_STEPS), row["step"])
            if around is None
            else _near(con, row, around)
        }
        for row in rows
    ]
    batches = [batch for alert in found for batch in alert["batches"]]
    ids = dict.fromkeys(text for batch in batches for text in batch["batch_ids"] or ())
    positions = {batch["position"] for batch in batches if batch["position"] is not None}
    return {"batch_ids": list(ids), "positions": sorted(positions), "alerts": found}


def _near(con: duckdb.DuckDBPyConnection, alert: Row, reach: int) -> list[dict[str, Any]]:
    place = [alert["run_id"], alert["segment"], alert["step"] - reach, alert["step"] + reach]
    cursor = con.execute(_BATCHES, place)
    columns = [column[0] for column in cursor.description or ()][2:]
    return [dict(zip(columns, row[2:], strict=True)) for row in cursor.fetchall()]


def _together(batches: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return those that lie around a step without a gap: others were written for another alert."""
    steps = sorted({batch["step"] for batch in batches} | {step})
    gap = min((after - before for before, after in itertools.pairwise(steps)), default=0)
    first = last = steps.index(step)
    while first > 0 and steps[first] - steps[first - 1] <= gap:
        first -= 1
    while last + 1 < len(steps) and steps[last + 1] - steps[last] <= gap:
        last += 1
    return [batch for batch in batches if steps[first] <= batch["step"] <= steps[last]]


def _write_skip(con: duckdb.DuckDBPyConnection, rows: Sequence[Row], path: Path, around: int | None) -> None:
    """Write the file whole or not at all: a trainer may be looking for it."""
    content = batches_to_skip(con, rows, around)
    try:
        publish(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    say(
        f"{path}: {len(content['batch_ids']):,} ids and {len(content['positions']):,} positions around "
        f"{len(rows):,} alert{'s' if len(rows) != 1 else ''}"
    )
    if rows and not content["batch_ids"] and not content["positions"]:
        say(
            "warning: no batches were logged around these alerts; give batch_ids or position to run.log or reducer.step"
        )


def _print_alerts(rows: Sequence[Row]) -> None:
    columns = [
        "RAISED (UTC)",
        "ALERT",
        "SEGMENT",
        "STEP",
        "TOKENS",
        "LEVEL",
        "RULE",
        "STATE",
        "MESSAGE",
    ]
    layout.print_table(
        columns,
        [
            [
                layout.moment(row["time"]),
                row["alert_id"] or "",
                str(row["segment"]),
                str(row["step"]),
                layout.tokens(row["tokens"]),
                row["level"] or "",
                row["rule"] or "",
                _state(row),
                row["message"] or "",
            ]
            for row in rows
        ],
        styles=_STYLES,
    )


def _state(row: Row) -> str:
    left = f"left behind by segment {row['superseded_by']}" if row["superseded_by"] is not None else ""
    word = "stays so; told no more from" if row["stays"] else "over at"
    over = f"{word} step {row['cleared_step']}" if row["cleared_step"] is not None else ""
    return ", ".join(filter(None, (over, left))) or "not over"


def _print_details(rows: Sequence[Row]) -> None:
    """Print what there is to know about alerts that were asked for by their ids."""
    for row in rows:
        ids, positions = list(dict.fromkeys(row["batch_ids"] or ())), row["positions"] or []
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        click.echo(f"\n{row['alert_id']}: {row['message']}")
        for line in row["context"]:
            click.echo(f"  {line}")
        if ids:
            click.echo(f"  batches of its step, then of the step before: {', '.join(ids[:_SHOWN_IDS])}{more}")
        if positions:
            click.echo(f"  position in the data: {', '.join(map(str, positions))}")


def _print_next(con: duckdb.DuckDBPyConnection, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    """Print what to do about the newest alert of each run and rule that no later segment has left behind."""
    newest = {(row["run_id"], row["rule"]): row for row in rows if row["superseded_by"] is None}
    known = [row for row in newest.values() if row["rule"] in _NEXT and row["level"] in _LEVELS]
    known.sort(key=lambda row: _LEVELS.index(row["level"]), reverse=True)
    again = {alert for one in verdicts if one.rule == "same_batch" for alert in one.alerts}
    for number, row in enumerate(known[:_SHOWN_NEXT]):
        text = _NEXT[_what(row, is_again=row["alert_id"] in again)].format(
            skip=f"llmtrack alerts {row['run_id']} --alert {row['alert_id']} --skip-batches skip.json",
            where=place_of_rank(con, row) if row["rule"] == "slow_rank" else "",
        )
        click.echo(f"{'' if number else chr(10)}next, {row['alert_id']}: {text}")


def _what(row: Row, *, is_again: bool) -> str:
    """Return the key of what to do about an alert."""
    rule = str(row["rule"])
    if is_again:
        return "same_batch"
    if rule == "nonfinite" and row["level"] == "warn":
        return "skipped_step"
    is_over = row["cleared_step"] is not None and not row["stays"]
    return "over" if is_over and rule in {"loss_spike", "grad_norm_spike", "throughput_drop"} else rule


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for one in verdicts:
        click.echo(f"\nverdict on {one.lineage}: {one.suspect}")
        click.echo(f"  {one.summary}")
        click.echo(f"  rule: {one.rule}")
        for line in one.evidence:
            click.echo(f"  evidence: {line}")
