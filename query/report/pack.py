"""The curves and marks of a report as JSON, packed so that a page of a million points stays small."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from llmtrack.query.draw.curves import Line
from llmtrack.query.draw.curves import Row as Point
from llmtrack.query.text.layout import tokens

from .data import EVAL_PANELS, ROWS, ReportData, Row, RunData, error_text, is_lower_better

TEXT: Final = 300  # characters of one text on a chart
_MARKS: Final = 4_000  # checkpoints, of all runs together
_HOLES: Final = 100  # bands, of each run
_SHOWN_IDS: Final = 5
_WHOLE: Final = 1e15  # whole numbers below need no ".0", and keep all their digits


def pack(report: ReportData, *, axis: str) -> str:
    """Return what the charts need: gzip, as base64, whose characters mean nothing in HTML.

    Args:
        report: From `read_report`.
        axis: The one to begin with: tokens, step, time or elapsed.
    """
    content = {
        "axis": axis,
        "runs": [_run(run, len(report.runs)) for run in report.runs],
        "panels": [
            *(_metric(report, name) for name in report.metrics),
            *(_evals(report, *key) for key in eval_names(report)),
        ],
    }
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def eval_names(report: ReportData) -> list[tuple[str, str]]:
    """Return the (task, metric) that checkpoints of the runs were evaluated by, as many as have a chart."""
    return sorted({(row["task"] or "", row["metric"] or "") for run in report.runs for row in run.evals})[:EVAL_PANELS]


def best_of(found: Iterable[Row]) -> Row | None:
    """Return the best of the evaluations of one metric that are not superseded, the earliest of equals."""
    current = [
        row
        for row in found
        if row["superseded_by"] is None and row["value"] is not None and not math.isnan(row["value"])
    ]
    if not current:
        return None
    sign = 1 if is_lower_better(current[0]) else -1
    return min(current, key=lambda row: (sign * row["value"], row["tokens"]))


def clipped(text: object, length: int = TEXT) -> str:
    """Return a text that is not too long, and says so when it was."""
    whole = str(text)
    return whole if len(whole) <= length else f"{whole[:length]}… ({len(whole):,} characters)"


def ms(time: dt.datetime | None) -> int:
    """Return a time in milliseconds since 1970."""
    return 0 if time is None else round(time.timestamp() * 1000)


def _run(run: RunData, runs: int) -> dict[str, Any]:
    points = [point for line in run.lines for point in line.rows]
    begins = [point.time for point in points] + ([] if run.first_time is None else [ms(run.first_time)])
    return {
        "id": run.run_id,
        "first_time": min(begins, default=0),
        "extent": _extent(points),
        "borders": [_border(row, run) for row in run.described.segments if row["started"]][: ROWS * 2],
        "alerts": [_alert(row) for row in _own_first(run.alerts)[: max(20, ROWS // runs)]],
        "gaps": _gaps(run),
        "checkpoints": [_saved(row) for row in _spread(run.checkpoints, max(50, _MARKS // runs))],
    }  # fmt: skip


def _saved(row: Row) -> dict[str, Any]:
    place = {"tokens": row["tokens"], "step": row["step"], "time": ms(row["time"])}
    return {**place, "from": row["source_run"], "text": f"checkpoint {clipped(row['ckpt_id'], 80)}"}


def _extent(points: Sequence[Point]) -> dict[str, list[int]] | None:
    if not points:
        return None
    found = {}
    for name in ("tokens", "step", "time"):
        places = [getattr(point, name) for point in points]
        found[name] = [min(places), max(places), min((place for place in places if place > 0), default=1)]
    return found


def _border(row: Row, run: RunData) -> dict[str, Any]:
    number = row["segment"]
    text = f"segment {number} starts"
    if row["from_run"] is None or row["from_segment"] is None:
        text += " from nothing"
    else:
        place = f"segment {row['from_segment']}, {tokens(row['start_tokens'])} tokens"
        text += f" from {place}" if row["from_run"] == run.run_id else f" as a fork of {row['from_run']}, {place}"
    if row["fork_reason"]:
        text += f" ({clipped(row['fork_reason'], 40)})"
    is_fork = row["from_run"] not in (None, run.run_id)
    flag = f"fork, {number}" if is_fork else str(number)
    return {
        "tokens": row["start_tokens"],
        "step": row["start_step"],
        "time": ms(row["start_time"]),
        "text": text,
        "flag": flag,
    }


def _alert(row: Row) -> dict[str, Any]:
    ids = row["ids"] or []
    text = f"{row['level'] or 'alert'}: {row['rule'] or ''}: {clipped(row['message'] or '')}"
    if ids:
        more = f" and {len(ids) - _SHOWN_IDS:,} more" if len(ids) > _SHOWN_IDS else ""
        text += f" · batches {', '.join(clipped(one, 60) for one in ids[:_SHOWN_IDS])}{more}"
    place = {"tokens": row["tokens"], "step": row["step"], "time": ms(row["time"])}
    return {**place, "from": row["source_run"], "metric": row["metric"], "by": row["superseded_by"], "text": text}


def _gaps(run: RunData) -> list[dict[str, Any]]:
    gaps = [
        (
            gap,
            f"gap: {gap['points'] or 0:,} points lost ({gap['reason']} {error_text(gap['errno'])})".replace(" )", ")"),
        )
        for gap in run.gaps
    ]
    holes = [(hole, f"damaged: {hole['missing']:,} rows cannot be read") for hole in run.holes]
    return [
        {
            "run": row["run_id"],
            "segment": row["segment"],
            "first": row["first_tokens"],
            "last": row["last_tokens"],
            "damage": "missing" in row,
            "text": clipped(text),
        }
        for row, text in (*gaps[:_HOLES], *holes[:_HOLES])
    ]


def _metric(report: ReportData, name: str) -> dict[str, Any]:
    lines = []
    for index, run in enumerate(report.runs):
        own = [line for line in run.lines if line.name == name]
        if current := [line for line in own if line.superseded_by is None]:
            lines.append(_line(index, current))
        lines += [_line(index, [line]) for line in own if line.superseded_by is not None]
    return {"name": clipped(name), "kind": "metric", "lines": lines}


def _line(run: int, lines: Sequence[Line]) -> dict[str, Any]:
    """Pack what is one line on the chart: all pieces of a run's path, or one piece that was left behind."""
    points = [point for line in lines for point in line.rows]
    settled = next((index for index, point in enumerate(points) if not point.settled), len(points))
    return {
        "run": run,
        "by": lines[0].superseded_by,
        "tokens": _differences([point.tokens for point in points]),
        "step": _differences([point.step for point in points]),
        "time": _differences([point.time for point in points]),
        "value": [_number(point.value) for point in points],
        "settled": settled,
        "pieces": [[len(line.rows), line.source_run, line.segment] for line in lines],
        "stretches": _stretches(lines),
        "count": sum(line.count for line in lines),
    }


