"""A loss or gradient norm that is no number any more."""

from __future__ import annotations

from math import inf, isnan
from typing import Final

from .detector import GRAD_NORM, LARGEST, LOSS, Detector, Finding, Values

_FAR_APART: Final = 100  # rows: loss scaling tries a larger scale no more often


class NonFinite(Detector):
    """Finds NaN and the infinities at once, without any warm-up; and what is so large that it is as good as infinite.

    An infinite gradient norm alone is a warning: with dynamic loss scaling the step is skipped and the scale halved.
    Such a run has one every so often. After some that stood alone, only what is not alone is an alert.

    Args:
        metrics: The metrics, the most important first.
        skips: Infinite gradient norms that stood alone, and are alerts; those that stand alone after them are none.
    """

    rule = "nonfinite"
    level = "error"
    clear_after = 5
    cooldown = 100
    carries = False
    at_once = True

    THRESHOLDS = ("skips",)
    STATE = ("skipped", "since")

    def __init__(self, metrics: tuple[str, ...] = (LOSS, GRAD_NORM), *, skips: int = 3) -> None:
        self.metrics = tuple(metrics)
        self.skips = skips
        self.skipped = 0
        self.since = _FAR_APART  # rows since the last infinite gradient norm, or more

    def update(self, values: Values) -> Finding | None:
        """Look at a row."""
        self.since += 1
        for metric in self.metrics:
            value = values.get(metric, 0.0)
            if not -LARGEST < value < LARGEST:
                word = {inf: "infinite", -inf: "minus infinity"}.get(value, f"{value:.4g}")
                message = f"{metric} is {'NaN' if isnan(value) else word}"
                if metric != GRAD_NORM or isnan(value):
                    return Finding(metric, value, None, None, message, self.level)
                if (finding := self._skipped_step(value, message)) is not None:
                    return finding
        return None

    def _skipped_step(self, value: float, message: str) -> Finding | None:
        is_alone, self.since = self.since > _FAR_APART, 0
        if is_alone:
            self.skipped += 1
            if self.skipped > self.skips:
                return None
            if self.skipped == self.skips:
                message += "; as with loss scaling: further ones that stand alone are not told"
        return Finding(GRAD_NORM, value, None, None, message, "warn")
