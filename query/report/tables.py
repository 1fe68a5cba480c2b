"""The tables of a report: segments and goodput, forks, alerts, evaluations, what changed, what is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from llmtrack.query.text import layout

from .data import ROWS, SEGMENTS, SETTINGS, ReportData, Row, RunData, error_text
from .differences import differing
from .html import Html, join, text
from .pack import best_of, eval_names
from .parts import as_json, badge, gpu_hours, hours, listed, name, number, token_count

_BATCH_IDS: Final = 12


def segments(report: ReportData) -> Html:
    """Return what each segment did, what of it was kept, and what was forked from it."""
    several = len(report.runs) > 1
    rows = [list(_segment_cells(run, row, several=several)) for run in report.runs for row in run.described.segments]
    heads = ["Segment", "From", "Tokens", "Ended", "Started (UTC)", "Ran", "Waited", "Host", "Ranks", "Checkpoints"]
    heads += ["Kept", "Superseded", "GPU hours", "Lost"]
    heads = ["Run", *heads] if several else heads
    table = listed(heads, rows[:SEGMENTS], numbers=range(9 + several, len(heads)), count=len(rows))
    parts = ["<h2>Segments and goodput</h2>", table]
    total = sum(gpu_hours(run)[0] for run in report.runs)
    lost = sum(gpu_hours(run)[1] for run in report.runs)
    if total:
        cost = f"of which {hours(lost)} ({lost / total:.1%}) trained tokens that a restart trained again"
        parts.append(f"<p>{hours(total)} GPU hours, {cost}.</p>")
    children = [(run, child) for run in report.runs for row in run.described.segments for child in row["children"]]
    children += [(run, child) for run in report.runs for child in run.described.children]
    if children:
        forks = [
            [
                name(run.run_id),
                name(child["run_id"]),
                token_count(child["fork_tokens"]),
                child["fork_reason"],
                badge(child["status"]),
            ]
            for run, child in children
        ]
        heads = ["Run", "Forked into", "At tokens", "Reason", "Status"]
        parts += ["<h3>Forks</h3>", listed(heads, forks[:ROWS], numbers=(2,), count=len(forks))]
    return join(["<section>", *parts, "</section>"])


def _segment_cells(run: RunData, row: Row, *, several: bool) -> Iterator[object]:
    if several:
        yield name(run.run_id)
    yield row["segment"]
    if not row["started"]:
        yield from ["its start cannot be read", *[""] * 12]
        return
    if row["from_run"] is None or row["from_segment"] is None:
        yield "nothing"
    else:
        other = "" if row["from_run"] == run.run_id else f"{row['from_run']}, "
        reason = f" ({row['fork_reason']})" if row["fork_reason"] else ""
        yield f"{other}segment {row['from_segment']}{reason}"
    from_to = f"{token_count(row['start_tokens'])} to {token_count(row['last_tokens'])}"
    yield Html(f'<span class="name-of">{from_to}</span>')
    is_last = row is run.described.segments[-1]
    yield badge(row["exit"] or (run.described.run["status"] if is_last else "no end"), row["detail"])
    yield layout.moment(row["start_time"])
    yield layout.span(row["running_s"])
    yield layout.span(row["waiting_s"]) if row["waiting_s"] else ""
    yield row["host"] or ""
    yield "" if row["world_size"] is None else f"{row['world_size']:,}"
    yield f"{row['checkpoints']:,}"
    yield token_count(row["tokens_kept"])
    yield token_count(row["tokens_superseded"]) if row["tokens_superseded"] else ""
    yield "" if row["gpu_hours"] is None else hours(row["gpu_hours"])
    yield hours(row["gpu_hours_lost"]) if row["gpu_hours_lost"] else ""


def alerts(report: ReportData) -> Html:
    """Return the alerts with the batches that they were raised on."""
    raised = [
        (index, run, row) for index, run in enumerate(report.runs) for row in run.alerts if _is_first(report, row)
    ]
    if not raised:
        return Html("")
    several = len(report.runs) > 1
    rows = []
    for index, run, row in raised[:ROWS]:
        # The page's scripts read these numbers; what the log says goes into texts.
        time = round(row["time"].timestamp() * 1000)
        place = f'data-index="{index}" data-tokens="{row["tokens"]}" data-step="{row["step"]}" data-time="{time}"'
        tokens = token_count(row["tokens"])
        at = Html(f'<button type="button" class="link" {place} title="show in the charts">{tokens}</button>')
        state = "" if row["superseded_by"] is None else f"superseded by segment {row['superseded_by']}"
        if row["cleared_tokens"] is not None:
            state = "; ".join(filter(None, (state, f"cleared at {layout.tokens(row['cleared_tokens'])}")))
        origin = "" if row["source_run"] is None else f"{row['source_run']}, "
        cells: list[object] = [at, f"{row['step']:,}", layout.moment(row["time"]), f"{origin}{row['segment']}"]
        cells += [
            badge(row["level"] or "alert"),
            name(row["rule"] or ""),
            name(row["metric"] or ""),
            number(row["value"]),
            row["message"],
            _batches(row),
            state,
        ]
        rows.append([name(run.run_id), *cells] if several else cells)
    heads = [
        "Tokens",
        "Step",
        "Time (UTC)",
        "Segment",
        "Level",
        "Rule",
        "Metric",
        "Value",
        "Message",
        "Batches",
        "State",
    ]
    heads = ["Run", *heads] if several else heads
    return join(
        [
            "<section>",
            "<h2>Alerts</h2>",
            listed(heads, rows, numbers=(several, several + 1), count=len(raised)),
            "</section>",
        ]
    )


def _is_first(report: ReportData, row: Row) -> bool:
    """Return whether a record is not among those of another run of the report, which this one was forked from."""
    return row["source_run"] not in {run.run_id for run in report.runs}


def _batches(row: Row) -> Html:
    ids: Sequence[str] = row["ids"] or []
    if not ids:
        return name(row["hash"] or "")
    shown = ", ".join(name(one) for one in ids[:_BATCH_IDS])
    more = f" and {len(ids) - _BATCH_IDS:,} more" if len(ids) > _BATCH_IDS else ""
    return Html(f"{shown}{more}")


def evaluations(report: ReportData) -> Html:
    """Return the best checkpoint by each evaluation, and all evaluations."""
    names = eval_names(report)
    if not (names or report.unmatched):
        return Html("")
    best = [
        best_of(row for run in report.runs for row in run.evals if (row["task"] or "", row["metric"] or "") == key)
        for key in names
    ]
    found = [row for row in best if row is not None]
    everything = [row for run in report.runs for row in run.evals if _is_first(report, row)]
    heads = ["Evaluation", "Value", "± stderr", "Run", "Tokens", "Step", "Checkpoint", "Path", "Harness"]
    parts = ["<h2>Evaluations</h2>"]
    if found:
        best_rows = [_eval_cells(row) for row in found]
        parts += ["<h3>Best checkpoint by each</h3>", listed(heads, best_rows, numbers=(1, 2, 4, 5))]
    rows = [
        [*_eval_cells(row), "" if row["superseded_by"] is None else f"superseded by segment {row['superseded_by']}"]
        for row in everything
    ]
    if rows:
        every = listed([*heads, "State"], rows[:ROWS], numbers=(1, 2, 4, 5), count=len(rows))
        parts.append(f"<details><summary>All {len(everything):,}</summary>{every}</details>")
    if strays := [_eval_cells(row) for row in report.unmatched]:
        parts.append("<h3>Of checkpoints that no run has recorded</h3>")
        parts.append("<p>They are on no curve until a run of this root records the checkpoint with that id.</p>")
        parts.append(listed(heads, strays[:ROWS], numbers=(1, 2, 4, 5), count=len(strays)))
    return join(["<section>", *parts, "</section>"])


def _eval_cells(row: Row) -> list[object]:
    return [
        f"{row['task'] or ''}/{row['metric'] or ''}",
        number(row["value"]),
        "" if row["stderr"] is None else f"{row['stderr']:.2g}",
        name(row["run_id"] or ""),
        token_count(row["tokens"]),
        "" if row["step"] is None else f"{row['step']:,}",
        name(row["ckpt_id"]),
        row["path"] or "",
        " ".join(filter(None, (row["harness"], row["harness_version"]))),
    ]


def changes(report: ReportData) -> Html:
    """Return what a restart changed in configuration, recipe and surroundings."""
    several = len(report.runs) > 1
    rows = [
        [*([run.run_id] if several else []), step, *change]
        for run in report.runs
        for step, changed in run.steps
        for change in changed
    ]
    if not rows:
        return Html("")
    heads = ["Between", "Key", "Before", "After"]
    heads = ["Run", *heads] if several else heads
    return join(
        [
            "<section>",
            "<h2>What changed from segment to segment</h2>",
            listed(heads, rows[:ROWS], count=len(rows)),
            "</section>",
        ]
    )


def between_runs(report: ReportData) -> Html:
    """Return the settings that are not the same in all runs."""
    if len(report.runs) < 2:  # noqa: PLR2004 - it takes two to differ
        return Html("")
    rows = [[key, *values] for key, values in differing([run.settings for run in report.runs])]
    if not rows:
        return join(
            ["<section>", "<h2>What differs between the runs</h2>", "<p>Nothing that was recorded.</p>", "</section>"]
        )
    most = max(20, SETTINGS // len(report.runs))
    heads = ["Key", *(run.run_id for run in report.runs)]
    return join(
        [
            "<section>",
            "<h2>What differs between the runs</h2>",
            listed(heads, rows[:most], count=len(rows)),
            "</section>",
        ]
    )


def lost(report: ReportData) -> Html:
    """Return where points are missing, and which bytes cannot be read."""
    gaps = _once(gap for run in report.runs for gap in run.gaps)
    holes = _once(hole for run in report.runs for hole in run.holes)
    if not (gaps or report.damages):
        return Html("")
    parts = ['<section id="lost">', "<h2>Gaps and damage</h2>"]
    if gaps:
        heads = ["Run", "Segment", "From tokens", "To tokens", "Points lost", "Reason", "Error"]
        rows = [[*_stretch(gap), f"{gap['points'] or 0:,}", gap["reason"], error_text(gap["errno"])] for gap in gaps]
        parts.append(listed(heads, rows[:ROWS], numbers=(2, 3, 4), count=len(rows)))
    if report.damages:
        rows = [
            [
                row["run_id"],
                row["segment"] or "",
                row["path"],
                f"{row['first_byte']:,}",
                f"{row['end_byte']:,}",
                row["reason"],
            ]
            for row in report.damages
        ]
        heads = ["Run", "Segment", "File", "From byte", "To byte", "Reason"]
        parts.append(listed(heads, rows[:ROWS], numbers=(3, 4), count=len(rows)))
    if holes:
        parts.append("<p>Rows that are missing there, between the last one before and the first one after:</p>")
        heads = ["Run", "Segment", "After tokens", "Before tokens", "Rows"]
        rows = [[*_stretch(hole), f"{hole['missing']:,}"] for hole in holes]
        parts.append(listed(heads, rows[:ROWS], numbers=(2, 3, 4), count=len(rows)))
    return join([*parts, "</section>"])


def _stretch(row: Row) -> list[object]:
    return [name(row["run_id"]), row["segment"], token_count(row["first_tokens"]), token_count(row["last_tokens"])]


def _once(rows: Iterable[Row]) -> list[Row]:
    """Return rows without those that are there already: a run and its fork have the same ones."""
    return list({tuple(row.values()): row for row in rows}.values())


def settings(report: ReportData) -> Html:
    """Return the configuration of each run, folded up."""
    most = max(20, SETTINGS // max(len(report.runs), 1))
    parts = []
    for run in report.runs:
        found = list(run.settings.items())
        if not found:
            continue
        rows = [[key, value if isinstance(value, str) else as_json(value)] for key, value in found[:most]]
        keys = f"{len(found):,} key{'' if len(found) == 1 else 's'}"
        summary = f"<summary>{text(run.run_id)}, newest segment <small>{keys}</small></summary>"
        parts.append(f"<details>{summary}{listed(['Key', 'Value'], rows, count=len(found))}</details>")
    return join(["<section>", "<h2>Configuration</h2>", *parts, "</section>"]) if parts else Html("")
