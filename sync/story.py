"""What a tracker is told of a run beside its points: segments, what changed in them, alerts, evaluated checkpoints.

A story is read anew at every sync and is small; its digest tells whether there is anything new to tell. What becomes
points of a run in the tracker follows the path rules as the points of the log do: settled alerts and the evaluations of
settled checkpoints belong to the canonical run, those that a restart left behind to the side run of their segment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .kinds import CANONICAL, PROVISIONAL, SUPERSEDED

if TYPE_CHECKING:
    import duckdb

_RAISED: Final = "raised"
_NO_VALUE: Final = 1.0  # an alert that is about no value is a point all the same

_SEGMENT_COLUMNS: Final = (
    "segment", "start_tokens", "end_tokens", "exit", "detail", "start_ms", "end_ms", "host", "world_size", "git_commit",
    "git_dirty", "from_run", "from_segment", "from_ckpt", "fork_reason", "start_step", "end_step", "dropped", "nodes",
    "scheduler", "image_digest", "versions",
)  # fmt: skip
# How far a segment has come is told once it comes no further: a story that changed with every point would be told again
# and again.
_SEGMENTS: Final = """
    SELECT s.run_id, s.segment, start_tokens, start_step, epoch_ms(start_time) AS start_ms,
           CASE WHEN over THEN last_tokens END AS end_tokens, CASE WHEN over THEN last_step END AS end_step,
           CASE WHEN over THEN epoch_ms(last_time) END AS end_ms, exit, detail,
           CASE WHEN over THEN dropped END AS dropped,
           from_run, from_segment, from_ckpt, fork_reason, host, world_size, nodes, git_commit, git_dirty, image_digest,
           scheduler, versions, config, recipe
    FROM (
        SELECT *, exit IS NOT NULL OR segment < max(segment) OVER (PARTITION BY run_id) AS over
        FROM segments
        WHERE started
    ) s
    ORDER BY s.run_id, s.segment
"""
_ALERTS: Final = """
    SELECT run_id, alert_id, segment, seq, epoch_ms(time) AS time_ms, step, tokens, rule, level, metric, value,
           baseline, score, message, phase, batch_hash, batch_ids, superseded_by, settled
    FROM alerts
    ORDER BY run_id, segment, seq
"""
_EVALS: Final = """
    SELECT e.run_id, e.ckpt_id, e.segment, e.step, e.tokens, e.superseded_by, e.matched, e.task, e.metric, e.value,
           e.stderr, epoch_ms(e.time) AS time_ms, e.harness, e.harness_version, e.prompt_hash, e.details
    FROM evals e
    ORDER BY ALL
"""
_CHECKPOINTS: Final = """
    SELECT run_id, segment, ckpt_id, max(path), max(bytes), min(epoch_ms(time)), bool_or(settled)
    FROM checkpoints
    WHERE ckpt_id IN (SELECT ckpt_id FROM evals)
    GROUP BY run_id, segment, ckpt_id
"""


class StoryPoint(NamedTuple):
    """One value that belongs to a run in the tracker although it is no point of the log."""

    name: str
    tokens: int
    step: int
    time_ms: int
    value: float
    ckpt_id: str | None = None  # of the checkpoint whose evaluation it is
    segment: int = 0


@dataclass(frozen=True)
class Evaluation:
    """One number that was measured of a checkpoint."""

    task: str
    metric: str
    value: float
    stderr: float | None
    time_ms: int
    harness: str | None
    harness_version: str | None
    prompt_hash: str | None
    details: str | None

    @property
    def name(self) -> str:
        """What its curve is called."""
        return f"eval/{self.task}/{self.metric}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was evaluated.

    Attributes:
        time_ms: When it was recorded first.
        superseded_by: The segment that left it behind; None while it is live.
        settled: It is on the path, and no restart can leave it behind.
        evaluations: By time.
    """

    ckpt_id: str
    segment: int
    tokens: int
    step: int
    time_ms: int
    path: str | None
    bytes: int | None
    superseded_by: int | None
    settled: bool
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True)
class Unknown:
    """An evaluation of a checkpoint that no run has recorded, as yet."""

    ckpt_id: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Alert:
    """A record about one alert: that it was raised, what was around it, that it is over."""

    alert_id: str | None
    segment: int
    time_ms: int
    step: int
    tokens: int
    rule: str
    level: str | None
    metric: str | None
    value: float | None
    baseline: float | None
    score: float | None
    message: str | None
    phase: str | None
    batch_hash: str | None
    batch_ids: tuple[str, ...]
    superseded_by: int | None
    settled: bool

    @property
    def is_raised(self) -> bool:
        """Whether it is the record that the alert was raised, and not one of what came after."""
        return self.phase in {_RAISED, None}

    @property
    def name(self) -> str:
        """What its points are called."""
        return f"alert/{self.rule}/{self.metric}" if self.metric else f"alert/{self.rule}"


