"""Metrics of runs as a picture, PNG or SVG: for a paper, a ticket, a chat."""

from __future__ import annotations

import datetime as dt
import io
import math
import unicodedata
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llmtrack.query.text.layout import digits_between, tokens
from llmtrack.writer.errors import UsageError

from .marks import at_tokens
from .plot import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg")
MOST_CURVES: Final = 40  # below each other; more would be a picture that nothing opens

_WIDTH_IN: Final = 10.0
_HEIGHT_IN: Final = 3.4  # of each curve
_DOTS_PER_IN: Final = 150
_COLOURS: Final = ("#1c6dd0", "#d4580b", "#1b8a5a", "#a3338f", "#7a5a00", "#0a8a9c", "#c4314b", "#5b52c4")
_PALE: Final = "#9aa1ab"
_ALERT: Final = "#d1242f"
_GAP: Final = "#f6c14a"
_EVAL: Final = "#b7791f"
_FORK: Final = "#a3338f"
_SHOWN: Final = 100  # characters of a name
_LARGEST: Final = 1e300  # beyond, the distance between two values may be no number, and no axis has ticks


def check_suffix(path: Path) -> None:
    """Refuse a name that does not say which format it means.

    Raises:
        UsageError: It ends neither with .png nor with .svg.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot tell the format of {path}", hint=f"end its name with {' or '.join(SUFFIXES)}")


def draw_curves(curves: Sequence[Curve], kind: str, *, axis: str = "tokens", log_y: bool = False) -> bytes:
    """Draw curves below each other, with all that the terminal marks: what restarts left behind, forks, alerts, gaps.

    Args:
        curves: From `plot.read_curves`.
        kind: png or svg.
        axis: tokens, step or time.
        log_y: Put the values on a logarithmic axis; what is not positive is left out and counted.

    Returns:
        The file.

    Raises:
        UsageError: There are too many for one picture.
    """
    if len(curves) > MOST_CURVES:
        raise UsageError(f"{len(curves)} metrics are too many for one picture", hint=f"name {MOST_CURVES} at most")
    figure, all_axes = _figure(len(curves))
    for curve, axes in zip(curves, all_axes, strict=True):
        _draw_curve(axes, curve, axis, log_y=log_y)
    keys: dict[str, Any] = {}
    for axes in all_axes:
        for key, label in zip(*axes.get_legend_handles_labels(), strict=True):
            keys.setdefault(str(label), key)
    figure.legend(list(keys.values()), list(keys), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return _rendered(figure, kind)


def draw_comparison(
    name: str,
    runs: dict[str, list[tuple[int, float]]],
    differences: dict[str, list[tuple[int, float]]],
    baseline: str,
    kind: str,
    *,
    log_y: bool = False,
) -> bytes:
    """Draw one metric of several runs in one frame, and below it how far each is from the first at equal tokens.

    Args:
        name: The metric.
        runs: Tokens and value of each run's points, in order.
        differences: The same of the differences.
        baseline: The run that the others are compared with.
        kind: png or svg.
        log_y: Put the values on a logarithmic axis.

    Returns:
        The file.
    """
    figure, (above, below) = _figure(2)
    for index, (run_id, points) in enumerate(runs.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        _plot(above, [(float(at), value) for at, value in points], color=colour, linewidth=1.2, label=_shown(run_id))
        if run_id != baseline:
            _plot(
                below,
                [(float(at), value) for at, value in differences[run_id]],
                color=colour,
                linewidth=1.2,
                marker=".",
            )
    above.set_title(_shown(name), loc="left", fontsize=11, fontweight="bold", parse_math=False)
    below.set_title(f"difference to {_shown(baseline)}", loc="left", fontsize=10, parse_math=False)
    below.axhline(0, color=_PALE, linewidth=0.8)
    above.legend(fontsize=8, frameon=False)
    if log_y:
        above.set_yscale("log")
    for axes in (above, below):
        _dress(axes, "tokens")
    below.set_xlim(above.get_xlim())
    return _rendered(figure, kind)


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # not pyplot: nothing here is global, and no window is opened

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN * count), layout="constrained")
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _draw_curve(axes: Axes, curve: Curve, axis: str, *, log_y: bool) -> None:
    if log_y:
        axes.set_yscale("log", nonpositive="mask")
    rows = list(curve.rows())
    live = sorted((row for row in rows if row["superseded_by"] is None), key=lambda row: (row[axis], row["seq"]))
    _, superseded, odd, not_positive = curve.counts()
    left = sorted((row for row in rows if row["superseded_by"] is not None), key=_branch)
    for _, stretch in groupby(left, key=_branch):
        places = [(_place(row[axis]), row["value"]) for row in stretch]
        _plot(axes, places, color=_PALE, linewidth=1.0, linestyle=(0, (3, 1.5)), label="superseded")
        axes.axvspan(places[0][0], places[-1][0], ymax=0.015, color=_PALE, alpha=0.7, linewidth=0)
    _plot(axes, _with_breaks(live, curve.marks.holes, axis), color=_COLOURS[0], linewidth=1.2, label="current")
    if odd:
        at = [_place(row[axis]) for row in rows if not math.isfinite(row["value"])]
        top = axes.get_xaxis_transform()
        axes.plot(at, [0.94] * len(at), "x", color=_ALERT, markersize=6, transform=top, label="NaN or infinite")
    _mark(axes, curve, rows, axis)
    title = f"{_shown(curve.name)}   {_shown(curve.run_id)}"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    notes = [
        (superseded, "points superseded"),
        (odd, "not finite"),
        (not_positive if log_y else 0, "not positive, not on this axis"),
    ]
    axes.set_title(", ".join(f"{count:,} {what}" for count, what in notes if count), loc="right", fontsize=8)
    _dress(axes, axis)


def _with_breaks(rows: Sequence[dict[str, Any]], holes: Sequence[dict[str, Any]], axis: str) -> list[tuple[Any, float]]:
    """Return places and values, with a break where rows are missing and, by time, where nobody trained."""
    places: list[tuple[Any, float]] = []
    before: dict[str, Any] | None = None
    for row in rows:
        if before is not None:
            is_same = (before["source_run"], before["segment"]) == (row["source_run"], row["segment"])
            is_hole = is_same and any(
                (hole["run_id"], hole["segment"]) == (row["source_run"], row["segment"])
                and before["tokens"] <= hole["first_tokens"] < hole["last_tokens"] <= row["tokens"]
                for hole in holes
            )
            if is_hole or (axis == "time" and not is_same):
                places.append((_place(row[axis]), math.nan))
        places.append((_place(row[axis]), row["value"]))
        before = row
    return places


def _mark(axes: Axes, curve: Curve, rows: Sequence[dict[str, Any]], axis: str) -> None:
    top = axes.get_xaxis_transform()
    for start in curve.starts:
        is_fork = start["from_run"] != curve.run_id
        axes.axvline(
            _place(start[axis]), color=_FORK if is_fork else _PALE, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1,
            label="a segment starts",
        )  # fmt: skip
        text = f" {'fork, ' if is_fork else ''}{start['segment']}"
        axes.text(_place(start[axis]), 0.99, text, transform=top, va="top", fontsize=7, color="#5b636e")
    marks = curve.marks
    for found, colour, what in ((marks.gaps, _GAP, "gap: points lost"), (marks.holes, _ALERT, "damaged: unreadable")):
        for gap in found:
            own = [row for row in rows if (row["source_run"], row["segment"]) == (gap["run_id"], gap["segment"])]
            first, last = (at_tokens(own, gap[name], axis) for name in ("first_tokens", "last_tokens"))
            if first is not None and last is not None:
                first, last = _from_number(first, axis), _from_number(last, axis)
                axes.axvspan(first, last, color=colour, alpha=0.3, linewidth=0, label=what, zorder=0)
    for found, marker, colour, what in (
        (marks.evals, "D", _EVAL, "evaluated"),
        (marks.forks, "v", _FORK, "forked into"),
        (marks.alerts, "^", _ALERT, "alert"),
    ):
        if found:
            places = [_place(row[axis]) for row in found]
            axes.plot(
                places,
                [0.03] * len(places),
                marker,
                color=colour,
                markersize=5,
                transform=top,
                label=what,
                clip_on=False,
            )


def _plot(axes: Axes, places: Sequence[tuple[Any, float]], **look: Any) -> None:
    """Draw a line that breaks where a value is no number; a point between two breaks is a dot."""
    xs = [place for place, _ in places]
    ys = [min(max(value, -_LARGEST), _LARGEST) if math.isfinite(value) else math.nan for _, value in places]
    if sum(not math.isnan(value) for value in ys) == 1:
        look["marker"] = "."
    axes.plot(xs, ys, **look)


def _dress(axes: Axes, axis: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, which="both")
    axes.set_xlabel("time (UTC)" if axis == "time" else axis, fontsize=9)
    axes.margins(x=0.01)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    if axis == "time":
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(tz=dt.UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=dt.UTC))  # type: ignore[no-untyped-call]
    else:
        axes.xaxis.set_major_formatter(lambda place, _: tokens(round(place), digits_between(*axes.get_xlim())))


def _rendered(figure: Figure, kind: str) -> bytes:
    """Return the bytes of the picture; the same picture has the same bytes."""
    from matplotlib import rc_context

    target = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "llmtrack"}):
        warnings.simplefilter("ignore")  # glyphs that the font does not have, values near the end of the numbers
        metadata = {"Date": None} if kind == "svg" else {"Software": "llmtrack"}
        figure.savefig(target, format=kind, dpi=_DOTS_PER_IN, metadata=metadata)
    return target.getvalue()


def _branch(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["source_run"], row["segment"], row["superseded_by"]


def _place(place: Any) -> Any:
    return place if isinstance(place, dt.datetime) else float(place)


def _from_number(place: float, axis: str) -> Any:
    return dt.datetime.fromtimestamp(place, dt.UTC) if axis == "time" else float(place)


def _shown(name: str) -> str:
    """Return a name that fits above a picture, its control characters visible."""
    text = "".join("�" if unicodedata.category(character).startswith("C") else character for character in name)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
