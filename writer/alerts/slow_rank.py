"""The slowest rank, when it is the same one for long."""

from __future__ import annotations

from .detector import LARGEST, Detector, Finding, Values
from .throughput import TOKENS_PER_S


class SlowRank(Detector):
    """Finds one rank that is the slowest at nearly every log step; chance would name another one each time.

    Args:
        metric: The metric whose ``<metric>_rank`` names the slowest; the reducer's ``min`` and ``max`` log both.
        of: What the metric is a part of: for the least tokens per second of a rank, those of all of them; for the time
            of waiting, that of a step.
        ranks: How many share `of`, where that is a sum; 0 when unknown, then only the name counts.
        gap: Share of `of` that the rank is behind the others, or waits, from which it is worth a word.
        points: Log steps in favour of one rank that are an alert.
        penalty: Log steps that one with another rank takes off.
    """

    rule = "slow_rank"
    clear_after = 10
    carries = False  # other nodes, and other numbers of them, are as fast as they are
    at_once = True
    cooldown = 100

    THRESHOLDS = ("gap", "points", "penalty")
    STATE = ("rank", "count", "behind")

    def __init__(
        self,
        metric: str = f"{TOKENS_PER_S}_min",
        of: str | None = TOKENS_PER_S,
        *,
        ranks: int = 0,
        gap: float = 0.01,
        points: int = 50,
        penalty: int = 4,
    ) -> None:
        self._metric, self._rank_metric, self._of = metric, f"{metric}_rank", of
        self.metrics = (self._rank_metric,)
        self.beside = (metric,) if of is None else (metric, of)
        self.ranks = ranks
        self.gap = gap
        self.points = points
        self.penalty = penalty
        self.rank = -1
        self.count = 0
        self.behind = 0.0  # share, averaged over the last ten log steps or so

    def update(self, values: Values) -> Finding | None:
        """Look at who was the slowest."""
        named = values.get(self._rank_metric)
        if named is None or not 0 <= named < LARGEST:
            return None
        rank = int(named)
        if self.ranks == 1 and rank == 0:
            return None
        if rank == self.rank:
            self.count = min(self.count + 1, 2 * self.points)
        elif self.count > self.penalty:
            self.count -= self.penalty
        else:
            self.rank, self.count, self.behind = rank, 1, 0.0
        behind = self._share_behind(values)
        if behind is not None:
            self.behind += (behind - self.behind) / min(self.count, 10)
        if self.count < self.points or (behind is not None and self.behind < self.gap):
            return None
        by = "" if behind is None else f", by {self.behind:.1%} of {self._of}"
        message = f"rank {self.rank} has been the slowest by {self._metric} for {self.count} log steps or more{by}"
        return Finding(self._rank_metric, named, None, float(self.count), message)

    def _share_behind(self, values: Values) -> float | None:
        value, whole = values.get(self._metric), values.get(self._of or "")
        if value is None or whole is None or not whole > 0.0 or value - value != 0.0:
            return None
        if not self._metric.startswith(str(self._of)):
            return value / whole
        return 1.0 - value * self.ranks / whole if self.ranks > 1 else None
