"""How well detectors tell what hurts a run from what does not, beside the rules that trainers have today.

    python benchmarks/bench_alerts.py              # the table of docs/ALERTS.md
    python benchmarks/bench_alerts.py --curves 5   # quickly
    python benchmarks/bench_alerts.py --first-seed 0    # the curves on which thresholds were chosen

Every rule sees the same curves, and becomes an alert in the same way: what goes on, or comes back within 20 points, is
one alert. The curves of the table are held out: no threshold was chosen on them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from llmtrack.alerts import Detector, Divergence, Finding, GradientSpike, LossSpike, ThroughputDrop, default
from tests import curves

SPEED = "throughput/tokens_per_s"

Kind = tuple[str, Callable[[], Detector], Callable[[int], curves.Curve], int]


class Rule(Detector):
    """One of the rules of others, on whatever metric it is shown."""

    metrics = ("value",)

    def __init__(self) -> None:
        self.seen = 0

    def update(self, values: Mapping[str, float]) -> Finding | None:
        """Apply the rule."""
        value = values["value"]
        self.seen += 1
        return Finding("value", value, None, None, "") if self.is_high(value) else None

    def is_high(self, value: float) -> bool:
        """Return whether the rule calls this value a spike, and learn from it."""
        raise NotImplementedError  # each rule below has its own


class EmaZScore(Rule):
    """Exponential moving mean and variance, z-score of 6, 50 points of warm-up; it learns from everything."""

    def __init__(self, share: float = 0.02, threshold: float = 6.0, warmup: int = 50) -> None:
        super().__init__()
        self.share, self.threshold, self.warmup = share, threshold, warmup
        self.mean = self.variance = 0.0

    def is_high(self, value: float) -> bool:
        """See `Rule`."""
        if self.seen == 1:
            self.mean = value
        residual = value - self.mean
        is_high = self.seen > self.warmup and residual > self.threshold * max(self.variance, 1e-12) ** 0.5
        self.mean += self.share * residual
        self.variance = (1 - self.share) * (self.variance + self.share * residual * residual)
        return is_high


class LargestOfFirst(Rule):
    """Megatron-LM's check of its rerun state machine: ten times the largest of the first 100."""

    def __init__(self, factor: float = 10.0, first: int = 100) -> None:
        super().__init__()
        self.factor, self.first = factor, first
        self.largest = 0.0

    def is_high(self, value: float) -> bool:
        """See `Rule`."""
        if self.seen <= self.first:
            self.largest = max(self.largest, value)
            return False
        return value >= self.factor * self.largest


class TwiceTheMean(Rule):
    """Twice the running mean, over about 100 points."""

    def __init__(self, share: float = 0.01, factor: float = 2.0) -> None:
        super().__init__()
        self.share, self.factor = share, factor
        self.mean = 0.0

    def is_high(self, value: float) -> bool:
        """See `Rule`."""
        if self.seen == 1:
            self.mean = value
        is_high = value > self.factor * self.mean
        self.mean += self.share * (value - self.mean)
        return is_high


class SixSigmaOf128(Rule):
    """Mean and six deviations of the last 128, as OLMo-core's SkipStepOptimizer has it."""

    def __init__(self, points: int = 128, sigmas: float = 6.0) -> None:
        super().__init__()
        self.sigmas = sigmas
        self.last: deque[float] = deque(maxlen=points)
        self.total = self.squares = 0.0

    def is_high(self, value: float) -> bool:
        """See `Rule`."""
        last, count = self.last, len(self.last)
        is_high = False
        if count == last.maxlen:
            mean = self.total / count
            deviation = max(self.squares / count - mean * mean, 0.0) ** 0.5
            is_high = value > mean + self.sigmas * deviation
            self.total -= last[0]
            self.squares -= last[0] * last[0]
        last.append(value)
        self.total += value
        self.squares += value * value
        return is_high