@dataclass(frozen=True)
class Setting:
    """Configuration and recipe of a segment, where it differs from those of the segment before."""

    segment: int
    config: Mapping[str, Any]
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Story:
    """What one run in the tracker is told; `of_side` makes that of a side run from that of the canonical run.

    Attributes:
        run_id: The run of the log.
        kind: Of the run in the tracker: `CANONICAL`, `PROVISIONAL` or `SUPERSEDED`.
        segment: That of a side run; None for a canonical run.
        segments: One row for each process lifetime whose start can be read, by `_SEGMENT_COLUMNS`.
        settings: The first segment's configuration, and each that was another one.
        alerts: All of the run, whatever became of them.
        checkpoints: All of the run that were evaluated, whatever became of them.
        unknown: Evaluations that lie in the run's folder, and whose checkpoint it has not recorded.
    """

    run_id: str
    kind: str = CANONICAL
    segment: int | None = None
    segments: tuple[Mapping[str, Any], ...] = ()
    settings: tuple[Setting, ...] = ()
    alerts: tuple[Alert, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    unknown: tuple[Unknown, ...] = ()

    def of_side(self, kind: str, segment: int) -> Story:
        """Return the story of one segment's provisional or superseded stretch: its alerts and checkpoints alone."""
        return Story(
            self.run_id,
            kind,
            segment,
            alerts=tuple(a for a in self.alerts if a.segment == segment and _part(a) == kind),
            checkpoints=tuple(c for c in self.checkpoints if c.segment == segment and _part(c) == kind),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.segments or self.settings or self.alerts or self.checkpoints or self.unknown)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change when anything does."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def own_checkpoints(self) -> list[Checkpoint]:
        """Return the evaluated checkpoints that belong to this run in the tracker."""
        return [checkpoint for checkpoint in self.checkpoints if self._owns(checkpoint)]

    def points(self) -> list[StoryPoint]:
        """Return what belongs to this run in the tracker as points, each once, in the order of tokens and time.

        An evaluation is a point ``eval/<task>/<metric>`` at its checkpoint's tokens and its own time; an alert that was
        raised is a point ``alert/<rule>/<metric>`` with the value that raised it.
        """
        found = {
            StoryPoint(e.name, c.tokens, c.step, e.time_ms, e.value, c.ckpt_id, c.segment): None
            for c in self.own_checkpoints()
            for e in c.evaluations
        }
        for a in self.alerts:
            if a.is_raised and self._owns(a):
                value = _NO_VALUE if a.value is None else a.value
                found[StoryPoint(a.name, a.tokens, a.step, a.time_ms, value, segment=a.segment)] = None
        return sorted(found, key=lambda point: (point.tokens, point.time_ms, point.name, str(point.value)))

    def points_elsewhere(self) -> Iterator[StoryPoint]:
        """Yield the points that belong to other runs in the tracker, or to none as yet."""
        if self.kind == CANONICAL:
            for kind in (PROVISIONAL, SUPERSEDED):
                for segment in sorted({*(a.segment for a in self.alerts), *(c.segment for c in self.checkpoints)}):
                    yield from self.of_side(kind, segment).points()

    def _owns(self, about: Alert | Checkpoint) -> bool:
        return _part(about) == self.kind and self.segment in {None, about.segment}


@dataclass(frozen=True)
class Stories:
    """The stories of all runs of a root, and what belongs to none.

    Attributes:
        by_run: By run id.
        unplaced: Evaluations of checkpoints that no run has recorded, in no run's folder.
    """

    by_run: Mapping[str, Story] = field(default_factory=dict)
    unplaced: tuple[Unknown, ...] = ()

    def of_run(self, run_id: str) -> Story:
        """Return the story of a run."""
        return self.by_run.get(run_id) or Story(run_id)


def read_stories(con: duckdb.DuckDBPyConnection) -> Stories:
    """Read the stories of all runs: a few queries, whatever the number of runs.

    Args:
        con: From `llmtrack.query.connect`.
    """
    segments = _by_run(_rows(con, _SEGMENTS))
    alerts = _by_run(_rows(con, _ALERTS))
    evals = _by_run(_rows(con, _EVALS))
    known = {(run, segment, ckpt): more for run, segment, ckpt, *more in con.execute(_CHECKPOINTS).fetchall()}
    stories = {
        run_id: Story(
            run_id,
            segments=tuple({name: row[name] for name in _SEGMENT_COLUMNS} for row in segments.get(run_id, ())),
            settings=tuple(_settings(segments.get(run_id, ()))),
            alerts=tuple(_alert(row) for row in alerts.get(run_id, ())),
            checkpoints=tuple(_checkpoints([row for row in evals.get(run_id, ()) if row["matched"]], known)),
            unknown=tuple(_unknown(evals.get(run_id, ()))),
        )
        for run_id in {*segments, *alerts, *evals}
        if run_id is not None
    }
    return Stories(stories, tuple(_unknown(evals.get(None, ()))))


def _part(about: Alert | Checkpoint) -> str:
    if about.superseded_by is not None:
        return SUPERSEDED
    return CANONICAL if about.settled else PROVISIONAL


def _rows(con: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    found = con.execute(query)
    columns = [column[0] for column in found.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]


def _by_run(rows: Sequence[dict[str, Any]]) -> dict[str | None, list[dict[str, Any]]]:
    by_run: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["run_id"], []).append(row)
    return by_run


def _settings(rows: Sequence[Mapping[str, Any]]) -> Iterator[Setting]:
    before = None
    for row in rows:
        setting = Setting(row["segment"], _json(row["config"]), _json(row["recipe"]))
        if (setting.config, setting.recipe) != before:
            yield setting
        before = (setting.config, setting.recipe)


def _json(text: str | None) -> dict[str, Any]:
    content = json.loads(text) if text else {}
    return content if isinstance(content, dict) else {"value": content}


def _alert(row: Mapping[str, Any]) -> Alert:
    columns: dict[str, Any] = {name: row[name] for name in Alert.__annotations__}
    columns |= {"batch_ids": tuple(map(str, row["batch_ids"] or ())), "rule": row["rule"] or "alert"}
    return Alert(**columns)


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    return Evaluation(**{name: row[name] for name in Evaluation.__annotations__})


def _checkpoints(
    rows: Sequence[Mapping[str, Any]], known: Mapping[tuple[str, int, str], Sequence[Any]]
) -> Iterator[Checkpoint]:
    by_id: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_id.setdefault((row["segment"], row["ckpt_id"]), []).append(row)
    for (segment, ckpt_id), found in sorted(by_id.items(), key=lambda item: (item[1][0]["tokens"], item[0])):
        first = found[0]
        path, size, time_ms, settled = known[first["run_id"], segment, ckpt_id]
        evaluations = sorted({_evaluation(row): None for row in found}, key=lambda e: (e.time_ms, e.name, str(e)))
        yield Checkpoint(
            ckpt_id=ckpt_id,
            segment=segment,
            tokens=first["tokens"],
            step=first["step"],
            time_ms=time_ms,
            path=path,
            bytes=size,
            superseded_by=first["superseded_by"],
            settled=bool(settled),
            evaluations=tuple(evaluations),
        )


def _unknown(rows: Sequence[Mapping[str, Any]]) -> Iterator[Unknown]:
    yield from (Unknown(row["ckpt_id"], _evaluation(row)) for row in rows if not row["matched"])
