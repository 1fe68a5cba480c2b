"""The first screen of a report: what the run is, how far it came, and what is missing."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator

from llmtrack.query.text import layout

from .data import THROUGHPUT, ReportData, Row, RunData
from .html import Html, table, text
from .pack import best_of, eval_names
from .parts import badge, gpu_hours, hours, number, own_alerts, token_count


def head(report: ReportData, now: dt.datetime) -> Html:
    """Return what a run is and how far it came; of several runs a table that chooses what is drawn."""
    if len(report.runs) == 1:
        run = report.runs[0]
        row = run.described.run
        title = Html(f"{text(run.run_id)} {badge(row['status'])}")
        names = [text(row[key]) for key in ("project", "run_name") if row.get(key)]
        facts = _tiles(report, run)
    else:
        title = Html(f"{len(report.runs)} runs")
        names = []
        facts = _run_table(report)
    written = f'written <time datetime="{now.isoformat(timespec="seconds")}">{now:%Y-%m-%d %H:%M} UTC</time>'
    sub = " · ".join([*names, f"from {text(os.path.abspath(report.root))}", written])
    return Html(f'<header>\n<h1>{title}</h1>\n<p class="sub">{sub}</p>\n{facts}\n</header>')


def _tiles(report: ReportData, run: RunData) -> Html:
    row = run.described.run
    tiles: list[tuple[str, Html, str]] = [
        ("Tokens", token_count(row.get("tokens")), _of_parent(row)),
        ("Step", text("" if row.get("step") is None else f"{row['step']:,}"), ""),
    ]
    if report.headline in run.last:
        tiles.append((f"Last {report.headline}", number(run.last[report.headline]), ""))
    if THROUGHPUT in run.last:
        tiles.append(("Tokens/s", token_count(round(run.last[THROUGHPUT])), ""))
    total, lost = gpu_hours(run)
    running = sum(one["running_s"] or 0 for one in run.described.segments)
    waiting = sum(one["waiting_s"] or 0 for one in run.described.segments)
    tiles.append(
        ("Trained for", text(layout.span(running)), f"and {layout.span(waiting)} between segments" if waiting else "")
    )
    if total:
        tiles.append(
            (
                "GPU hours",
                text(hours(total)),
                f"{lost / total:.1%} lost to restarts" if lost else "none lost to restarts",
            )
        )
    restarts = max(len(run.described.segments) - 1, 0)
    tiles.append(("Segments", text(len(run.described.segments)), f"{restarts} restart{'' if restarts == 1 else 's'}"))
    raised = own_alerts(run)
    left = sum(one["superseded_by"] is not None for one in run.alerts)
    before = len(run.alerts) - left - raised
    more = [f"{left} superseded" if left else "", f"{before} before the fork" if before else ""]
    tiles.append(("Alerts", text(raised), " ".join(f"and {one}" for one in more if one)))
    for task, metric in eval_names(report)[:1]:
        best = best_of(row for row in run.evals if (row["task"] or "", row["metric"] or "") == (task, metric))
        if best:
            tiles.append((f"Best {task}/{metric}", number(best["value"]), f"at {layout.tokens(best['tokens'])} tokens"))
    return Html(
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{text(name, long=40)}</dt><dd>{value}<small>{text(note)}</small></dd></div>"
            for name, value, note in tiles
        )
        + "</dl>"
    )


def _run_table(report: ReportData) -> Html:
    rows = []
    for index, run in enumerate(report.runs):
        row = run.described.run
        total, lost = gpu_hours(run)
        choose = (
            f'<label class="choose"><input type="checkbox" checked data-run="{index}">'
            f'<span class="swatch run-{index % 8}"></span>{text(run.run_id)}</label>'
        )
        fork = f"{row['parent_run']} at {layout.tokens(row['fork_tokens'])}" if row.get("parent_run") else ""
        rows.append(
            [
                Html(choose),
                badge(row["status"]),
                token_count(row.get("tokens")),
                f"{row['step']:,}" if row.get("step") is not None else "",
                number(run.last.get(report.headline or "")),
                token_count(round(run.last[THROUGHPUT]) if THROUGHPUT in run.last else None),
                len(run.described.segments),
                hours(total) if total else "",
                f"{lost / total:.1%}" if total else "",
                own_alerts(run),
                fork,
                row.get("run_name") or "",
            ]
        )
    heads = [
        "Run",
        "Status",
        "Tokens",
        "Step",
        f"Last {report.headline or 'loss'}",
        "Tokens/s",
        "Segments",
        "GPU hours",
        "Lost",
    ]
    return table([*heads, "Alerts", "Forked from", "Name"], rows, numbers=range(2, 10), kind="runs")


def _of_parent(row: Row) -> str:
    if not row.get("parent_run"):
        return ""
    reason = f" ({row['fork_reason']})" if row["fork_reason"] else ""
    return f"forked from {row['parent_run']} at {layout.tokens(row['fork_tokens'])}{reason}"


def warnings(report: ReportData) -> Html:
    """Say first what is missing: damage, gaps, runs that went silent, two writers at once."""
    notes = []
    if report.damages:
        stretches = f"{len(report.damages)} stretch{'es' if len(report.damages) > 1 else ''} of bytes"
        files = len({row["path"] for row in report.damages})
        notes.append(
            f"<strong>Damaged:</strong> {stretches} in {files} file{'s' if files > 1 else ''} cannot be read, "
            'and what they held is missing here. <a href="#lost">Which</a>'
        )
    for run in report.runs:
        notes += _warnings_of(run)
    if report.left_out:
        more = f"<strong>{report.left_out:,} more metrics</strong> are not in this file"
        notes.append(f"{more}: llmtrack report --metric GLOB chooses.")
    if not notes:
        return Html("")
    shown = "".join(f"<li>{note}</li>" for note in notes[:20])
    more = f"<li>and {len(notes) - 20} more</li>" if len(notes) > 20 else ""  # noqa: PLR2004 - as above
    return Html(f'<ul class="warnings" aria-label="What is missing">{shown}{more}</ul>')


def _warnings_of(run: RunData) -> Iterator[str]:
    name = text(run.run_id)
    lost = sum(gap["points"] or 0 for gap in run.gaps if gap["run_id"] == run.run_id)
    if lost:
        yield f'<strong>Gaps:</strong> {name} could not keep {lost:,} points. <a href="#lost">Where</a>'
    status = run.described.run["status"]
    if status in {"stalled", "lost"}:
        since = layout.moment(run.described.run.get("last_time")) or "its start"
        yield f"<strong>{text(status.capitalize())}:</strong> no sign of life from {name} since {since} UTC."
    for row in run.described.segments:
        if not row["started"]:
            yield f"<strong>Segment {row['segment']}</strong> of {name} has no readable start: it is on no path."
        if row["at_once_with"]:
            others = ", ".join(map(str, row["at_once_with"]))
            which = f"segment {row['segment']} of {name} went on while segment {others} was running"
            yield f"<strong>Two writers at once:</strong> {which}; the path decides."
