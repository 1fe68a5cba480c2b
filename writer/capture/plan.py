"""What a run will log: points, bytes, files, and what replaying them into a tracker takes, before it is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final

from llmtrack.writer.errors import UsageError
from llmtrack.writer.settings import Settings

from .cadence import Cadence, Group

# Measured with the table that comes along, fp32 values and times that jitter.
_SEALED_BYTES_A_POINT: Final = 4.5
_SEALED_BYTES_A_PART: Final = 3_000
_SEALED_BYTES_A_NAME: Final = 40  # of each metric in each part: the footer has them, in two places
_SEALED_BYTES_OF_NAMES: Final = 40_000  # at most
_OPEN_BYTES_A_POINT: Final = 7.5
_OPEN_BYTES_A_BATCH: Final = 1_650  # a flush: a message has its own header, and names and numbers compress alone
# segments, checkpoints, alerts, batches and heartbeat; gaps are no plan
_FILES_A_SEGMENT: Final = 5

_MLFLOW_POINTS_A_REQUEST: Final = 1_000  # the REST API takes no more
_MLFLOW_POINTS_A_SECOND: Final = 4_000  # measured: one client, the default server on two cores, SQLite or PostgreSQL
_MLFLOW_BYTES_A_POINT: Final = 450  # PostgreSQL; 300 with SQLite
_MLFLOW_LARGE_BYTES: Final = 100e9

# Limits that W&B's documentation gives for its multi-tenant cloud.
_WANDB_ROWS_A_MINUTE: Final = 1_000
_WANDB_VALUES_A_MINUTE: Final = 100_000
_WANDB_ROWS_A_RUN: Final = 500_000
_WANDB_NAMES_A_PROJECT: Final = 100_000
_WANDB_VALUES_OF_A_ROW: Final = 3  # tokens, step and segment, which sync adds
_WANDB_SECONDS_A_REQUEST: Final = 15  # its client sends so often at most

_LARGE_SHARE: Final = 0.5
_INTERVALS_LIMIT: Final = 16  # different ones: the rows of more would take too long to count


@dataclass(frozen=True)
class GroupPlan:
    """A group of a cadence over a run."""

    name: str
    purpose: str
    every: int
    metrics: int
    rows: int
    points: int


@dataclass(frozen=True)
class TrackerPlan:
    """What it takes to replay a run into a tracker.

    Attributes:
        name: mlflow or wandb.
        requests: At least.
        hours: At the rate that `basis` says.
        basis: Where the rate is from.
        problems: Limits that the run goes beyond, in words.
    """

    name: str
    requests: int
    hours: float
    basis: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a run will log.

    Attributes:
        groups: The most points first.
        rows: Calls of `log`: what is due at the same step is one.
        points: Values.
        metrics: Different names.
        step_time_s: Of one step.
        hours: How long the run takes.
        disk_bytes: Once it is sealed.
        open_bytes: Most that it has before, in the part that is open.
        files: At its end.
        burst_points: What one alert adds.
        trackers: One for each.
        advice: What to change, in words.
    """

    groups: tuple[GroupPlan, ...]
    rows: int
    points: int
    metrics: int
    step_time_s: float
    hours: float
    disk_bytes: int
    open_bytes: int
    files: int
    burst_points: int
    trackers: tuple[TrackerPlan, ...]
    advice: tuple[str, ...]


def estimate_layers(parameters: float) -> int:
    """Return how many layers a dense decoder of so many parameters has: 12 L d^2 of them, with d = 128 L."""
    return max(1, round(math.cbrt(parameters / (12 * 128**2))))


