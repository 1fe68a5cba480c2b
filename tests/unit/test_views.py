"""The views: what each says of runs that resume, roll back, fork, die and are still running."""

from __future__ import annotations

import datetime as dt
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from llmtrack.query import connect, refresh
from llmtrack.writer.checkpoints.evals import log_eval
from llmtrack.writer.errors import UsageError
from llmtrack.writer.format import SCHEMAS, segment_folder
from llmtrack.writer.log.seal import seal_part, seal_segment
from llmtrack.writer.run import open_run
from tests.handmade import DAY, write_heartbeat, write_part, write_segment
from tests.oracle import Point, Segment

_PLACE = ["run_id", "segment", "seq", "time", "step", "tokens"]
_TABLE = {table: [field.name for field in schema][4:] for table, schema in SCHEMAS.items()}


def ask(root: Path, query: str, *values: object, **how: Any) -> list[tuple[Any, ...]]:
    """Return the rows of one query over a root."""
    with connect(root, **how) as con:
        return con.execute(query, list(values)).fetchall()


def loss(*tokens: int, name: str = "loss", value: float | None = None) -> list[Point]:
    """Return points at some tokens, whose value is their tokens unless said otherwise."""
    return [Point(place, name, float(place) if value is None else value) for place in tokens]


# The contract


@pytest.mark.parametrize(
    ("view", "columns"),
    [
        (
            "runs",
            [
                *("run_id", "project", "run_name", "parent_run", "fork_reason", "fork_tokens", "status", "segments"),
                *("first_time", "last_time", "step", "tokens", "recipe_hash"),
            ],
        ),
        ("metrics", [*_PLACE, "name", "value", "superseded_by", "settled"]),
        ("live", [*_PLACE, "name", "value", "superseded_by", "settled"]),
        (
            "history",
            ["run_id", "source_run", "segment", "seq", "time", "step", "tokens", "name", "value", "settled"],
        ),
        ("checkpoints", [*_PLACE, *_TABLE["checkpoints"], "superseded_by", "settled"]),
        ("alerts", [*_PLACE, *_TABLE["alerts"], "superseded_by", "settled"]),
        ("batches", [*_PLACE, *_TABLE["batches"], "superseded_by", "settled"]),
        ("gaps", [*_PLACE, *_TABLE["gaps"]]),
        ("evals", [*_PLACE, *_TABLE["evals"], "superseded_by", "matched"]),
        (
            "goodput",
            [
                *("run_id", "segment", "tokens_kept", "tokens_superseded", "running_s", "waiting_s"),
                *("gpu_hours", "gpu_hours_lost"),
            ],
        ),
        ("damages", ["run_id", "segment", "path", "first_byte", "end_byte", "reason"]),
    ],
)
def test_the_columns_of_a_view_are_a_contract(tmp_path: Path, view: str, columns: list[str]) -> None:
    """Names and order, also over an empty root."""
    with connect(tmp_path) as con:
        assert con.sql(f"FROM {view}").columns == columns


def test_segments_has_start_and_end_in_one_row(tmp_path: Path) -> None:
    """Every column of the start record, and where and how it ended."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10), exit="preempted"), project="p", nodes=["n1", "n2"])
    with connect(tmp_path) as con:
        columns = con.sql("FROM segments").columns
        row = dict(zip(columns, con.sql("FROM segments").fetchall()[0], strict=True))
    assert set(_TABLE["segments"]) - {"phase", "adopts"} <= set(columns)
    assert (row["start_tokens"], row["end_tokens"], row["exit"]) == (0, 10, "preempted")
    assert (row["start_step"], row["end_step"], row["nodes"], row["started"]) == (0, 1, ["n1", "n2"], True)
    assert row["start_time"] == DAY + dt.timedelta(hours=1)
    assert row["end_time"] == row["last_time"] == DAY + dt.timedelta(hours=1, minutes=50)


def test_the_root_may_have_any_name_and_an_id_may_be_all_digits(tmp_path: Path) -> None:
    """A quote in a folder's name ends no string, a bracket is no pattern, and a run called 007 is no number."""
    root = tmp_path / "it's; a -- [root]*?"
    folder = write_segment(root, Segment("007", 1, points=loss(5)), sealed=True)
    write_part(folder, "metrics", [{"seq": 9, "tokens": 6, "name": "loss", "value": 6.0}], part=2)
    assert ask(root, "SELECT run_id, tokens FROM live ORDER BY tokens") == [("007", 5), ("007", 6)]


