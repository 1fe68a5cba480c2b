"""The rules of the path in plain Python, point by point and as slow as they read: what the SQL is compared with.

Written from the words of the design: where a segment starts, who owns what on the way back from a head, what that makes
of a point. No interval arithmetic is shared with `query/sql/views.sql`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Point:
    """One value at a place; `value` is also its name among all others."""

    tokens: int
    name: str
    value: float


@dataclass
class Segment:
    """What a segment wrote."""

    run_id: str
    number: int
    start: int = 0
    origin: tuple[str, int] | None = None
    points: list[Point] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    exit: str | None = None
    started: bool = True  # whether its start record can be read

    @property
    def key(self) -> tuple[str, int]:
        """Return run and number."""
        return self.run_id, self.number


class Oracle:
    """Answers for one root what each point is."""

    def __init__(self, segments: list[Segment]) -> None:
        self._all = {segment.key: segment for segment in segments}
        self._started = {segment.key: segment for segment in segments if segment.started}

    def head(self, run_id: str) -> Segment | None:
        """Return the highest segment of a run."""
        own = [segment for segment in self._started.values() if segment.run_id == run_id]
        return max(own, key=lambda segment: segment.number, default=None)

    def runs(self) -> list[str]:
        """Return the runs that have a head."""
        return sorted({run_id for run_id, _ in self._started})

    def walk(self, head: Segment) -> Iterator[tuple[Segment, float]]:
        """Yield the segments on the path of a head, newest first, each with the last token that is its own."""
        upto = float("inf")
        segment: Segment | None = head
        seen = set()
        while segment is not None and segment.key not in seen:
            seen.add(segment.key)
            yield segment, upto
            upto = min(upto, segment.start)
            segment = self._started.get(segment.origin) if segment.origin else None

    def passes(self, head: Segment, segment: Segment, tokens: int) -> bool:
        """Return whether the path of a head leads along a segment at some tokens, its own start included."""
        return any(step.key == segment.key and segment.start <= tokens <= upto for step, upto in self.walk(head))

    def earlier_has(self, segment: Segment, name: str) -> bool:
        """Return whether a segment was at this one's start before it, and has a point of that metric there."""
        before = self._all.get(segment.origin) if segment.origin else None
        seen = set()
        while before is not None and before.key not in seen:
            seen.add(before.key)
            if any(point.tokens == segment.start and point.name == name for point in before.points):
                return True
            if not before.started or before.start != segment.start or before.origin is None:
                return False
            before = self._all.get(before.origin)
        return False

    def superseded_by(self, segment: Segment, point: Point) -> int | None:
        """Return None for a live point, and otherwise the first later segment whose branch left it behind."""
        return self._superseded_by(segment, point.tokens, point.name)

    def checkpoint_superseded_by(self, segment: Segment, tokens: int) -> int | None:
        """Return the same for a checkpoint: nothing that another segment has takes its place."""
        return self._superseded_by(segment, tokens, None)

    def _superseded_by(self, segment: Segment, tokens: int, name: str | None) -> int | None:
        later = sorted(
            number for run_id, number in self._started if run_id == segment.run_id and number > segment.number
        )
        if not segment.started:
            return later[0] if later else segment.number
        head = self.head(segment.run_id)
        assert head is not None
        if self.passes(head, segment, tokens):
            if name is not None and segment.origin and tokens == segment.start and self.earlier_has(segment, name):
                return segment.origin[1]
            return None
        for number in later:
            if not self.passes(self._started[segment.run_id, number], segment, tokens):
                return number
        raise AssertionError(f"{segment.key} at {tokens} is not live, and nobody left it behind")

    def horizon(self, run_id: str) -> float:
        """Return H: what is live at or below it is settled."""
        head = self.head(run_id)
        assert head is not None
        if head.exit in {"finished", "abandoned"}:
            return float("inf")
        newest = [
            tokens
            for segment in self._started.values()
            if segment.run_id == run_id
            for tokens in segment.checkpoints
            if self.checkpoint_superseded_by(segment, tokens) is None
        ]
        return max([*newest, head.start if head.origin else -1])

    def settled(self, segment: Segment, point: Point) -> bool:
        """Return whether a point is live and cannot be left behind by a restart from the newest checkpoint."""
        if not segment.started or self.superseded_by(segment, point) is not None:
            return False
        return self._settled(segment.run_id, segment, point.tokens)

    def _settled(self, run_id: str, segment: Segment, tokens: int) -> bool:
        horizon = self.horizon(run_id)
        ended = segment.exit in {"finished", "abandoned"}
        if segment.run_id == run_id and segment.origin and tokens == segment.start and not ended:
            # The checkpoint that it started from is not its own: a later segment may start from there as well.
            return horizon > tokens
        return tokens <= horizon

    def history(self, run_id: str) -> dict[float, tuple[str, int, bool]]:
        """Return the curve of a run: each point's value, where it was logged, and whether it is settled."""
        head = self.head(run_id)
        assert head is not None
        curve = {}
        for segment, upto in self.walk(head):
            for point in segment.points:
                if not segment.start <= point.tokens <= upto:
                    continue
                if segment.origin and point.tokens == segment.start and self.earlier_has(segment, point.name):
                    continue
                curve[point.value] = (*segment.key, self._settled(run_id, segment, point.tokens))
        return curve


def doubled(curve: Mapping[float, tuple[str, int, bool]], segments: list[Segment]) -> list[tuple[str, int]]:
    """Return every (metric, tokens) at which a curve has more than one point."""
    places: dict[tuple[str, int], int] = {}
    for segment in segments:
        for point in segment.points:
            if point.value in curve and curve[point.value][:2] == segment.key:
                places[point.name, point.tokens] = places.get((point.name, point.tokens), 0) + 1
    return sorted(place for place, count in places.items() if count > 1)
