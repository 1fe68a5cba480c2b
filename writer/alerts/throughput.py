"""A training that became slower: suddenly by much, or by a little for good."""

from __future__ import annotations

from statistics import median
from typing import Final

from .detector import LARGEST, Detector, Finding, Values, written

TOKENS_PER_S: Final = "throughput/tokens_per_s"

_FILTER: Final = 5  # points whose median is looked at: two pauses in a row are no drop
_SKIPPED: Final = 3  # first points of a process: it compiles, allocates and fills caches
_LEAST_POINTS: Final = 4  # that the sum takes to come to its threshold, however low they are
_SUDDEN_POINTS: Final = 3  # in a row, and about the same: three pauses are not
_STEADY: Final = 0.05  # share of the baseline that they may differ by, at least
_STEADY_DEVIATIONS: Final = 8.0
_DEVIATION_MEMORY: Final = 1000.0  # points: longer than what declines slowly takes
_JITTER_MEMORY: Final = 100.0  # points
_OF_CHANGES: Final = 0.886  # a Gaussian's deviation, in the mean distance of two of its points
_MOST_WEIGHT: Final = 10.0  # so many times the sum that is an alert, at most
_DOUBTS: Final = 4.0  # so many times as slowly it learns from what may be the beginning of a drop
_FIRST_DEVIATION: Final = 2.2  # of few points that are alike: half as much again as their median distance says
_OF_ABS: Final = 1.2533  # a Gaussian's deviation, in its mean distance from the mean
_YOUNG: Final = 0.5
_RECOVERED: Final = 5  # points in a row


