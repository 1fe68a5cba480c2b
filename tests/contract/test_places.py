"""Projects of any name, ids with a prefix, and forks from one project into another: each run is where it belongs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from llmtrack.sync.wandb.describe import project_of
from tests.contract.conftest import Bench, Log, Stored, Tracker, WandbTracker, read_log

ODD = "team/llm: 7b #1 100%? frühe 'Läufe' \\ \N{SNOWMAN}"


def runs_of(tracker: Tracker, project: str, run_id: str) -> list[Stored]:
    """Return the runs of a project that were made of one run of the log."""
    named = project_of(project) if tracker.to == "wandb" else project
    return [run for run in tracker.runs(named) if run.tag("run_id") == run_id]


def test_a_project_may_have_any_name(each: Bench) -> None:
    """W&B refuses some: such a project has a readable name there, and each of its runs says what it is in the log."""
    each.log.project = ODD
    segment = each.log.segment().train(0, 100).checkpoint(70)
    each.sync()
    segment.train(100, 150).checkpoint(150)
    (row,) = each.sync()
    assert (row["project"], row["error"]) == (ODD, "")
    (run,) = runs_of(each.tracker, ODD, "run")
    assert run.points == Counter(row.point for row in each.rows())
    if isinstance(each.tracker, WandbTracker):
        (there,) = each.tracker.server.runs.values()
        assert there.project.startswith("team-llm- 7b -1 100-- frühe 'Läufe' - \N{SNOWMAN}.")
        assert there.about["project"] == ODD
        assert f"/{there.name}" in row["url"]
    assert each.sync()[0]["points_sent"] == 0


@pytest.mark.parametrize("project", ["runs", "sweeps", "a.b", "7b", "x" * 128, "ä b"])
def test_a_project_that_wandb_takes_keeps_its_name(project: str) -> None:
    """But for one word, which the client leaves out of paths."""
    assert (project_of(project) == project) is (project != "sweeps")
    assert project_of(project_of(project)) == project_of(project)


@pytest.mark.parametrize("project", ["a/b", "a:b", "a?b", " a-b", "", "x" * 129, "a\nb"])
def test_a_project_that_wandb_refuses_meets_no_other(project: str) -> None:
    """The rest is readable, twelve digits tell it from all others, and W&B takes it."""
    named = project_of(project)
    assert project_of(named) == named != project
    assert len(named) <= 128
    assert len({project_of(name) for name in ("a/b", "a:b", "a?b", "a-b", " a-b", "a\nb")}) == 6


def test_a_run_of_a_project_called_runs_is_found_again(
    wandb_tracker: WandbTracker, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    """The word also stands in the paths by which W&B's client asks."""
    log.project = "runs"
    web = Bench(log, wandb_tracker, tmp_path / "state", capsys)
    log.segment("runs").train(0, 100).checkpoint(100)
    web.sync()
    assert web.sync()[0]["points_sent"] == 0
    (run,) = wandb_tracker.runs("runs")
    assert run.points == Counter(row.point for row in web.rows("runs"))


def test_a_fork_into_another_project_is_whole_and_says_where_it_is_from(each: Bench) -> None:
    """The child and its own child are in their project, the parent stays in its own, and all are synced once."""
    other = f"{each.log.project}-other"
    each.log.segment("root").train(0, 200).checkpoint(200).end("finished", 200)
    fork = {"fork_reason": "recipe", "from_ckpt": "ckpt-1-200", "recipe_diff": json.dumps({"lr": [1, 2]})}
    each.log.segment("child", after=("root", 1, 200), project=other, **fork).train(200, 300).checkpoint(300)
    each.log.segment("last", after=("child", 1, 250), project=other, **fork).train(250, 350).end("finished", 350)
    rows = each.sync()
    assert [row["error"] for row in rows] == ["", "", ""]
    (root,) = runs_of(each.tracker, each.log.project, "root")
    (child,) = runs_of(each.tracker, other, "child")
    last = next(run for run in runs_of(each.tracker, other, "last") if run.tag("kind") == "canonical")
    for run, run_id in ((root, "root"), (child, "child")):
        assert run.points == Counter(row.point for row in each.rows(run_id))
    assert (child.tag("parent_run"), child.tag("fork_tokens")) == ("root", "200")
    if each.tracker.to == "mlflow":
        assert child.tags["mlflow.parentRunId"] == root.ref
        assert last.tags["mlflow.parentRunId"] == child.ref
    assert [row["points_sent"] for row in each.sync()] == [0, 0, 0]


def test_two_roots_with_equal_ids_share_a_wandb_project_by_their_prefixes(
    wandb_tracker: WandbTracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids, side runs, groups and read-back of the one have nothing to do with those of the other."""
    for n, prefix in enumerate(("a.", "b_")):
        (tmp_path / prefix).mkdir()
        log = Log(tmp_path / prefix, "shared")
        log.segment().train(0, 200 + 100 * n).checkpoint(100)
        log.segment(after=("run", 1, 100)).train(100, 150).checkpoint(150)
        log.segment("child", after=("run", 2, 150), fork_reason="recipe").train(150, 200).checkpoint(200)
        web = Bench(log, wandb_tracker, tmp_path / f"state-{prefix}", capsys)
        web.sync("--wandb-id-prefix", prefix)
        assert [row["points_sent"] for row in web.sync("--wandb-id-prefix", prefix)] == [0, 0]
    there = dict(wandb_tracker.server.runs)
    assert {ref: run.group for (_, ref), run in there.items()} == {
        f"{prefix}{ref}": f"{prefix}run" for prefix in ("a.", "b_") for ref in ("run", "run-s1-x100", "child")
    }
    for prefix in ("a.", "b_"):
        rows = read_log(tmp_path / prefix)
        settled = [row for row in rows if (row.segment, row.tokens) <= (1, 100) or row.segment == 2]
        held = next(run for run in wandb_tracker.runs("shared") if run.ref == f"{prefix}run")
        assert held.points == Counter(row.point for row in settled)
