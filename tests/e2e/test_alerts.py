"""A spike, then NaN, in a run that is killed and resumed: what a person on call is told, and what the log has."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import llmtrack
from llmtrack.writer.capture.cadence import Group
from llmtrack.writer.run import RecordingRun
from tests.reading import Segment, read_segment

STEPS = 2000
SPIKE, NAN = 1500, 1600
TOKENS = 4096


def loss_at(step: int) -> float:
    """Return 2.0 ± 0.01, with a spike and NaN."""
    if step == SPIKE:
        return 3.0
    return math.nan if step == NAN else 2.0 + 0.01 * random.Random(step).gauss(0, 1)


def ids_of(step: int) -> list[str]:
    """Return what a step was trained on."""
    return [f"doc-{step}-{number}" for number in range(3)]


def train(run: llmtrack.Run, first: int, last: int, *, every: int = 1) -> None:
    """Log steps, with the ids of each."""
    for step in range(first, last + 1):
        run.batches(step, ids_of(step), position=step * 3)
        if step % every == 0:
            run.log({"train/loss": loss_at(step), "train/lr": 3e-4}, step, step * TOKENS)


def open_run(root: Path, **given: Any) -> RecordingRun:
    """Open the run, which rank 0 writes."""
    run = llmtrack.open_run(root, run_id=given.pop("run_id", "run"), **given)
    assert isinstance(run, RecordingRun)
    return run


def raised(segment: Segment) -> list[tuple[str, int]]:
    """Return rule and step of every alert."""
    return [(alert["rule"], alert["step"]) for alert in segment["alerts"] if alert["phase"] == "raised"]


def test_a_spike_and_then_nan_are_exactly_two_alerts(tmp_path: Path) -> None:
    """With the ids of the step and of the one before; each is one event, and the batches around it are in the log."""
    told: list[Any] = []
    with open_run(tmp_path, on_alert=told.append) as run:
        train(run, 1, STEPS)
    segment = read_segment(run.folder)
    assert raised(segment) == [("loss_spike", SPIKE), ("nonfinite", NAN)]
    assert [alert["step"] for alert in told] == [SPIKE, NAN]
    for alert, step in zip(told, (SPIKE, NAN), strict=True):
        assert alert["batch_ids"] == ids_of(step) + ids_of(step - 1)
        own = [row for row in segment["alerts"] if row["alert_id"] == alert["alert_id"]]
        assert [row["phase"] for row in own] == ["raised", "context", "cleared"]
        batches = {row["step"]: row for row in segment["batches"] if abs(row["step"] - step) < 50}
        assert sorted(batches) == list(range(step - 16, step + 9))
        assert batches[step]["batch_hash"] == alert["batch_hash"]
        assert (batches[step]["batch_ids"], batches[step]["position"]) == (ids_of(step), 3 * step)
        assert batches[step]["tokens"] == step * TOKENS
    spike = told[0]
    assert (spike["value"], spike["level"], spike["metric"]) == (3.0, "warn", "train/loss")
    assert spike["baseline"] == pytest.approx(2.0, abs=0.02)
    assert spike["score"] > 50


def test_the_row_and_the_alert_are_on_disk_when_the_trainer_raises(tmp_path: Path) -> None:
    """On the same step, with the reason in the end record."""
    run = open_run(tmp_path)

    def train_until_it_hurts() -> None:
        with run:
            train(run, 1, NAN)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_until_it_hurts()
    segment = read_segment(run.folder)
    assert raised(segment) == [("loss_spike", SPIKE), ("nonfinite", NAN)]
    assert math.isnan(segment.series("train/loss")[-1])
    assert segment["alerts"][-1]["batch_ids"] == ids_of(NAN) + ids_of(NAN - 1)
    assert segment.end["exit"] == "failed"


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("carries", ["the state", "the log", "nothing"])
def test_after_a_resume_there_is_no_false_alert_and_no_blindness(tmp_path: Path, carries: str, every: int) -> None:
    """With the detectors' state, with what the log has, and with neither; then a spike is found."""
    with open_run(tmp_path) as run:
        train(run, 1, 1400, every=every)
        state, meta = run.state_dict(), run.meta(1400, 1400 * TOKENS)
    again = open_run(tmp_path / "elsewhere" if carries == "nothing" else tmp_path, checkpoint=meta)
    if carries == "the state":
        again.load_state_dict(state)
    for row in range(1, 101):
        step = 1400 + row * every
        again.log({"train/loss": 2.0 + 0.01 * random.Random(step).gauss(0, 1)}, step, step * TOKENS)
    last = 1400 + 101 * every
    again.log({"train/loss": 2.5}, last, last * TOKENS)
    again.finish()
    assert raised(read_segment(again.folder)) == [("loss_spike", last)]


def test_a_spike_in_the_first_rows_after_a_resume_is_found(tmp_path: Path) -> None:
    """What is usual is known from the log, at the third row."""
    with open_run(tmp_path) as run:
        train(run, 1, 300)
    again = open_run(tmp_path, checkpoint=run.meta(300, 300 * TOKENS))
    for step, loss in ((301, 2.0), (302, 2.01), (303, 2.4), (304, 2.0)):
        again.log({"train/loss": loss}, step, step * TOKENS)
    again.finish()
    assert raised(read_segment(again.folder)) == [("loss_spike", 303)]


def test_another_recipe_learns_nothing_from_the_past(tmp_path: Path) -> None:
    """A data mix with a higher loss is no spike."""
    with open_run(tmp_path, recipe={"mix": "web"}) as run:
        train(run, 1, 300)
        state = run.state_dict()
    meta = run.meta(300, 300 * TOKENS)
    child = llmtrack.open_run(tmp_path, recipe={"mix": "code"}, checkpoint=meta)
    child.load_state_dict(state)
    assert isinstance(child, RecordingRun)
    for step in range(301, 500):
        child.log({"train/loss": 1.5 + loss_at(step)}, step, step * TOKENS)
    child.finish()
    assert raised(read_segment(child.folder)) == []