@pytest.mark.parametrize("sealed", [False, True])
def test_values_and_tokens_come_back_bit_for_bit(tmp_path: Path, *, sealed: bool) -> None:
    """NaN with its payload, infinities, zeros with a sign, subnormals, and tokens that no float can hold."""
    bits = [0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 1, 1 << 63]
    values = [struct.unpack("<d", struct.pack("<Q", word))[0] for word in bits]
    places = [2**53 + 1, 10**15 + 3, 10**16 + 7, 2**62 + 1, 2**62 + 3, 2**62 + 5]
    points = [Point(place, "loss", value) for place, value in zip(places, values, strict=True)]
    write_segment(tmp_path, Segment("a", 1, points=points, checkpoints=[10**16 + 7]), sealed=sealed)
    found = ask(tmp_path, "SELECT tokens, value, settled FROM live ORDER BY seq")
    assert [struct.unpack("<Q", struct.pack("<d", value))[0] for _, value, _ in found] == bits
    assert [(place, settled) for place, _, settled in found] == [(place, place <= 10**16 + 7) for place in places]


@pytest.mark.parametrize("sealed", [False, True])
def test_nan_and_infinities_are_found_by_a_condition(tmp_path: Path, *, sealed: bool) -> None:
    """DuckDB believes statistics, which leave NaN out: a part must have none of its values."""
    points = [Point(tokens, "loss", value) for tokens, value in ((1, 1.0), (2, math.nan), (3, math.inf), (4, 90.0))]
    write_segment(tmp_path, Segment("a", 1, points=points, checkpoints=[4]), sealed=sealed)
    log_eval(tmp_path, "x", "task", {"acc": 0.5, "loss": math.nan})
    with connect(tmp_path) as con:
        for condition, tokens in (
            ("isnan(value)", [2]),
            ("value = 'nan'", [2]),
            ("value > 50", [2, 3, 4]),
            ("NOT isfinite(value)", [2, 3]),
        ):
            found = con.sql(f"SELECT tokens FROM live WHERE {condition} ORDER BY tokens").fetchall()
            assert [row[0] for row in found] == tokens, condition
        assert con.sql("SELECT max(value) FROM live WHERE NOT isnan(value)").fetchall() == [(math.inf,)]
        assert con.sql("SELECT metric FROM evals WHERE isnan(value)").fetchall() == [("loss",)]


# Paths


def test_a_restart_supersedes_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    """Checkpoint at 4000, crash at 5000, resumed to 5200: one current row a step, 1000 superseded, all kept."""
    write_segment(tmp_path, Segment("a", 1, points=loss(*range(1, 5001)), checkpoints=[4000]), sealed=True)
    write_segment(tmp_path, Segment("a", 2, 4000, ("a", 1), points=loss(*range(4001, 5201))))
    with connect(tmp_path) as con:
        assert con.sql("SELECT count(*), count(DISTINCT tokens), max(tokens) FROM live").fetchall() == [
            (5200, 5200, 5200)
        ]
        assert con.sql(
            "SELECT segment, superseded_by, min(tokens), max(tokens), count(*) FROM metrics"
            " WHERE superseded_by IS NOT NULL GROUP BY ALL"
        ).fetchall() == [(1, 2, 4001, 5000, 1000)]
        assert con.sql("SELECT count(*) FROM metrics").fetchall() == [(6200,)]
        assert con.sql("SELECT count(*), max(tokens) FROM live WHERE settled").fetchall() == [(4000, 4000)]


