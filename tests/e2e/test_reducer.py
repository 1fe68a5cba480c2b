"""The reducer on two and on four ranks with gloo: real processes, and the log that they leave.

Starting ranks takes seconds, so all scenarios of `reducer_ranks.py` run in one job of each size.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.reading import Segment, find_segment, read_segment

pytest.importorskip("torch")

_PROGRAM = Path(__file__).with_name("reducer_ranks.py")
_JOB_LIMIT_S = 300.0
_EVERYWHERE = (
    *("ragged", "micro_batches", "stages", "extremes", "any_order", "different_from_the_start", "different_later"),
    *("collectives", "burst", "ids", "many_alerts", "checkpointed", "destroyed", "fsdp", "refused"),
)
_SCENARIOS = {
    2: (*_EVERYWHERE, "different_alike", "different_setups", "ddp", "different_steps"),
    4: (*_EVERYWHERE, "subgroups"),
}


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    folder: Path
    world_size: int

    def log(self, scenario: str) -> Segment:
        """Return what the log of a scenario holds."""
        return read_segment(find_segment(self.folder / scenario))

    def results(self, scenario: str) -> list[Any]:
        """Return what a scenario gave on each rank."""
        files = [self.folder / f"rank-{rank}.json" for rank in range(self.world_size)]
        return [json.loads(file.read_text(encoding="utf-8"))[scenario] for file in files]


def start(folder: Path, world_size: int, *scenarios: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job."""
    return [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(folder), *scenarios],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run all scenarios on so many ranks, once for all tests."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
    ranks = start(folder, world_size, *_SCENARIOS[world_size])
    errors = [rank.communicate(timeout=_JOB_LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)
    return Job(folder, world_size)


on_two_ranks = pytest.mark.parametrize("job", [2], indirect=True, ids=["two ranks"])
on_four_ranks = pytest.mark.parametrize("job", [4], indirect=True, ids=["four ranks"])


def test_a_mean_is_weighted_by_tokens(job: Job) -> None:
    """On two ranks 3 of 12 and 3 of 4 tokens give 0.375, and not the 0.5 of a mean of means."""
    log, others = job.log("ragged"), job.world_size - 1
    exact = (others * 3 + 3) / (others * 12 + 4)
    assert job.world_size != 2 or exact == 0.375
    for name in ("tensor weight", "number weight", "bf16", "numbers"):
        assert log.series(name) == [exact]
    assert log.series("not weighted") == [(others * 0.25 + 0.75) / job.world_size]
    assert log.series("tokens") == [others * 12 + 4]


def test_ten_thousand_micro_batches_of_bf16_add_up(job: Job) -> None:
    """The mean over all of them on all ranks is the exact one, and NaN losses without tokens have no say."""
    batches = [batch for batches in job.results("micro_batches") for batch in batches]
    exact = sum(Fraction(loss) * weight for loss, weight in batches) / sum(weight for _, weight in batches)
    log = job.log("micro_batches")
    assert log.series("train/loss") == [pytest.approx(float(exact), rel=1e-14)]
    assert log.series("by tensor") == [pytest.approx(float(exact), rel=1e-14)]


def test_a_rank_without_a_value_gives_none(job: Job) -> None:
    """What one rank knows is logged, and what nobody knows is not."""
    log = job.log("stages")
    assert log.series("train/loss") == [1.0, 2.0]
    assert log.series("of the last stage") == [7.0, 7.0]
    assert log.series("busiest_rank") == [job.world_size - 1] * 2
    assert log.series("train/accuracy") == []


def test_the_slow_rank_is_named(job: Job) -> None:
    """The extreme over the ranks, and who had it; NaN is one."""
    log, n = job.log("extremes"), job.world_size
    took = [[[1.0, 1.5, 0.25, 0.5][(rank + step) % n] for rank in range(n)] for step in (1, 2)]
    assert log.series("slowest")[:2] == log.series("unnamed")[:2] == [max(row) for row in took]
    assert log.series("slowest_rank") == [row.index(max(row)) for row in took] + [1]
    assert log.series("fastest")[:2] == [min(row) for row in took]
    assert log.series("fastest_rank") == [row.index(min(row)) for row in took] + [1]
    assert all(math.isnan(log.series(name)[2]) for name in ("slowest", "fastest", "unnamed"))
    assert log.series("unnamed_rank") == []


def test_the_order_in_which_metrics_are_given_does_not_matter(job: Job) -> None:
    """Each rank may have its own, at every step."""
    log = job.log("any_order")
    for index in range(20):
        assert log.series(f"m{index}") == [job.world_size * (index + step) for step in (1, 2, 3)]


def test_ranks_that_differ_from_the_start_are_told(job: Job) -> None:
    """Every rank names what is where, one log step later; nothing wrong is in the log, and what is not is counted."""
    for problem in job.results("different_from_the_start"):
        assert problem.startswith("step 2: ")
        assert "rank 0 lacks sum 'train/aux'" in problem
        assert "rank 1 lacks sum 'train/extra'" in problem
    log = job.log("different_from_the_start")
    assert log.series("train/loss") == [(job.world_size - 1) / 2]
    assert log.series("train/aux") == log.series("train/extra") == []
    assert [gap["points"] for gap in log["gaps"]] == [1]


def test_ranks_that_differ_later_are_told(job: Job) -> None:
    """Every rank names the rank, and the metric that is new or missing on it; the others are logged."""
    for problems in job.results("different_later"):
        assert [problem is not None for problem in problems] == [False, False, True, False, False, True]
        assert "rank 1 says that sum 'train/new' is new, max 'train/newer' is new" in problems[2]
        assert "rank 1 says that sum 'train/tokens' is missing" in problems[5]
    log = job.log("different_later")
    assert log.series("train/loss") == [1.0, 2.0, 3.5, 5.0]
    assert log.series("train/tokens") == [job.world_size * steps for steps in (1, 1, 2)]
    assert log.series("train/new") == log.series("train/newer") == []


@on_two_ranks
def test_ranks_that_change_their_metrics_together_are_told(job: Job) -> None:
    """Otherwise a curve would end without a word."""
    for problems in job.results("different_alike"):
        assert [problem is not None for problem in problems] == [False, False, False, True, False]
        assert "last 'train/lr' is missing" in problems[3]


@on_two_ranks
def test_ranks_whose_reducers_were_made_differently_are_told(job: Job) -> None:
    """The second one to make it, before anything is sent: gloo would kill the process, or the trainer would hang."""
    words = (("every=2", "every=3"), ("max_metrics=100", "max_metrics=200"), ("no cadence", "a cadence of"))
    for said, problems in zip(words, zip(*job.results("different_setups"), strict=True), strict=False):
        (problem,) = (problem for problem in problems if problem is not None)
        assert all(word in problem for word in said)
    assert [problems[-1] for problems in job.results("different_setups")] == [None, None]


def test_what_is_refused_leaves_nothing_behind(job: Job) -> None:
    """A trainer that catches the error goes on as if the call had not been there."""
    for problems in job.results("refused"):
        assert len(problems) == 14
        assert None not in problems
    log = job.log("refused")
    assert log.series("made in inference mode") == log.series("outside of it") == [1.0, 2.0]
    assert {point["name"].removesuffix("_rank") for point in log["metrics"]} == {
        "made in inference mode",
        "outside of it",
    }


@on_two_ranks
def test_ranks_at_different_steps_are_told(job: Job) -> None:
    """Two intervals are no reduction."""
    for problem in job.results("different_steps"):
        assert "rank 0 is at step 0" in problem or "rank 1 is at step 1" in problem
    assert job.log("different_steps").series("train/loss") == []


def test_a_log_step_takes_one_collective_and_no_wait(job: Job) -> None:
    """Whatever the number of metrics and their kinds; and no tensor becomes a number on the training thread."""
    for counted in job.results("collectives"):
        assert counted["collectives"] == {str(step): int(step % 5 == 0) for step in range(1, 21)}
        assert counted["to numbers"] == 0
    log = job.log("collectives")
    assert log.series("sum 7") == [2.0 * 5 * job.world_size] * 4
    assert log.series("mean 4") == log.series("max 9") == log.series("train/grad_norm") == [2.0] * 4


def test_around_an_alert_the_log_has_the_ids_of_all_ranks(job: Job) -> None:
    """Each with its rank; those that are the same on all ranks once."""
    log = job.log("ids")
    (alert,) = [row for row in log["alerts"] if row["phase"] == "raised"]
    assert (alert["rule"], alert["step"]) == ("loss_spike", 80)
    assert alert["batch_ids"] == [f"rank 0 step {step} {part}" for step in (80, 79) for part in range(2)]
    batches = {(row["step"], row["rank"]): row for row in log["batches"]}
    assert len(batches) == len(log["batches"])
    own = range(64, 87)
    assert {key for key in batches if key[0] in own} == {(step, rank) for step in own for rank in range(job.world_size)}
    for (step, rank), row in batches.items():
        names = [f"all-{step}"] if step > 86 else [f"rank {rank} step {step} {part}" for part in range(2)]
        assert (row["batch_ids"], row["position"], row["tokens"]) == (names, step, step * 10)
    assert {key for key in batches if key[0] > 86} == {(87, 0), (88, 0)}


def test_alerts_one_after_another_bring_the_ids_of_every_rank_once(job: Job) -> None:
    """All ranks begin to gather at the same steps, however late one of them sees what arrived: otherwise they hang."""
    batches = [(row["step"], row["rank"]) for row in job.log("many_alerts")["batches"]]
    assert sorted(batches) == [(step, rank) for step in range(1, 42) for rank in range(job.world_size)]


def test_a_burst_comes_to_all_ranks_at_once(job: Job) -> None:
    """Rank 0 alone saw the alert, and no rank computes per-layer norms that the others do not."""
    # The alert came at step 13; at 14 it was sent, at 15 every rank knew, and 16 is the first of five.
    due = [12, 16, 17, 18, 19, 20, 24]
    assert job.results("burst") == [due] * job.world_size
    log = job.log("burst")
    assert log.series("layers/0/norm") == [job.world_size * (job.world_size + 1) / 2] * len(due)
    assert [point["step"] for point in log["metrics"] if point["name"] == "layers/0/norm"] == due
    assert log.steps() == sorted([*{*range(3, 31, 3), *due}, 20])  # once more at 20: a checkpoint
    alert, context = log["alerts"]
    assert (context["alert_id"], context["phase"], context["step"]) == (alert["alert_id"], "context", 15)
    assert context["message"] == "per_layer at every step from 16 to 20"


def test_a_checkpoint_ends_the_window_on_all_ranks(job: Job) -> None:
    """The point at the checkpoint covers what it has seen, and the next one what came after."""
    log = job.log("checkpointed")
    assert log.steps() == [10, 14, 20]
    assert log.series("train/loss") == [5.5, 12.5, 17.5]
    assert log.series("steps") == [steps * job.world_size for steps in (10, 4, 6)]


def test_every_rank_can_print_the_newest_values_that_arrived(job: Job) -> None:
    """Those of the log step before the last one, without a wait."""
    newest = [14, {"train/loss": 12.5, "steps": 4.0 * job.world_size}]
    assert job.results("checkpointed") == [newest] * job.world_size


@on_four_ranks
def test_a_group_of_ranks_reduces_by_itself(job: Job) -> None:
    """Under tensor parallelism the ranks with the same part of the model; ranks are named by their place in the job."""
    log = job.log("subgroups")
    assert log.series("train/loss") == [(0 * 1 + 2 * 3) / 4] * 2
    assert log.series("slowest_rank") == [2.0, 2.0]
    inside, outside = job.results("subgroups")[0], job.results("subgroups")[3]
    assert "not in the group" in outside
    assert "not in the group" not in inside
    assert all("a cadence needs all ranks" in errors for errors in job.results("subgroups"))


def test_a_group_may_be_gone_before_the_run_is_finished(job: Job) -> None:
    """What was sent by then is logged."""
    assert job.log("destroyed").series("slowest_rank") == [job.world_size - 1] * 3


@on_two_ranks
def test_the_loss_and_the_norm_under_ddp_are_the_true_ones(job: Job) -> None:
    """With accumulation over ragged micro-batches and a compiled model, against one process that saw every batch."""
    truth = job.results("ddp")[0]
    losses = [
        (first[0] + second[0]) / (first[1] + second[1]) for first, second in zip(truth[::2], truth[1::2], strict=True)
    ]
    log = job.log("ddp")
    assert log.series("train/loss") == pytest.approx(losses, rel=1e-5)
    assert log.series("train/grad_norm") == pytest.approx([norm for _, _, norm in truth[1::2]], rel=1e-5)


def test_the_gradient_norm_under_fsdp_is_the_global_one(job: Job) -> None:
    """Of any order, on shards and on replicas of shards, without a collective of its own."""
    log, (truth, *_) = job.log("fsdp"), job.results("fsdp")
    norms = {name: norm for name, norm in truth.items() if name != "error"}
    assert len(norms) == (8 if job.world_size == 4 else 4)
    for name, norm in norms.items():
        assert log.series(name) == pytest.approx([norm], rel=1e-5)
        assert log.series(f"{name}, of shards") == pytest.approx([norm], rel=1e-5)


@on_four_ranks
def test_a_norm_over_other_ranks_is_refused(job: Job) -> None:
    """Parts of it would be counted twice, or not at all."""
    for truth in job.results("fsdp"):
        assert "full_tensor" in truth["error"]


# --- a rank that dies ---------------------------------------------------------------------------------------------

_GROUP_TIMEOUT_S = 5.0


def time_until_the_other_gives_up(folder: Path, how: str) -> float:
    """Return how long rank 0 takes to end after rank 1 was killed or stopped."""
    folder.mkdir()
    ranks = start(folder, 2, "killed", KILLED_HOW=how, GROUP_TIMEOUT_S=str(_GROUP_TIMEOUT_S))
    try:
        ranks[0].communicate(timeout=_JOB_LIMIT_S)
        assert ranks[0].returncode == 1
    finally:
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].communicate()
    return float(json.loads((folder / f"{how}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_rank_that_dies_keeps_no_other_longer_than_without_llmtrack(tmp_path: Path, what: str) -> None:
    """A killed rank is noticed at once; one that only stopped, when the trainer's own collective times out."""
    started_s = time.monotonic()
    without_s = time_until_the_other_gives_up(tmp_path / "without", f"without {what}")
    with_s = time_until_the_other_gives_up(tmp_path / "with", f"with {what}")
    log = read_segment(find_segment(tmp_path / "with" / "killed"))
    # The reducer's own patience is 30 s: half of that is no busy machine.
    assert with_s < without_s + 15.0, f"{with_s:.1f} s with, {without_s:.1f} s without"
    assert log.series("slowest")[:3] == [1.0] * 3
    assert log.end["exit"] == "failed"
    assert time.monotonic() - started_s < _JOB_LIMIT_S


def test_a_rank_that_dies_while_ids_are_gathered_ends_no_training(tmp_path: Path) -> None:
    """The gathering is given up with the reductions, which say so; what rank 0 logs itself goes on."""
    ranks = start(tmp_path, 2, "killed_while_gathering", GROUP_TIMEOUT_S=str(_GROUP_TIMEOUT_S))
    try:
        ranks[0].communicate(timeout=_JOB_LIMIT_S)
    finally:
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].communicate()
    log = read_segment(find_segment(tmp_path / "killed_while_gathering"))
    assert log.series("of rank 0") == [float(step) for step in range(1, 31)]
    assert log.series("train/loss")[:16] == [float(step) for step in range(1, 17)]
    assert [row["rule"] for row in log["alerts"] if row["phase"] == "raised"] == ["spike", "reducer"]
    assert log.end["exit"] == "finished"
