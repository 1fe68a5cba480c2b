"""Curves as large runs draw them, with what went wrong in them written down; for tests and benchmarks of detectors.

A loss falls as a power of the step, with noise that shrinks as the batch grows, warms up, changes its level where the
data mix changes, wanders a little, and spikes. The gradient norm has heavy tails. The throughput has noise, pauses that
nobody marked, and drops that last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from llmtrack.alerts import Detector

Kind = Literal["spike", "shift", "rise", "drop"]
Shape = Literal["flat", "decay", "grow"]

CLEAR_DEVIATIONS: Final = 8.0  # of a spike that must be found
_TAIL_POINTS: Final = 20  # after an event: the detector may still be on its way back
_GROWTH_POINTS: Final = 5


@dataclass(frozen=True)
class Event:
    """Something that a person would call by name.

    Attributes:
        kind: A spike; a level that changes for good; a slow rise; a drop of throughput that lasts.
        first: Index of the first point that it touches.
        last: Index of the last.
        height: By how much, at most.
        deviations: The same in standard deviations of the noise there.
        visible: Index of the first point that is at least `CLEAR_DEVIATIONS` high; None when there is none.
    """

    kind: Kind
    first: int
    last: int
    height: float
    deviations: float
    visible: int | None


@dataclass(frozen=True)
class Curve:
    """Values of one metric, ``[points]`` float64, and what happened in them."""

    values: NDArray[np.float64]
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Score:
    """How a detector did on one curve or on many.

    Attributes:
        points: How many it saw.
        clear: Spikes it had to find.
        found: Those it found.
        delays: Points from when a spike was visible to its alert, of those found.
        false_alerts: Alerts where nothing had happened.
        shift_alerts: Alerts at a level that rose for good: at that point it looks like a spike.
        repeated: Further alerts in one event.
    """

    points: int = 0
    clear: int = 0
    found: int = 0
    delays: tuple[int, ...] = ()
    false_alerts: int = 0
    shift_alerts: int = 0
    repeated: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.points + other.points,
            self.clear + other.clear,
            self.found + other.found,
            self.delays + other.delays,
            self.false_alerts + other.false_alerts,
            self.shift_alerts + other.shift_alerts,
            self.repeated + other.repeated,
        )

    @property
    def recall(self) -> float:
        """Share of the clear spikes that were found."""
        return self.found / max(self.clear, 1)

    @property
    def false_per_100k(self) -> float:
        """False alerts in 100,000 points."""
        return 1e5 * self.false_alerts / max(self.points, 1)

    def late(self, points: int = 2) -> int:
        """Return how many were found later than so many points after they were visible."""
        return sum(delay > points for delay in self.delays)


def raised(detector: Detector, values: Iterable[float]) -> list[int]:
    """Return the indices at which a detector alone raises an alert, events and cool-down as a run has them."""
    found: list[int] = []
    is_open, quiet, since = False, 0, detector.cooldown + 1
    row: dict[str, float] = {}
    for index, value in enumerate(values):
        row[detector.metrics[0]] = value
        if detector.update(row) is not None:
            if not is_open and since > detector.cooldown:
                found.append(index)
            is_open, quiet, since = True, 0, 0
        elif is_open:
            quiet += 1
            is_open = quiet < detector.clear_after
        else:
            since += 1
    return found


def score(curve: Curve, alerts: list[int]) -> Score:
    """Compare the indices at which alerts were raised with what happened.

    A clear spike is found by an alert from its first point to two points after its last one.
    """
    left = set(alerts)
    clear = found = shifts = repeated = 0
    delays: list[int] = []
    for event in curve.events:
        mine = sorted(at for at in left if event.first <= at <= event.last + _TAIL_POINTS)
        left -= set(mine)
        if event.kind == "spike" and event.visible is not None:
            clear += 1
            if mine and mine[0] <= event.last + 2:
                found += 1
                delays.append(mine[0] - event.visible)
        elif event.kind == "shift":
            shifts += len(mine)
        repeated += max(len(mine) - 1, 0)
    return Score(len(curve.values), clear, found, tuple(delays), len(left), shifts, repeated)


def loss(
    seed: int,
    points: int = 20_000,
    *,
    sigma: float | None = None,
    every: int = 1,
    spikes: int = 12,
    shifts: int = 3,
    ramp: bool = True,
    warmup: int = 200,
    wander: float = 0.3,
    tail: float = 0.0,
    rise: float = 0.0,
    first_step: int = 0,
    deviations: tuple[float, float] | None = None,
    first_spike: int = 100,
    freedom: float = inf,
    memory: float = 0.0,
) -> Curve:
    """Return a loss curve.

    Args:
        seed: Of all that is random.
        points: How many.
        sigma: Deviation of the noise at the beginning; None draws it from 0.008 to 0.05.
        every: Steps between two points.
        spikes: How many at most; heights from 0.2 to 5 on a logarithmic scale, lengths from 1 to 30.
        shifts: Changes of level, up or down by 2 to 60 deviations.
        ramp: The batch doubles a few times in the first third, and the noise shrinks.
        warmup: Steps of learning-rate warm-up.
        wander: Deviation of the slow wandering of the mean, in those of the noise.
        tail: Share of points whose noise is three times as large.
        rise: By how much the loss rises over the last fifth: a slow divergence.
        first_step: Where the curve begins: past the steep fall for a run that was resumed.
        deviations: Range of the spikes' heights in deviations of the noise, instead of 0.2 to 5.
        first_spike: No spike before this point.
        freedom: Degrees of freedom of the noise, Student's t above 2: the fewer, the heavier its tails.
        memory: Points over which the noise is correlated; 0 for none.
    """
    rng = np.random.default_rng(seed)
    steps = first_step + every * np.arange(1, points + 1)
    first_sigma = float(rng.uniform(0.008, 0.05)) if sigma is None else sigma
    values, deviation = _quiet(
        rng, steps, first_sigma, ramp=ramp, warmup=warmup, wander=wander, tail=tail, freedom=freedom, memory=memory
    )
    events: list[Event] = []
    for at in _places(rng, points, shifts, gap=500):
        height = float(rng.choice([-1.0, 1.0]) * deviation[at] * np.exp(rng.uniform(np.log(2), np.log(60))))
        values[at:] += height
        if height > 3 * deviation[at]:
            events.append(Event("shift", at, min(at + 60, points - 1), height, height / float(deviation[at]), at))
    if rise:
        begin = points - points // 5
        values[begin:] += rise * np.linspace(0.0, 1.0, points - begin)
        events.append(Event("rise", begin, points - 1, rise, rise / float(deviation[begin]), None))
    taken = [event.first for event in events]
    for at in _places(rng, points, spikes, gap=100, first=first_spike):
        length = int(rng.integers(1, 31))
        if at + length >= points or any(abs(at - other) < 150 for other in taken):
            continue
        low, high = (0.2, 5.0) if deviations is None else np.array(deviations) * deviation[at]
        height = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        shape: Shape = rng.choice(["flat", "decay", "grow"])
        rises = height * _profile(shape, length)
        values[at : at + length] += rises
        seen = np.flatnonzero(rises >= CLEAR_DEVIATIONS * deviation[at : at + length])
        visible = at + int(seen[0]) if len(seen) else None
        events.append(Event("spike", at, at + length - 1, height, height / float(deviation[at]), visible))
    return Curve(values, sorted(events, key=lambda event: event.first))


def grad_norm(
    seed: int,
    points: int = 20_000,
    *,
    spikes: int = 12,
    scale: float | None = None,
    outliers: float = 0.002,
    freedom: float = inf,
    memory: float = 0.0,
) -> Curve:
    """Return the norm of a gradient: lognormal, with single outliers that mean nothing.

    Args:
        seed: Of all that is random.
        points: How many.
        spikes: How many at most, of 3 to 30 times the norm, which grow over up to five points and last 2 to 30.
        scale: Deviation of the logarithm; None draws it from 0.05 to 0.3.
        outliers: Share of points that are up to some times as large, with an exponential tail in the logarithm.
        freedom: As of `loss`, of the noise of the logarithm.
        memory: As of `loss`.
    """
    rng = np.random.default_rng(seed + 1_000_003)
    deviation = float(rng.uniform(0.05, 0.3)) if scale is None else scale
    at = np.arange(points)
    level = np.log(0.3 + 3.0 * np.exp(-at / 150.0)) + 0.2 * np.sin(2 * np.pi * at / 30_000)
    noise = deviation * _noise(rng, points, freedom, memory)
    is_outlier = rng.random(points) < outliers
    noise += np.where(is_outlier, 2 * deviation * (1 + rng.exponential(1.0, points)), 0.0)
    values = np.exp(level + noise)
    events: list[Event] = []
    for first in _places(rng, points, spikes, gap=100):
        length = int(rng.integers(2, 31))
        if first + length >= points:
            continue
        factor = float(np.exp(rng.uniform(np.log(3.0), np.log(30.0))))
        growth = 1 + (factor - 1) * _profile("grow" if rng.random() < 0.5 else "decay", length)
        values[first : first + length] *= growth
        seen = np.flatnonzero(np.log(growth) >= CLEAR_DEVIATIONS * deviation)
        visible = first + int(seen[0]) if len(seen) else None
        events.append(Event("spike", first, first + length - 1, factor, float(np.log(factor) / deviation), visible))
    return Curve(values, events)


def throughput(
    seed: int,
    points: int = 5_000,
    *,
    noise: float = 0.01,
    drop: float = 0.0,
    pauses: float = 0.01,
    every_pause: int = 0,
    wander: float = 0.3,
    level: float = 4e5,
    decline: int = 0,
    freedom: float = inf,
    memory: float = 0.0,
) -> Curve:
    """Return tokens per second.

    Args:
        seed: Of all that is random.
        points: How many.
        noise: Deviation, as a share.
        drop: Share that is lost from two thirds on.
        pauses: Share of points in which the trainer did something else that nobody marked.
        every_pause: A pause at every so many points; 0 for none.
        wander: Deviation of the slow wandering of the mean, in those of the noise.
        level: Its mean.
        decline: Points over which the drop comes; 0 for at once.
        freedom: As of `loss`.
        memory: As of `loss`.
    """
    rng = np.random.default_rng(seed + 2_000_003)
    values = level * (1 + noise * (_noise(rng, points, freedom, memory) + wander * _wander(rng, points, 200)))
    values[:3] *= np.array([0.3, 0.7, 0.9])  # the first steps compile
    paused = rng.random(points) < pauses
    if every_pause:
        paused |= np.arange(1, points + 1) % every_pause == 0
    values[paused] *= rng.uniform(0.05, 0.8, points)[paused]
    events: list[Event] = []
    if drop:
        at = points * 2 // 3
        values[at:] *= 1 - drop * np.minimum(np.arange(1, points - at + 1) / max(decline, 1), 1.0)
        events.append(Event("drop", at, points - 1, drop, drop / noise, at))
    return Curve(values, events)


def _quiet(
    rng: np.random.Generator,
    steps: NDArray[np.int64],
    sigma: float,
    *,
    ramp: bool,
    warmup: int,
    wander: float,
    tail: float,
    freedom: float,
    memory: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a curve in which nothing happens, and the deviation of its noise at every point."""
    points = len(steps)
    floor, power, scale = rng.uniform(1.6, 2.2), rng.uniform(0.3, 0.6), rng.uniform(20, 200)
    effective = steps * np.minimum(1.0, steps / max(warmup, 1))  # little is learned while the rate warms up
    mean = floor + (11.0 - floor) * (1 + effective / scale) ** -power
    deviation = np.full(points, sigma)
    if ramp:
        for part in (0.08, 0.16, 0.32):
            deviation[int(points * part) :] /= np.sqrt(2)
    noise = _noise(rng, points, freedom, memory)
    if tail:
        noise *= np.where(rng.random(points) < tail, 3.0, 1.0)
    return mean + deviation * (noise + wander * _wander(rng, points, 300)), deviation


