"""A daemon thread for what may take long (fsync, sealing, checkpoint ids), so that nothing else waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

_log = logging.getLogger("llmtrack")


class Worker:
    """Runs jobs one after another; its thread starts with the first job.

    Not a `ThreadPoolExecutor`: the interpreter waits at exit for those, and storage may hang for ever.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; never waits."""
        if self._thread is None:
            self._thread = Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def stop(self, timeout: float) -> bool:
        """End after the jobs that are queued, and return whether that happened within `timeout` seconds."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001  # the thread outlives the job, whatever is wrong with it: the next one must run
                _log.exception("llmtrack: a job on the thread %s failed", self._name)
