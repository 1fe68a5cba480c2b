"""Complaints about tools of this kind, each of which must stay impossible; the numbers are those of the scenarios.

What is not here is in `test_sink.py`: 3 status, 4 synced twice and killed, 5 and 13 allocations and preemptions in a
row, 12 and 18 overlaps, 15 and 16 child runs, 20 no `finish()`; 10 is in `tests/unit/test_sync_cli.py`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import llmtrack
from llmtrack.writer.upkeep.adopt import adopt
from tests.contract.conftest import Bench, Log, Point, Row, SegmentLog
from tests.faultproxy import Request, proxy

_RUNS = 8
_JOBS = 3


def points(rows: list[Row]) -> Counter[Point]:
    """Return points as the tracker should hold them."""
    return Counter(row.point for row in rows)


def test_1_a_row_of_a_run_that_is_still_writing_is_sent(local: Bench) -> None:
    """One small row, flushed, of a trainer that lives: what is on disk is what is sent, whatever its size."""
    with llmtrack.open_run(local.log.root, run_id="slow", project=local.log.project) as run:
        run.log({"train/loss": 2.5}, step=1, tokens=100)
        assert run.flush(timeout=30.0)
        (row,) = local.sync()
        assert (row["status"], row["points_sent"]) == ("running", 1)
        assert [key for key, *_ in local.only("provisional", "slow").points] == ["train/loss"]
    local.sync()
    assert local.only("canonical", "slow").status == "FINISHED"


def test_6_many_runs_at_once_and_the_live_one_first(bench: Bench) -> None:
    """Several at a time: each has its points, and what is being trained is not behind the backlog."""
    for number in range(_RUNS):
        segment = bench.log.segment(f"run-{number:02}").train(0, 300).checkpoint(200)
        if number == _RUNS - 1:
            segment.alive()
        else:
            segment.end("finished", 300)
    if not bench.tracker.uri.startswith("http") or bench.tracker.to != "mlflow":
        bench.sync("--jobs", str(_JOBS))
    else:
        with proxy(bench.tracker.uri) as before:
            own, bench.tracker = bench.tracker, type(bench.tracker)(before.uri, bench.tracker.database)
            bench.sync("--jobs", str(_JOBS))
            bench.tracker = own
            made = [_run_id(request) for request in before.requests if request.endpoint == "runs/create"]
            assert made.index(f"run-{_RUNS - 1:02}") < _JOBS
    for number in range(_RUNS):
        run_id = f"run-{number:02}"
        held = Counter[Point]()
        for kind in ("canonical", "provisional"):
            for run in bench.runs(kind, run_id):
                held += run.points
        assert held == points(bench.rows(run_id))
    assert all(row["points_sent"] == 0 for row in bench.sync("--jobs", str(_JOBS)))


def _run_id(request: Request) -> str:
    return request.body.decode().partition('"llmtrack.run_id","value":"')[2].partition('"')[0]


def test_6_the_rate_is_printed(local: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """In points per second, at the end."""
    from llmtrack.sync.cli import main

    local.log.segment().train(0, 300).checkpoint(300)
    with pytest.raises(SystemExit):
        main(local.arguments)
    assert "points/s)" in capsys.readouterr().out


def test_9_a_copied_root_is_the_same_run_with_its_own_times(local: Bench, tmp_path: Path) -> None:
    """Synced from another host, into another tracker: start, end and the time of every row are the original ones."""
    local.log.segment().train(0, 1000).checkpoint(600).end("finished", 1000)
    shutil.copytree(local.log.root, tmp_path / "copied")
    rows = local.rows()
    shutil.rmtree(local.log.root)
    local.log.root = tmp_path / "copied"
    local.sync()
    run = local.only("canonical")
    assert run.points == points(rows)
    assert (run.start_ms, run.end_ms) == (rows[0].ms - 7, max(row.ms for row in rows) + 2)


def test_14_five_requeues_are_one_run(local: Bench) -> None:
    """Synced after each: one canonical run with the whole curve, and one side run per stretch that was left behind."""
    local.log.segment().train(0, 200).checkpoint(100)
    local.sync()
    for number in range(1, 6):
        start = number * 100
        local.log.segment(after=("run", number, start)).train(start, start + 200).checkpoint(start + 100)
        local.sync()
    rows = local.rows()
    assert local.only("canonical").points == points([row for row in rows if row.tokens <= 100 * row.segment])
    assert [run.tag("segment") for run in local.runs("superseded")] == ["1", "2", "3", "4", "5"]


def test_17_a_run_that_really_went_on_from_another_is_joined(local: Bench) -> None:
    """`adopt` after both were sent: the child says where it started, and what it repeated from below is on no path."""
    local.log.segment("one").train(0, 1000).checkpoint(600).end("finished", 1000)
    local.log.segment("two").train(500, 1200).end("finished", 1200)
    local.sync()
    assert local.only("canonical", "two").points == points(local.rows("two"))
    adopt(local.log.root, "two", from_run="one", tokens=600)
    local.sync()
    child = local.only("canonical", "two")
    assert child.tag("parent_run") == "one"
    assert child.tags["mlflow.parentRunId"] == local.only("canonical", "one").ref
    assert child.points == points([row for row in local.rows("two") if row.tokens > 600])
    assert local.sync()[0]["points_sent"] == 0


def test_a_log_in_open_and_sealed_parts_is_one_run(local: Bench) -> None:
    """Whatever was sealed between two syncs: nothing is sent twice."""
    segment: SegmentLog = local.log.segment().train(0, 500)
    local.sync()
    from llmtrack.writer.log.seal import seal_part

    rows = local.rows()
    for part in sorted(segment.folder.glob("metrics-*.arrows")):
        seal_part(part)
    assert local.sync()[0]["points_sent"] == 0
    assert local.only("provisional").points == points(rows)


def test_a_part_of_a_newer_format_is_named_with_the_remedy(local: Bench) -> None:
    """It is not damaged, and its run is incomplete; the other runs are sent."""
    import pyarrow as pa

    from llmtrack.writer.format import SCHEMAS

    newer = local.log.segment("newer").train(0, 100).checkpoint(100)
    head = SCHEMAS["metrics"].with_metadata({"llmtrack.format": "99", "llmtrack.table": "metrics"})
    (newer.folder / "metrics-00002.arrows").write_bytes(head.serialize().to_pybytes())
    unknown = Log(local.log.root, local.log.project).segment("unknown")
    head = SCHEMAS["segments"].with_metadata({"llmtrack.format": "99", "llmtrack.table": "segments"})
    assert isinstance(head, pa.Schema)
    (unknown.folder / "segments-00001.arrows").write_bytes(head.serialize().to_pybytes())
    local.log.segment("well").train(0, 100).checkpoint(100)
    rows = {row["run_id"]: row for row in local.sync(expect=2)}
    for run_id in ("newer", "unknown"):
        assert "a newer llmtrack wrote" in rows[run_id]["error"]
        assert "upgrade llmtrack" in rows[run_id]["error"]
        assert "damaged" not in rows[run_id]["error"]
    assert rows["well"]["error"] == ""
    assert sum(local.only("canonical", "newer").points.values()) == 20  # what this llmtrack can read
