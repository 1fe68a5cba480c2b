"""What the noise of a curve does by itself: how far its tail reaches, how much of it comes back in the next point."""

from __future__ import annotations

from math import log, sqrt
from typing import Final

from .detector import LARGEST, Detector

_BEYOND: Final = 2.5  # deviations from which a point belongs to the tail
_ALONE: Final = 2.0  # deviations of the next point up to which one in the tail stood alone, and was noise
_POINTS: Final = 40_000.0  # after so many, what was seen counts half
# What is believed before anything was seen: some points of Gaussian noise.
_FIRST_POINTS: Final = 970.0
_FIRST_BEYOND: Final = 6.0
_FIRST_INDEX: Final = 0.12
_DOUBT: Final = 0.5  # standard errors by which the tail is taken to be longer than it was seen

_CLIP: Final = 2.0  # deviations that one point may teach of the echo
_ECHO_MEMORY: Final = 1000.0  # points
_ECHO_DOUBT: Final = 0.1  # an echo of less is chance
_ECHO_MOST: Final = 0.25  # taking off more would hide what lasts


class NoisyDetector(Detector):
    """A detector of spikes that learns what the noise of its curve does by itself, and finds what it does not do.

    How far out one point in a million is, comes from the tail (Hill, 1975; Weissman, 1978): beyond some limit, the
    share of points that is farther out falls as a power of the distance, or faster, and the power is the mean of the
    logarithm of what was seen there. A few dozen points are enough for that; the farthest one alone says less. Where
    the noise of a point comes back in the next, a score is of what is new in it: two points in a row are then two
    pieces of evidence.

    Attributes:
        threshold: Deviations at which a point is an alert, at least.
        pair_threshold: Deviations at which two points in a row are one, at least.
        chance: How likely noise may be beyond the limit for one point.
        pair_chance: And beyond that for each of two.
    """

    threshold: float
    pair_threshold: float
    chance: float
    pair_chance: float

    NOISE_STATE = ("last_score", "last_off", "product", "points", "beyond", "excess")
    ADDED = ("last_off", "product", "points", "beyond", "excess")

    def __init__(self) -> None:
        self.last_score = 0.0
        self.last_off = 0.0  # deviations that the last point was off, all of them
        self.product = 0.0  # mean product of those of one point and of the next
        self.points = 0.0
        self.beyond = 0.0  # of these points, those in the tail
        self.excess = 0.0  # sum of the logarithms of how many times as far as the limit they were

    def score(self, off: float) -> float:
        """Return how many deviations of what is off are new, and not left from the last point."""
        echo = self.product - _ECHO_DOUBT
        if echo <= 0.0:
            return off
        echo = min(echo, _ECHO_MOST)
        return (off - echo * self.last_off) / sqrt(1.0 - echo * echo)

    def is_spike(self, score: float) -> bool:
        """Return whether noise alone does not come to this score, after the last one."""
        if score > self.threshold and score > self._reach(self.chance):
            return True
        lower = min(score, self.last_score)
        return lower > self.pair_threshold and lower > self._reach(self.pair_chance)

    def learn_noise(self, off: float, score: float) -> None:
        """Take a point to the noise, and the one before to its tail if it stood alone.

        Args:
            off: Deviations that it is off.
            score: Those of them that are new.
        """
        last, last_off = self.last_score, self.last_off
        self.last_score, self.last_off = max(min(score, LARGEST), -LARGEST), max(min(off, LARGEST), -LARGEST)
        self.points += 1.0
        if last > _BEYOND and score < _ALONE:
            self.beyond += 1.0
            self.excess += log(last / _BEYOND)
        if self.points > _POINTS:
            self.points, self.beyond, self.excess = self.points / 2, self.beyond / 2, self.excess / 2
        product = max(min(last_off, _CLIP), -_CLIP) * max(min(off, _CLIP), -_CLIP)
        self.product += (product - self.product) / _ECHO_MEMORY

    def forget_last(self) -> None:
        """Begin anew after the last point: what comes is no pair with it, nor its echo."""
        self.last_score = self.last_off = 0.0

    def _reach(self, chance: float) -> float:
        """Return beyond how many deviations noise is with this probability; too many rather than too few."""
        beyond = self.beyond + _FIRST_BEYOND
        index = (self.excess + _FIRST_BEYOND * _FIRST_INDEX) / beyond * (1.0 + _DOUBT / sqrt(beyond))
        return _BEYOND * float(max(beyond / (self.points + _FIRST_POINTS) / chance, 1.0) ** index)
