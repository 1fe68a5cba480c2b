"""Live, superseded, settled and history in SQL against the same rules as plain Python, on trees of any shape."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrack.query import connect
from tests.handmade import write_segment
from tests.oracle import Oracle, Point, Segment, doubled

_RUNS = ("a", "b", "c")
_METRICS = ("loss", "lr")


@st.composite
def trees(draw: st.DrawFn, *, most: int = 9) -> list[Segment]:
    """Draw the segments of a few runs: resumes, rollbacks, forks of forks, requeues, and writers that were not dead.

    A segment starts from nowhere, from anywhere on a segment that was there before (of any run, on its path or left
    behind, also at that one's own start), or from a run that is not in the root. When it logged does not matter, so a
    late second writer is a segment that goes on beyond the place from which the next one started.
    """
    segments: list[Segment] = []
    counts = dict.fromkeys(_RUNS, 0)
    value = iter(range(1_000_000))
    for _ in range(draw(st.integers(1, most))):
        run_id = draw(st.sampled_from(_RUNS))
        counts[run_id] += 1
        segment = Segment(run_id, counts[run_id], started=draw(st.integers(0, 19)) > 0)
        kind = draw(st.integers(0, 9))
        if segments and kind >= 2:
            own = [other for other in segments if other.run_id == run_id]
            before = draw(st.sampled_from(own if own and kind >= 4 else segments))
            segment.origin, segment.start = before.key, before.start + draw(st.sampled_from((0, 0, 1, 2, 3, 6)))
        elif kind == 1:
            segment.origin, segment.start = ("elsewhere", 1), draw(st.integers(0, 6))
        places = st.sampled_from([segment.start, *range(segment.start, segment.start + 8)])
        for name in _METRICS:
            for tokens in sorted(draw(st.sets(places, max_size=5))):
                segment.points.append(Point(tokens, name, float(next(value))))
        segment.checkpoints = sorted(draw(st.sets(places, max_size=2)))
        segment.exit = draw(st.sampled_from([None, None, "failed", "finished", "abandoned"]))
        segments.append(segment)
    return segments


@settings(max_examples=100)
@given(trees(), st.sets(st.integers(0, 8)))
def test_the_sql_says_of_every_point_what_the_rules_say(segments: list[Segment], sealed: set[int]) -> None:
    """Each point is there once, with the `superseded_by` and `settled` of the rules; so is each checkpoint."""
    oracle = Oracle(segments)
    with tempfile.TemporaryDirectory() as folder:
        for index, segment in enumerate(segments):
            write_segment(Path(folder), segment, sealed=index in sealed)
        with connect(folder) as con:
            columns = "value, run_id, segment, tokens, name, superseded_by, settled"
            found = sorted(con.execute(f"SELECT {columns} FROM metrics").fetchall())
            live = sorted(con.execute(f"SELECT {columns} FROM live").fetchall())
            checkpoints = con.execute("SELECT run_id, segment, tokens, superseded_by FROM checkpoints").fetchall()
            curves = {
                run_id: con.execute(
                    "SELECT value, source_run, segment, settled FROM history WHERE run_id = ?", [run_id]
                ).fetchall()
                for run_id in oracle.runs()
            }
    expected = sorted(
        (p.value, *s.key, p.tokens, p.name, oracle.superseded_by(s, p), oracle.settled(s, p))
        for s in segments
        for p in s.points
    )
    assert found == expected
    assert live == [row for row in expected if row[5] is None]
    assert sorted(checkpoints) == sorted(
        (*s.key, tokens, oracle.checkpoint_superseded_by(s, tokens)) for s in segments for tokens in s.checkpoints
    )
    for run_id, curve in curves.items():
        assert sorted(curve) == sorted((value, *where) for value, where in oracle.history(run_id).items())
        assert not doubled(oracle.history(run_id), segments), "one point at each place of each metric"
