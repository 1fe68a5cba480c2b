"""Which run and segment a process becomes: every rule of docs/LINEAGE.md, and its edges."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from llmtrack.writer.errors import UsageError, VersionError
from llmtrack.writer.format import SCHEMAS, check_run_id, part_name, segment_folder
from llmtrack.writer.lineage.opening import Opening, new_run_id, open_segment
from llmtrack.writer.lineage.recipe import recipe_hash
from llmtrack.writer.log.stream import PartWriter

Meta = dict[str, object]


@dataclass
class Log:
    """A root, and what trainers write into it."""

    root: Path

    def open(self, **arguments: Any) -> Opening:
        """Open a segment and write its start record, as `open_run` does."""
        opening = open_segment(self.root, **arguments)
        self.write(
            opening,
            "segments",
            opening.start_tokens,
            phase="start",
            step=opening.start_step,
            **{
                name: getattr(opening, name)
                for name in (
                    "from_run",
                    "from_segment",
                    "from_ckpt",
                    "fork_reason",
                    "recipe_hash",
                    "recipe",
                    "recipe_diff",
                )
            },
        )
        return opening

    def save(self, opening: Opening, tokens: int) -> Meta:
        """Save a checkpoint and record it."""
        self.write(opening, "checkpoints", tokens, ckpt_id=f"quick-{tokens}")
        return meta(opening, tokens)

    def end(self, opening: Opening, how: str, tokens: int) -> None:
        """Log points up to these tokens, and end the segment."""
        self.write(opening, "metrics", tokens, name="train/loss", value=1.0)
        self.write(opening, "segments", tokens, phase="end", exit=how)

    def write(self, opening: Opening, table: str, tokens: int, **columns: object) -> Path:
        """Write one record into a part of its own."""
        part = next(n for n in count(1) if not (opening.folder / part_name(table, n)).exists())
        row = {"seq": 1, "time": datetime.now(UTC), "step": tokens // 100, "tokens": tokens, **columns}
        writer = PartWriter(opening.folder / part_name(table, part), table)
        writer.append(pa.RecordBatch.from_pylist([row], schema=SCHEMAS[table]), 1, 1)
        writer.close()
        return writer.path


def meta(opening: Opening, tokens: int, **changes: object) -> Meta:
    """Return what `run.meta()` puts into a checkpoint."""
    return {
        "run_id": opening.run_id,
        "segment": opening.segment,
        "recipe_hash": opening.recipe_hash,
        "step": tokens // 100,
        "tokens": tokens,
        **changes,
    }


def place(opening: Opening) -> tuple[str | None, int | None, int]:
    """Return where a segment starts from."""
    return opening.from_run, opening.from_segment, opening.start_tokens


def decision(opening: Opening) -> tuple[str, int, str | None]:
    """Return what was decided."""
    return opening.run_id, opening.segment, opening.fork_reason


NOWHERE = (None, None, 0)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Return an empty root that does not exist yet."""
    return Log(tmp_path / "some" / "root")


# A run without a checkpoint