def test_the_point_at_a_checkpoint_belongs_to_the_segment_that_reached_it(tmp_path: Path) -> None:
    """What the next segment logs at its start is live only for metrics that have no point there yet."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20), checkpoints=[20]))
    resumed = [*loss(20, value=7.0), *loss(20, name="eval/x", value=8.0), *loss(30)]
    write_segment(tmp_path, Segment("a", 2, 20, ("a", 1), points=resumed))
    found = ask(tmp_path, "SELECT segment, name, tokens, superseded_by, settled FROM metrics ORDER BY segment, seq")
    assert found == [
        (1, "loss", 10, None, True),
        (1, "loss", 20, None, True),
        (2, "loss", 20, 1, False),
        (2, "eval/x", 20, None, False),
        (2, "loss", 30, None, False),
    ]


def test_a_start_is_compared_with_everyone_who_was_there_before(tmp_path: Path) -> None:
    """The segment before only resumed there and logged nothing: the one before that has the point."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20)), sealed=True)
    write_segment(tmp_path, Segment("a", 2, 20, ("a", 1)))
    write_segment(tmp_path, Segment("a", 3, 20, ("a", 2), points=[*loss(20, value=7.0), *loss(30)]))
    found = ask(tmp_path, "SELECT segment, tokens, superseded_by FROM metrics ORDER BY segment, tokens")
    assert found == [(1, 10, None), (1, 20, None), (3, 20, 2), (3, 30, None)]
    assert ask(tmp_path, "SELECT tokens, segment FROM series('a', 'loss')") == [(10, 1), (20, 1), (30, 3)]


def test_a_start_is_compared_from_the_refresh_on_in_which_it_came(tmp_path: Path) -> None:
    """A connection that had nothing to compare learns to, with and without points in open parts."""
    query = "SELECT segment, tokens, name FROM history ORDER BY ALL"
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20), checkpoints=[20]), sealed=True)
    with connect(tmp_path) as con:
        assert con.execute(query).fetchall() == [(1, 10, "loss"), (1, 20, "loss")]
        again = [*loss(20, 30), *loss(20, name="eval")]
        folder = write_segment(tmp_path, Segment("a", 2, origin=("a", 1), start=20, points=again))
        whole = [(1, 10, "loss"), (1, 20, "loss"), (2, 20, "eval"), (2, 30, "loss")]
        for change in (lambda: None, lambda: seal_part(folder / "metrics-00001.arrows"), lambda: None):
            change()
            refresh(con)
            assert con.execute(query).fetchall() == whole


def test_a_part_of_another_program_has_the_types_of_ours(tmp_path: Path) -> None:
    """Also where it is the only part, with narrower numbers."""
    write_segment(tmp_path, Segment("a", 1))
    with connect(tmp_path) as con:
        ours = con.execute("DESCRIBE metrics").fetchall()
        columns = {"seq": "INTEGER", "time": "TIMESTAMP", "step": "INTEGER", "tokens": "INTEGER", "name": "VARCHAR"}
        values = "1, '2025-03-01', 2, 3, 'loss', 0.5"
        con.execute(f"CREATE TABLE theirs ({', '.join(map(' '.join, columns.items()))}, value FLOAT)")
        con.execute(f"INSERT INTO theirs VALUES ({values})")
        con.execute(f"COPY theirs TO '{segment_folder(tmp_path, 'a', 1)}/metrics-00001.parquet' (FORMAT parquet)")
        refresh(con)
        assert con.execute("DESCRIBE metrics").fetchall() == ours
        row = con.execute("SELECT seq, time, step, tokens, name, value FROM metrics").fetchall()
        assert row == [(1, DAY, 2, 3, "loss", 0.5)]


def test_a_restart_from_nothing_supersedes_all_before(tmp_path: Path) -> None:
    """And what was logged at tokens 0 is the new segment's, and settled only once there is a checkpoint."""
    write_segment(tmp_path, Segment("a", 1, points=loss(0, 10)))
    write_segment(tmp_path, Segment("a", 2, points=loss(0, 5)))
    found = ask(tmp_path, "SELECT segment, tokens, superseded_by, settled FROM metrics ORDER BY segment, tokens")
    assert found == [(1, 0, 2, False), (1, 10, 2, False), (2, 0, None, False), (2, 5, None, False)]


