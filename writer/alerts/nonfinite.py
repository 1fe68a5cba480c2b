"""A loss or gradient norm that is no number any more."""

from __future__ import annotations

from math import isnan

from .detector import GRAD_NORM, LOSS, Detector, Finding, Level, Values


class NonFinite(Detector):
    """Finds NaN and the infinities at once, without any warm-up.

    An infinite gradient norm alone is a warning: with dynamic loss scaling the step is skipped and the scale halved.

    Args:
        metrics: The metrics, the most important first.
    """

    rule = "nonfinite"
    level = "error"
    clear_after = 5
    cooldown = 100
    carries = False
    at_once = True

    def __init__(self, metrics: tuple[str, ...] = (LOSS, GRAD_NORM)) -> None:
        self.metrics = tuple(metrics)

    def update(self, values: Values) -> Finding | None:
        """Look at a row."""
        for metric in self.metrics:
            value = values.get(metric, 0.0)
            if value - value != 0.0:
                word = "NaN" if isnan(value) else "infinite" if value > 0 else "minus infinity"
                level: Level = "warn" if metric == GRAD_NORM and not isnan(value) else self.level
                return Finding(metric, value, None, None, f"{metric} is {word}", level)
        return None
