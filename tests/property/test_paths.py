"""Live, superseded, settled and history in SQL against the same rules as plain Python, on trees of any shape."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrack.query import connect, refresh
from llmtrack.writer.format import part_name, segment_folder
from llmtrack.writer.log.stream import read_part
from llmtrack.writer.run import Run, open_run
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
    with tempfile.TemporaryDirectory() as folder:
        for index, segment in enumerate(segments):
            write_segment(Path(folder), segment, sealed=index in sealed)
        with connect(folder) as con:
            _compare(con, segments)


_JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "resumes": st.none() | st.integers(0, 20),
            "recipe": st.sampled_from([1, 1, 1, 2]),
            "on_rollback": st.sampled_from(["continue", "fork"]),
            "steps": st.integers(0, 6),
            "saves": st.sets(st.integers(0, 6), max_size=2),
            "how": st.sampled_from([None, None, "failed", "finished"]),
        }
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=15)
@given(_JOBS)
def test_the_sql_says_the_same_of_what_the_public_api_writes(jobs: list[dict[str, Any]]) -> None:
    """Jobs open runs, log, save and end, or are simply gone; after each the connection takes in what is new."""
    segments: list[Segment] = []
    saved: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, connect(folder) as con, ExitStack() as killed:
        for job in jobs:
            checkpoint = saved[job["resumes"] % len(saved)] if saved and job["resumes"] is not None else None
            run = open_run(
                folder,
                run_id="a" if checkpoint is None else None,
                recipe={"lr": job["recipe"]},
                checkpoint=checkpoint,
                on_rollback=job["on_rollback"],
            )
            segment = Segment(run.run_id, run.segment, run.start_tokens, _origin(Path(folder), run))
            for step in range(run.start_step, run.start_step + job["steps"] + 1):
                tokens, value = step * 10, float(len(segments) * 100 + step)
                run.log({"loss": value}, step=step, tokens=tokens)
                segment.points.append(Point(tokens, "loss", value))
                if step - run.start_step in job["saves"]:
                    saved.append(run.meta(step=step, tokens=tokens))
                    path = Path(folder, f"{run.run_id}-{run.segment}-{step}.pt")
                    path.write_bytes(b"weights")
                    run.checkpoint(path, step=step, tokens=tokens)
                    segment.checkpoints.append(tokens)
            assert run.flush()
            if job["how"] is None:
                killed.callback(run.finish)  # it is not heard of again until all is compared
            else:
                run.finish(job["how"])
                segment.exit = job["how"]
            segments.append(segment)
            refresh(con)
            _compare(con, segments)


def _origin(root: Path, run: Run) -> tuple[str, int] | None:
    """Return where a segment says that it starts from."""
    part = segment_folder(root, run.run_id, run.segment) / part_name("segments", 1)
    row = read_part(part).table.to_pylist()[0]
    return None if row["from_segment"] is None else (row["from_run"], row["from_segment"])


def _compare(con: duckdb.DuckDBPyConnection, segments: list[Segment]) -> None:
    """Compare what the views say of all points and checkpoints with what the oracle says."""
    oracle = Oracle(segments)
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