def test_an_on_alert_that_hangs_or_raises_holds_nobody(tmp_path: Path) -> None:
    """The loop goes on, the log has everything, and the run ends."""
    held = threading.Event()

    def hang(_: object) -> None:
        held.wait(60.0)
        raise OSError("nobody listens")

    with open_run(tmp_path, on_alert=hang) as run:
        train(run, 1, STEPS)
        held.set()
    assert raised(read_segment(run.folder)) == [("loss_spike", SPIKE), ("nonfinite", NAN)]


def test_no_detectors_find_nothing_and_the_callers_own_alerts_have_their_batches(tmp_path: Path) -> None:
    """alerts=False, and run.alert."""
    with open_run(tmp_path, alerts=False) as run:
        train(run, 1, 1650)
        run.alert("data", "shard 7 is broken", 1650, 1650 * TOKENS)
        train(run, 1651, 1700)
    segment = read_segment(run.folder)
    assert raised(segment) == [("data", 1650)]
    (alert,) = segment["alerts"]
    assert alert["batch_ids"] == ids_of(1650) + ids_of(1649)
    assert [row["step"] for row in segment["batches"]] == list(range(1634, 1659))
    assert segment["segments"][0]["alerts"] is None


def test_an_instability_is_one_event_from_the_gradient_norm_on(tmp_path: Path) -> None:
    """The norm moves a step before the loss, and both grow over five steps."""
    rng = random.Random(0)
    with open_run(tmp_path) as run:
        for step in range(1, 701):
            loss, norm = 2.0 + rng.gauss(0, 0.01), 0.4 * math.exp(rng.gauss(0, 0.15))
            if 500 <= step < 505:
                norm *= (2.0, 3.0, 5.0, 8.0, 12.0)[step - 500]
            if 501 <= step < 506:
                loss += (0.1, 0.3, 0.6, 1.0, 1.5)[step - 501]
            run.log({"train/loss": loss, "train/grad_norm": norm}, step, step * TOKENS)
    alerts = read_segment(run.folder)["alerts"]
    assert len({alert["alert_id"] for alert in alerts}) == 1
    assert alerts[0]["step"] in {500, 501, 502}
    assert {alert["rule"] for alert in alerts if alert["message"].startswith(("train", "also"))} == {
        "grad_norm_spike",
        "loss_spike",
    }


def test_a_run_of_nan_after_an_overflow_is_one_alert(tmp_path: Path) -> None:
    """And it is over when the numbers are back."""
    with open_run(tmp_path) as run:
        for step in range(1, 401):
            loss = math.inf if step == 300 else math.nan if 300 < step < 340 else loss_at(step)
            run.log({"train/loss": loss}, step, step * TOKENS)
    alerts = read_segment(run.folder)["alerts"]
    assert [(alert["rule"], alert["phase"]) for alert in alerts] == [
        ("nonfinite", "raised"),
        ("nonfinite", "context"),
        ("nonfinite", "cleared"),
    ]
    assert alerts[-1]["step"] == 344


def test_a_slow_gpu_is_found_in_what_a_run_logs(tmp_path: Path) -> None:
    """Five percent less for good, with an evaluation every 50 rows that is marked, and one that is not."""
    rng = random.Random(1)
    with open_run(tmp_path) as run:
        for step in range(10, 5001, 10):
            speed = 4e5 * (1 + rng.gauss(0, 0.01)) * (0.95 if step > 4000 else 1.0)
            if step % 500 == 0:
                with run.pause():
                    speed *= 0.4
            elif step % 700 == 0:
                speed *= 0.4
            run.log({"throughput/tokens_per_s": speed}, step, step * TOKENS)
    ((rule, step),) = raised(read_segment(run.folder))
    assert rule == "throughput_drop"
    assert 4000 < step <= 4200


def test_the_reducer_gives_the_batches_of_the_whole_window_and_logs_denser(tmp_path: Path) -> None:
    """A loss over ten steps is of ten batches; the burst that follows is recorded with the alert."""
    groups = (
        Group("optimisation", 10, metrics=("train/*",)),
        Group("per_layer", 100, metrics=("layers/*",), burst=True),
    )
    cadence = llmtrack.Cadence(groups, burst_steps=5)
    with open_run(tmp_path) as run:
        reducer = llmtrack.Reducer(run, cadence=cadence)
        for step in range(1, 601):
            loss = 9.0 if step == 495 else 2.0 + 0.01 * random.Random(step).gauss(0, 1)
            reducer.mean("train/loss", loss)
            if cadence.due("per_layer", step):
                reducer.last("layers/0/norm", 1.0)
            reducer.step(step, step * TOKENS, batch_ids=ids_of(step), position=step)
            if step == 500:
                run.flush()  # until the detectors have seen it
    segment = read_segment(run.folder)
    assert raised(segment) == [("loss_spike", 500)]
    alert, *more = segment["alerts"]
    assert alert["batch_ids"] == ids_of(500) + ids_of(499)
    assert [row["step"] for row in segment["batches"]] == list(range(484, 509))
    assert all(row["tokens"] == row["step"] * TOKENS for row in segment["batches"])
    assert "per_layer at every step from 511 to 515" in [row["message"] for row in more]
    assert {row["alert_id"] for row in more} == {alert["alert_id"]}
    points = [point["step"] for point in segment["metrics"] if point["name"] == "layers/0/norm"]
    assert points == [100, 200, 300, 400, 500, *range(511, 516), 600]
