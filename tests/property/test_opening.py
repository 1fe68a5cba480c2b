"""Whatever jobs do, what a run has settled stays on its curve: sync never has to take a point back."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrack.writer.lineage.opening import open_segment
from llmtrack.writer.lineage.path import BEFORE_ALL, UNBOUNDED, Start, path
from tests.handmade import write_part
from tests.oracle import Oracle, Point, Segment

_HERE, _GONE = 1, 2  # a checkpoint's record is on storage; its job was killed before that


class _Jobs:
    """Jobs that open runs of one root, log, save and die; the oracle is told what they wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.segments: list[Segment] = []
        self.saved: list[dict[str, object]] = []

    def run(self, arguments: Mapping[str, Any], reach: int, saves: list[tuple[int, int]], how: str | None) -> None:
        """Be one process lifetime: log every ten tokens and at the start, save where told, end as told."""
        opening = open_segment(self.root, **arguments)
        start, key = opening.start_tokens, (opening.run_id, opening.segment)
        origin = None if opening.from_segment is None else (str(opening.from_run), opening.from_segment)
        names = ("from_run", "from_segment", "fork_reason", "recipe_hash", "recipe")
        begun = {"phase": "start", "tokens": start, **{name: getattr(opening, name) for name in names}}
        value = float(len(self.segments) * 1000)
        points = [Point(start, "eval/loss", value)]
        points += [
            Point(t, "train/loss", value + t) for t in range(start + (10 if origin else 0), start + reach + 1, 10)
        ]
        recorded = []
        for after, kept in saves:
            tokens = start + min(after, reach)
            self.saved.append(
                {"run_id": key[0], "segment": key[1], "recipe_hash": opening.recipe_hash, "step": 0, "tokens": tokens}
            )
            recorded += [tokens] if kept == _HERE else []
        end = [{"phase": "end", "exit": how, "tokens": start + reach}] if how else []
        write_part(opening.folder, "segments", [begun, *end])
        write_part(opening.folder, "metrics", [{"tokens": p.tokens, "name": p.name, "value": p.value} for p in points])
        if recorded:
            write_part(opening.folder, "checkpoints", [{"tokens": tokens} for tokens in recorded])
        self.segments.append(Segment(*key, start, origin, points, recorded, how))

    def settled(self) -> set[tuple[str, float]]:
        """Return the settled points of every run."""
        oracle = Oracle(self.segments)
        return {
            (segment.run_id, point.value)
            for segment in self.segments
            for point in segment.points
            if oracle.settled(segment, point)
        }


_JOB = st.fixed_dictionaries(
    {
        "resumes": st.none() | st.integers(0, 30),
        "run_id": st.sampled_from([None, "a", "b"]),
        "recipe": st.sampled_from([None, 1, 2]),
        "fork": st.sampled_from([False, False, False, True]),
        "reach": st.sampled_from([0, 0, 20, 50, 100]),
        "saves": st.lists(
            st.tuples(st.sampled_from([0, 10, 20, 50, 100]), st.sampled_from([_HERE, _HERE, _GONE])), max_size=2
        ),
        "how": st.sampled_from([None, None, "preempted", "finished"]),
    }
)


@settings(max_examples=60)
@given(st.lists(_JOB, min_size=2, max_size=9))
def test_what_is_settled_stays_settled_whatever_jobs_do(jobs: list[dict[str, Any]]) -> None:
    """Requeues, rollbacks, forks, lost checkpoints and zombies, in any order."""
    with tempfile.TemporaryDirectory() as root:
        log = _Jobs(Path(root))
        before: set[tuple[str, float]] = set()
        for job in jobs:
            arguments = {name: job[name] for name in ("run_id", "recipe", "fork")}
            if job["resumes"] is not None and log.saved:
                arguments["checkpoint"] = log.saved[job["resumes"] % len(log.saved)]
            log.run(arguments, job["reach"], job["saves"], job["how"])
            after = log.settled()
            assert before <= after
            before = after


@given(
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 8), st.integers(0, 50)), min_size=1, max_size=9),
    st.integers(0, 8),
)
def test_the_path_owns_what_the_words_of_the_design_say(made: list[tuple[int, int | None, int]], which: int) -> None:
    """Point by point, also where segments start below where they came from, or from themselves."""
    segments: list[Segment] = []
    for number, (run, origin, start) in enumerate(made, start=1):
        run_id = f"r{run}"
        known = None if origin is None else (f"r{made[origin % len(made)][0]}", origin % len(made) + 1)
        segments.append(Segment(run_id, number, start if known else 0, known))
    starts = {segment.key: Start(segment.start, segment.origin) for segment in segments}
    head = segments[which % len(segments)]
    stretches = list(path(lambda run_id, segment: starts.get((run_id, segment)), *head.key))
    walked = list(Oracle(segments).walk(head))
    assert [(s.run_id, s.segment) for s in stretches] == [segment.key for segment, _ in walked]
    for stretch, (segment, upto) in zip(stretches, walked, strict=True):
        assert stretch.lo == (segment.start if segment.origin else BEFORE_ALL)
        assert stretch.hi == (UNBOUNDED if upto == float("inf") else upto)