def make_plan(
    cadence: Cadence,
    *,
    steps: int,
    layers: int,
    step_time_s: float,
    segments: int = 1,
    settings: Settings | None = None,
) -> Plan:
    """Work out what a run will log.

    Args:
        cadence: Its groups, with the number of their metrics.
        steps: Of the optimiser.
        layers: Of the model.
        step_time_s: Of one step.
        segments: How often the job is started.
        settings: Those of the writer.

    Raises:
        UsageError: A figure is not positive, or the cadence has more different intervals than can be counted.
    """
    for name, figure in (("steps", steps), ("layers", layers), ("step time", step_time_s), ("segments", segments)):
        if figure <= 0:
            raise UsageError(f"{name} is {figure}", hint="give a positive number")
    limits = settings or Settings()
    groups = sorted((_plan_group(group, steps, layers) for group in cadence.groups.values()), key=lambda g: -g.points)
    points = sum(group.points for group in groups)
    rows = _count_rows([group.every for group in groups if group.metrics], steps)
    seconds = steps * step_time_s
    # A flush writes what came since the last one as one batch: at most one for each row.
    batches = min(rows, math.ceil(seconds / limits.flush_interval_s))
    open_bytes = batches * _OPEN_BYTES_A_BATCH + points * _OPEN_BYTES_A_POINT
    parts = max(math.ceil(open_bytes / limits.part_bytes), math.ceil(batches / limits.part_batches))
    parts += segments - 1  # each segment ends a part before it is full
    metrics = sum(group.metrics for group in groups)
    part_bytes = _SEALED_BYTES_A_PART + min(metrics * _SEALED_BYTES_A_NAME, _SEALED_BYTES_OF_NAMES)
    return Plan(
        groups=tuple(groups),
        rows=rows,
        points=points,
        metrics=metrics,
        step_time_s=step_time_s,
        hours=seconds / 3600,
        disk_bytes=round(points * _SEALED_BYTES_A_POINT + parts * part_bytes),
        open_bytes=round(min(open_bytes, open_bytes / max(parts, 1) + _OPEN_BYTES_A_BATCH)),
        files=parts + segments * _FILES_A_SEGMENT,
        burst_points=_burst_points(cadence, layers),
        trackers=(_plan_mlflow(rows, points), _plan_wandb(rows, points, metrics)),
        advice=tuple(_advise(cadence, groups, points)),
    )


def _plan_group(group: Group, steps: int, layers: int) -> GroupPlan:
    metrics = group.points + group.points_per_layer * layers
    rows = steps // group.every if metrics else 0
    return GroupPlan(group.name, group.purpose, group.every, metrics, rows, rows * metrics)