def test_two_rollbacks_name_who_left_what_behind_first(tmp_path: Path) -> None:
    """A second rollback behind the first does not rename what the first one left."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20, 30, 40)))
    write_segment(tmp_path, Segment("a", 2, 30, ("a", 1), points=loss(35, 45)))
    write_segment(tmp_path, Segment("a", 3, 10, ("a", 1), points=loss(15)))
    found = ask(tmp_path, "SELECT segment, tokens, superseded_by FROM metrics ORDER BY segment, tokens")
    assert found == [(1, 10, None), (1, 20, 3), (1, 30, 3), (1, 40, 2), (2, 35, 3), (2, 45, 3), (3, 15, None)]


def test_a_writer_that_was_not_dead_is_superseded_where_the_other_went_on(tmp_path: Path) -> None:
    """Both have their own segment; what the first logs later is beside the path."""
    first = write_segment(tmp_path, Segment("a", 1, points=loss(10, 20), checkpoints=[20]))
    write_segment(tmp_path, Segment("a", 2, 20, ("a", 1), points=loss(25)))
    with connect(tmp_path) as con:
        write_part(first, "metrics", [{"seq": 99, "tokens": 30, "name": "loss", "value": 30.0}], part=2)
        refresh(con)
        found = con.sql("SELECT segment, tokens, superseded_by FROM metrics ORDER BY tokens").fetchall()
    assert found == [(1, 10, None), (1, 20, None), (2, 25, None), (1, 30, 2)]


def test_a_childs_history_is_stitched_from_its_parents(tmp_path: Path) -> None:
    """Through a fork of a fork; each run keeps its own points to itself."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20, 30)))
    write_segment(tmp_path, Segment("b", 1, 20, ("a", 1), points=loss(25, 35)), fork_reason="recipe", recipe_hash="h")
    write_segment(tmp_path, Segment("c", 1, 25, ("b", 1), points=loss(40)), fork_reason="rollback")
    with connect(tmp_path) as con:
        curves = con.sql(
            "SELECT run_id, list((source_run, tokens) ORDER BY tokens) FROM history GROUP BY run_id ORDER BY run_id"
        ).fetchall()
        live = con.sql(
            "SELECT run_id, list(tokens ORDER BY tokens) FROM live GROUP BY run_id ORDER BY run_id"
        ).fetchall()
        runs = con.sql("SELECT run_id, parent_run, fork_reason, fork_tokens FROM runs ORDER BY run_id").fetchall()
        series = con.sql("SELECT tokens, source_run FROM series('c', 'loss')").fetchall()
    assert curves == [
        ("a", [("a", 10), ("a", 20), ("a", 30)]),
        ("b", [("a", 10), ("a", 20), ("b", 25), ("b", 35)]),
        ("c", [("a", 10), ("a", 20), ("b", 25), ("c", 40)]),
    ]
    assert live == [("a", [10, 20, 30]), ("b", [25, 35]), ("c", [40])]
    assert runs == [("a", None, None, None), ("b", "a", "recipe", 20), ("c", "b", "rollback", 25)]
    assert series == [(10, "a"), (20, "a"), (25, "b"), (40, "c")]


def test_a_child_of_a_run_that_is_not_here_has_its_own_curve(tmp_path: Path) -> None:
    """Known by name only: the path ends there."""
    write_segment(tmp_path, Segment("b", 1, 20, ("elsewhere", 4), points=loss(20, 25)), fork_reason="foreign")
    assert ask(tmp_path, "SELECT tokens, superseded_by FROM live ORDER BY tokens") == [(20, None), (25, None)]
    assert ask(tmp_path, "SELECT parent_run, fork_reason, fork_tokens FROM runs") == [("elsewhere", "foreign", 20)]


def test_a_segment_without_a_start_is_on_no_path_and_hides_nothing(tmp_path: Path) -> None:
    """Its points are there, as superseded by the next segment or, when it is the last, by itself."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10)))
    write_segment(tmp_path, Segment("a", 2, points=loss(20), started=False))
    write_segment(tmp_path, Segment("a", 3, 10, ("a", 1), points=loss(30)))
    write_segment(tmp_path, Segment("a", 4, points=loss(40), started=False))
    with connect(tmp_path) as con:
        found = con.sql("SELECT segment, superseded_by FROM metrics ORDER BY segment").fetchall()
        assert found == [(1, None), (2, 3), (3, None), (4, 4)]
        assert con.sql("SELECT segment, started FROM segments ORDER BY segment").fetchall() == [
            (1, True),
            (2, False),
            (3, True),
            (4, False),
        ]
        assert con.sql("SELECT segments, tokens FROM runs").fetchall() == [(4, 30)]


def test_records_that_point_at_each_other_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    """Only damage can make them; every point is still there once."""
    write_segment(tmp_path, Segment("a", 1, 5, ("b", 1), points=loss(6)))
    write_segment(tmp_path, Segment("b", 1, 5, ("a", 1), points=loss(7)))
    write_segment(tmp_path, Segment("c", 1, 5, ("c", 1), points=loss(8)))
    assert ask(tmp_path, "SELECT run_id, tokens FROM metrics ORDER BY run_id") == [("a", 6), ("b", 7), ("c", 8)]


def test_points_below_a_segments_start_are_on_no_path(tmp_path: Path) -> None:
    """The writer refuses them; in a file made by another hand they are shown, and count for nothing."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20)))
    write_segment(tmp_path, Segment("a", 2, 20, ("a", 1), points=loss(15, 30)))
    found = ask(tmp_path, "SELECT segment, tokens, superseded_by FROM metrics ORDER BY tokens")
    assert found == [(1, 10, None), (2, 15, 2), (1, 20, None), (2, 30, None)]


