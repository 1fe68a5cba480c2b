"""What every sink must do, against the real MLflow: in this process, and as a server on loopback.

The log is read here with Arrow and the tracker with SQLite, by code that shares nothing with what is tested.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from llmtrack.writer.log.seal import seal_part
from tests.contract.conftest import Bench, Point, Row

SENTINEL_MS = 1_767_225_600_000


def points(rows: list[Row], belongs: Callable[[Row], bool]) -> Counter[Point]:
    """Return the points of the log that belong somewhere, each with the number of times it must be there."""
    return Counter(row.point for row in rows if belongs(row))


def test_settled_points_arrive_once_and_bit_for_bit(bench: Bench) -> None:
    """The canonical run holds exactly the settled points: same names, tokens, times and bits of the values."""
    bench.log.segment().train(0, 3000).checkpoint(2000)
    bench.sync()
    settled = [row for row in bench.rows() if row.tokens <= 2000]
    held = bench.only("canonical")
    assert held.points == Counter(row.point for row in settled)
    bits = {struct.pack("<d", row.value) for row in settled}
    assert {struct.pack("<d", value) for (*_, value) in held.points} == bits


def test_side_runs_hold_exactly_what_is_superseded_or_provisional(bench: Bench) -> None:
    """A restart from 4000 after a crash at 5000 leaves 1000 tokens to one side run and its own tail to another."""
    bench.log.segment().train(0, 5000, every=100).checkpoint(4000)
    bench.log.segment(after=("run", 1, 4000)).train(4000, 5200, every=100)
    bench.sync()
    rows = bench.rows()
    canonical, left, tail = bench.only("canonical"), bench.only("superseded"), bench.only("provisional")
    assert canonical.points == points(rows, lambda row: row.segment == 1 and row.tokens <= 4000)
    assert left.points == points(rows, lambda row: row.segment == 1 and row.tokens > 4000)
    assert tail.points == points(rows, lambda row: row.segment == 2)
    assert (left.name, left.status) == ("segment 1: superseded by 2, 4000\N{EN DASH}5000 tokens", "KILLED")
    assert (left.tag("segment"), left.tag("superseded_by"), tail.tag("segment")) == ("1", "2", "2")
    for side in (left, tail):
        assert side.tags["mlflow.parentRunId"] == canonical.ref
        assert side.tags["mlflow.runColor"].startswith("#")


def test_a_second_sync_sends_nothing(bench: Bench) -> None:
    """Syncing again changes nothing in the tracker and says that it sent nothing."""
    bench.log.segment().train(0, 1000).checkpoint(500)
    bench.sync()
    before = bench.tracker.runs(bench.log.project)
    assert [row["points_sent"] for row in bench.sync()] == [0]
    assert bench.tracker.runs(bench.log.project) == before


def test_what_was_logged_since_is_all_that_is_sent(bench: Bench) -> None:
    """A sync of a run that went on sends the new points only."""
    segment = bench.log.segment().train(0, 1000).checkpoint(1000)
    bench.sync()
    segment.train(1000, 1500).checkpoint(1500)
    (row,) = bench.sync()
    assert row["points_sent"] == 2 * 50
    assert bench.only("canonical").points == points(bench.rows(), lambda _: True)


def test_three_preemptions_in_a_row_lose_nothing(each: Bench) -> None:
    """Four segments, synced after each: nothing is missing, nothing is there twice, whatever was left behind."""
    starts = [0, 900, 1800, 2700]
    for number, start in enumerate(starts, start=1):
        after = ("run", number - 1, start) if start else None
        each.log.segment(after=after).train(start, start + 1000).checkpoint(start + 900)
        each.sync()
    ends = [*starts[1:], math.inf]
    rows = each.rows()
    canonical = points(rows, lambda row: row.tokens <= min(ends[row.segment - 1], 3600))
    assert each.only("canonical").points == canonical
    for run in each.runs("superseded"):
        segment = int(run.tags["llmtrack.segment"])
        assert run.points == Counter(r.point for r in rows if r.segment == segment and r.tokens > ends[segment - 1])
    assert [run.tag("segment") for run in each.runs("superseded")] == ["1", "2", "3"]
    assert each.only("provisional").points == points(rows, lambda row: row.segment == 4 and row.tokens > 3600)


def test_a_provisional_tail_that_settles_moves_into_the_canonical_run(each: Bench) -> None:
    """Its side run is deleted, and the new tail gets one with its points only."""
    segment = each.log.segment().train(0, 1000)
    each.sync()
    assert each.only("provisional").points == points(each.rows(), lambda _: True)
    first = each.only("provisional").ref
    segment.checkpoint(800).train(1000, 1200)
    each.sync()
    rows = each.rows()
    assert each.only("canonical").points == points(rows, lambda row: row.tokens <= 800)
    assert each.only("provisional").points == points(rows, lambda row: row.tokens > 800)
    assert each.only("provisional").ref != first
    segment.end("finished", 1200)
    (row,) = each.sync()
    assert row["side_runs_deleted"] == 1
    assert [run.tag("kind") for run in each.tracker.runs(each.log.project)] == ["canonical"]
    assert each.only("canonical").points == points(rows, lambda _: True)


def test_a_provisional_tail_that_is_left_behind_becomes_the_superseded_run(each: Bench) -> None:
    """Where all of its points were left behind it is renamed, not sent again."""
    each.log.segment().train(0, 1000).checkpoint(400)
    each.sync()
    tail = each.only("provisional").ref
    each.log.segment(after=("run", 1, 400)).train(400, 700)
    (row,) = each.sync()
    assert each.only("superseded").ref == tail
    assert row["superseded_sent"] == 0
    assert each.only("superseded").status == "KILLED"
    assert each.only("superseded").points == points(each.rows(), lambda row: row.segment == 1 and row.tokens > 400)


def test_a_tail_of_which_a_part_settled_and_the_rest_was_left_behind_is_made_anew(each: Bench) -> None:
    """The superseded run has exactly the superseded points, and the one that had both is gone."""
    each.log.segment().train(0, 1000).checkpoint(400)
    each.sync()
    each.log.segment(after=("run", 1, 800)).train(800, 900)
    each.sync()
    rows = each.rows()
    assert each.only("canonical").points == points(rows, lambda row: row.segment == 1 and row.tokens <= 800)
    assert each.only("superseded").points == points(rows, lambda row: row.segment == 1 and row.tokens > 800)
    assert len(each.tracker.runs(each.log.project)) == 3


def test_a_forced_rollback_below_what_was_settled_makes_a_new_generation(bench: Bench) -> None:
    """The run that held points which are superseded now is tagged replaced; another has exactly the present curve."""
    bench.log.segment().train(0, 1000).checkpoint(1000)
    bench.sync()
    old = bench.only("canonical").ref
    bench.log.segment(after=("run", 1, 300)).train(300, 600).checkpoint(600)
    (row,) = bench.sync()
    rows = bench.rows()
    new, replaced = bench.only("canonical"), bench.only("replaced")
    assert (replaced.ref, replaced.tag("generation"), replaced.status) == (old, "1", "KILLED")
    assert replaced.tags["mlflow.parentRunId"] == new.ref
    assert new.tag("generation") == "2"
    assert new.points == points(rows, lambda row: row.segment == 2 or row.tokens <= 300)
    assert bench.only("superseded").points == points(rows, lambda row: row.segment == 1 and row.tokens > 300)
    assert "generation 2" in " ".join(row["notes"])
    assert bench.sync()[0]["points_sent"] == 0


def test_status_and_times_are_those_of_the_log(each: Bench) -> None:
    """Running, finished, failed and killed, with the start and end of the log and not of the sync."""
    each.log.segment("alive").train(0, 100).alive()
    each.log.segment("done").train(0, 100).end("finished", 100)
    each.log.segment("broken").train(0, 100).end("failed", 100)
    each.log.segment("preempted").train(0, 100).end("preempted", 100)
    each.log.segment("lost").train(0, 100)
    each.sync()
    found = {run.name: run for run in each.tracker.runs(each.log.project) if run.tag("kind") == "canonical"}
    assert {name: run.status for name, run in found.items()} == {
        "alive": "RUNNING", "done": "FINISHED", "broken": "FAILED", "preempted": "KILLED", "lost": "KILLED",
    }  # fmt: skip
    first, last = (choose(row.ms for row in each.rows("done")) for choose in (min, max))
    assert SENTINEL_MS < found["done"].start_ms < first
    assert last < (found["done"].end_ms or 0) < first + 3_600_000
    assert found["alive"].end_ms is None


def test_a_run_that_goes_on_is_running_again(each: Bench) -> None:
    """A preempted run that was resumed does not stay killed."""
    each.log.segment().train(0, 100).checkpoint(100).end("preempted", 100)
    each.sync()
    assert each.only("canonical").status == "KILLED"
    each.log.segment(after=("run", 1, 100)).train(100, 200).alive()
    each.sync()
    assert each.only("canonical").status == "RUNNING"


def test_a_child_run_is_nested_in_its_parent_with_its_fork_point(each: Bench) -> None:
    """The parent is sent first, and the child says where it left it and what changed."""
    each.log.segment("parent").train(0, 1000).checkpoint(600).end("finished", 1000)
    difference = json.dumps({"lr": [1e-4, 2e-4]})
    fork = {"fork_reason": "recipe", "from_ckpt": "ckpt-1-600", "recipe_diff": difference}
    each.log.segment("a-child", after=("parent", 1, 600), **fork).train(600, 700).end("finished", 700)
    each.sync()
    child = each.only("canonical", "a-child")
    assert child.tags["mlflow.parentRunId"] == each.only("canonical", "parent").ref
    assert child.tag("parent_run") == "parent"
    assert (child.tag("fork_segment"), child.tag("fork_tokens"), child.tag("fork_ckpt")) == ("1", "600", "ckpt-1-600")
    assert (child.tag("fork_reason"), child.tag("fork_recipe_diff")) == ("recipe", difference)
    assert child.points == points(each.rows("a-child"), lambda _: True)


def test_the_optimiser_step_is_a_metric_once_per_row(each: Bench) -> None:
    """MLflow's step is tokens; the metric ``step`` has the optimiser step at the time of the row."""
    each.log.segment().train(0, 500).checkpoint(500)
    each.sync()
    rows = each.rows()
    assert each.only("canonical").steps == {(row.tokens, row.ms, float(row.step)) for row in rows}
    assert sum(point[0] == "step" for point in each.only("canonical").metrics) == 50


