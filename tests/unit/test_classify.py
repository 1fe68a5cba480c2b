"""What belongs into a tracker, asked of the views."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from llmtrack.query import connect
from llmtrack.sync.replay import classify
from tests.handmade import write_segment
from tests.oracle import Point, Segment


def test_a_bound_for_points_does_not_hinder_reading_a_long_lineage_again(tmp_path: Path) -> None:
    """A watch reads a run again with a connection that a sync has bound; an hour of kills took 80 MB of 64."""
    origin, tokens = None, 0
    for run_id in ("a", "b", "c"):
        for number in range(1, 5):
            points = [Point(tokens + more, "loss", 1.0) for more in range(1, 9)]
            write_segment(tmp_path, Segment(run_id, number, tokens, origin, points, [tokens + 4]))
            origin, tokens = (run_id, number), tokens + 4
    with closing(connect(tmp_path, runs=["c"])) as con:
        con.execute("SET threads = 2")
        con.execute("SET memory_limit = '14MB'")  # as little beside these 12 segments as 64 MB beside 150
        (run,) = classify.read_runs(con, ["c"])[-1:]
        assert (run.run_id, len(run.segments)) == ("c", 4)