def test_opt_175b_in_small(tmp_path: Path) -> None:
    """90 segments, 6 changes of recipe, 4 rollbacks: the last child's curve has one point for each metric and place."""
    names, runs, saved = ("loss", "grad_norm"), ["opt"], 0
    place: tuple[str, int] | None = None
    number, start, forks, rollbacks = 0, 0, {13, 27, 40, 55, 68, 81}, {9, 33, 60, 77}
    expected = 0
    for step in range(90):
        if step in forks:
            runs.append(f"opt-recipe-{len(runs)}")
            number = 0
        if step in rollbacks:
            saved -= 30
        number += 1
        start = saved
        reached = start + 100
        points = [point for name in names for point in loss(*range(start + 10, reached + 1, 10), name=name)]
        write_segment(
            tmp_path,
            Segment(runs[-1], number, start, place, points=points, checkpoints=[start + 50, start + 80]),
            sealed=step % 3 == 0,
            fork_reason="recipe" if step in forks else None,
        )
        place, saved = (runs[-1], number), start + 80
        expected = reached
    with connect(tmp_path) as con:
        last = runs[-1]
        curve = con.execute("SELECT name, tokens FROM history WHERE run_id = ? ORDER BY ALL", [last]).fetchall()
        assert curve == sorted((name, tokens) for name in names for tokens in range(10, expected + 1, 10))
        assert con.sql("SELECT count(*) FROM segments").fetchall() == [(90,)]
        assert con.sql("SELECT run_id, parent_run FROM runs ORDER BY run_id").fetchall() == list(
            zip(runs, [None, *runs], strict=False)
        )
        doubled = con.sql("SELECT run_id, name, tokens FROM live GROUP BY ALL HAVING count(*) > 1").fetchall()
        assert doubled == []
        kept, lost = con.sql("SELECT sum(tokens_kept), sum(tokens_superseded) FROM goodput").fetchall()[0]
        assert kept + lost == 90 * 100


# Settled


@pytest.mark.parametrize(
    ("how", "settled"), [("finished", True), ("abandoned", True), ("failed", False), (None, False)]
)
def test_everything_is_settled_once_nothing_is_to_come(tmp_path: Path, how: str | None, *, settled: bool) -> None:
    """A head that finished or was abandoned settles what lies beyond its newest checkpoint."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20), checkpoints=[10], exit=how))
    assert ask(tmp_path, "SELECT tokens, settled FROM live ORDER BY tokens") == [(10, True), (20, settled)]


def test_a_checkpoint_that_was_left_behind_settles_nothing(tmp_path: Path) -> None:
    """Only those on the path count, and the place that the head starts from."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10, 20, 30), checkpoints=[20, 30]))
    write_segment(tmp_path, Segment("a", 2, 20, ("a", 1), points=loss(25)))
    assert ask(tmp_path, "SELECT tokens, settled FROM live ORDER BY tokens") == [(10, True), (20, True), (25, False)]
    found = ask(tmp_path, "SELECT tokens, superseded_by, settled FROM checkpoints ORDER BY tokens")
    assert found == [(20, None, True), (30, 2, False)]


def test_alerts_are_live_and_settled_as_points_are(tmp_path: Path) -> None:
    """An alert in a stretch that was left behind is superseded with it."""
    folder = write_segment(tmp_path, Segment("a", 1, points=loss(10, 20), checkpoints=[10]))
    write_part(
        folder, "alerts", [{"tokens": 10, "alert_id": "x"}, {"tokens": 20, "alert_id": "y", "batch_ids": ["b1"]}]
    )
    write_segment(tmp_path, Segment("a", 2, 10, ("a", 1)))
    found = ask(tmp_path, "SELECT alert_id, superseded_by, settled, batch_ids FROM alerts ORDER BY alert_id")
    assert found == [("x", None, True, None), ("y", 2, False, ["b1"])]