def test_a_new_run_gets_an_id_that_sorts_by_time(log: Log) -> None:
    """And everything that does not exist yet is made."""
    opening = log.open(recipe={"lr": 1})
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", opening.run_id)
    assert check_run_id(opening.run_id) == opening.run_id
    assert (
        abs(datetime.strptime(opening.run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp() - time.time()) < 60
    )
    assert opening == Opening(
        run_id=opening.run_id,
        segment=1,
        folder=log.root / f"run_id={opening.run_id}" / "segment=00001",
        from_run=None,
        from_segment=None,
        from_ckpt=None,
        start_step=0,
        start_tokens=0,
        fork_reason=None,
        recipe_hash=recipe_hash({"lr": 1}),
        recipe='{"lr":1}',
        recipe_diff=None,
    )
    assert opening.folder.is_dir()
    assert len({new_run_id() for _ in range(50)}) == 50


def test_the_argument_comes_before_the_environment_and_that_before_a_new_id(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable is none."""
    monkeypatch.setenv("LLMTRACK_RUN_ID", "job-7")
    assert log.open(run_id="mine").run_id == "mine"
    assert log.open().run_id == "job-7"
    monkeypatch.setenv("LLMTRACK_RUN_ID", "")
    assert log.open().run_id not in ("mine", "job-7", "")


@pytest.mark.parametrize("how", [None, "preempted", "failed"])
def test_a_run_that_settled_nothing_is_requeued_from_nowhere(log: Log, how: str | None) -> None:
    """Whatever was logged without a checkpoint is lost with the model."""
    first = log.open(run_id="a", recipe={"lr": 1})
    if how:
        log.end(first, how, 500)
    again = log.open(run_id="a", recipe={"lr": 1})
    assert decision(again) == ("a", 2, None)
    assert place(again) == NOWHERE


def test_a_requeue_may_bring_another_recipe(log: Log) -> None:
    """There is no curve yet that it could change."""
    log.open(run_id="a", recipe={"lr": 1})
    again = log.open(run_id="a", recipe={"lr": 2})
    assert decision(again) == ("a", 2, None)
    assert again.recipe == '{"lr":2}'
    assert again.recipe_diff is None


def test_a_run_that_settled_something_is_not_started_over_but_gets_a_child(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    """The settled curve only grows: the child starts from nowhere, and knows its parent."""
    first = log.open(run_id="a", recipe={"lr": 1})
    log.save(first, 1000)
    child = log.open(run_id="a", recipe={"lr": 1})
    assert re.fullmatch(r"a-rollback-[0-9a-f]{6}", child.run_id)
    assert decision(child) == (child.run_id, 1, "rollback")
    assert place(child) == ("a", None, 0)
    assert f"run a goes on as {child.run_id}" in caplog.text


def test_a_checkpoint_at_zero_tokens_settles_what_was_logged_there(log: Log) -> None:
    """An evaluation before the first step is a point like others."""
    log.save(log.open(run_id="a"), 0)
    assert log.open(run_id="a").fork_reason == "rollback"


def test_starting_over_goes_on_with_the_run_where_the_caller_says_so(log: Log) -> None:
    """Then everything so far is superseded."""
    log.save(log.open(run_id="a"), 1000)
    again = log.open(run_id="a", on_rollback="continue")
    assert decision(again) == ("a", 2, None)
    assert place(again) == NOWHERE


def test_starting_over_with_another_recipe_is_a_fork_by_recipe(log: Log) -> None:
    """Recipe comes before rollback, and the difference is kept."""
    log.save(log.open(run_id="a", recipe={"lr": 1}), 1000)
    child = log.open(run_id="a", recipe={"lr": 2})
    assert child.fork_reason == "recipe"
    assert place(child) == ("a", None, 0)
    assert json.loads(str(child.recipe_diff)) == {"lr": [1, 2]}


# The next segment of a run


def test_five_requeues_with_the_id_only_in_the_checkpoint_are_one_run(log: Log) -> None:
    """Each starts from where the last checkpoint was."""
    opening = log.open(recipe={"lr": 1})
    run_id = opening.run_id
    for segment in range(2, 7):
        saved = log.save(opening, segment * 1000)
        resumed = log.open(checkpoint=saved, recipe={"lr": 1.0})
        assert decision(resumed) == (run_id, segment, None)
        assert place(resumed) == (run_id, segment - 1, segment * 1000)
        assert resumed.start_step == segment * 10
        assert resumed.from_ckpt == f"quick-{segment * 1000}"
        opening = resumed


def test_a_checkpoint_that_was_saved_and_not_recorded_is_gone_on_from(log: Log) -> None:
    """Killed between saving and recording: what the checkpoint says is enough."""
    first = log.open(run_id="a")
    log.save(first, 1000)
    resumed = log.open(checkpoint=meta(first, 2000))
    assert decision(resumed) == ("a", 2, None)
    assert resumed.from_ckpt is None


def test_a_checkpoint_may_bring_its_id_along(log: Log) -> None:
    """And other keys, which are ignored."""
    first = log.open(run_id="a")
    resumed = log.open(checkpoint=meta(first, 2000, ckpt_id="full-1", saved_by="me"))
    assert resumed.from_ckpt == "full-1"


def test_preempted_again_before_a_checkpoint_the_run_goes_on_from_the_old_one(log: Log) -> None:
    """Its own points since then were provisional."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    log.end(log.open(checkpoint=saved), "preempted", 1500)
    third = log.open(checkpoint=saved)
    assert decision(third) == ("a", 3, None)
    assert place(third) == ("a", 1, 1000)


def test_the_newest_checkpoint_that_nobody_recorded_may_be_lost(log: Log) -> None:
    """It had settled nothing, so the one before it is no rollback, and later the lost one is none either."""
    first = log.open(run_id="a")
    saved, unrecorded = log.save(first, 1000), meta(first, 2000)
    assert decision(log.open(checkpoint=saved)) == ("a", 2, None)
    assert decision(log.open(checkpoint=unrecorded)) == ("a", 3, None)


def test_a_finished_run_goes_on_at_its_last_point(log: Log) -> None:
    """More tokens than planned at first."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    log.end(first, "finished", 1000)
    assert decision(log.open(checkpoint=saved)) == ("a", 2, None)


def test_a_segment_without_a_start_record_has_its_number_and_nothing_else(log: Log) -> None:
    """Killed between claiming its folder and the first write."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    killed = open_segment(log.root, checkpoint=saved)
    assert killed.segment == 2
    resumed = log.open(checkpoint=saved)
    assert decision(resumed) == ("a", 3, None)
    assert place(resumed) == ("a", 1, 1000)
    assert decision(log.open(run_id="a")) == (log.open(run_id="a").run_id, 1, "rollback")


# Recipes


def test_another_recipe_makes_a_child_that_says_what_differs(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """One line of a chart never has two learning rates."""
    first = log.open(run_id="a", recipe={"lr": 1, "mix": {"web": 0.7, "code": 0.3}})
    saved = log.save(first, 1000)
    child = log.open(checkpoint=saved, recipe={"lr": 2, "mix": {"web": 0.7, "code": 0.2}})
    assert re.fullmatch(r"a-recipe-[0-9a-f]{6}", child.run_id)
    assert decision(child) == (child.run_id, 1, "recipe")
    assert place(child) == ("a", 1, 1000)
    assert json.loads(str(child.recipe_diff)) == {"lr": [1, 2], "mix.code": [0.3, 0.2]}
    assert "another recipe (lr, mix.code)" in caplog.text


def test_no_recipe_is_not_compared_and_the_one_on_record_stays(log: Log) -> None:
    """So that a later change is still seen."""
    saved = log.save(log.open(run_id="a", recipe={"lr": 1}), 1000)
    second = log.open(checkpoint=saved)
    assert decision(second) == ("a", 2, None)
    assert (second.recipe_hash, second.recipe) == (recipe_hash({"lr": 1}), '{"lr":1}')
    assert log.open(checkpoint=log.save(second, 2000), recipe={"lr": 2}).fork_reason == "recipe"


def test_a_run_without_a_recipe_takes_the_first_one_it_is_given(log: Log) -> None:
    """There is nothing to compare it with."""
    second = log.open(checkpoint=log.save(log.open(run_id="a"), 1000), recipe={"lr": 1})
    assert decision(second) == ("a", 2, None)
    assert log.open(checkpoint=log.save(second, 2000), recipe={"lr": 2}).fork_reason == "recipe"


def test_a_recipe_that_a_newer_llmtrack_hashes_otherwise_is_still_the_same(log: Log) -> None:
    """Its text counts."""
    first = open_segment(log.root, run_id="a", recipe={"lr": 1})
    log.write(first, "segments", 0, phase="start", recipe_hash="0ther", recipe=first.recipe)
    assert decision(log.open(checkpoint=meta(first, 10, recipe_hash="0ther"), recipe={"lr": 1})) == ("a", 2, None)


# Rollbacks


def test_an_older_checkpoint_than_the_newest_makes_a_child(log: Log) -> None:
    """What was settled after it stays."""
    first = log.open(run_id="a")
    old = log.save(first, 1000)
    log.save(first, 2000)
    child = log.open(checkpoint=old)
    assert decision(child) == (child.run_id, 1, "rollback")
    assert place(child) == ("a", 1, 1000)
    again = log.open(checkpoint=old, on_rollback="continue")
    assert decision(again) == ("a", 2, None)


def test_a_job_that_was_thought_dead_and_comes_back_makes_a_child(log: Log) -> None:
    """Its checkpoint lies on a branch that was left, and the run has settled points beyond it."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    zombie = log.save(first, 1300)
    second = log.open(checkpoint=saved, on_rollback="continue")
    log.save(second, 1200)
    child = log.open(checkpoint=zombie)
    assert child.fork_reason == "rollback"
    assert place(child) == ("a", 1, 1300)


def test_a_branch_that_was_left_may_be_taken_again_while_the_other_has_settled_nothing(log: Log) -> None:
    """Nothing settled is left behind."""
    first = log.open(run_id="a")
    saved, zombie = log.save(first, 1000), meta(first, 1300)
    log.open(checkpoint=saved)
    assert decision(log.open(checkpoint=zombie)) == ("a", 3, None)


@pytest.mark.parametrize("how", ["finished", "abandoned"])
def test_going_back_behind_the_end_of_a_run_is_a_rollback(log: Log, how: str) -> None:
    """Its end settled every point."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    log.end(first, how, 1500)
    assert log.open(checkpoint=saved).fork_reason == "rollback"
    assert log.open(run_id="a").fork_reason == "rollback"


def test_a_run_that_finished_without_a_point_has_settled_nothing(log: Log) -> None:
    """A dry run of the job script takes no id away."""
    first = log.open(run_id="a")
    log.write(first, "segments", 0, phase="end", exit="finished")
    assert decision(log.open(run_id="a")) == ("a", 2, None)


def test_what_a_finished_segment_logged_at_its_start_stays(log: Log) -> None:
    """A run that was opened again for an evaluation only."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    second = log.open(checkpoint=saved)
    log.end(second, "finished", 1000)
    assert log.open(checkpoint=saved).fork_reason == "rollback"
    assert decision(log.open(checkpoint=meta(second, 1000))) == ("a", 3, None)
    assert log.open(checkpoint=saved, recipe={"lr": 1}).fork_reason == "rollback"


def test_going_back_to_a_segment_before_the_last_is_a_rollback_once_the_last_has_settled_something(log: Log) -> None:
    """And not before."""
    one = log.save(log.open(run_id="a"), 1000)
    second = log.open(checkpoint=one)
    two = log.save(second, 2000)
    third = log.open(checkpoint=two)
    assert log.open(checkpoint=one).fork_reason == "rollback"
    log.save(third, 3000)
    assert log.open(checkpoint=two).fork_reason == "rollback"


def test_a_forced_rollback_makes_the_new_branch_the_one_to_be_kept(log: Log) -> None:
    """What it left behind is settled no more."""
    first = log.open(run_id="a")
    old, new = log.save(first, 1000), log.save(first, 2000)
    second = log.open(checkpoint=old, on_rollback="continue")
    assert decision(log.open(checkpoint=new)) == ("a", 3, None)
    log.save(second, 1500)


# Checkpoints of other runs


def test_a_checkpoint_of_a_run_that_is_not_here_makes_a_foreign_child(log: Log, tmp_path: Path) -> None:
    """Its parent is known by name."""
    elsewhere = Log(tmp_path / "elsewhere").open(run_id="base", recipe={"lr": 1})
    child = log.open(checkpoint=meta(elsewhere, 5000), recipe={"lr": 2})
    assert re.fullmatch(r"base-foreign-[0-9a-f]{6}", child.run_id)
    assert decision(child) == (child.run_id, 1, "foreign")
    assert place(child) == ("base", 1, 5000)
    assert decision(log.open(checkpoint=log.save(child, 6000))) == (child.run_id, 2, None)


def test_a_checkpoint_of_a_segment_that_is_not_here_is_foreign_too(log: Log) -> None:
    """The root is an old copy."""
    first = log.open(run_id="a")
    child = log.open(checkpoint=meta(first, 5000, segment=7))
    assert child.fork_reason == "foreign"
    assert place(child) == ("a", 7, 5000)


def test_the_own_id_beside_a_foreign_checkpoint_of_that_name_is_not_taken(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are never used twice; the job script's id still leads to the child later on."""
    monkeypatch.setenv("LLMTRACK_RUN_ID", "a")
    elsewhere = Log(tmp_path / "elsewhere").open()
    child = log.open(checkpoint=meta(elsewhere, 5000))
    assert child.fork_reason == "foreign"
    assert child.run_id != "a"
    assert decision(log.open(checkpoint=log.save(child, 6000))) == (child.run_id, 2, None)


def test_an_id_beside_a_checkpoint_of_another_run_is_the_childs(log: Log) -> None:
    """A name for it is a request for it."""
    saved = log.save(log.open(run_id="base", recipe={"lr": 1}), 1000)
    child = log.open(run_id="tuned", checkpoint=saved, recipe={"lr": 2})
    assert decision(child) == ("tuned", 1, "requested")
    assert place(child) == ("base", 1, 1000)
    assert json.loads(str(child.recipe_diff)) == {"lr": [1, 2]}


def test_a_named_child_that_settled_nothing_is_requeued_from_wherever_its_parent_is_now(log: Log) -> None:
    """The job script names both; the parent went on meanwhile."""
    base = log.open(run_id="base")
    saved = log.save(base, 1000)
    log.open(run_id="tuned", checkpoint=saved)
    again = log.open(run_id="tuned", checkpoint=saved)
    assert decision(again) == ("tuned", 2, "requested")
    newer = log.open(run_id="tuned", checkpoint=log.save(base, 2000))
    assert decision(newer) == ("tuned", 3, "requested")
    assert place(newer) == ("base", 1, 2000)


def test_a_named_child_that_settled_something_is_not_started_over_from_its_parent(log: Log) -> None:
    """Resuming from the parent's checkpoint would leave the child's settled points behind."""
    saved = log.save(log.open(run_id="base"), 1000)
    log.save(log.open(run_id="tuned", checkpoint=saved), 1500)
    child = log.open(run_id="tuned", checkpoint=saved)
    assert decision(child) == (child.run_id, 1, "requested")
    assert re.fullmatch("tuned-requested-[0-9a-f]{6}", child.run_id)
    again = log.open(run_id="tuned", checkpoint=saved, on_rollback="continue")
    assert decision(again) == ("tuned", 2, "requested")


def test_somebody_elses_checkpoint_is_never_appended_to_with_an_id_of_ones_own(log: Log) -> None:
    """A job that resumes the latest checkpoint found that of a fork that a colleague made of this very run."""
    mine = log.save(log.open(run_id="mine"), 1000)
    theirs = log.save(log.open(run_id="theirs", checkpoint=mine), 2000)
    child = log.open(run_id="mine", checkpoint=theirs)
    assert re.fullmatch("mine-requested-[0-9a-f]{6}", child.run_id)
    assert place(child) == ("theirs", 1, 2000)
    assert decision(log.open(run_id="mine", checkpoint=theirs)) == (child.run_id, 2, "requested")
    assert decision(log.open(run_id="mine", checkpoint=log.save(child, 3000))) == (child.run_id, 3, None)


def test_a_fork_that_was_asked_for_comes_before_every_other_reason(log: Log, tmp_path: Path) -> None:
    """Requested, foreign, recipe, rollback."""
    first = log.open(run_id="a", recipe={"lr": 1})
    old, new = log.save(first, 1000), log.save(first, 2000)
    elsewhere = Log(tmp_path / "elsewhere").open(run_id="b", recipe={"lr": 1})
    foreign = meta(elsewhere, 10)

    def reason(checkpoint: Mapping[str, object] | None, lr: int, **more: Any) -> str | None:
        return log.open(checkpoint=checkpoint, recipe={"lr": lr}, **more).fork_reason

    assert reason(new, 1, fork=True) == "requested"
    assert reason(old, 2, fork=True) == reason(foreign, 2, fork=True) == "requested"
    assert reason(None, 1, fork=True, run_id="a") == "requested"
    assert reason(foreign, 2) == "foreign"
    assert reason(old, 2) == reason(old, 2, on_rollback="continue") == "recipe"
    assert reason(old, 1) == "rollback"
    assert reason(new, 1) is None


def test_asking_for_a_fork_of_nothing_is_a_new_run(log: Log) -> None:
    """There is nothing to be a child of."""
    assert decision(log.open(run_id="a", fork=True)) == ("a", 1, None)


# Children that are opened again


@pytest.mark.parametrize("why", ["recipe", "rollback", "foreign", "requested", "nowhere"])
def test_a_child_that_settled_nothing_is_continued_by_the_same_request(log: Log, why: str, tmp_path: Path) -> None:
    """The job died before its first checkpoint and was requeued with the same arguments."""
    first = log.open(run_id="a", recipe={"lr": 1})
    old, new = log.save(first, 1000), log.save(first, 2000)
    foreign = meta(Log(tmp_path / "elsewhere").open(run_id="b"), 10)
    requests: dict[str, dict[str, Any]] = {
        "recipe": {"checkpoint": new, "recipe": {"lr": 2}},
        "rollback": {"checkpoint": old, "recipe": {"lr": 1}},
        "foreign": {"checkpoint": foreign, "recipe": {"lr": 1}},
        "requested": {"checkpoint": new, "fork": True},
        "nowhere": {"run_id": "a"},
    }
    request = requests[why]
    child = log.open(**request)
    log.end(child, "preempted", child.start_tokens + 50)
    again = log.open(**request)
    assert decision(again) == (child.run_id, 2, child.fork_reason)
    assert place(again) == place(child)
    assert again.recipe_diff == child.recipe_diff
    log.save(again, again.start_tokens + 100)
    assert log.open(**request).run_id != child.run_id


def test_another_place_or_another_recipe_is_another_child(log: Log) -> None:
    """Only the very same is continued."""
    first = log.open(run_id="a", recipe={"lr": 1})
    one, two, _ = log.save(first, 1000), log.save(first, 2000), log.save(first, 3000)
    children = [
        log.open(checkpoint=one, recipe={"lr": 1}),
        log.open(checkpoint=two, recipe={"lr": 1}),
        log.open(checkpoint=two, recipe={"lr": 2}),
        log.open(checkpoint=two, recipe={"lr": 3}),
        log.open(run_id="a", recipe={"lr": 1}),
    ]
    assert len({child.run_id for child in children}) == len(children)
    assert {child.segment for child in children} == {1}


def test_a_job_script_with_one_id_for_good_stays_with_the_run_that_it_was_forked_into(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked twice, and requeued with the checkpoints of the forks."""
    monkeypatch.setenv("LLMTRACK_RUN_ID", "a")
    saved = log.save(log.open(recipe={"lr": 1}), 1000)
    child = log.open(checkpoint=saved, recipe={"lr": 2})
    old = log.save(child, 2000)
    second = log.open(checkpoint=old, recipe={"lr": 2})
    assert decision(second) == (child.run_id, 2, None)
    log.save(second, 3000)
    grandchild = log.open(checkpoint=old, recipe={"lr": 2})
    assert decision(grandchild) == (grandchild.run_id, 1, "rollback")
    assert re.fullmatch(r"a-rollback-[0-9a-f]{6}", grandchild.run_id)
    third = log.open(checkpoint=log.save(grandchild, 2500), recipe={"lr": 2})
    assert decision(third) == (grandchild.run_id, 2, None)


def test_a_childs_id_has_room_for_its_reason(log: Log) -> None:
    """Also when the parent's has 64 characters; children of two such parents are not confused."""
    saved = log.save(log.open(run_id="r" * 64), 1000)
    child = log.open(checkpoint=saved, fork=True)
    assert len(child.run_id) <= 64
    assert decision(log.open(checkpoint=saved, fork=True)) == (child.run_id, 2, "requested")
    assert decision(log.open(run_id="r" * 64, checkpoint=log.save(child, 2000))) == (child.run_id, 3, None)
    assert decision(log.open(run_id="r" * 63, checkpoint=meta(child, 2000))) == ("r" * 63, 1, "requested")


def test_a_parents_settled_points_are_not_the_childs_to_leave_behind(log: Log) -> None:
    """A child whose parent went on is resumed as ever."""
    first = log.open(run_id="a", recipe={"lr": 1})
    saved = log.save(first, 1000)
    child = log.open(checkpoint=saved, recipe={"lr": 2})
    log.save(first, 5000)
    assert decision(log.open(run_id=child.run_id, recipe={"lr": 2})) == (child.run_id, 2, None)
    assert decision(log.open(checkpoint=meta(child, 1500), recipe={"lr": 2})) == (child.run_id, 3, None)


# What a checkpoint may say


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"run_id": None}, "run id '' is not valid"),
        ({"run_id": "../x"}, "run id '../x' is not valid"),
        ({"run_id": 5}, "run_id 5"),
        ({"segment": "1"}, "segment '1'"),
        ({"segment": -1}, "segment -1"),
        ({"segment": True}, "segment True"),
        ({"step": 1.5}, "step 1.5"),
        ({"tokens": -1}, "tokens -1"),
        ({"tokens": 2**63}, "tokens 9223372036854775808"),
        ({"tokens": None}, "tokens None"),
        ({"recipe_hash": 5}, "recipe_hash 5"),
    ],
)
def test_a_checkpoint_with_a_wrong_value_is_refused(log: Log, bad: Meta, says: str) -> None:
    """Nothing is made in the root."""
    good = {"run_id": "a", "segment": 1, "recipe_hash": None, "step": 1, "tokens": 10}
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        open_segment(log.root, checkpoint={**good, **bad})
    assert refused.value.hint
    assert not log.root.exists()


