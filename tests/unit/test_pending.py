"""Rows whose values are still on their way: they keep their place, and hold up nothing but what comes after them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmtrack
from llmtrack.writer.log.pending import DeviceRow, PendingRow
from llmtrack.writer.log.tensors import PendingValue
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings
from tests.faults import TINY
from tests.reading import Segment, find_segment, read_segment

PATIENCE_S = 30.0


class Late(PendingRow):
    """A row that arrives when the test says so."""

    def __init__(self, values: dict[str, float] | None, error: Exception | None = None) -> None:
        self.values, self.error = values, error
        self.arrived = threading.Event()
        self.asked = threading.Event()

    def __len__(self) -> int:
        return 2

    def is_ready(self) -> bool:  # noqa: D102  # as in the base
        self.asked.set()
        return self.arrived.is_set()

    def resolve(self) -> dict[str, float]:  # noqa: D102  # as in the base
        if self.error is not None:
            raise self.error
        return self.values or {}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordingRun]:
    """Yield a run that writes at once."""
    run = llmtrack.open_run(tmp_path, settings=Settings(**TINY))
    assert isinstance(run, RecordingRun)
    yield run
    run.finish()


def end(run: RecordingRun) -> Segment:
    """Finish the run and read it."""
    run.finish()
    return read_segment(run.folder)


def test_a_late_row_keeps_its_place(run: RecordingRun) -> None:
    """What was logged after it is written after it, once its values are there."""
    late = Late({"a": 2.0, "b": 3.0})
    run.log({"a": 1.0}, 1, 10)
    run.log_later(late, 2, 20)
    run.log({"a": 4.0}, 3, 30)
    assert late.asked.wait(PATIENCE_S)
    assert not run.flush(timeout=0.0)
    late.arrived.set()
    assert run.flush(PATIENCE_S)
    rows = [(point["step"], point["name"], point["value"]) for point in end(run)["metrics"]]
    assert rows == [(1, "a", 1.0), (2, "a", 2.0), (2, "b", 3.0), (3, "a", 4.0)]


def test_what_came_before_a_late_row_is_on_disk(run: RecordingRun, tmp_path: Path) -> None:
    """A rank that never answers keeps back only what follows."""
    late = Late({})
    run.log({"a": 1.0}, 1, 10)
    barrier = threading.Thread(target=run.flush, args=(PATIENCE_S,))
    barrier.start()
    barrier.join()
    run.log_later(late, 2, 20)
    run.log({"a": 3.0}, 3, 30)
    assert late.asked.wait(PATIENCE_S)
    assert read_segment(find_segment(tmp_path)).series("a") == [1.0]
    late.arrived.set()


def test_points_that_never_arrive_are_counted(run: RecordingRun) -> None:
    """Their tokens are a gap in the log, and what follows is kept."""
    late = Late(None, RuntimeError("rank 3 is gone"))
    late.arrived.set()
    run.log_later(late, 2, 20)
    run.log({"a": 3.0}, 3, 30)
    segment = end(run)
    assert segment.series("a") == [3.0]
    assert [(gap["first_tokens"], gap["points"], gap["reason"]) for gap in segment["gaps"]] == [(20, 2, "bad_value")]
    assert segment.end["dropped"] == 2


def test_a_gpu_that_failed_ends_no_log(run: RecordingRun) -> None:
    """To ask it whether a value is there raises: that row is lost, and what follows is kept."""

    class Failed(Late):
        def is_ready(self) -> bool:
            raise RuntimeError("device-side assert triggered")

    run.log_later(Failed({}), 2, 20)
    run.log({"a": 3.0}, 3, 30)
    segment = end(run)
    assert segment.series("a") == [3.0]
    assert [gap["points"] for gap in segment["gaps"]] == [2]


def test_points_that_could_not_be_kept_are_counted(run: RecordingRun) -> None:
    """The others of their row are in the log."""
    late = Late({"a": 1.0})
    late.lost_points = 1
    late.arrived.set()
    run.log_later(late, 2, 20)
    segment = end(run)
    assert segment.series("a") == [1.0]
    assert [gap["points"] for gap in segment["gaps"]] == [1]


def test_a_run_ends_without_a_row_that_does_not_come(run: RecordingRun) -> None:
    """A rank that is gone keeps no other from ending: half of the time that `finish` has goes by for it."""
    run.log_later(Late({}), 2, 20)
    run.log({"a": 3.0}, 3, 30)
    run.finish(timeout=4.0)
    segment = read_segment(run.folder)
    assert segment.series("a") == [3.0]
    assert [gap["points"] for gap in segment["gaps"]] == [2]
    assert segment.end["exit"] == "finished"


def test_a_late_row_without_points_is_no_row(run: RecordingRun) -> None:
    """No rank had a value: nothing is written, and nothing is missing."""
    late = Late({})
    late.arrived.set()
    run.log_later(late, 2, 20)
    segment = end(run)
    assert segment["metrics"] == segment["gaps"] == []


def test_a_late_row_does_not_go_back(run: RecordingRun) -> None:
    """It is refused like any other."""
    run.log({"a": 1.0}, 1, 10)
    with pytest.raises(llmtrack.UsageError, match="backwards"):
        run.log_later(Late({}), 2, 9)


class Number(PendingValue):
    """A value on its way from a device."""

    __slots__ = ("arrived",)

    def __init__(self) -> None:
        self.arrived = False

    def __float__(self) -> float:
        return 7.0

    def is_ready(self) -> bool:  # noqa: D102  # as in the base
        return self.arrived


def test_a_row_is_as_late_as_its_latest_value() -> None:
    """The others wait with it."""
    first, second = Number(), Number()
    row = DeviceRow({"a": 1.0, "b": first, "c": second})
    first.arrived = True
    assert not row.is_ready()
    second.arrived = True
    assert row.is_ready()
    assert (len(row), row.resolve()) == (3, {"a": 1.0, "b": 7.0, "c": 7.0})


def test_a_value_on_its_way_makes_the_row_late(run: RecordingRun) -> None:
    """The drain thread never waits for a GPU: one that hangs must not keep the log from being written."""
    value = Number()
    run.log({"a": 1.0, "b": value}, 1, 10)
    assert not run.flush(timeout=0.05)
    value.arrived = True
    assert run.flush(PATIENCE_S)
    assert end(run).series("b") == [7.0]