def _stretches(lines: Sequence[Line]) -> list[list[Any]] | None:
    """Return what is averaged by smoothing; where a piece was kept whole each of its points is a stretch."""
    if not any(line.stretches for line in lines):
        return None
    found: list[list[Any]] = []
    for line in lines:
        if line.stretches:
            found += [[one.kept, one.numbers, _finite(one.mean)] for one in line.stretches]
        else:
            found += [[1, int(math.isfinite(row.value)), _finite(row.value)] for row in line.rows]
    return found


def _evals(report: ReportData, task: str, metric: str) -> dict[str, Any]:
    name = f"{task}/{metric}"
    everyone = [
        row for run in report.runs for row in run.evals if (row["task"] or "", row["metric"] or "") == (task, metric)
    ]
    best = best_of(everyone)
    lines = []
    for index, run in enumerate(report.runs):
        own = [
            row
            for row in run.evals
            if (row["task"] or "", row["metric"] or "") == (task, metric) and row["value"] is not None
        ]
        for by in sorted({row["superseded_by"] for row in own}, key=lambda number: (number is not None, number or 0)):
            some = [row for row in own if row["superseded_by"] == by]
            lines.append(
                {
                    "run": index,
                    "by": by,
                    "tokens": _differences([row["tokens"] or 0 for row in some]),
                    "step": _differences([row["step"] or 0 for row in some]),
                    "time": _differences([ms(row["time"]) for row in some]),
                    "value": [_number(row["value"]) for row in some],
                    "settled": len(some),
                    "pieces": [[1, row["run_id"], row["segment"]] for row in some],
                    "stretches": None,
                    "count": len(some),
                    "label": [_label(row, is_best=best is not None and _same(row, best)) for row in some],
                }
            )
    return {"name": clipped(name), "kind": "eval", "lines": lines}


def _same(row: Row, other: Row) -> bool:
    """Return whether two rows are one evaluation, which a run has from the one that it was forked from."""
    return all(row[key] == other[key] for key in ("run_id", "ckpt_id", "value", "time", "harness", "details"))


def _own_first(found: Sequence[Row]) -> list[Row]:
    return sorted(found, key=lambda row: row["source_run"] is not None)


def _label(row: Row, *, is_best: bool) -> dict[str, Any]:
    text = f"checkpoint {clipped(row['ckpt_id'], 80)}"
    if row["stderr"] is not None:
        text += f" · ± {row['stderr']:.3g}"
    return {"text": ("best · " if is_best else "") + text, "best": is_best}


def _differences(numbers: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise([0, *numbers])]


def _number(value: float) -> float | int | str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return (
        int(value)
        if float(value).is_integer() and abs(value) < _WHOLE and not (value == 0 and math.copysign(1, value) < 0)
        else value
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _spread(found: Sequence[Row], most: int) -> Sequence[Row]:
    """Return rows evenly from among many, the last one included."""
    if len(found) <= most:
        return found
    return [found[(index + 1) * len(found) // most - 1] for index in range(most)]
