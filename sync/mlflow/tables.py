"""A run's story as tables, in the form of MLflow's `log_table`, without pandas."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from llmtrack.sync.story import Story

FOLDER: Final = "llmtrack"  # among the artifacts of a run

_TIMES: Final = {"time_ms": "time", "start_ms": "start_time", "end_ms": "end_time"}

_ALERT_COLUMNS: Final = (
    "time", "tokens", "step", "segment", "level", "rule", "metric", "value", "baseline", "score", "message", "phase",
    "state", "batch_hash", "batch_ids", "alert_id",
)  # fmt: skip
_EVAL_COLUMNS: Final = (
    "tokens", "step", "task", "metric", "value", "stderr", "state", "time", "segment", "ckpt_id", "path", "harness",
    "harness_version", "prompt_hash", "details",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A file among the artifacts of a run.

    Attributes:
        name: Of the file.
        text: Its content.
        is_table: MLflow shows it as a table.
    """

    name: str
    text: str
    is_table: bool = True

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change when the content does."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def tables(story: Story) -> list[Table]:
    """Return the tables of a canonical run's story; those that would be empty are left out."""
    made = [
        Table("segments.json", _split(story.segments)) if story.segments else None,
        Table("alerts.json", _split(_alerts(story), _ALERT_COLUMNS)) if story.alerts else None,
        Table("evaluations.json", _split(_evaluations(story), _EVAL_COLUMNS))
        if story.checkpoints or story.unknown
        else None,
        Table("config.json", json.dumps([asdict(setting) for setting in story.settings], indent=1), is_table=False)
        if story.settings
        else None,
    ]
    return [table for table in made if table is not None]


def _alerts(story: Story) -> Iterable[Mapping[str, Any]]:
    for alert in story.alerts:
        yield asdict(alert) | {"state": _state(alert.superseded_by, settled=alert.settled)}


def _evaluations(story: Story) -> Iterable[Mapping[str, Any]]:
    for checkpoint in story.checkpoints:
        place = asdict(checkpoint) | {"state": _state(checkpoint.superseded_by, settled=checkpoint.settled)}
        for evaluation in checkpoint.evaluations:
            yield place | asdict(evaluation)
    for unknown in story.unknown:
        yield {"ckpt_id": unknown.ckpt_id, "state": "checkpoint not recorded"} | asdict(unknown.evaluation)


def _state(superseded_by: int | None, *, settled: bool) -> str:
    if superseded_by is not None:
        return f"superseded by segment {superseded_by}"
    return "live" if settled else "provisional"


def _split(rows: Iterable[Mapping[str, Any]], columns: Iterable[str] | None = None) -> str:
    """Return rows as pandas writes them with ``orient="split"``: times as text, what is nested as JSON."""
    shown = [_times(row) for row in rows]
    names = list(columns or shown[0])
    return json.dumps({"columns": names, "data": [[_cell(row.get(name)) for name in names] for row in shown]})


def _times(row: Mapping[str, Any]) -> dict[str, Any]:
    return {_TIMES.get(name, name): time_text(value) if name in _TIMES else value for name, value in row.items()}


def time_text(time_ms: int | None) -> str | None:
    """Return milliseconds since the epoch as people read them."""
    if time_ms is None:
        return None
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cell(value: Any) -> Any:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):  # noqa: PLR0124 - NaN
        return str(value)  # JSON has no word for it
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
