"""A worker does its jobs one after another, and nobody waits for it who does not want to."""

from __future__ import annotations

import functools
import threading

import pytest

from llmtrack.writer.log.worker import Worker


def test_jobs_are_done_in_order() -> None:
    """On one thread, that starts with the first."""
    worker = Worker("llmtrack-test")
    done: list[int] = []
    threads: set[str] = set()

    def job(number: int) -> None:
        done.append(number)
        threads.add(threading.current_thread().name)

    for number in range(100):
        worker.submit(functools.partial(job, number))
    assert worker.stop(30.0)
    assert done == list(range(100))
    assert threads == {"llmtrack-test"}


def test_a_worker_without_a_job_has_no_thread() -> None:
    """Most runs never seal a part before their end."""
    before = threading.active_count()
    worker = Worker("llmtrack-test")
    assert threading.active_count() == before
    assert worker.stop(0.0)


def test_a_job_that_fails_is_said_and_the_next_one_done(caplog: pytest.LogCaptureFixture) -> None:
    """A defect in one is not the end of all."""
    worker = Worker("llmtrack-test")
    done: list[int] = []
    worker.submit(lambda: done.append(1 // 0))
    worker.submit(lambda: done.append(2))
    assert worker.stop(30.0)
    assert done == [2]
    assert "ZeroDivisionError" in caplog.text


def test_stopping_waits_no_longer_than_it_is_told() -> None:
    """A job that hangs in a system call hangs alone, and the interpreter does not wait for its thread."""
    worker = Worker("llmtrack-test")
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()

    worker.submit(hang)
    begun.wait()
    assert not worker.stop(0.0)
    assert not worker.stop(-5.0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "llmtrack-test"]
    assert thread.daemon
    release.set()
    assert worker.stop(30.0)
