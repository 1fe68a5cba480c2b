"""Which run is replayed next when several are at once: parents before children, runs that live before backlogs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from .classify import LoggedRun


class Queue:
    """Hands out runs, each once and not before its parent is done; may be used by several threads.

    What is being trained comes first, with its ancestors: a live run waits for nobody's backlog.
    """

    def __init__(self, runs: Sequence[LoggedRun]) -> None:
        parent_of = {run.run_id: run.parent_run for run in runs}
        urgent = set[str]()
        for run in runs:
            ancestor: str | None = run.run_id if run.status == "running" else None
            while ancestor in parent_of and ancestor not in urgent:
                urgent.add(ancestor)
                ancestor = parent_of[ancestor]
        self._waiting = sorted(runs, key=lambda run: run.run_id not in urgent)  # keeps the order otherwise
        self._unfinished = {run.run_id for run in runs}
        self._changed = threading.Condition()
        self._stopped = False

    def take(self) -> LoggedRun | None:
        """Return the next run, and wait while each of those left has a parent under way; None when there is none."""
        with self._changed:
            while self._waiting and not self._stopped:
                for run in self._waiting:
                    if run.parent_run not in self._unfinished or run.parent_run == run.run_id:
                        self._waiting.remove(run)
                        return run
                if len(self._unfinished) == len(self._waiting):  # parents in a circle, which only damage can make
                    return self._waiting.pop(0)
                self._changed.wait()
            return None

    def done(self, run: LoggedRun) -> None:
        """Let the children of a run have their turn."""
        with self._changed:
            self._unfinished.discard(run.run_id)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def work_off(
    runs: Sequence[LoggedRun],
    jobs: int,
    work: Callable[[LoggedRun], bool],
    *,
    end: Callable[[], None],
    wait_s: float,
) -> None:
    """Call a function for every run, for several at once, and return when all calls have.

    Args:
        runs: Parents before their children.
        jobs: How many at once.
        work: Returns whether to go on with further runs.
        end: Called when this one is interrupted, to make calls under way end.
        wait_s: How long calls under way are waited for then; they end with the process.

    Raises:
        BaseException: The first that a call raised, or an interrupt.
    """
    queue = Queue(runs)
    raised: list[BaseException] = []

    def labour() -> None:
        while (run := queue.take()) is not None:
            try:
                if not work(run):
                    queue.stop()
            except BaseException as error:  # noqa: BLE001 - the end of a thread: it is raised again by its maker
                raised.append(error)
                queue.stop()
            finally:
                queue.done(run)

    threads = [
        threading.Thread(target=labour, daemon=True, name=f"llmtrack-run-{n}") for n in range(min(jobs, len(runs)))
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads)
    except BaseException:
        queue.stop()
        end()
        _join(threads, wait_s)
        raise
    if raised:
        raise raised[0]


def _join(threads: Iterable[threading.Thread], wait_s: float | None = None) -> None:
    for thread in threads:
        thread.join(wait_s)