def _count_rows(intervals: list[int], steps: int) -> int:
    """Return how many steps from 1 on any of the intervals divides, by inclusion and exclusion."""
    different = sorted(set(intervals))
    different = [one for one in different if not any(one % other == 0 for other in different if other < one)]
    if len(different) > _INTERVALS_LIMIT:
        raise UsageError(
            f"the cadence has {len(different)} intervals of which none divides another",
            hint="choose intervals that divide each other, such as 10, 50 and 100: their points share rows",
        )
    return sum(
        (1 if size % 2 else -1) * (steps // math.lcm(*chosen))
        for size in range(1, len(different) + 1)
        for chosen in combinations(different, size)
    )


def _burst_points(cadence: Cadence, layers: int) -> int:
    """Return what one alert adds: the groups that are marked for it at each step of a burst, less those due anyway."""
    return sum(
        (group.points + group.points_per_layer * layers) * (cadence.burst_steps - cadence.burst_steps // group.every)
        for group in cadence.groups.values()
        if group.burst
    )


def _plan_mlflow(rows: int, points: int) -> TrackerPlan:
    metrics = points + rows  # the step is a metric of its own there
    problems = []
    if metrics * _MLFLOW_BYTES_A_POINT > _MLFLOW_LARGE_BYTES:
        problems.append(f"its database grows by about {metrics * _MLFLOW_BYTES_A_POINT / 1e9:,.0f} GB")
    return TrackerPlan(
        "mlflow",
        math.ceil(metrics / _MLFLOW_POINTS_A_REQUEST),
        metrics / _MLFLOW_POINTS_A_SECOND / 3600,
        f"{_MLFLOW_POINTS_A_REQUEST:,} metrics a request, its documented limit; {_MLFLOW_POINTS_A_SECOND:,} a second "
        "as measured with one client and the default server on two cores",
        tuple(problems),
    )


def _plan_wandb(rows: int, points: int, metrics: int) -> TrackerPlan:
    values = points + rows * _WANDB_VALUES_OF_A_ROW
    minutes = max(rows / _WANDB_ROWS_A_MINUTE, values / _WANDB_VALUES_A_MINUTE)
    problems = []
    if rows > _WANDB_ROWS_A_RUN:
        problems.append(f"{rows:,} rows, and its documentation advises at most {_WANDB_ROWS_A_RUN:,} a run")
    if metrics > _WANDB_NAMES_A_PROJECT:
        problems.append(
            f"{metrics:,} names, and its documentation advises at most {_WANDB_NAMES_A_PROJECT:,} a project"
        )
    return TrackerPlan(
        "wandb",
        math.ceil(minutes * 60 / _WANDB_SECONDS_A_REQUEST) if rows else 0,
        minutes / 60,
        f"{_WANDB_ROWS_A_MINUTE:,} rows and {_WANDB_VALUES_A_MINUTE:,} values a minute, the documented limits of its "
        f"cloud; its client sends every {_WANDB_SECONDS_A_REQUEST} s at most",
        tuple(problems),
    )


def _advise(cadence: Cadence, groups: list[GroupPlan], points: int) -> Iterator[str]:
    for plan in groups:
        if cadence.groups[plan.name].monitoring and plan.points:
            yield (
                f"move {plan.name} ({plan.points / points:.0%} of the points) to the cluster's monitoring, such as "
                "DCGM and Prometheus: it sees idle and broken nodes, too"
            )
    largest = groups[0]
    share = largest.points / points if points else 0.0
    if share > _LARGE_SHARE:
        burst = "; a burst still shows every step after an alert" if cadence.groups[largest.name].burst else ""
        yield (
            f"{largest.name} dominates with {share:.0%} of the points: every = {2 * largest.every} would save "
            f"{largest.points // 2:,}{burst}"
        )


def to_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a plan as rows for JSON: one for each group and tracker, one for the whole, one for each advice."""
    run = asdict(plan)
    for part in ("groups", "trackers", "advice"):
        del run[part]
    return [
        *({"kind": "group", **asdict(group)} for group in plan.groups),
        {"kind": "run", "name": None, **run},
        *({"kind": "tracker", **asdict(tracker)} for tracker in plan.trackers),
        *({"kind": "advice", "name": None, "text": text} for text in plan.advice),
    ]


def to_lines(plan: Plan) -> Iterator[str]:
    """Yield a plan as lines for a terminal."""
    width = max(len("the run"), *(len(group.name) for group in plan.groups))
    yield f"{'':{width}}  {'every':>7}  {'metrics':>7}  {'rows':>11}  {'points':>15}  share"
    for group in plan.groups:
        share = group.points / plan.points if plan.points else 0.0
        yield (
            f"{group.name:{width}}  {group.every:>7,}  {group.metrics:>7,}  {group.rows:>11,}  {group.points:>15,}  "
            f"{share:>5.0%}  {group.purpose}"
        )
    yield f"{'the run':{width}}  {'':>7}  {plan.metrics:>7,}  {plan.rows:>11,}  {plan.points:>15,}  {1:>5.0%}"
    yield ""
    yield (
        f"{_size(plan.disk_bytes)} on disk in {plan.files:,} files, and up to {_size(plan.open_bytes)} more while it "
        f"is written; {plan.hours:,.1f} hours of training at {plan.step_time_s:g} s a step"
    )
    if plan.burst_points:
        yield f"each alert adds up to {plan.burst_points:,} points"
    for tracker in plan.trackers:
        yield f"{tracker.name}: {tracker.requests:,} requests, {tracker.hours:,.1f} hours ({tracker.basis})"
        for problem in tracker.problems:
            yield f"  beyond its limits: {problem}"
    for text in plan.advice:
        yield f"advice: {text}"


def _size(size_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1e3:,.0f} kB"
