"""A loss that rises slowly, so slowly that no single point gives it away."""

from __future__ import annotations

from statistics import median
from typing import Final

from .detector import LARGEST, LOSS, Detector, Finding, Values

_APART: Final = 8  # blocks from one to another, between which noise that is correlated wanders
_WIDE_MEMORY: Final = 100.0  # blocks
_MOST: Final = 6.0  # deviations that one bend teaches
_OF_BENDS: Final = 0.512  # a Gaussian's deviation, in how far a point is from the line through two others, twice


class Divergence(Detector):
    """Finds a loss whose medians over blocks of points have risen above the lowest of them, and stay there.

    A sudden change of level is no divergence: what one block is above the one before, beyond what blocks usually are,
    is taken off. How far the medians of a quiet curve wander is measured on the curve itself: from one to the next, and
    by how it bends over some blocks, for a curve that wanders bends down as far as up.

    Args:
        metric: The metric.
        block: Points of a block.
        threshold: Rise above the lowest block that is an alert, in deviations of its blocks.
        rise: And as a share of the loss, at least.
        blocks: For so many blocks in a row.
        jump: Deviations between two blocks that are a change of level.
        warmup: Blocks before the first alert.
        memory: Blocks over which deviations are averaged.
        patience: Blocks after which a loss that stays up is the new level.
    """

    rule = "divergence"
    level = "error"
    family = None
    clear_after = 1
    cooldown = 500

    THRESHOLDS = ("block", "threshold", "rise", "blocks", "jump", "warmup", "memory", "patience")
    STATE = ("seen", "values", "last", "lowest", "deviation", "wide", "past", "above", "high_for")
    ADDED = ("wide", "past")

    def __init__(
        self,
        metric: str = LOSS,
        *,
        block: int = 25,
        threshold: float = 8.0,
        rise: float = 0.015,
        blocks: int = 3,
        jump: float = 5.0,
        warmup: int = 10,
        memory: float = 24.0,
        patience: int = 20,
    ) -> None:
        self.metrics = (metric,)
        self.block = block
        self.threshold = threshold
        self.rise = rise
        self.blocks = blocks
        self.jump = jump
        self.warmup = warmup
        self.memory = memory
        self.patience = patience
        self._metric = metric
        self.seen = 0  # blocks
        self.values: list[float] = []  # of the block that is not full
        self.last = 0.0  # median of the last block
        self.lowest = 0.0
        self.deviation = 0.0
        self.wide = 0.0  # the same of blocks that are some blocks apart: more, where the noise is correlated
        self.past: list[float] = []  # medians of the last blocks
        self.above = 0  # blocks in a row
        self.high_for = 0  # blocks since the alert; 0 when there is none
        self._finding: Finding | None = None

    def update(self, values: Values) -> Finding | None:
        """Look at the loss of a row; what is said changes at the end of a block."""
        value = values.get(self._metric)
        if value is None or not -LARGEST < value < LARGEST:
            return self._finding
        block = self.values
        block.append(value)
        if len(block) >= self.block:
            self._finding = self._end_block(median(block))
            block.clear()
        return self._finding

    def _end_block(self, now: float) -> Finding | None:
        self.seen += 1
        if self.seen == 1:
            self.last = self.lowest = now
            return None
        change, self.last = now - self.last, now
        if self.seen <= self.warmup:
            self.lowest = now
            self.deviation += (abs(change) / 1.128 - self.deviation) / (self.seen - 1)
            return None
        limit = self.jump * self.deviation
        if change > max(limit, self.rise * abs(now)):
            self.lowest += change  # a change of level, or a spike: others look for those
        else:
            self.deviation += (min(abs(change), limit) / 1.128 - self.deviation) / self.memory
        self.lowest = min(self.lowest, now)
        self._see_wandering(now)
        least = max(self.threshold * max(self.deviation, self.wide), self.rise * abs(self.lowest))
        self.above = self.above + 1 if now - self.lowest > least else 0
        if self.high_for:
            return self._go_on(now, least)
        if self.above < self.blocks:
            return None
        self.high_for = 1
        return self._say(now)

    def _see_wandering(self, now: float) -> None:
        """Learn from where the curve bends down: what bends it up may be what is looked for, or the end of its fall."""
        past = self.past
        past.append(now)
        if len(past) <= 2 * _APART:
            return
        bend = 2.0 * past[_APART] - past.pop(0) - now
        if bend > 0.0:
            bend = min(bend, _MOST * max(self.deviation, self.wide))
            self.wide += (_OF_BENDS * bend - self.wide) / _WIDE_MEMORY

    def _go_on(self, now: float, least: float) -> Finding | None:
        self.high_for += 1
        if now - self.lowest < least / 2:
            self.high_for, self.stays = 0, False
            return None
        if self.high_for > self.patience:
            self.high_for = self.above = 0
            self.stays = True
            self.lowest = now
            return None
        return self._say(now)

    def _say(self, now: float) -> Finding:
        score = (now - self.lowest) / max(self.deviation, self.wide, 1e-300)
        message = (
            f"{self._metric} has risen from {self.lowest:.4g} to {now:.4g}, slowly; both are medians of "
            f"{self.block} points"
        )
        return Finding(self._metric, now, self.lowest, score, message)