def test_no_value_is_nan_or_infinite_in_the_tracker(bench: Bench) -> None:
    """They are there under another name, so that none is lost and none hides a curve."""
    values = [2.5, math.nan, math.inf, -math.inf, 0.5]
    bench.log.segment().log([(10 * n, {"loss": value}) for n, value in enumerate(values, start=1)]).checkpoint(50)
    bench.sync()
    held = {(key, tokens): value for key, tokens, _, value in bench.only("canonical").points}
    assert held == {
        ("loss", 10): 2.5, ("loss_nonfinite", 20): 0.0, ("loss_nonfinite", 30): 1.0, ("loss_nonfinite", 40): -1.0,
        ("loss", 50): 0.5,
    }  # fmt: skip


def test_extreme_values_and_tokens_arrive_as_they_are(bench: Bench) -> None:
    """The smallest and the largest doubles, tokens of 10^15 and beyond 2^53; -0.0 is 0.0 to a database."""
    values = [5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 0.1 + 0.2, 1e-17, -0.0, -1.0, -2.0]
    first = 10**15
    bench.log.segment().log([(first + n, {"x": value}) for n, value in enumerate(values)]).log(
        [(2**53 + 1, {"x": 1.0})]
    )
    bench.sync()
    held = {tokens: value for _, tokens, _, value in bench.only("provisional").points}
    assert held == {**{first + n: value for n, value in enumerate(values)}, 2**53 + 1: 1.0}