class ThroughputDrop(Detector):
    """Finds a lasting drop of the throughput by a cumulative sum, and says of a large one that it is large.

    Looked at is the median of the last five points, so that a pause which nobody marked, for an evaluation or a
    checkpoint, is nothing. A throughput that rose, or that stayed down, becomes the new baseline. Where the noise is
    correlated, as that of a shared network is, the sum must be larger: by how much the run itself says, by how far two
    medians near each other differ, and how far from the baseline they are.

    Args:
        metric: The metric.
        sudden: Share below the baseline that is a sudden drop.
        slack: Share below the baseline that is none, at least.
        slack_deviations: The same in deviations of the throughput.
        threshold: Sum of what is beyond the slack, as a share, that is an alert, at least.
        threshold_deviations: The same in deviations.
        warmup: Points from which the first baseline is made.
        memory: Points over which the baseline is averaged.
        patience: Points after which a throughput that stays down is the new baseline.
    """

    rule = "throughput_drop"
    clear_after = 1
    carries = False  # other nodes, and other numbers of them, are as fast as they are
    at_once = True
    cooldown = 20

    THRESHOLDS = (
        "sudden",
        "slack",
        "slack_deviations",
        "threshold",
        "threshold_deviations",
        "warmup",
        "memory",
        "patience",
    )
    ADDED = ("jitter", "past", "gain")
    STATE = (
        "seen",
        "recent",
        "first",
        "base",
        "deviation",
        "jitter",
        "past",
        "total",
        "gain",
        "below",
        "above",
        "low_for",
    )

    def __init__(
        self,
        metric: str = TOKENS_PER_S,
        *,
        sudden: float = 0.15,
        slack: float = 0.02,
        slack_deviations: float = 2.5,
        threshold: float = 0.1,
        threshold_deviations: float = 10.0,
        warmup: int = 25,
        memory: float = 3000.0,
        patience: int = 200,
    ) -> None:
        self.metrics = (metric,)
        self.sudden = sudden
        self.slack = slack
        self.slack_deviations = slack_deviations
        self.threshold = threshold
        self.threshold_deviations = threshold_deviations
        self.warmup = warmup
        self.memory = memory
        self.patience = patience
        self._metric = metric
        self.seen = 0
        self.recent: list[float] = []
        self.first: list[float] = []  # medians of the warm-up
        self.base = 0.0
        self.deviation = 0.0  # of the median from the baseline, as a share
        self.jitter = 0.0  # the same of two medians that have no point in common
        self.past: list[float] = []  # medians of the last points
        self.total = 0.0  # of what is below the baseline, beyond the slack
        self.gain = 0.0  # of what is above it
        self.below = 0  # points in a row with a sudden drop
        self.above = 0  # points in a row beyond the baseline or, in an event, back at it
        self.low_for = 0  # points since the event began; 0 when there is none
        self.is_paused = False
        self._last: Finding | None = None

    def pause(self) -> None:
        """Do not look at the next point."""
        self.is_paused = True

    def update(self, values: Values) -> Finding | None:
        """Look at the throughput of a row."""
        value = values.get(self._metric)
        if value is None or not 0.0 < value < LARGEST:
            return None
        self.seen += 1
        if self.is_paused or self.seen <= _SKIPPED:
            self.is_paused = False
            return self._last
        self._last = self._look(value)
        return self._last

    def _look(self, value: float) -> Finding | None:
        recent = self.recent
        recent.append(value)
        if len(recent) < _FILTER:
            return None
        if len(recent) > _FILTER:
            del recent[0]
        now = sorted(recent)[_FILTER // 2]
        if not self.base:
            self._warm_up(now)
            return None
        short = 1.0 - now / self.base
        if self.low_for:
            return self._go_on(now, short)
        deviation = max(self.deviation, self.jitter)
        slack = max(self.slack, self.slack_deviations * deviation)
        slack *= 1.0 + _YOUNG * self.warmup / self.seen  # the baseline is of few points
        limit = max(self.threshold, self.threshold_deviations * deviation * self._weight(deviation))
        self.total = max(self.total + min(short - slack, limit / _LEAST_POINTS), 0.0)
        if value < (1.0 - self.sudden) * self.base:
            self.below += 1
            is_sudden = self.below >= _SUDDEN_POINTS and self._is_steady(recent[-_SUDDEN_POINTS:])
        else:
            self.below, is_sudden = 0, False
        if self.total > limit or is_sudden:
            self.low_for = 1
            self.above = 0
            return self._say(value if is_sudden else now, is_sudden=is_sudden)
        self._learn(now, short, slack, limit)
        return None

    def _is_steady(self, values: list[float]) -> bool:
        return max(values) - min(values) <= self.base * max(_STEADY, _STEADY_DEVIATIONS * self.deviation)

    def _warm_up(self, now: float) -> None:
        self.first.append(now)
        if len(self.first) >= self.warmup:
            self.base = median(self.first)
            changes = [abs(one - self.base) for one in self.first]
            self.deviation = self.jitter = _FIRST_DEVIATION * median(changes) / self.base
            self.first = []

    def _weight(self, deviation: float) -> float:
        """Return how many times the evidence is needed: correlated points say less, and stay down together."""
        news = (self.jitter / deviation) ** 2 if deviation else 1.0  # share of its variance
        return min((2.0 - news) / max(news, 1e-9), _MOST_WEIGHT)

    def _learn(self, now: float, short: float, slack: float, limit: float) -> None:
        self.gain = max(self.gain + min(-short - slack, limit / _LEAST_POINTS), 0.0)
        if self.gain > limit:  # faster for good: a larger batch, a node that came back
            self.base, self.gain, self.total = now, 0.0, 0.0
            return
        learned = self.seen - _SKIPPED
        share = 1.0 / min(max(learned, self.warmup), self.memory)
        most = 4 * max(self.deviation, self.jitter, self.slack / 4)
        self.base -= share * max(min(short, slack), -slack) * self.base
        doubts = _DOUBTS if self.total else 1.0
        memory = min(max(learned, self.warmup), _DEVIATION_MEMORY)
        self.deviation += (_OF_ABS * min(abs(short), most) - self.deviation) / (memory * doubts)
        past = self.past
        past.append(now)
        if len(past) > _FILTER:
            change = min(abs(now - past.pop(0)) / self.base, most)
            self.jitter += (_OF_CHANGES * change - self.jitter) / _JITTER_MEMORY

    def _go_on(self, now: float, short: float) -> Finding | None:
        self.low_for += 1
        self.above = self.above + 1 if short < self.slack / 2 else 0
        if self.above >= _RECOVERED or self.low_for > self.patience:
            self.stays = self.low_for > self.patience
            if self.stays:
                self.base = now
            self.low_for = self.above = self.below = 0
            self.total = self.gain = 0.0
            return None
        return self._say(now)

    def _say(self, now: float, *, is_sudden: bool = False) -> Finding:
        short = 1.0 - now / self.base
        message = (
            f"{self._metric} is {written(now)}, {short:.1%} below {written(self.base)}"
            f"{', suddenly' if is_sudden else '; it has been for some points'}"
        )
        return Finding(self._metric, now, self.base, short, message, "error" if is_sudden else None)
