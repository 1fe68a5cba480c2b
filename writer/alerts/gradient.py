"""A gradient norm that jumps: it usually moves before the loss does."""

from __future__ import annotations

from math import exp, log
from typing import Final

from .detector import GRAD_NORM, LARGEST, Detector, Finding, Values, short

_CLIP: Final = 2.5  # scales that one point may teach
_MEAN_OF_ABS: Final = 1.2533  # a Gaussian's deviation, in its mean distance from the mean
_HIGH_SHARE: Final = 0.002  # of points that are to be beyond the limit for a pair
_TAIL_KEPT: Final = 1 - 1 / 20_000  # of the memory of the largest distance, at every point
_END: Final = 2.5  # scales below which an event ends
_TREND: Final = 0.05  # share of what the mean learns that the trend learns
_FORGETS: Final = 4  # at the start the scale is that of the last quarter: the norm falls, too


class GradientSpike(Detector):
    """Finds a gradient norm far above what it was, on a logarithmic scale, where its heavy tails are shorter.

    Single points far out are common and mean nothing; two in a row are rare. So two in a row are an alert beyond a
    limit that one point in 500 reaches, and one alone only much farther out. Both limits follow the run's own tails.

    Args:
        metric: The metric.
        threshold: Scales above the mean of the logarithm at which a point alone is an alert.
        pair_threshold: Scales beyond which two points in a row are one, at least.
        tail_factor: A point alone must be so many times as far out as the farthest of the last 20,000 or so.
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
        "tail_factor",
        "ratio",
        "floor",
        "warmup",
        "memory",
        "scale_memory",
        "patience",
    )
    STATE = ("seen", "mean", "trend", "scale", "high", "tail", "last_score", "high_for")

    def __init__(
        self,
        metric: str = GRAD_NORM,
        *,
        threshold: float = 20.0,
        pair_threshold: float = 4.0,
        tail_factor: float = 1.5,
        ratio: float = 1.5,
        floor: float = 0.02,
        warmup: int = 50,
        memory: float = 30.0,
        scale_memory: float = 200.0,
        patience: int = 60,
    ) -> None:
        self.metrics = (metric,)
        self.threshold = threshold
        self.pair_threshold = pair_threshold
        self.tail_factor = tail_factor
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
        self.high = pair_threshold  # scales that one point in 500 exceeds
        self.tail = 0.0
        self.last_score = 0.0
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
        score = distance / scale
        if self.high_for:
            return self._go_on(value, height, score)
        pair_limit = max(self.pair_threshold, self.high)
        if (
            score > pair_limit
            and distance > self._log_ratio
            and seen > self.warmup
            and (self.last_score > pair_limit or score > max(self.threshold, self.tail_factor * self.tail))
        ):
            self.high_for = 1
            self.last_score = 0.0
            return self._finding(value, score)
        self._learn(distance, scale, score)
        return None

    def _learn(self, distance: float, scale: float, score: float) -> None:
        seen = self.seen
        if seen > self.warmup:
            last, self.last_score = self.last_score, score
            if last > self.high:
                if score < self.pair_threshold:  # it stood alone: the tails are as long as that
                    self.high += 1.0 - _HIGH_SHARE
                    self.tail = max(self.tail, last)
            else:
                self.high -= _HIGH_SHARE
            self.tail *= _TAIL_KEPT
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
            self.high_for = 0
            return None
        if self.high_for > self.patience:
            self.high_for = 0
            self.mean, self.trend = height, 0.0
            return None
        return self._finding(value, score)

    def _finding(self, value: float, score: float) -> Finding:
        usual = exp(self.mean)
        message = f"{self._metric} is {value:.4g}, {short(value / usual)} times its usual {usual:.4g}"
        return Finding(self._metric, value, usual, score, message)