def test_equal_points_are_all_kept(bench: Bench) -> None:
    """MLflow merges points that are equal in everything; the second and third get keys of their own."""
    bench.log.segment().log([(10, {"x": 1.0})] * 3 + [(20, {"x": 1.0})], ms=0).checkpoint(20)
    bench.sync()
    held = Counter((key, tokens) for key, tokens, _, _ in bench.only("canonical").points.elements())
    copies = ["x"] * 3 if bench.tracker.to == "wandb" else ["x", "x_copy2", "x_copy3"]  # W&B keeps equal rows
    assert held == Counter([*((key, 10) for key in copies), ("x", 20)])
    shutil.rmtree(bench.state)
    assert bench.sync()[0]["points_sent"] == 0


def test_names_that_a_tracker_refuses_are_mapped_and_can_be_mapped_back(bench: Bench) -> None:
    """The tracker itself says what each of them is called in the log, and no two of them meet."""
    names = ["loss@ema", "loss#ema", "a//b", "../up", "x" * 400, "(", "step", "loss_nonfinite", "ok/name.with-all_ 9:"]
    bench.log.segment().log([(10, {name: float(n) for n, name in enumerate(names)})]).checkpoint(10)
    (row,) = bench.sync()
    held = bench.only("canonical")
    original = {key: held.tags.get(f"llmtrack.name.{key}", key) for key, *_ in held.points}
    assert {original[key]: value for key, _, _, value in held.points} == {n: float(i) for i, n in enumerate(names)}
    assert len(row["notes"]) == sum(key != name for key, name in original.items())


