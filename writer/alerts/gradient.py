"""A gradient norm that jumps: it usually moves before the loss does."""

from __future__ import annotations

from math import exp, log
from typing import Final

from .detector import GRAD_NORM, LARGEST, Finding, Values, short
from .noise import NoisyDetector

_CLIP: Final = 2.5  # scales that one point may teach
_MEAN_OF_ABS: Final = 1.2533  # a Gaussian's deviation, in its mean distance from the mean
_END: Final = 2.5  # scales below which an event ends
_TREND: Final = 0.05  # share of what the mean learns that the trend learns
_FORGETS: Final = 4  # at the start the scale is that of the last quarter: the norm falls, too


class GradientSpike(NoisyDetector):
    """Finds a gradient norm far above what it was, on a logarithmic scale, where its heavy tails are shorter.

    Single points far out are common and mean nothing; two in a row are rare. So two in a row are an alert beyond a
    limit that few points reach, and one alone only much farther out. Both limits follow the run's own tails.

    Args:
        metric: The metric.
        threshold: Scales above the mean of the logarithm at which a point alone is an alert, at least.
        pair_threshold: Scales beyond which two points in a row are one, at least.
        chance: How likely noise with this norm's own tail may be beyond the limit for one point.
        pair_chance: And beyond that for each of two in a row.
        ratio: A norm less than so many times the usual one is no alert.
        floor: The least scale of the logarithm, for norms that are all but constant.
        warmup: Points before the first alert.
        memory: Points over which the mean is averaged.
        scale_memory: Points over which the scale is averaged.
        patience: Points after which a norm that stays up is the new level.
    """

    rule = "grad_norm_spike"
    family = "instability"

    THRESHOLDS = (
        "threshold",
        "pair_threshold",
        "chance",
        "pair_chance",
        "ratio",
        "floor",
        "warmup",
        "memory",
        "scale_memory",
        "patience",
    )
    STATE = ("seen", "mean", "trend", "scale", "high_for", *NoisyDetector.NOISE_STATE)

    def __init__(
        self,
        metric: str = GRAD_NORM,
        *,
        threshold: float = 20.0,
        pair_threshold: float = 4.0,
        chance: float = 2e-6,
        pair_chance: float = 1e-3,
        ratio: float = 1.5,
        floor: float = 0.02,
        warmup: int = 50,
        memory: float = 30.0,
        scale_memory: float = 200.0,
        patience: int = 60,
    ) -> None:
        super().__init__()
        self.metrics = (metric,)
        self.threshold = threshold
        self.pair_threshold = pair_threshold
        self.chance = chance
        self.pair_chance = pair_chance
        self.ratio = ratio
        self.floor = floor
        self.warmup = warmup
        self.memory = memory
        self.scale_memory = scale_memory
        self.patience = patience
        self._metric = metric
        self._log_ratio = log(ratio)
        self.seen = 0
        self.mean = 0.0  # of the logarithm
        self.trend = 0.0
        self.scale = 0.0  # mean distance from it
        self.high_for = 0

    def update(self, values: Values) -> Finding | None:
        """Look at the gradient norm of a row."""
        value = values.get(self._metric)
        if value is None or not 0.0 < value < LARGEST:  # NaN and infinity are another detector's; 0 has no logarithm
            return None
        height = log(value)
        seen = self.seen = self.seen + 1
        if seen == 1:
            self.mean = height
            return None
        distance = height - self.mean - self.trend
        scale = max(_MEAN_OF_ABS * self.scale, self.floor)
        off = distance / scale
        if self.high_for:
            return self._go_on(value, height, off)
        score = self.score(off)
        if score > self.pair_threshold and distance > self._log_ratio and seen > self.warmup and self.is_spike(score):
            self.high_for = 1
            self.forget_last()
            return self._finding(value, off)
        self._learn(distance, scale, off, score)
        return None

    def _learn(self, distance: float, scale: float, off: float, score: float) -> None:
        seen = self.seen
        if seen > self.warmup:
            self.learn_noise(off, score)
            limit = _CLIP * scale
            if distance > limit:
                distance = limit
            elif distance < -limit:
                distance = -limit
        learned = distance / min(seen, self.memory)
        self.mean += self.trend + learned
        self.trend += _TREND * learned
        share = max(1.0 / self.scale_memory, 1.0 / (_FORGETS + seen / _FORGETS))
        self.scale += share * ((distance if distance >= 0.0 else -distance) - self.scale)

    def _go_on(self, value: float, height: float, score: float) -> Finding | None:
        self.high_for += 1
        if score < _END:
            self.high_for, self.stays = 0, False
            return None
        if self.high_for > self.patience:
            self.high_for, self.stays = 0, True
            self.mean, self.trend = height, 0.0
            return None
        return self._finding(value, score)

    def _finding(self, value: float, score: float) -> Finding:
        usual = exp(self.mean)
        message = f"{self._metric} is {value:.4g}, {short(value / usual)} times its usual {usual:.4g}"
        return Finding(self._metric, value, usual, score, message)
