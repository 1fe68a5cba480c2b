"""What happens to runs when a process ends is tried on real processes in tests/crash; here, who may ask for it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from llmtrack.writer import shutdown
from llmtrack.writer.errors import UsageError


class Ending:
    """Something that notes how it was ended."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def finish(self, exit: str, detail: str | None, timeout: float) -> None:  # noqa: A002  # the column's name
        """Note how the run ends."""
        self.calls.append((exit, detail, timeout))

    def disown(self) -> None:
        """Note that the run is somebody else's."""
        self.calls.append(("disowned",))


def test_what_was_finished_is_not_kept() -> None:
    """A process that opens one run after another does not hold all of them."""
    before = set(shutdown._open_runs)
    run = Ending()
    shutdown.keep_until_exit(run)
    assert set(shutdown._open_runs) == before | {run}
    shutdown.forget(run)
    shutdown.forget(run)
    assert set(shutdown._open_runs) == before


def test_a_signal_can_only_be_asked_for_on_the_main_thread() -> None:
    """Python handles signals there alone, and says so less clearly."""
    errors: list[UsageError] = []

    def ask() -> None:
        try:
            shutdown.end_on_signal(Ending(), signal.SIGUSR1)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.parametrize("before", [signal.SIG_IGN, None])
def test_a_signal_ends_the_run_and_then_does_what_it_did_before(before: Any, request: pytest.FixtureRequest) -> None:
    """Ignored stays ignored, a handler is called; what kills is tried in a process of its own."""
    seen: list[int] = []
    installed = before or (lambda number, _frame: seen.append(number))
    original = signal.signal(signal.SIGUSR1, installed)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, original))
    run = Ending()
    shutdown.end_on_signal(run, signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert run.calls == [("preempted", "SIGUSR1", shutdown._SIGNAL_TIMEOUT_S)]
    assert seen == ([] if before else [signal.SIGUSR1])