def test_the_whole_configuration_arrives(local: Bench) -> None:
    """Nested, long, many and refused keys: nothing is cut, and what does not fit is in tags."""
    long = "".join(random.Random(1).choices("abcdefgh ", k=20_000)).strip()
    config = {"model": {"d": 128, "rope": None}, "data": [1, 2.5], "note": long, "lr@peak": 1e-4}
    config |= {f"key{n}": n for n in range(250)}
    local.log.segment(config=config, recipe=json.dumps({"lr": 0.1})).train(0, 50).checkpoint(50)
    local.sync()
    run = local.only("canonical")
    assert run.params["model.d"] == "128"
    assert (run.params["model.rope"], run.params["data"], run.params["recipe.lr"]) == ("null", "[1, 2.5]", "0.1")
    assert {run.params[f"key{n}"] for n in range(250)} == {str(n) for n in range(250)}
    pieces = [run.tags[f"llmtrack.param.note.{n}"] for n in range(1, 5)]
    assert "".join(pieces) == long
    (mapped,) = (key for key in run.params if key.startswith("lr_peak."))
    assert run.tags[f"llmtrack.name.{mapped}"] == "lr@peak"


def test_long_names_are_whole_in_a_tag(local: Bench) -> None:
    """MLflow has room for 250 characters of a run's name."""
    local.log.segment(run_name="n" * 300).train(0, 50).checkpoint(50)
    local.sync()
    assert local.only("canonical").tag("run_name") == "n" * 300
    assert local.only("canonical").name.startswith("n" * 249)
    assert local.sync()[0]["points_sent"] == 0


def test_a_lost_cursor_costs_a_comparison_and_no_point(bench: Bench) -> None:
    """Without its state the sync finds the runs by their tags, sees that nothing is lacking, and sends nothing."""
    bench.log.segment().train(0, 2000).checkpoint(1000)
    bench.sync()
    before = bench.tracker.runs(bench.log.project)
    shutil.rmtree(bench.state)
    assert [row["points_sent"] for row in bench.sync()] == [0]
    assert bench.tracker.runs(bench.log.project) == before


def test_a_damaged_cursor_counts_as_none(each: Bench) -> None:
    """Whatever is in the file, what the tracker holds decides."""
    each.log.segment().train(0, 500).checkpoint(500)
    each.sync()
    before = each.tracker.runs(each.log.project)
    (cursor,) = each.state.glob("*/run.json")
    cursor.write_bytes(cursor.read_bytes()[:-20])
    assert each.sync()[0]["points_sent"] == 0
    assert each.tracker.runs(each.log.project) == before


