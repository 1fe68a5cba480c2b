"""A utilisation that cannot be."""

from __future__ import annotations

from .detector import Detector, Finding, Values

MFU = "throughput/mfu"


class ImpossibleMfu(Detector):
    """Finds a model that uses more of its devices than there is: the formula, the peak or the number is wrong.

    Args:
        metric: The metric, a share.
        limit: What cannot be exceeded.
    """

    rule = "mfu"
    clear_after = 10
    cooldown = 1000
    carries = False
    at_once = True

    THRESHOLDS = ("limit",)

    def __init__(self, metric: str = MFU, *, limit: float = 1.0) -> None:
        self.metrics = (metric,)
        self.limit = limit
        self._metric = metric

    def update(self, values: Values) -> Finding | None:
        """Look at the utilisation of a row."""
        value = values.get(self._metric, 0.0)
        if not value > self.limit:
            return None
        message = (
            f"the model uses {value:.0%} of what its devices can do at most: the formula's terms, the peak or the "
            "number of devices in the segment's flops are not those of this job"
        )
        return Finding(self._metric, value, self.limit, value, message)
