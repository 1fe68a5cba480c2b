"""What a run was like before is read along its path, from the last parts only, whatever is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmtrack
from llmtrack.writer.alerts.history import read_history
from llmtrack.writer.log.seal import seal_segment
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings
from tests.faults import TINY

METRICS = ("train/loss", "train/grad_norm")


def train(root: Path, first: int, last: int, value: float, **given: Any) -> RecordingRun:
    """Log steps as a trainer does that is killed: nothing is sealed but what was full."""
    settings = Settings(**{**TINY, **given.pop("limits", {})})
    flush_every = given.pop("flush_every", last + 1)
    run = llmtrack.open_run(root, run_id=given.pop("run_id", "run"), alerts=False, settings=settings, **given)
    assert isinstance(run, RecordingRun)
    for step in range(first, last + 1):
        if step % flush_every == 0:
            run.flush()
        run.log({"train/loss": value, "train/grad_norm": value * 10, "other": 1.0}, step, step * 10)
    run.finish("failed")
    return run


def losses(root: Path, segment: int, tokens: int, run_id: str = "run") -> list[tuple[int, float]]:
    """Return tokens and loss of the history of a place."""
    return [(at, row["train/loss"]) for at, row in read_history(root, run_id, segment, tokens, METRICS)]


def test_the_history_follows_the_path(tmp_path: Path) -> None:
    """What was left behind is no part of it; parents are."""
    first = train(tmp_path, 1, 100, 1.0)
    second = train(tmp_path, 51, 80, 2.0, checkpoint={**first.meta(50, 500)})
    child = train(tmp_path, 71, 90, 3.0, run_id="child", checkpoint={**second.meta(70, 700)})
    expected = [(10 * step, 1.0 if step <= 50 else 2.0 if step <= 70 else 3.0) for step in range(1, 86)]
    assert losses(tmp_path, child.segment, 850, "child") == expected
    assert losses(tmp_path, 1, 30) == expected[:3]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_only_the_end_of_a_long_history_is_read(tmp_path: Path, is_sealed: bool) -> None:
    """The last two thousand rows, with all metrics that were asked for and no other."""
    run = train(tmp_path, 1, 5000, 1.0)
    if is_sealed:
        seal_segment(run.folder)
    rows = read_history(tmp_path, "run", 1, 49_990, METRICS)
    assert [at for at, _ in rows] == list(range(30_000, 50_000, 10))
    assert all(set(values) == set(METRICS) for _, values in rows)


def test_many_small_parts_are_not_all_read(tmp_path: Path) -> None:
    """A few of the newest are enough."""
    run = train(tmp_path, 1, 400, 1.0, limits={"part_batches": 1}, flush_every=10)
    assert len(list(run.folder.glob("metrics-*"))) > 20
    found = losses(tmp_path, 1, 4000)
    assert found
    assert found[-1] == (4000, 1.0)
    assert len(found) < 100


def test_damage_is_left_out(tmp_path: Path) -> None:
    """A history without the broken part is better than none, and nobody is held up."""
    run = train(tmp_path, 1, 100, 1.0)
    for path in run.folder.glob("metrics-*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert losses(tmp_path, 1, 1000) == []


def test_nothing_is_the_history_of_nothing(tmp_path: Path) -> None:
    """No such run, no such segment, no such metric."""
    train(tmp_path, 1, 10, 1.0)
    assert losses(tmp_path, 1, 100, "another") == []
    assert losses(tmp_path, 7, 100) == []
    assert read_history(tmp_path, "run", 1, 100, ("none",)) == []