def _wander(rng: np.random.Generator, points: int, memory: int) -> NDArray[np.float64]:
    """Return a slow random walk back to zero, of deviation one."""
    return _correlated(rng.standard_normal(points), memory)


def _noise(rng: np.random.Generator, points: int, freedom: float, memory: float) -> NDArray[np.float64]:
    """Return noise of deviation one."""
    noise = rng.standard_t(freedom, points) * np.sqrt(1 - 2 / freedom) if freedom < inf else rng.standard_normal(points)
    return _correlated(noise, memory) if memory else noise


def _correlated(noise: NDArray[np.float64], memory: float) -> NDArray[np.float64]:
    """Return noise of the same deviation that forgets within so many points."""
    kept = 1 - 1 / memory
    steps = noise * np.sqrt(1 - kept**2)
    walk = np.empty(len(noise))
    at = 0.0
    for index, step in enumerate(steps.tolist()):
        at = kept * at + step
        walk[index] = at
    return walk


def _places(rng: np.random.Generator, points: int, count: int, gap: int, first: int | None = None) -> list[int]:
    """Return indices at least `gap` apart, none among the first `first`, or the first `gap`."""
    begin = gap if first is None else first
    places: list[int] = []
    for at in sorted(rng.integers(begin, max(points - gap, begin + 1), count).tolist()):
        if not places or at - places[-1] >= gap:
            places.append(at)
    return places


def _profile(shape: Shape, length: int) -> NDArray[np.float64]:
    """Return how high a spike is at each of its points, 1 at its height."""
    at = np.arange(length)
    if shape == "flat":
        return np.ones(length)
    if shape == "decay":
        return np.exp(-2.0 * at / length)
    growth = min(_GROWTH_POINTS, length)
    return np.minimum((at + 1) / growth, np.exp(-2.0 * np.maximum(at - growth + 1, 0) / length))