# Runs


def _status(root: Path, **how: Any) -> str:
    return str(ask(root, "SELECT status FROM runs", **how)[0][0])


def test_a_run_is_running_then_stalled_then_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the silence since its heartbeat; both bounds can be set."""
    folder = write_segment(tmp_path, Segment("a", 1))
    now = dt.datetime.now(dt.UTC)
    for silence_s, status in ((0, "running"), (800, "running"), (1000, "stalled"), (90_000, "lost")):
        write_heartbeat(folder, now - dt.timedelta(seconds=silence_s))
        assert _status(tmp_path) == status
    assert _status(tmp_path, stalled_after_s=200_000, lost_after_s=300_000) == "running"
    monkeypatch.setenv("LLMTRACK_STALLED_AFTER", "1e6")
    monkeypatch.setenv("LLMTRACK_LOST_AFTER", "2e6")
    assert _status(tmp_path) == "running"
    monkeypatch.setenv("LLMTRACK_LOST_AFTER", "soon")
    with pytest.raises(UsageError, match="LLMTRACK_LOST_AFTER='soon' is not a number"):
        connect(tmp_path)


@pytest.mark.parametrize("how", ["finished", "preempted", "failed"])
def test_a_run_that_said_how_it_ended_has_that_status(tmp_path: Path, how: str) -> None:
    """However long ago that was."""
    write_segment(tmp_path, Segment("a", 1, exit=how))
    assert _status(tmp_path) == how


def test_the_status_is_the_heads(tmp_path: Path) -> None:
    """A run that failed and was started again is running."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10), checkpoints=[10], exit="failed"))
    write_heartbeat(write_segment(tmp_path, Segment("a", 2, 10, ("a", 1))), dt.datetime.now(dt.UTC), tokens=40)
    assert ask(tmp_path, "SELECT status, segments, tokens, step FROM runs") == [("running", 2, 40, 4)]


def test_goodput_says_what_the_time_of_each_segment_bought(tmp_path: Path) -> None:
    """Eight GPUs for 50 minutes to 100 tokens, of which 60 were kept; ten minutes of waiting after it."""
    write_segment(tmp_path, Segment("a", 1, points=loss(100), checkpoints=[60], exit="failed"))
    write_segment(tmp_path, Segment("a", 2, 60, ("a", 1), points=loss(90), exit="finished"))
    with connect(tmp_path) as con:
        found = con.sql("SELECT * EXCLUDE run_id FROM goodput ORDER BY segment").fetchall()
    hours = 8 * 50 / 60
    assert found[0][:5] == (1, 60, 40, 3000.0, 0.0)
    assert found[0][5:] == (pytest.approx(hours), pytest.approx(hours * 0.4))
    assert found[1][:5] == (2, 30, 0, 3000.0, 600.0)
    assert found[1][5:] == (pytest.approx(hours), 0.0)


# Evaluations


def test_an_eval_is_as_live_as_its_checkpoint(tmp_path: Path) -> None:
    """With the run and tokens of the checkpoint; of several with one id the livest; none: not matched."""
    first = write_segment(tmp_path, Segment("a", 1, points=loss(30)))
    checkpoints = [{"seq": 7, "tokens": 10, "ckpt_id": "both"}, {"seq": 8, "tokens": 30, "ckpt_id": "left"}]
    write_part(first, "checkpoints", checkpoints)
    second = write_segment(tmp_path, Segment("a", 2, 5, ("a", 1), points=loss(20)))
    write_part(second, "checkpoints", [{"seq": 9, "tokens": 20, "ckpt_id": "both"}])
    for ckpt_id in ("both", "left", "nobody's"):
        log_eval(tmp_path, ckpt_id, "hellaswag", {"acc": 0.5}, run_id="a")
    found = ask(tmp_path, "SELECT ckpt_id, run_id, segment, tokens, superseded_by, matched FROM evals ORDER BY ckpt_id")
    assert found == [
        ("both", "a", 2, 20, None, True),
        ("left", "a", 1, 30, 2, True),
        ("nobody's", "a", None, None, None, False),
    ]