def test_points_that_the_tracker_lost_are_sent_again_and_no_others(local: Bench) -> None:
    """A database that was put back to an older state is noticed although the cursor says that all was accepted."""
    local.log.segment().train(0, 1000).checkpoint(1000)
    local.sync()
    for table in ("metrics", "latest_metrics"):
        local.tracker.execute(f"DELETE FROM {table} WHERE step > 700")
    local.tracker.execute(
        "INSERT INTO latest_metrics SELECT key, value, timestamp, step, is_nan, run_uuid FROM metrics WHERE step = 700"
    )
    (row,) = local.sync()
    assert row["points_sent"] == 2 * 30
    assert local.only("canonical").points == points(local.rows(), lambda _: True)


def test_a_tracker_that_does_not_keep_what_it_accepted_is_found_out(local: Bench) -> None:
    """The sync reads back, sends what is lacking, and says so when it will not stay."""
    local.log.segment().train(0, 100).checkpoint(100)
    local.tracker.execute(
        "CREATE TRIGGER forgetful AFTER INSERT ON metrics WHEN NEW.step = 50 BEGIN"
        " DELETE FROM metrics WHERE step = 50; END"
    )
    (row,) = local.sync(expect=2)
    assert "are not there" in row["error"]


def test_a_value_that_somebody_else_logged_there_is_left_alone(local: Bench) -> None:
    """A metric added to our run by hand is neither a reason to send anything nor to replace the run."""
    local.log.segment().train(0, 100).checkpoint(100)
    local.sync()
    ref = local.only("canonical").ref
    for table in ("metrics", "latest_metrics"):
        local.tracker.execute(
            f"INSERT INTO {table} (key, value, timestamp, step, is_nan, run_uuid) VALUES ('mine', 1.0, 5, 5, 0, ?)",
            ref,
        )
    (row,) = local.sync()
    assert (row["points_sent"], row["error"]) == (0, "")
    assert local.only("canonical").ref == ref


def test_a_canonical_run_that_was_made_twice_becomes_one(local: Bench) -> None:
    """An orphan from an answer that was lost is found by its tags and deleted."""
    local.log.segment().train(0, 500).checkpoint(500)
    local.sync()
    ref = local.only("canonical").ref
    for table, columns in (
        ("runs", "name, user_id, status, start_time, end_time, lifecycle_stage, artifact_uri, experiment_id"),
        ("tags", "key, value"),
    ):
        local.tracker.execute(
            f"INSERT INTO {table} (run_uuid, {columns}) SELECT '{'0' * 32}', {columns} FROM {table} WHERE run_uuid = ?",
            ref,
        )
    shutil.rmtree(local.state)
    local.sync()
    assert local.only("canonical").points == points(local.rows(), lambda _: True)
    assert local.sync()[0]["points_sent"] == 0


def test_the_tail_can_be_held_back(each: Bench) -> None:
    """``--tail hold`` sends what is settled, and says what it did not send and why."""
    each.log.segment().train(0, 1000).checkpoint(400)
    (row,) = each.sync("--tail", "hold")
    assert [run.tag("kind") for run in each.tracker.runs(each.log.project)] == ["canonical"]
    assert row["points_held"] == 2 * 60
    assert "beyond 400 tokens" in row["held"]


def test_superseded_points_can_be_left_out(each: Bench) -> None:
    """``--superseded drop`` makes no run for them."""
    each.log.segment().train(0, 1000).checkpoint(400)
    each.sync()
    each.log.segment(after=("run", 1, 400)).train(400, 500)
    (row,) = each.sync("--superseded", "drop")
    kinds = sorted(str(run.tag("kind")) for run in each.tracker.runs(each.log.project))
    assert kinds == ["canonical", "provisional"]
    assert row["points_held"] == 2 * 60


@pytest.mark.parametrize("verify", ["full", "fast", "off"])
def test_however_sure_it_is_the_same_is_there(each: Bench, verify: str) -> None:
    """Each way to verify ends with the same content, and with nothing to send."""
    each.log.segment().train(0, 300).checkpoint(200)
    each.sync("--verify", verify)
    assert each.only("canonical").points == points(each.rows(), lambda row: row.tokens <= 200)
    assert each.sync("--verify", verify)[0]["points_sent"] == 0