PEERS: dict[str, Callable[[], Detector]] = {
    "EMA z-score": EmaZScore,
    "ten times the largest of 100": LargestOfFirst,
    "twice the running mean": TwiceTheMean,
    "mean + 6 sigma of 128": SixSigmaOf128,
}


def measure(make: Callable[[], Detector], many: Iterator[curves.Curve]) -> curves.Score:
    """Return how a rule does on many curves, a new one for each."""
    return sum((curves.score(one, curves.raised(make(), one.values.tolist())) for one in many), curves.Score())


def spikes(count: int) -> Iterator[Kind]:
    """Yield kinds of curves: name, our detector, how one is made, how many."""
    yield "loss", LossSpike, curves.loss, count
    yield "loss, spikes of 8 to 16 deviations", LossSpike, lambda at: curves.loss(at, deviations=(8, 16)), count
    yield (
        "loss, first 600 points",
        LossSpike,
        lambda at: curves.loss(at, 600, spikes=3, first_spike=80, shifts=0),
        4 * count,
    )
    yield "loss at every 10th step", LossSpike, lambda at: curves.loss(at, 5000, every=10), count
    yield (
        "loss, quiet for 200,000 points",
        LossSpike,
        lambda at: curves.loss(at, 200_000, spikes=0, shifts=0),
        max(count // 10, 1),
    )
    yield (
        "loss, one point in 100 with thrice the noise",
        LossSpike,
        lambda at: curves.loss(at, 100_000, tail=0.01, spikes=40),
        max(count // 5, 1),
    )
    yield "gradient norm", GradientSpike, curves.grad_norm, count


def noisy(count: int) -> Iterator[Kind]:
    """Yield kinds of curves as `spikes` does, with noise that is not Gaussian and white: as real runs have it."""
    for freedom in (3, 4, 5, 10):
        yield (
            f"loss, noise of Student's t({freedom})",
            LossSpike,
            lambda at, freedom=freedom: curves.loss(at, 100_000, freedom=freedom, spikes=40),
            max(count // 5, 1),
        )
    yield "loss, t(4), first 20,000 points", LossSpike, lambda at: curves.loss(at, freedom=4), count
    for memory in (2, 10, 50):
        yield (
            f"loss, noise correlated over {memory} points",
            LossSpike,
            lambda at, memory=memory: curves.loss(at, memory=memory, wander=0.0),
            count,
        )
    yield "loss, t(4), correlated over 2 points", LossSpike, lambda at: curves.loss(at, freedom=4, memory=2), count
    yield "gradient norm, t(4)", GradientSpike, lambda at: curves.grad_norm(at, freedom=4), count
    yield (
        "gradient norm, correlated over 10 points",
        GradientSpike,
        lambda at: curves.grad_norm(at, memory=10),
        count,
    )
    yield (
        "gradient norm, t(4), correlated over 2 points",
        GradientSpike,
        lambda at: curves.grad_norm(at, freedom=4, memory=2),
        count,
    )


def print_spikes(kinds: Iterator[Kind], first: int) -> None:
    """Print of every rule: spikes found, false alerts per 100,000 points, spikes found later than after two points."""
    rules = ["llmtrack", *PEERS]
    print(f"\n| curves: found, false alerts per 100,000 points, late | points | spikes | {' | '.join(rules)} |")
    print("|---|---|---|" + "---|" * len(rules))
    shifts = dict.fromkeys(rules, 0)
    for name, ours, curve, many in kinds:
        results = {
            rule: measure(make, (curve(first + seed) for seed in range(many)))
            for rule, make in {"llmtrack": ours, **PEERS}.items()
        }
        cells = []
        for rule, result in results.items():
            shifts[rule] += result.shift_alerts
            found = f"{result.recall:.1%}, " if result.clear else ""
            cells.append(f"{found}{result.false_per_100k:.2f}, {result.late()}")
        ours_result = results["llmtrack"]
        spikes_there = f"{ours_result.clear:,}" if ours_result.clear else "none"
        print(f"| {name} | {ours_result.points:,} | {spikes_there} | {' | '.join(cells)} |", flush=True)
    print(f"| alerts at levels that rose for good | | | {' | '.join(map(str, shifts.values()))} |", flush=True)


def print_single(count: int, first: int) -> None:
    """Print how many spikes of one point are found, by their height and by how heavy the tails of the noise are."""
    heights = (8, 10, 14, 20, 30, 50)
    print(f"\n| one point alone, found of {2 * count} | {' | '.join(f'{height} deviations' for height in heights)} |")
    print("|---|" + "---|" * len(heights))
    for freedom in (inf, 10, 5, 4, 3):
        found = dict.fromkeys(heights, 0)
        for seed in range(first, first + count):
            quiet = curves.loss(seed, 12_000, sigma=0.02, ramp=False, spikes=0, shifts=0, freedom=freedom).values
            places = [4000 + seed % 900, 8000 + seed % 900]
            for height in heights:
                values = quiet.copy()
                values[places] += height * 0.02
                found[height] += len(set(places) & set(curves.raised(LossSpike(), values.tolist())))
        noise = f"Student's t({freedom})" if freedom < inf else "Gaussian noise"
        print(f"| {noise} | {' | '.join(map(str, found.values()))} |", flush=True)


def print_lasting(count: int, first: int) -> None:
    """Print how soon what lasts is found."""
    print("\n| what lasts | found | after, median | 95 % within | false alerts per 100,000 |")
    print("|---|---|---|---|---|")
    for drop, noise in ((0.03, 0.01), (0.05, 0.01), (0.05, 0.002), (0.2, 0.01)):
        many = [curves.throughput(first + seed, 1500, drop=drop, noise=noise) for seed in range(4 * count)]
        print_found(f"throughput {drop:.0%} lower, noise {noise:.1%}", ThroughputDrop, many)
    for memory in (3, 10, 30):
        many = [curves.throughput(first + seed, 3000, drop=0.05, memory=memory) for seed in range(count)]
        print_found(f"throughput 5% lower, noise 1.0%, correlated over {memory} points", ThroughputDrop, many)
    for drop, decline in ((0.05, 300), (0.05, 1000), (0.2, 1000), (0.2, 3000)):
        many = [curves.throughput(first + seed, 12_000, drop=drop, decline=decline) for seed in range(count)]
        print_found(f"throughput falls by {drop:.0%} over {decline:,} points, noise 1.0%", ThroughputDrop, many)
    for rise in (0.2, 0.5):
        many = [curves.loss(first + seed, sigma=0.02, spikes=6, shifts=1, rise=rise) for seed in range(count)]
        print_found(f"loss rises by {rise} over 4,000 points, noise 0.02", Divergence, many)
    for rise in (0.2, 0.5):
        many = [
            curves.loss(first + seed, sigma=0.02, spikes=6, shifts=1, rise=rise, memory=50, wander=0.0)
            for seed in range(count)
        ]
        print_found(f"loss rises by {rise}, noise correlated over 50 points", Divergence, many)


def print_quiet(count: int, first: int) -> None:
    """Print how often something is found where nothing lasts."""
    print("\n| nothing lasts | points | alerts | per 100,000 |")
    print("|---|---|---|---|")
    seeds = range(first, first + count)
    for memory in (0, 3, 10, 30, 100):
        name = f"throughput, noise 1.0%, correlated over {memory} points" if memory else "throughput, noise 1.0%"
        print_false(name, ThroughputDrop, (curves.throughput(seed, 20_000, memory=memory) for seed in seeds))
    print_false("throughput, t(3)", ThroughputDrop, (curves.throughput(seed, 20_000, freedom=3) for seed in seeds))
    print_false(
        "throughput, t(3), correlated over 10 points",
        ThroughputDrop,
        (curves.throughput(seed, 20_000, freedom=3, memory=10) for seed in seeds),
    )
    for freedom in (3, 4, 5):
        print_false(
            f"`loss_spike` in the first 2,000 points of t({freedom})",
            LossSpike,
            (curves.loss(seed, 2000, freedom=freedom, spikes=0, shifts=0) for seed in seeds),
        )
    print_false("`divergence`: loss with spikes and shifts", Divergence, map(curves.loss, seeds))
    print_false(
        "`divergence`: loss, t(3)", Divergence, (curves.loss(seed, freedom=3, spikes=0, shifts=0) for seed in seeds)
    )
    for memory in (50, 150, 500):
        print_false(
            f"`divergence`: loss, noise of 1 to 2 %, correlated over {memory} points",
            Divergence,
            (curves.loss(seed, sigma=0.03, ramp=False, memory=memory, spikes=0, shifts=0) for seed in seeds),
        )


def print_false(name: str, make: Callable[[], Detector], many: Iterable[curves.Curve]) -> None:
    """Print one line of `print_quiet`."""
    points = alerts = 0
    for curve in many:
        points += len(curve.values)
        alerts += len(curves.raised(make(), curve.values.tolist()))
    print(f"| {name} | {points:,} | {alerts} | {1e5 * alerts / points:.2f} |", flush=True)


def print_found(name: str, make: Callable[[], Detector], many: list[curves.Curve]) -> None:
    """Print one line of `print_lasting`."""
    delays: list[float] = []
    wrong = 0
    for curve in many:
        (event,) = [event for event in curve.events if event.kind in {"drop", "rise"}]
        raised = curves.raised(make(), curve.values.tolist())
        wrong += sum(at < event.first for at in raised)
        delays.append(min((at - event.first for at in raised if at >= event.first), default=float("inf")))
    delays.sort()
    within = delays[int(len(delays) * 0.95)]
    before = sum(event.first for curve in many for event in curve.events if event.kind in {"drop", "rise"})
    print(
        f"| {name} | {sum(delay < float('inf') for delay in delays)} of {len(many)} | {delays[len(delays) // 2]:.0f} "
        f"points | {f'{within:.0f} points' if within < float('inf') else 'not all'} | {1e5 * wrong / before:.2f} |",
        flush=True,
    )


def print_cost(rows: int) -> None:
    """Print what all detectors together cost a row, on the thread that writes the log."""
    columns: dict[str, Any] = {
        "train/loss": curves.loss(1, rows).values.tolist(),
        "train/grad_norm": curves.grad_norm(1, rows).values.tolist(),
        SPEED: curves.throughput(1, rows).values.tolist(),
        f"{SPEED}_min_rank": [float(index * 7919 % 64) for index in range(rows)],
        "throughput/mfu": [0.41] * rows,
    }
    table = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    best = float("inf")
    for _ in range(5):
        detectors = default(64)
        began_s = time.process_time()
        for row in table:
            for detector in detectors:
                detector.update(row)
        best = min(best, (time.process_time() - began_s) / rows)
    print(f"\n`update` of all detectors together: {1e6 * best:.1f} µs of CPU time a row that has all of their metrics")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=100, metavar="N", help="of each kind")
    parser.add_argument("--first-seed", type=int, default=100_000, metavar="SEED")
    parser.add_argument("--only", choices=list(_PARTS), action="append", metavar="PART", help=", ".join(_PARTS))
    given = parser.parse_args()
    for part in given.only or _PARTS:
        _PARTS[part](given.curves, given.first_seed)


_PARTS: Final[dict[str, Callable[[int, int], None]]] = {
    "spikes": lambda count, first: print_spikes(spikes(count), first),
    "noisy": lambda count, first: print_spikes(noisy(count), first),
    "single": lambda count, first: print_single(max(count // 5, 1), first),
    "lasting": print_lasting,
    "quiet": print_quiet,
    "cost": lambda count, _first: print_cost(200 * count),
}


if __name__ == "__main__":
    main()
