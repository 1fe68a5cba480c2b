"""The drain writes what the buffer holds, in order; whatever it is given, the log goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrack.writer.log.buffer import Barrier, Buffer, End, Record
from llmtrack.writer.log.drain import Drain
from llmtrack.writer.log.pending import PendingRow
from llmtrack.writer.log.tensors import DeviceValue
from llmtrack.writer.settings import Settings
from tests.faults import TINY
from tests.reading import Segment, read_segment

PATIENCE_S = 30.0


class Log:
    """A drain on a folder of its own, and the buffer that it drains."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.folder = folder
        self.buffer = Buffer(100_000)
        start = Record("segments", {"time": 0, "step": 0, "tokens": 0, "phase": "start"})
        self.drain = Drain(folder, self.buffer, start, Settings(**{**TINY, **settings}))
        self.drain.open()

    def put(self, item: Record | Barrier) -> None:
        """Put a record or a barrier, and wait until it is durable."""
        self.buffer.put_item(item)
        self.drain.wake()
        assert item.durable.wait(PATIENCE_S)

    def end(self) -> Segment:
        """End the segment, and return what can be read of it."""
        self.buffer.put_item(End({"time": 0, "phase": "end", "exit": "finished", "detail": None}))
        self.drain.give_up_at(time.monotonic() + PATIENCE_S)
        self.drain.wake()
        assert self.drain.ended.wait(PATIENCE_S)
        assert self.drain.durable.is_set()
        return read_segment(self.folder)


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[..., Log]]:
    """Yield a function that opens a log; ends what a failed test leaves open."""
    logs: list[Log] = []

    def open_(**settings: Any) -> Log:
        logs.append(Log(tmp_path / f"segment={len(logs) + 1:05d}", **settings))
        return logs[-1]

    yield open_
    for log in logs:
        log.drain.give_up_at(0.0)
        log.drain.wake()
        assert log.drain.ended.wait(PATIENCE_S)


class Unwilling:
    """A value that is no number after all."""

    def __float__(self) -> float:
        raise ValueError("not today")


BAD = [
    ({1: 1.0}, "a name that is a number"),
    ({None: 1.0}, "no name"),
    ({("a", "b"): 1.0}, "a name that is a tuple"),
    ({"half a surrogate \ud800": 1.0}, "a name that is no text"),
    ({"late": Unwilling()}, "a value that refuses"),
    ({"no memory": DeviceValue(torch.empty((), device="meta"))}, "a value that never comes"),
    ({"huge": 10**400}, "a value that no double can hold"),
]


@pytest.mark.parametrize("row", [row for row, _ in BAD], ids=[what for _, what in BAD])
def test_a_point_that_cannot_be_stored_is_counted_and_costs_no_other(
    open_log: Callable[..., Log], row: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The points beside it, before it and after it are in the log, and it is a gap."""
    log = open_log()
    log.buffer.put(1, 10, {"before": 1.0})
    log.buffer.put(2, 20, {"beside": 2.0, **row})
    log.buffer.put(3, 30, row)
    log.buffer.put(4, 40, {"after": 3.0})
    segment = log.end()
    assert [(read.step, list(read.bits)) for read in segment.rows()] == [
        (1, ["before"]),
        (2, ["beside"]),
        (4, ["after"]),
    ]
    (gap,) = segment["gaps"]
    assert (gap["first_tokens"], gap["last_tokens"], gap["points"], gap["reason"]) == (20, 30, 2, "bad_value")
    assert segment.end["dropped"] == 2
    assert json.loads((log.folder / "heartbeat.json").read_text())["dropped"] == 2
    assert len(caplog.records) == 1


class Failing(PendingRow):
    """A row on a device that fails: CUDA says so whenever it is asked for anything."""

    def __len__(self) -> int:
        return 3

    def is_ready(self) -> bool:  # noqa: D102  # as in the base
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_that_fails_costs_the_rows_that_were_on_it(
    open_log: Callable[..., Log], caplog: pytest.LogCaptureFixture
) -> None:
    """They are counted; the rows that say how it came to that, and the end, are in the log."""
    log = open_log()
    log.buffer.put(1, 10, {"before": 1.0})
    for step in (2, 3):
        log.buffer.put(step, step * 10, Failing())
    log.buffer.put(4, 40, {"after": 1.0})
    segment = log.end()
    assert segment.steps() == [1, 4]
    assert [(gap["first_tokens"], gap["last_tokens"], gap["points"]) for gap in segment["gaps"]] == [(20, 30, 6)]
    assert segment.end["exit"] == "finished"
    assert len(caplog.records) == 1


def test_a_step_beyond_64_bits_is_a_gap(open_log: Callable[..., Log], caplog: pytest.LogCaptureFixture) -> None:
    """The row is counted, and the gap itself can be stored."""
    log = open_log()
    log.buffer.put(1 << 63, 10, {"a": 1.0, "b": 1.0})
    log.buffer.put(2, 20, {"a": 1.0})
    segment = log.end()
    assert segment.steps() == [2]
    assert [gap["points"] for gap in segment["gaps"]] == [2]
    assert len(caplog.records) == 1


def test_a_metric_that_can_never_be_stored_does_not_fill_the_log_with_gaps(
    open_log: Callable[..., Log], caplog: pytest.LogCaptureFixture
) -> None:
    """It comes with every row, and its gap with every fsync at most."""
    log = open_log(fsync_interval_s=60.0)
    with_a_bad_name: Any = {"good": 1.0, 7: 1.0}
    for step in range(1, 501):
        log.buffer.put(step, step, with_a_bad_name)
        if step % 50 == 0:
            log.drain.wake()
    segment = log.end()
    assert segment.steps() == list(range(1, 501))
    assert [(gap["first_tokens"], gap["last_tokens"], gap["points"]) for gap in segment["gaps"]] == [(1, 500, 500)]
    assert len(caplog.records) == 1


def test_tokens_never_go_backwards_in_the_log(open_log: Callable[..., Log], caplog: pytest.LogCaptureFixture) -> None:
    """The count of dropped points stands where the log has come to, not where the first of them was."""
    log = open_log(fsync_interval_s=0.001)
    bad: Any = {7: 1.0}
    for step in range(1, 201):
        log.buffer.put(step, step, {"good": 1.0} if step % 3 else bad)
        log.drain.wake()
    points = log.end()["metrics"]
    assert [point["tokens"] for point in points] == sorted(point["tokens"] for point in points)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "given, stored",
    [
        ({"message": "half a surrogate \ud800"}, {"message": "half a surrogate \\ud800"}),
        ({"metric": 7}, {"metric": "7"}),
        ({"value": "high"}, {"value": None}),
        ({"batch_ids": ["a", 7, "\ud800"]}, {"batch_ids": ["a", "7", "\\ud800"]}),
        ({"batch_ids": 7}, {"batch_ids": None}),
    ],
)
def test_a_record_is_stored_with_what_can_be_kept_of_it(
    open_log: Callable[..., Log], given: dict[str, Any], stored: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A rare record is never dropped for one of its columns."""
    log = open_log()
    log.put(Record("alerts", {"time": 5, "step": 1, "tokens": 2, "rule": "data", **given}))
    (alert,) = log.end()["alerts"]
    assert {name: alert[name] for name in ("rule", "tokens", *stored)} == {"rule": "data", "tokens": 2, **stored}
    assert len(caplog.records) == 1