def test_something_else_than_a_checkpoints_meta_is_refused(log: Log) -> None:
    """The whole checkpoint, a path, nothing in it."""
    with pytest.raises(UsageError, match="lacks run_id, segment, recipe_hash, step, tokens") as refused:
        open_segment(log.root, checkpoint={"model": {}, "llmtrack": {}})
    assert "checkpoint=state['llmtrack']" in refused.value.hint
    with pytest.raises(UsageError, match="checkpoint is a str"):
        open_segment(log.root, checkpoint=cast("Any", "/ckpt/1000"))


def test_a_checkpoint_from_before_its_segment_began_is_refused(log: Log) -> None:
    """Somebody called run.meta() with tokens that are not the model's."""
    second = log.open(checkpoint=log.save(log.open(run_id="a"), 1000))
    with pytest.raises(UsageError, match="says 10 tokens, but segment 2 of run a began at 1000"):
        log.open(checkpoint=meta(second, 10))


def test_a_checkpoint_of_a_process_without_a_log_starts_from_nowhere_at_its_tokens(log: Log) -> None:
    """It was saved with LLMTRACK_MODE=disabled."""
    unlogged: Meta = {"run_id": "", "segment": 0, "recipe_hash": None, "step": 10, "tokens": 1000}
    opening = log.open(checkpoint=unlogged)
    assert decision(opening) == (opening.run_id, 1, None)
    assert (*place(opening), opening.start_step) == (None, None, 1000, 10)
    assert decision(log.open(checkpoint={**unlogged, "run_id": "b"})) == ("b", 1, None)


