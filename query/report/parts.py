"""Small pieces of a page: badges, numbers, long tables that say what they leave out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

from llmtrack.query.text import layout

from .data import RunData
from .html import Html, attribute, table, text

_KNOWN: Final = frozenset(
    "running stalled finished preempted failed lost abandoned warn warning error critical info".split()  # noqa: SIM905
) | {"no end"}

_IN_ONE_PIECE: Final = 44  # characters: of an id of a checkpoint, not of a path
_LEAST_HOURS: Final = 0.01  # that are told apart


def gpu_hours(run: RunData) -> tuple[float, float]:
    """Return the GPU hours of all segments of a run, and those of tokens that were trained again."""
    segments = run.described.segments
    return sum(row["gpu_hours"] or 0 for row in segments), sum(row["gpu_hours_lost"] or 0 for row in segments)


def own_alerts(run: RunData) -> int:
    """Return how many alerts a run raised itself that no restart left behind."""
    return sum(row["superseded_by"] is None and row["source_run"] is None for row in run.alerts)


def listed(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Iterable[int] = (), count: int | None = None
) -> Html:
    """Return a table, and how many rows it leaves out when it has not all of them."""
    made = table(heads, rows, numbers=numbers)
    missing = (count or 0) - len(rows)
    return Html(f"{made}<p>and {missing:,} more, which the log has</p>") if missing > 0 else made


def badge(status: object, title: object = None) -> Html:
    """Return a status or a level as a word with a border; one that we know has a colour."""
    kind = str(status).replace(" ", "-") if status in _KNOWN else "other"
    about = f' title="{attribute(title)}"' if title else ""
    return Html(f'<span class="badge {kind}"{about}>{text(status, long=40)}</span>')


def name(value: object) -> Html:
    """Return a name or an id, in one piece where it is not too long: a hyphen in it is no place to break it."""
    whole = text(value, long=80)
    return Html(f'<span class="name-of">{whole}</span>') if len(str(value)) <= _IN_ONE_PIECE else whole


def hours(count: float) -> str:
    """Return a number of hours in about four digits."""
    if 0 < count < _LEAST_HOURS:
        return f"< {_LEAST_HOURS}"
    return f"{count:,.0f}" if count >= 1000 else f"{count:,.4g}"  # noqa: PLR2004 - four digits


def token_count(count: int | None) -> Html:
    """Return a number of tokens, short, with all its digits behind it."""
    return Html("") if count is None else Html(f'<span title="{count:,}">{layout.tokens(count)}</span>')


def number(value: float | None) -> Html:
    """Return a value, short, with all its digits behind it."""
    if value is None:
        return Html("")
    if not math.isfinite(value):
        return Html("NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf")
    return Html(f'<span title="{value!r}">{value:.6g}</span>')


def as_json(value: object) -> str:
    """Return a value of a configuration as text."""
    return json.dumps(value, ensure_ascii=False)
