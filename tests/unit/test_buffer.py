"""The queue between the training loop and the drain: bounded, in order, and it counts what it drops."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.log.buffer import Barrier, Buffer, Gap, Item, Record


def steps(items: list[Item]) -> list[int]:
    """Return the step of each row."""
    return [item[1] for item in items if isinstance(item, tuple)]


def row(points: int) -> dict[str, float]:
    """Return the values of a row."""
    return {f"m/{index}": float(index) for index in range(points)}


def test_what_is_put_is_taken_in_order() -> None:
    """Rows and records alike."""
    buffer = Buffer(100)
    record, barrier = Record("alerts", {}), Barrier()
    buffer.put(1, 10, row(2))
    buffer.put_item(record)
    buffer.put(2, 20, row(2))
    buffer.put_item(barrier)
    first, second, third, fourth = buffer.take(1000)
    assert isinstance(first, tuple)
    assert first[1:] == (1, 10, row(2))
    assert second is record
    assert isinstance(third, tuple)
    assert fourth is barrier
    assert buffer.take(1000) == []


def test_no_more_is_taken_than_was_asked_for_and_one_row() -> None:
    """A batch is bounded, and a row that is larger than the bound is taken all the same."""
    buffer = Buffer(1000)
    for step in range(10):
        buffer.put(step, step, row(10))
    assert steps(buffer.take(25)) == [0, 1, 2]
    assert steps(buffer.take(10)) == [3]
    assert steps(buffer.take(1)) == [4]
    assert steps(buffer.take(1000)) == [5, 6, 7, 8, 9]


def test_what_does_not_fit_is_a_gap_where_it_would_have_stood() -> None:
    """With its range of tokens and its points; the gap ends where the next row fits."""
    buffer = Buffer(4)
    for step in range(5):
        buffer.put(step, step * 10, row(2))
    assert steps(buffer.take(1000)) == [0, 1]
    buffer.put(5, 50, row(2))
    gap, after = buffer.take(1000)
    assert gap == Gap(20, 40, 4, 6, "queue_full", None)
    assert isinstance(after, tuple)
    assert after[1] == 5
    assert buffer.dropped_points == 6


def test_a_gap_has_the_error_that_the_storage_had_when_it_began() -> None:
    """The drain says what the system said."""
    buffer = Buffer(0)
    buffer.errno = 28
    buffer.put(1, 10, row(1))
    buffer.errno = None
    buffer.put(2, 20, row(1))
    buffer.put_item(Barrier())
    gap, _ = buffer.take(1000)
    assert gap == Gap(10, 20, 2, 2, "io_error", 28)


def test_a_gap_at_the_very_end_is_taken_with_what_ends_the_segment() -> None:
    """No row follows that could bring it along."""
    buffer = Buffer(2)
    buffer.put(1, 10, row(2))
    buffer.put(2, 20, row(2))
    record = Record("segments", {})
    buffer.put_item(record)
    assert buffer.take(1000)[1:] == [Gap(20, 20, 2, 2, "queue_full", None), record]


def test_a_record_is_never_dropped() -> None:
    """However full the queue is."""
    buffer = Buffer(2)
    for step in range(10):
        buffer.put(step, step, row(2))
        buffer.put_item(Record("alerts", {"step": step}))
    assert sum(isinstance(item, Record) for item in buffer.take(1000)) == 10


def test_nothing_is_taken_in_once_the_run_is_over() -> None:
    """It is counted, and stays so when the drain looks again."""
    buffer = Buffer(100)
    buffer.put(1, 10, row(1))
    buffer.refuse()
    buffer.put(2, 20, row(1))
    assert steps(buffer.take(1000)) == [1]
    buffer.put(3, 30, row(1))
    assert steps(buffer.take(1000)) == []
    assert buffer.dropped_points == 2


def test_the_drain_is_to_be_woken_when_a_quarter_of_the_room_is_taken() -> None:
    """Long before anything has to be dropped; `log` compares with this one number."""
    buffer = Buffer(100)
    assert buffer.easy_points == 25
    for _ in range(10):
        buffer.put(1, 1, row(10))
    buffer.take(30)
    assert buffer.easy_points == 30 + 25
    buffer.take(1000)
    assert buffer.easy_points == 100 + 25


def test_a_count_that_came_out_low_is_right_again_when_the_queue_is_empty() -> None:
    """Two threads that log at the same moment may each count from the same number."""
    buffer = Buffer(10)
    for _ in range(5):
        before = buffer.put_points
        buffer.put(1, 1, row(2))
        buffer.put_points = before  # what the other thread read
    assert len(buffer.take(1000)) == 5
    for step in range(7):
        buffer.put(step, step, row(2))
    assert steps(buffer.take(1000)) == [0, 1, 2, 3, 4]


@given(st.data())
def test_the_queue_never_holds_more_than_its_limit_and_every_point_is_taken_or_counted(data: st.DataObject) -> None:
    """Whatever is put and taken in whatever order, the accounts do not drift."""
    limit = data.draw(st.integers(0, 60), "limit")
    buffer = Buffer(limit)
    held = put = taken = gaps = 0
    waiting: list[int] = []
    seen: list[int] = []
    for step in range(data.draw(st.integers(0, 40), "operations")):
        if data.draw(st.booleans(), "put"):
            points = data.draw(st.integers(1, 20), "points")
            buffer.put(step, step, row(points))
            put += points
            if held + points <= limit:
                held += points
                waiting.append(step)
        else:
            items = buffer.take(data.draw(st.integers(1, 50), "at most"))
            for item in items:
                if isinstance(item, tuple):
                    seen.append(item[1])
                    held -= len(item[3])
                    taken += len(item[3])
                elif isinstance(item, Gap):
                    gaps += item.points
        assert sum(len(item[3]) for item in buffer.items if isinstance(item, tuple)) == held <= limit
    buffer.put_item(Barrier())
    rest: list[Any] = buffer.take(10_000)
    seen += steps(rest)
    taken += sum(len(item[3]) for item in rest if isinstance(item, tuple))
    gaps += sum(item.points for item in rest if isinstance(item, Gap))
    assert seen == waiting
    assert taken + gaps == put
    assert gaps == buffer.dropped_points
