"""Several runs at once: parents before children, live runs before backlogs, and nobody waits for ever."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmtrack.sync.replay.classify import LoggedRun
from llmtrack.sync.replay.jobs import Queue, work_off
from llmtrack.sync.replay.patience import Patience, StoppedError
from llmtrack.writer.errors import RetryableSinkError


def logged(run_id: str, parent: str | None = None, status: str = "finished") -> LoggedRun:
    """Return a run of which only this is asked."""
    return LoggedRun(
        run_id=run_id,
        project="p",
        name=run_id,
        status=status,
        parent_run=parent,
        fork={},
        settled_to=None,
        start_ms=0,
        end_ms=None,
        git_commit=None,
        config={},
        recipe={},
        segments=[],
    )


def order(runs: list[LoggedRun], jobs: int = 1) -> list[str]:
    """Return the runs in the order in which they were worked off."""
    done: list[str] = []

    def work(run: LoggedRun) -> bool:
        done.append(run.run_id)
        return True

    work_off(runs, jobs, work, end=lambda: None, wait_s=1.0)
    return done


def test_a_live_run_and_its_ancestors_come_before_backlogs() -> None:
    """Otherwise the order stays what it was."""
    runs = [logged("a"), logged("b"), logged("c", "b"), logged("d", "c", "running"), logged("e", "a")]
    assert order(runs) == ["b", "c", "d", "a", "e"]


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_a_child_waits_for_its_parent(jobs: int) -> None:
    """However many work at once; a parent that is not among the runs is not waited for."""
    runs = [logged("0", "elsewhere"), *(logged(str(n), str((n - 1) // 2)) for n in range(1, 40))]
    done = set[str]()
    lock = threading.Lock()

    def work(run: LoggedRun) -> bool:
        with lock:
            assert run.parent_run == "elsewhere" or run.parent_run in done
        with lock:
            done.add(run.run_id)
        return True

    work_off(runs, jobs, work, end=lambda: None, wait_s=1.0)
    assert len(done) == 40


def test_parents_in_a_circle_come_to_an_end() -> None:
    """Only damage makes one."""
    assert sorted(order([logged("a", "b"), logged("b", "a"), logged("c", "c")], jobs=2)) == ["a", "b", "c"]


def test_as_many_are_under_way_as_there_are_jobs() -> None:
    """Four runs meet, and none could go on alone."""
    together = threading.Barrier(4, timeout=30.0)

    def work(run: LoggedRun) -> bool:
        assert run.status == "finished"
        together.wait()
        return True

    work_off([logged(str(n)) for n in range(8)], 4, work, end=lambda: None, wait_s=1.0)
    assert not together.broken


def test_no_more_are_handed_out_after_one_says_stop() -> None:
    """As when the tracker refuses us as such."""
    done: list[str] = []

    def work(run: LoggedRun) -> bool:
        done.append(run.run_id)
        return len(done) < 2

    work_off([logged(str(n)) for n in range(5)], 1, work, end=lambda: None, wait_s=1.0)
    assert done == ["0", "1"]


def test_what_a_call_raises_reaches_the_caller() -> None:
    """And ends the others."""

    def work(run: LoggedRun) -> bool:
        raise KeyError(run.run_id)

    with pytest.raises(KeyError, match="0"):
        work_off([logged("0"), logged("1")], 1, work, end=lambda: None, wait_s=1.0)


def test_a_queue_that_was_stopped_gives_nothing() -> None:
    """Also to one who waits."""
    queue = Queue([logged("a"), logged("b", "a")])
    first = queue.take()
    assert first is not None
    taken: list[LoggedRun | None] = []
    waiting = threading.Thread(target=lambda: taken.append(queue.take()))
    waiting.start()
    queue.stop()
    waiting.join()
    assert taken == [None]


def heard(error: RetryableSinkError, pause_s: float) -> None:
    """Hear of a wait that no test should see."""
    raise AssertionError((error, pause_s))


def test_patience_that_was_stopped_asks_nobody() -> None:
    """Nor do its forks, made before or after; another fork of the same tracker goes on when one is stopped."""
    patience = Patience(60.0, heard)
    one, other = patience.fork(), patience.fork()
    one.stop()
    with pytest.raises(StoppedError):
        one.call(lambda: 1)
    assert other.call(lambda: 2) == 2
    patience.stop()
    for each in (patience, other, patience.fork()):
        with pytest.raises(StoppedError):
            each.call(lambda: 3)


def test_a_tracker_that_says_when_is_asked_then() -> None:
    """Retry-After is heeded, and never beyond the end of patience."""
    pauses: list[float] = []

    def waiting(error: RetryableSinkError, pause_s: float) -> None:
        assert error.retry_after_s is not None
        pauses.append(pause_s)
        patience.stop()

    patience = Patience(1000.0, waiting)

    def busy() -> None:
        error = RetryableSinkError("busy", sink="memory")
        error.retry_after_s = 3600.0
        raise error

    with pytest.raises(RetryableSinkError, match="stopped"):
        patience.call(busy)
    assert 500 < pauses[0] <= 1000


def test_no_more_calls_are_under_way_than_the_tracker_takes(tmp_path: Path) -> None:
    """From however many threads and forks."""
    patience = Patience(60.0, heard, at_once=2)
    under_way, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        (tmp_path / threading.current_thread().name).write_text("something that takes a while")
        with lock:
            under_way -= 1

    threads = [threading.Thread(target=lambda: patience.fork().call(call)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most <= 2
