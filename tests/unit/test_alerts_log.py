"""Whoever looks at the rows sees all of them; what it says is recorded behind them, and it cannot hurt the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import llmtrack
from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.buffer import Buffer, End, Record, Row
from llmtrack.writer.log.drain import Drain
from llmtrack.writer.log.ids import Mark, StepIds
from llmtrack.writer.run import RecordingRun
from llmtrack.writer.settings import Settings
from tests.faults import TINY
from tests.reading import Segment, read_batches, read_segment

PATIENCE_S = 30.0


class Witness:
    """Remembers what it was shown, and says something of every tenth row and at the end."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[Row | Mark] = []
        self.fails_at = fails_at

    def look(self, items: Sequence[Row | Mark]) -> list[Record]:
        """Look at rows."""
        self.seen += items
        if 0 <= self.fails_at <= len(self.seen):
            raise ZeroDivisionError
        rows = [item for item in items if isinstance(item, tuple)]
        return [alert(row[1], row[2]) for row in rows if row[1] % 10 == 0]

    def note(self, record: Record) -> list[Record]:
        """Complete an alert."""
        if "batch_hash" in record.values:
            return []
        record.values["batch_hash"] = "noted"
        return [alert(0, 0)]

    def end(self) -> list[Record]:
        """Say the last word."""
        return [alert(999, 9990)]


def alert(step: int, tokens: int) -> Record:
    """Return an alert of a witness."""
    return Record("alerts", {"time": 0, "step": step, "tokens": tokens, "batch_hash": "seen", "phase": "raised"})


def log_through(folder: Path, witness: Witness, items: Sequence[Row | Mark | Record]) -> Segment:
    """Write what is given with a witness, end the segment, and return what can be read of it."""
    folder.mkdir()
    buffer = Buffer(100_000)
    start = Record("segments", {"time": 0, "step": 0, "tokens": 0, "phase": "start"})
    drain = Drain(folder, buffer, start, Settings(**TINY), witness)
    for item in items:
        if isinstance(item, tuple):
            buffer.put(item[1], item[2], item[3])
        elif isinstance(item, Record):
            buffer.put_item(item)
        else:
            assert buffer.put_mark(item)
    drain.open()
    buffer.put_item(End({"time": 0, "phase": "end", "exit": "finished", "detail": None}))
    drain.give_up_at(time.monotonic() + PATIENCE_S)
    drain.wake()
    assert drain.ended.wait(PATIENCE_S)
    assert drain.durable.is_set()
    return read_segment(folder)


def rows_of(count: int) -> list[Row]:
    """Return rows of steps from 1 on."""
    return [(0, step, step * 10, {"a": float(step)}) for step in range(1, count + 1)]


def test_a_witness_sees_all_and_what_it_says_stands_behind_the_rows(tmp_path: Path) -> None:
    """Ids in their place among them; the last word before the end record."""
    witness = Witness()
    items: list[Any] = []
    for row in rows_of(25):
        items += [StepIds(row[1], row[2], (row[1],)), row]
    segment = log_through(tmp_path / "log", witness, items)
    assert [item[1] if isinstance(item, tuple) else getattr(item, "step", None) for item in witness.seen] == [
        step for step in range(1, 26) for _ in range(2)
    ]
    assert [row.step for row in segment.rows()] == list(range(1, 26))
    seqs = {row.step: row.seq for row in segment.rows()}
    assert [(row["step"], row["seq"] > seqs[min(row["step"], 25)]) for row in segment["alerts"]] == [
        (10, True),
        (20, True),
        (999, True),
    ]
    assert segment.end["seq"] > segment["alerts"][-1]["seq"]


def test_ids_between_the_rows_do_not_make_more_batches(tmp_path: Path) -> None:
    """A thousand rows with ids are as few Arrow batches as without."""
    items: list[Any] = []
    for row in rows_of(1000):
        items += [StepIds(row[1], row[2], (row[1],)), row]
    folder = tmp_path / "log"
    witness = Witness()
    quiet = [item for item in items if not (isinstance(item, tuple) and item[1] % 10 == 0)]
    segment = log_through(folder, witness, quiet)
    assert len(segment.rows()) == 900
    parts = [*folder.glob("metrics-*.arrows")]
    assert sum(1 for part in parts for _ in read_batches(part)) < 10


def test_a_witness_that_fails_sees_nothing_more_and_the_log_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    segment = log_through(tmp_path / "log", Witness(fails_at=0), [*rows_of(20), alert(20, 200), *rows_of(0)])
    assert [row.step for row in segment.rows()] == list(range(1, 21))
    assert len(segment["alerts"]) == 1
    assert segment.end["exit"] == "finished"
    assert caplog.text.count("nothing looks at what is logged any more") == 1


def test_alerts_of_the_caller_are_completed_before_they_are_written(tmp_path: Path) -> None:
    """Those of the witness are not."""
    own = Record("alerts", {"time": 0, "step": 3, "tokens": 30, "rule": "data", "phase": "raised"})
    segment = log_through(tmp_path / "log", Witness(), [*rows_of(3), own])
    assert [(row["rule"], row["batch_hash"]) for row in segment["alerts"]] == [
        ("data", "noted"),
        (None, "seen"),
        (None, "seen"),
    ]


def test_ids_that_find_no_room_are_left_out_and_the_rows_are_not(tmp_path: Path) -> None:
    """Memory is bounded whatever is given, and an id costs as much as a point."""
    buffer = Buffer(100)
    assert buffer.put_mark(StepIds(1, 0, tuple(range(90))))
    assert not buffer.put_mark(StepIds(2, 0, tuple(range(20))))
    buffer.put(2, 20, {"a": 1.0})
    assert buffer.dropped_points == 0
    assert len(buffer.take(1000)) == 2
    run = llmtrack.open_run(tmp_path, run_id="run", settings=Settings(**{**TINY, "queue_points": 1000}))
    run.batches(1, range(10_000))
    run.log({"a": 1.0}, 1, 10, batch_ids=range(10_000))
    run.finish()
    assert isinstance(run, RecordingRun)
    assert [row.step for row in read_segment(run.folder).rows()] == [1]


@pytest.mark.parametrize("given", [{"batch_ids": 3.5}, {"batch_ids": [None]}, {"position": -1}, {"position": "x"}])
def test_what_are_no_ids_is_refused_with_the_row(tmp_path: Path, given: dict[str, Any]) -> None:
    """Nothing of it is stored."""
    run = llmtrack.open_run(tmp_path, run_id="run", settings=Settings(**TINY))
    with pytest.raises(UsageError):
        run.log({"a": 1.0}, 1, 10, **given)
    with pytest.raises(UsageError):
        run.log({"a": 1}, 1, 10, **given)
    run.finish()
    assert isinstance(run, RecordingRun)
    assert read_segment(run.folder).rows() == []


def test_a_run_that_records_nothing_has_the_same_methods() -> None:
    """On other ranks, and where logging is disabled."""
    run = llmtrack.Run("run", 1)
    run.log({"a": 1.0}, 1, 10, batch_ids=[1], position=1)
    run.batches(1, [1], 1)
    run.context("nothing", 1, 10)
    with run.pause():
        pass
    assert run.state_dict() == {}
    run.load_state_dict({})
    run.load_state_dict(None)
    assert run.alert_step == 0