def test_a_damaged_part_costs_its_points_and_no_other_run(each: Bench) -> None:
    """Intact points of all runs are sent, and the exit status says that something was damaged."""
    segment = each.log.segment("hurt").train(0, 100).train(100, 200).checkpoint(200)
    each.log.segment("well").train(0, 100).checkpoint(100)
    part = segment.folder / "metrics-00001.arrows"
    content = bytearray(part.read_bytes())
    content[-200] ^= 1
    part.write_bytes(content)
    each.sync(expect=4)
    assert each.only("canonical", "well").points == points(each.rows("well"), lambda _: True)
    assert set(Counter(tokens for _, tokens, *_ in each.only("canonical", "hurt").points)) == set(range(110, 201, 10))


def test_a_run_without_a_readable_start_is_incomplete(each: Bench) -> None:
    """Neither its project nor its path is known: it is named, and the others are sent."""
    lost = each.log.segment("lost").train(0, 100)
    (lost.folder / "segments-00001.arrows").unlink()
    each.log.segment("well").train(0, 100).checkpoint(100)
    rows = {row["run_id"]: row for row in each.sync(expect=2)}
    assert "start record" in rows["lost"]["error"]
    assert each.only("canonical", "well").points == points(each.rows("well"), lambda _: True)


def test_a_sealed_part_with_a_flipped_byte_never_reaches_the_tracker(each: Bench) -> None:
    """DuckDB would read it as wrong values; the checksum says so before anything is sent."""
    for run_id in ("hurt", "well"):
        segment = each.log.segment(run_id).train(0, 1000).train(1000, 2000).checkpoint(2000)
        for part in sorted(segment.folder.glob("metrics-*.arrows")):
            seal_part(part)
    (part, _) = sorted((each.log.root / "run_id=hurt").glob("segment=*/*.parquet"))
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 0x10
    part.write_bytes(content)
    each.sync(expect=4)
    held = {run_id: each.only("canonical", run_id).points for run_id in ("hurt", "well")}
    assert {tokens for _, tokens, *_ in held["hurt"]} == set(range(1010, 2001, 10))
    assert sum(held["well"].values()) == 400


def test_a_run_that_fails_does_not_stop_the_others(local: Bench) -> None:
    """The experiment of one run was deleted in MLflow: that run is incomplete, the rest is sent."""
    local.log.segment("first").train(0, 100).checkpoint(100)
    local.sync()
    local.tracker.execute("UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = ?", local.log.project)
    project, local.log.project = local.log.project, local.log.project + "-other"
    local.log.segment("second").train(0, 100).checkpoint(100)
    rows = {row["run_id"]: row for row in local.sync(expect=2)}
    assert "deleted in MLflow" in rows["first"]["error"]
    assert (project in rows["first"]["error"], rows["second"]["error"]) == (True, "")
    assert local.only("canonical", "second").points == points(local.rows("second"), lambda _: True)


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_a_sync_killed_at_random_moments_leaves_every_point_once(bench: Bench, kills: int) -> None:
    """SIGKILL while it creates, sends, reads back: the next sync completes it, and nothing is there twice."""
    bench.log.segment().train(0, 20_000).checkpoint(15_000)
    bench.log.segment(after=("run", 1, 15_000)).train(15_000, 17_000)
    generator = random.Random(4)
    total = len(bench.rows()) * 3 // 2  # with the metric step

    def count() -> int:
        return sum(sum(run.metrics.values()) for run in bench.tracker.runs(bench.log.project))

    for wanted in sorted(generator.uniform(0, total) for _ in range(kills)):
        process = subprocess.Popen(
            [sys.executable, "-c", "from llmtrack.sync.cli import main; main()", *bench.arguments],
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and count() < wanted:
            try:
                process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        process.wait()
    bench.sync()
    rows = bench.rows()
    assert bench.only("canonical").points == points(rows, lambda row: row.segment == 1 and row.tokens <= 15_000)
    assert bench.only("superseded").points == points(rows, lambda row: row.segment == 1 and row.tokens > 15_000)
    assert bench.only("provisional").points == points(rows, lambda row: row.segment == 2)
    assert bench.sync()[0]["points_sent"] == 0