@pytest.mark.parametrize("run_id", ["", "a/b", "-a", "a" * 65])
def test_an_id_that_is_no_folder_name_is_refused(log: Log, run_id: str) -> None:
    """At once, with what is allowed."""
    with pytest.raises(UsageError, match="is not valid"):
        open_segment(log.root, run_id=run_id)


def test_a_wrong_word_for_on_rollback_is_refused(log: Log) -> None:
    """At once, and not at the first rollback."""
    with pytest.raises(UsageError, match="on_rollback is 'resume'"):
        open_segment(log.root, on_rollback=cast("Any", "resume"))


# Damage, races, size


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) - 8, 40):
        data[at] ^= 0xFF
    path.write_bytes(data)


def test_damaged_records_do_not_keep_a_job_from_training(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on with what can be read, and says what cannot."""
    first = log.open(run_id="a")
    saved = log.save(first, 1000)
    _flip(first.folder / "checkpoints-00001.arrows")
    (first.folder / "checkpoints-00002.arrows").mkdir()
    second = log.open(checkpoint=saved)
    assert decision(second) == ("a", 2, None)
    assert "checkpoints-00001.arrows" in caplog.text
    assert "checkpoints-00002.arrows" in caplog.text
    _flip(second.folder / "segments-00001.arrows")
    (first.folder / "segments-00001.arrows").write_bytes(b"")
    third = log.open(checkpoint=meta(second, 2000))
    assert decision(third) == ("a", 3, None)
    assert "segments-00001.arrows" in caplog.text


def test_a_record_written_by_a_newer_llmtrack_is_not_guessed_at(log: Log) -> None:
    """The caller learns that this one is too old."""
    first = log.open(run_id="a")
    path = first.folder / "segments-00001.arrows"
    data = path.read_bytes()
    newer = SCHEMAS["segments"].with_metadata({"llmtrack.format": "2"}).serialize().to_pybytes()
    path.write_bytes(newer + data)
    with pytest.raises(VersionError, match="format 2"):
        log.open(run_id="a")


_CLAIM = """
import sys
from pathlib import Path
from llmtrack.writer.lineage.opening import open_segment
sys.stdin.readline()
for _ in range(20):
    print(open_segment(Path(sys.argv[1]), run_id="a").segment)
"""


def test_processes_that_open_one_run_at_once_get_segments_of_their_own(log: Log) -> None:
    """The folder is claimed by mkdir, and by nothing that a network file system does not keep."""
    log.root.mkdir(parents=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CLAIM, str(log.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        cast("Any", process.stdin).write("go\n")
        cast("Any", process.stdin).flush()
    claimed = [int(line) for process in processes for line in process.communicate()[0].split()]
    assert sorted(claimed) == list(range(1, 81))


_COUNT_READS = """
import json, sys
from pathlib import Path
from llmtrack.writer.lineage.opening import open_segment
reads = []
sys.addaudithook(lambda event, args: reads.append(args[0]) if event == "open" and ".arrows" in str(args[0]) else None)
root, saved = Path(sys.argv[1]), json.loads(sys.argv[2])
resumed = open_segment(root, checkpoint=saved, recipe={"lr": 1})
forked = open_segment(root, checkpoint=saved, recipe={"lr": 2})
print(resumed.segment, forked.fork_reason, len(reads))
"""


def test_a_run_of_many_segments_is_opened_by_reading_a_few(log: Log) -> None:
    """As many requeues as a run may have, among many other runs."""
    for other in range(100):
        log.open(run_id=f"other-{other}")
    opening = log.open(run_id="a", recipe={"lr": 1})
    for segment in range(2, 302):
        opening = log.open(checkpoint=log.save(opening, segment * 10), recipe={"lr": 1})
    saved = log.save(opening, 10_000)

    ran = subprocess.run(
        [sys.executable, "-c", _COUNT_READS, str(log.root), json.dumps(saved)],
        capture_output=True,
        text=True,
        check=True,
    )
    resumed, reason, reads = ran.stdout.split()
    assert (resumed, reason) == ("302", "recipe")
    assert int(reads) < 12
    assert segment_folder(log.root, "a", 302).is_dir()
