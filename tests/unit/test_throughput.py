"""Throughput on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmtrack
from llmtrack.writer.capture.cadence import Cadence, Group
from llmtrack.writer.capture.flops import estimate
from llmtrack.writer.capture.throughput import Throughput
from tests.reading import Segment, find_segment, read_segment

pytest.importorskip("torch")


class Clock:
    """Shows what the test sets it to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:  # noqa: D102  # see the class
        return self.now_s


def train(root: Path, throughput: Throughput, clock: Clock, *, cadence: Cadence | None = None) -> Segment:
    """Take twelve steps of 100 tokens: the first one long, then 2 s each; with waits for data and an evaluation."""
    with llmtrack.open_run(root) as run:
        reducer = llmtrack.Reducer(run, every=4, cadence=cadence, throughput=throughput)
        clock.now_s += 60.0
        for step in range(1, 13):
            with reducer.data_wait():
                clock.now_s += 0.5
            clock.now_s += 1.5
            reducer.last("train/lr", 0.1)
            reducer.step(step, step * 100)
            if step == 10:
                reducer.flush(step, step * 100)
            if step in {6, 10}:
                with reducer.pause():
                    clock.now_s += 1000.0
    return read_segment(find_segment(root))


def test_speed_is_that_of_training(tmp_path: Path) -> None:
    """The first step, which compiles, does not count, and neither do evaluations and checkpoints."""
    clock = Clock()
    flops = estimate("6n", parameters=1e9, peak_flops=1e12, devices=1)
    log = train(tmp_path, Throughput(flops, clock=clock), clock)
    assert log.steps() == [4, 8, 10, 12]
    assert log.series("throughput/tokens_per_s") == [50.0] * 4
    assert log.series("throughput/tokens_per_s_min") == [50.0] * 4
    assert log.series("throughput/tokens_per_s_min_rank") == [0.0] * 4
    assert log.series("throughput/step_time_s") == [2.0] * 4
    assert log.series("throughput/data_wait_s") == [0.5] * 4
    assert log.series("throughput/mfu") == [pytest.approx(50.0 * 6e9 / 1e12)] * 4
    assert log.series("memory/max_bytes") == []  # there is no GPU
    assert log["alerts"] == []


def test_more_than_everything_is_an_alert(tmp_path: Path) -> None:
    """Once, in the log: the peak or the formula is not that of this job."""
    clock = Clock()
    flops = estimate("6n", parameters=10e9, peak_flops=1e12, devices=2)
    log = train(tmp_path, Throughput(flops, clock=clock), clock)
    assert log.series("throughput/mfu") == [pytest.approx(1.5)] * 4
    (alert,) = log["alerts"]
    assert (alert["rule"], alert["metric"], alert["step"]) == ("mfu", "throughput/mfu", 4)
    assert "150%" in alert["message"]


def test_without_a_peak_there_is_no_utilisation(tmp_path: Path) -> None:
    """And everything else is there."""
    clock = Clock()
    log = train(tmp_path, Throughput(estimate("6n", parameters=1e9, device="abacus"), clock=clock), clock)
    assert log.series("throughput/tokens_per_s") == [50.0] * 4
    assert log.series("throughput/mfu") == []


def test_throughput_comes_with_its_group(tmp_path: Path) -> None:
    """At the group's steps, over the group's window."""
    clock = Clock()
    groups = (Group("optimisation", 4, metrics=("train/*",)), Group("speed", 6, metrics=("throughput/*",)))
    log = train(tmp_path, Throughput(clock=clock), clock, cadence=Cadence(groups))
    at = [point["step"] for point in log["metrics"] if point["name"] == "throughput/step_time_s"]
    assert at == [6, 10, 12]
    assert log.series("throughput/step_time_s") == [2.0] * 3


def test_every_step_may_be_a_log_step(tmp_path: Path) -> None:
    """The first one has nothing to say yet."""
    clock = Clock()
    with llmtrack.open_run(tmp_path) as run:
        reducer = llmtrack.Reducer(run, every=1, throughput=Throughput(clock=clock))
        for step in (1, 2, 3):
            clock.now_s += 1.0
            reducer.step(step, step * 10)
            reducer.flush(step, step * 10)
    assert read_segment(find_segment(tmp_path)).series("throughput/tokens_per_s") == [10.0, 10.0]


def test_waits_without_throughput_cost_nothing(tmp_path: Path) -> None:
    """The loop needs no `if`."""
    with llmtrack.open_run(tmp_path) as run:
        reducer = llmtrack.Reducer(run)
        with reducer.data_wait(), reducer.pause():
            pass
