"""The path of a run: which stretch of which segment is on its curve.

`docs/LINEAGE.md` draws it, and the SQL of the views says the same of all runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

BEFORE_ALL: Final = -1  # tokens before the first: who starts from nowhere owns also what it logs at 0
UNBOUNDED: Final = (1 << 63) - 1  # where the head's own stretch ends: nowhere yet


@dataclass(frozen=True)
class Start:
    """Where a segment starts.

    Attributes:
        tokens: Tokens seen by then.
        origin: Run and segment that it goes on from; None when it starts from nowhere.
    """

    tokens: int
    origin: tuple[str, int] | None


@dataclass(frozen=True)
class Stretch:
    """The tokens ``(lo, hi]`` of one segment: open on the left, so that a checkpoint belongs to who reached it."""

    run_id: str
    segment: int
    lo: int
    hi: int


def path(
    start_of: Callable[[str, int], Start | None], run_id: str, segment: int, tokens: int = UNBOUNDED
) -> Iterator[Stretch]:
    """Walk back from a place, newest stretch first, through parents to a segment that starts from nowhere.

    Args:
        start_of: Where a segment of a run starts; None for one without a start record, which is on no path. Asked only
            as far as the walk is followed.
        run_id: The run of the place.
        segment: Its segment; the highest with a start record is the run's head.
        tokens: Its tokens.
    """
    place: tuple[str, int] | None = (run_id, segment)
    walked = set()
    while place is not None and place not in walked:  # records that were tampered with must not hold a trainer
        walked.add(place)
        start = start_of(*place)
        if start is None:
            return
        lo = BEFORE_ALL if start.origin is None else start.tokens
        yield Stretch(*place, lo, tokens)
        place, tokens = start.origin, min(lo, tokens)
