"""A loss that jumps: exponential moving mean, trend and deviation, and what the curve's own noise can do."""

from __future__ import annotations

from math import sqrt
from statistics import median
from typing import Final

from .detector import LARGEST, LOSS, Finding, Values, short
from .noise import NoisyDetector

_CLIP: Final = 3.5  # deviations that one point may teach
_TREND: Final = 0.1  # share of what the level learns that the trend learns
_YOUNG: Final = 4.0  # while there are few points, level and trend are those of a line through all of them
_YOUNG_TREND: Final = 6.0
_TREND_KEPT: Final = 0.97  # of the trend at every point of an event
_FORGETS: Final = 6.0  # at the start the noise is that of the last sixth of the curve: it was larger in the fall
_QUANTUM_GROWTH: Final = 1.001  # at every point: a value may lose precision later on
_COARSEST: Final = 1 / 128  # of a value: the largest step of bfloat16; a longer one is a change of the loss itself
_END: Final = 3.0  # deviations below which an event ends
_RECENT: Final = 15  # values from which a new level is made


class LossSpike(NoisyDetector):
    """Finds a loss that is far above where its curve was to go.

    The curve is followed by a moving level and trend, so that the steep fall at the start neither hides a spike nor is
    one; the noise is measured around it. No point teaches more than it would if it were just beyond the noise, and
    those of a spike teach nothing. A level that has not come back is the new level. Noise with heavy tails raises the
    thresholds by itself: what the run does all the time is no alert.

    Args:
        metric: The metric.
        threshold: Deviations above the curve at which a point is an alert, at least.
        pair_threshold: Deviations at which two points in a row are one, at least.
        chance: How likely noise with this curve's own tail may be beyond the limit for one point.
        pair_chance: And beyond that for each of two in a row.
        floor: The least that counts as a deviation, as a share of the loss: for curves that are all but constant.
        quanta: The least that counts as a spike, in the smallest step the values take: for a loss in bfloat16.
        warmup: Points before the first alert.
        memory: Points over which the level is averaged.
        noise_memory: Points over which the deviation is averaged.
        patience: Points after which a loss that stays up is the new level.
    """

    rule = "loss_spike"
    family = "instability"

    THRESHOLDS = (
        "threshold",
        "pair_threshold",
        "chance",
        "pair_chance",
        "floor",
        "quanta",
        "warmup",
        "memory",
        "noise_memory",
        "patience",
    )
    STATE = (
        "seen",
        "last",
        "quantum",
        "mean",
        "trend",
        "variance",
        "high_for",
        "recent",
        *NoisyDetector.NOISE_STATE,
    )

    def __init__(
        self,
        metric: str = LOSS,
        *,
        threshold: float = 6.0,
        pair_threshold: float = 4.0,
        chance: float = 2e-6,
        pair_chance: float = 3e-4,
        floor: float = 0.0005,
        quanta: float = 4.0,
        warmup: int = 30,
        memory: float = 12.0,
        noise_memory: float = 200.0,
        patience: int = 50,
    ) -> None:
        super().__init__()
        self.metrics = (metric,)
        self.threshold = threshold
        self.pair_threshold = pair_threshold
        self.chance = chance
        self.pair_chance = pair_chance
        self.floor = floor
        self.quanta = quanta
        self.warmup = warmup
        self.memory = memory
        self.noise_memory = noise_memory
        self.patience = patience
        self._metric = metric
        self.seen = 0
        self.last = 0.0  # value
        self.quantum = 0.0  # smallest step between two values, lately; 0 before there was one
        self.mean = 0.0
        self.trend = 0.0
        self.variance = 0.0
        self.high_for = 0  # points since the event began; 0 when there is none
        self.recent: list[float] = []  # values of the event

    def update(self, values: Values) -> Finding | None:
        """Look at the loss of a row."""
        value = values.get(self._metric)
        if value is None or not -LARGEST < value < LARGEST:  # NaN and the infinities are another detector's
            return None
        seen = self.seen = self.seen + 1
        if seen == 1:
            self.mean = self.last = value
            return None
        change = value - self.last if value > self.last else self.last - value
        self.last = value
        if 0.0 < change < self.quantum or not self.quantum:
            self.quantum = change
        else:
            self.quantum *= _QUANTUM_GROWTH
        expected = self.mean + self.trend
        residual = value - expected
        size = expected if expected >= 0.0 else -expected
        # A curve that did not change so far has no step but that of its spike.
        self.quantum = min(self.quantum, _COARSEST * size)
        deviation = max(sqrt(self.variance), self.floor * size, 1e-300)
        off = residual / deviation
        if self.high_for:
            return self._go_on(value, expected, off)
        score = self.score(off)
        if (
            score > self.pair_threshold
            and seen > self.warmup
            and residual >= self.quanta * self.quantum
            and self.is_spike(score)
        ):
            self.high_for = 1
            self.recent = [value]
            self.forget_last()
            return self._finding(value, expected, off)
        self._learn(value, expected, deviation, off, score)
        return None

    def _learn(self, value: float, expected: float, deviation: float, off: float, score: float) -> None:
        seen, residual = self.seen, value - expected
        share = min(max(_YOUNG / (seen + 2.0), 1.0 / self.memory), 1.0)
        if seen > self.warmup:
            if (
                self.last_score < -_CLIP and score < -_CLIP
            ):  # the curve has fallen: nobody minds, the noise is as it was
                self.mean = value
                self.forget_last()
                return
            self.learn_noise(off, score)
            limit = _CLIP * deviation
            if residual > limit:
                residual = limit
            elif residual < -limit:
                residual = -limit
        self.mean = expected + share * residual
        self.trend += max(share * _TREND, _YOUNG_TREND / ((seen + 1.0) * (seen + 2.0))) * residual
        noise_share = max(1.0 / self.noise_memory, 1.0 / (_FORGETS + seen / _FORGETS))
        self.variance += noise_share * (residual * residual - self.variance)

    def _go_on(self, value: float, expected: float, score: float) -> Finding | None:
        """Look at a point of an event: it teaches nothing, unless it stays."""
        self.high_for += 1
        self.recent = [*self.recent[1 - _RECENT :], value]
        if score < _END:
            self.high_for, self.stays = 0, False
            self._learn(value, expected, max(sqrt(self.variance), 1e-300), score, score)
            return None
        if self.high_for > self.patience:
            self.high_for, self.stays = 0, True
            self.mean = median(self.recent)
            self.trend = 0.0
            spread = 1.4826 * median(abs(recent - self.mean) for recent in self.recent)
            self.variance = max(self.variance, spread * spread)
            return None
        self.mean = expected
        self.trend *= _TREND_KEPT
        return self._finding(value, expected, score)

    def _finding(self, value: float, expected: float, score: float) -> Finding:
        message = f"{self._metric} is {value:.4g}, {short(score)} deviations above {expected:.4g}"
        return Finding(self._metric, value, expected, score, message)
