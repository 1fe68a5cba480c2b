"""A flag is set once, for everybody who waits."""

from __future__ import annotations

import signal
import threading

import pytest

from llmtrack.writer.log.flag import Flag


def test_a_flag_is_not_set_at_first() -> None:
    """Waiting for it ends with the time."""
    flag = Flag()
    assert not flag.is_set()
    assert not flag.wait(0.0)
    assert not flag.wait(-1.0)
    assert not flag.wait(0.01)


def test_a_flag_that_is_set_stays_set() -> None:
    """Nobody waits for it any more, however often it is set."""
    flag = Flag()
    flag.set()
    flag.set()
    assert flag.is_set()
    assert flag.wait(0.0)
    assert flag.wait(1e12)


def test_everybody_who_waits_goes_on() -> None:
    """One flag, many threads."""
    flag = Flag()
    seen: list[bool] = []
    waiting = threading.Barrier(6)

    def wait() -> None:
        waiting.wait()
        seen.append(flag.wait(60.0))

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    waiting.wait()
    flag.set()
    for thread in threads:
        thread.join()
    assert seen == [True] * 5


def test_a_signal_handler_can_wait_for_the_flag_that_it_interrupts_the_wait_for(
    request: pytest.FixtureRequest,
) -> None:
    """With an event the handler would wait for the thread that it interrupts."""
    interrupted: list[bool] = []
    to_be_set = [Flag()]
    to_be_set[0].set()

    def handle(_number: int, _frame: object) -> None:
        interrupted.append(to_be_set[0].wait(30.0))

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    before = signal.signal(signal.SIGALRM, handle)
    request.addfinalizer(end)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0003)
    for _ in range(1_000):
        flag = Flag()
        setter = threading.Thread(target=flag.set)
        setter.start()
        to_be_set[0] = flag
        assert flag.wait(30.0)
        setter.join()
    end()
    assert interrupted
    assert all(interrupted)