# A run that is still running, by the public API


@pytest.fixture
def run_and_con(tmp_path: Path) -> Iterator[tuple[Any, duckdb.DuckDBPyConnection]]:
    """Open a run that has logged one row, and a connection."""
    with open_run(tmp_path, run_id="a", project="p") as run, connect(tmp_path) as con:
        run.log({"train/loss": 2.5}, step=1, tokens=100)
        assert run.flush()
        yield run, con


def test_a_running_runs_loss_is_there_after_a_flush(run_and_con: tuple[Any, duckdb.DuckDBPyConnection]) -> None:
    """`refresh` takes in what is new; until then the connection is the moment at which it was opened."""
    run, con = run_and_con
    query = "SELECT tokens, value FROM live WHERE run_id = 'a' AND name = 'train/loss' ORDER BY tokens"
    assert con.sql(query).fetchall() == []
    refresh(con)
    assert con.sql(query).fetchall() == [(100, 2.5)]
    run.log({"train/loss": math.nan}, step=2, tokens=200)
    assert run.flush()
    assert len(con.sql(query).fetchall()) == 1
    refresh(con)
    (_, (tokens, value)) = con.sql(query).fetchall()
    assert (tokens, math.isnan(value)) == (200, True)
    assert con.sql("SELECT status, tokens, step FROM runs").fetchall() == [("running", 200, 2)]


def test_a_run_that_finishes_and_is_sealed_between_two_refreshes_keeps_its_points(
    tmp_path: Path, run_and_con: tuple[Any, duckdb.DuckDBPyConnection]
) -> None:
    """Open part, sealed part, and again: each point once; cursors see the same."""
    run, con = run_and_con
    refresh(con)
    run.log({"train/loss": 2.0}, step=2, tokens=200)
    run.finish()
    seal_segment(segment_folder(tmp_path, "a", 1))
    refresh(con)
    with con.cursor() as cursor:
        assert cursor.execute("SELECT tokens, settled FROM live WHERE name = 'train/loss' ORDER BY 1").fetchall() == [
            (100, True),
            (200, True),
        ]
        assert cursor.execute("SELECT status FROM runs").fetchall() == [("finished",)]


@pytest.mark.parametrize("only", [None, ["b"]], ids=["all", "a run that a watcher names"])
def test_a_refresh_that_failed_in_the_middle_costs_no_point(tmp_path: Path, only: list[str] | None) -> None:
    """Somebody else changes the database at that moment: the next refresh has all that the failed one had read."""
    first = write_segment(tmp_path, Segment("a", 1, points=loss(10)))
    write_segment(tmp_path, Segment("b", 1, points=loss(10)))
    with connect(tmp_path) as con:
        write_part(first, "metrics", [{"seq": 9, "time": DAY, "tokens": 20, "name": "new", "value": 1.0}], part=2)
        with con.cursor() as other:
            other.execute("BEGIN")
            other.execute("DROP TABLE log.damages")
            with pytest.raises(duckdb.TransactionException):
                refresh(con)
            other.execute("ROLLBACK")
        refresh(con, runs=only)
        points = "SELECT run_id, name, tokens FROM metrics ORDER BY ALL"
        assert con.execute(points).fetchall() == [("a", "loss", 10), ("a", "new", 20), ("b", "loss", 10)]
        refresh(con)
        assert len(con.execute(points).fetchall()) == 3


def test_resumes_by_the_public_api_make_one_run(tmp_path: Path) -> None:
    """Five starts, the id only from the checkpoint: one run, five segments, one value a step."""
    meta = None
    for _ in range(5):
        with open_run(tmp_path, project="p", checkpoint=meta) as run:
            for step in range(run.start_step + 1, run.start_step + 11):
                run.log({"train/loss": step + run.segment / 10}, step=step, tokens=step * 10)
            saved = tmp_path / f"{run.segment}.pt"
            saved.write_bytes(os.urandom(8))
            step = run.start_step + 7
            meta = run.meta(step=step, tokens=step * 10)
            run.checkpoint(saved, step=step, tokens=step * 10)
            run.finish("failed")
    with connect(tmp_path) as con:
        assert con.sql("SELECT segments, status, tokens FROM runs").fetchall() == [(5, "failed", 380)]
        assert con.sql("SELECT count(*), count(DISTINCT step) FROM live WHERE name = 'train/loss'").fetchall() == [
            (38, 38)
        ]
        assert con.sql("SELECT count(*) FROM metrics WHERE superseded_by IS NOT NULL").fetchall() == [(12,)]


