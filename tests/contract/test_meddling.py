"""What people do to our runs in the tracker, and what it does not show: what differs is said, and mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrack.sync.cli import main
from tests.contract.conftest import Bench, Log, WandbTracker
from tests.wandb_server import WandbServer


def tell(log: Log) -> None:
    """Log a run with settled, superseded and provisional points."""
    log.segment().train(0, 800).checkpoint(500)
    log.segment(after=("run", 1, 500)).train(500, 600)


def check(bench: Bench) -> None:
    """See that each run there holds exactly its points."""
    rows = bench.rows()
    settled = {row.point for row in rows if row.segment == 1 and row.tokens <= 500}
    assert set(bench.only("canonical").points) == settled
    assert set(bench.only("superseded").points) == {row.point for row in rows if row.segment == 1} - settled
    assert set(bench.only("provisional").points) == {row.point for row in rows if row.segment == 2}


def delete(bench: Bench, kind: str) -> str:
    """Delete a run as a person does on the tracker's pages, and return its id there."""
    ref = bench.only(kind).ref
    if isinstance(bench.tracker, WandbTracker):
        server, place = bench.tracker.server, (bench.log.project, ref)
        del server.runs[place]
        server.deleted.add(place)
    else:
        bench.tracker.execute("UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", ref)
    return ref


@pytest.mark.parametrize("kind", ["canonical", "superseded"])
def test_a_run_that_a_person_deleted_is_made_again(each: Bench, kind: str) -> None:
    """With all of its points, and what is nested in it is nested in the new one."""
    tell(each.log)
    each.sync()
    ref = delete(each, kind)
    # W&B's client asks again and again before it believes that an id is gone.
    (row,) = each.sync(*(["--timeout", "3"] if each.tracker.to == "wandb" else []))
    assert (row["error"], row["points_sent"]) == ("", sum(each.only(kind).points.values()))
    assert each.only(kind).ref != ref
    check(each)
    if each.tracker.to == "mlflow":
        parents = {
            side.tags["mlflow.parentRunId"] for side in each.tracker.runs(each.log.project) if side.tag("segment")
        }
        assert parents == {each.only("canonical").ref}
    assert each.sync()[0]["points_sent"] == 0


def test_an_experiment_that_was_renamed_is_another_one(local: Bench) -> None:
    """The project's name is made anew with all of its runs, and what was renamed stays as it is."""
    tell(local.log)
    local.sync()
    local.tracker.execute("UPDATE experiments SET name = 'mine now' WHERE name = ?", local.log.project)
    before = local.tracker.runs("mine now")
    local.sync()
    check(local)
    assert local.tracker.runs("mine now") == before
    assert local.sync()[0]["points_sent"] == 0


def test_a_value_that_a_person_changed_or_added_is_named(local: Bench) -> None:
    """The log's own value is sent again beside it, and the sync says under which metrics there is more than that."""
    tell(local.log)
    local.sync()
    ref = local.only("canonical").ref
    for table in ("metrics", "latest_metrics"):
        local.tracker.execute(
            f"UPDATE {table} SET value = 77.0 WHERE run_uuid = ? AND key = 'train/loss' AND step = 500", ref
        )
        local.tracker.execute(
            f"INSERT INTO {table} (key, value, timestamp, step, is_nan, run_uuid) VALUES ('mine', 1.0, 5, 5, 0, ?)", ref
        )
    (row,) = local.sync()
    assert (row["points_sent"], row["error"]) == (1, "")
    assert [note for note in row["notes"] if "(mine: 1, train/loss: 1)" in note and "canonical" in note]
    held = local.only("canonical").points
    logged = {row.point for row in local.rows() if row.segment == 1 and row.tokens <= 500}
    assert {point[:2] for point in held if point not in logged} == {("mine", 5), ("train/loss", 500)}
    assert logged <= set(held)
    again = local.sync()[0]
    assert (again["points_sent"], again["error"]) == (0, "")


def test_what_a_tracker_does_not_keep_is_named(local: Bench) -> None:
    """Which metrics, how many values, and between which tokens; status 2."""
    local.log.segment().train(0, 100).checkpoint(100)
    local.tracker.execute(
        "CREATE TRIGGER forgetful AFTER INSERT ON metrics WHEN NEW.step BETWEEN 50 AND 70 AND NEW.key = 'train/lr'"
        " BEGIN DELETE FROM metrics WHERE step = NEW.step AND key = 'train/lr'; END"
    )
    (row,) = local.sync(expect=2)
    assert "3 of them are not there (train/lr: 3, between 50 and 70 tokens)" in row["error"]


def test_rows_that_wandb_does_not_show_are_not_taken_for_lost(
    wandb_server: WandbServer, wandb_tracker: WandbTracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page with fewer rows than it counts: status 3 with both numbers, and nothing is sent twice."""
    bench = Bench(log, wandb_tracker, tmp_path / "state", capsys)
    segment = log.segment().train(0, 500).checkpoint(500)
    bench.sync()
    segment.train(500, 700).checkpoint(700)
    wandb_server.hide_rows_from(60)
    with pytest.raises(SystemExit) as ended:
        main([*bench.arguments[:-1], "1"])
    assert ended.value.code == 3
    assert "W&B shows 60 of 70 rows" in capsys.readouterr().err
    wandb_server.heal()
    bench.sync()
    rows = bench.only("canonical").points
    assert (set(rows), set(rows.values())) == ({row.point for row in bench.rows()}, {1})