# Other ways in


def test_plain_sql_over_the_sealed_parquet_needs_nothing_of_ours(tmp_path: Path) -> None:
    """Also while parts are open, and while one is just being sealed under its temporary name."""
    folder = write_segment(tmp_path, Segment("a", 1, points=loss(10, 20)), sealed=True)
    write_part(folder, "metrics", [{"seq": 90, "tokens": 30, "name": "loss", "value": 1.0}], part=2)
    (folder / ".metrics-00002.parquet.12345.tmp").write_bytes(b"PAR1 half")
    glob = f"{tmp_path}/*/*/metrics-*.parquet"
    query = f"SELECT run_id, CAST(segment AS INT), tokens FROM read_parquet('{glob}', hive_partitioning=true)"
    with duckdb.connect() as con:
        assert con.sql(f"{query} ORDER BY tokens").fetchall() == [("a", 1, 10), ("a", 1, 20)]


def test_a_connection_without_points_says_so(tmp_path: Path) -> None:
    """Instead of none, which would look like an answer."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10)))
    with connect(tmp_path, points=False) as con:
        assert con.sql("SELECT run_id, tokens FROM runs").fetchall() == [("a", 10)]
        with pytest.raises(duckdb.Error, match="metrics does not exist"):
            con.sql("SELECT count(*) FROM metrics").fetchall()


@pytest.mark.parametrize("what", ["metrics", "evals"])
def test_a_quick_look_at_the_runs_stumbles_over_no_damaged_file(tmp_path: Path, what: str) -> None:
    """Whichever byte of a footer was changed: DuckDB may not be able to open it, or Arrow to spell what is in it."""
    folder = write_segment(tmp_path, Segment("a", 1, points=loss(10)), sealed=True)
    seal_part(write_part(folder, "metrics", [{"seq": 9, "time": DAY, "tokens": 20, "name": "x", "value": 1.0}], part=2))
    write_segment(tmp_path, Segment("b", 1, points=loss(10)))
    log_eval(tmp_path, "unknown", "task", {"acc": 0.5})
    path = min(path for path in tmp_path.rglob("*.parquet") if path.name.startswith(what))
    whole = path.read_bytes()
    for position in range(len(whole) - 1000, len(whole), 11):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x95]) + whole[position + 1 :])
        assert ask(tmp_path, "SELECT run_id FROM runs ORDER BY ALL", points=False) == [("a",), ("b",)]


def test_refresh_wants_a_connection_of_ours() -> None:
    """Any other is refused with what to do."""
    with duckdb.connect() as con, pytest.raises(UsageError, match=r"con = connect\(root\)"):
        refresh(con)


def test_a_damaged_part_is_in_the_view_of_damage(tmp_path: Path) -> None:
    """With its run and segment, while everything else answers."""
    folder = write_segment(tmp_path, Segment("a", 1, points=loss(10)))
    write_segment(tmp_path, Segment("b", 1, points=loss(20)))
    sealed = seal_part(folder / "metrics-00001.arrows")
    sealed.write_bytes(sealed.read_bytes()[:-3])
    with connect(tmp_path) as con:
        assert con.sql("SELECT run_id, segment, path FROM damages").fetchall() == [("a", 1, str(sealed))]
        assert con.sql("SELECT run_id FROM live").fetchall() == [("b",)]


@pytest.mark.skipif(duckdb.__version__.startswith(("0.", "1.")), reason="DuckDB 1 imports it by itself")
def test_a_connection_loads_no_pandas(tmp_path: Path) -> None:
    """It would cost a third of a second of every command where it is installed, and nothing here needs it."""
    write_segment(tmp_path, Segment("a", 1, points=loss(10), checkpoints=[10]))
    write_part(segment_folder(tmp_path, "a", 1), "alerts", [{"tokens": 10, "alert_id": "x", "batch_ids": ["b"]}])
    code = f"import sys; from llmtrack.query import connect; con = connect({str(tmp_path)!r})"
    code += "; con.sql('FROM live').fetchall(); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
