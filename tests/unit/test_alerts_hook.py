"""Whoever is to be told of an alert is told, and can neither hold nor hurt anybody."""

from __future__ import annotations

import json
import os
import select
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmtrack.writer.alerts.hook import Hook
from llmtrack.writer.errors import UsageError

ALERT = {"run_id": "run", "alert_id": "run-1-1", "step": 7, "message": "train/loss is 3", "value": float("nan")}
_LONG_S = 30.0  # a bound against hanging


def write_to(file: Path) -> list[str]:
    """Return a command that appends what it was told to a file."""
    program = (
        "import os, sys; file = open(sys.argv[1], 'a'); "
        "print(os.environ['LLMTRACK_ALERT_MESSAGE'], sys.stdin.read().strip(), sep='|', file=file)"
    )
    return [sys.executable, "-c", program, str(file)]


def test_a_function_is_called_with_each_alert_in_order() -> None:
    """On a thread of its own."""
    told: list[tuple[Any, str]] = []
    hook = Hook(lambda alert: told.append((alert, threading.current_thread().name)))
    for step in range(3):
        hook.tell({**ALERT, "step": step})
    assert hook.stop(_LONG_S)
    assert [(alert["step"], thread) for alert, thread in told] == [(step, "llmtrack-on-alert") for step in range(3)]


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_function_that_raises_is_called_again(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """For the next alert; what it raised is logged."""
    told: list[Any] = []

    def fail(alert: Any) -> None:
        told.append(alert)
        raise error("nobody listens")

    hook = Hook(fail)
    hook.tell(ALERT)
    hook.tell(ALERT)
    assert hook.stop(_LONG_S)
    assert len(told) == 2
    assert "nobody listens" in caplog.text


def test_a_function_that_hangs_holds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Alerts wait up to a bound; what is beyond is said once, and is in the log of the run."""
    release, entered = threading.Event(), threading.Event()
    told: list[Any] = []

    def hang(alert: Any) -> None:
        entered.set()
        release.wait(_LONG_S)
        told.append(alert)

    hook = Hook(hang)
    hook.tell(ALERT)
    assert entered.wait(_LONG_S)
    for _ in range(100):
        hook.tell(ALERT)
    assert not hook.stop(0.0)
    hook.tell(ALERT)  # after the end: nothing
    release.set()
    assert hook.stop(_LONG_S)
    assert len(told) == 33
    assert caplog.text.count("has not come back") == 1


@pytest.mark.parametrize("is_line", [False, True], ids=["words", "line"])
def test_a_command_gets_the_alert_as_json_and_in_its_environment(tmp_path: Path, is_line: bool) -> None:
    """As words, or as a line that is split as a shell would."""
    file = tmp_path / "told"
    hook = Hook(shlex.join(write_to(file)) if is_line else write_to(file))
    hook.tell(ALERT)
    assert hook.stop(_LONG_S)
    message, _, text = file.read_text(encoding="utf-8").partition("|")
    assert message == "train/loss is 3"
    assert json.loads(text) == {**ALERT, "value": "nan"}


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next alert is told."""
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    hook = Hook([sys.executable, "-c", program], command_s=2.0)
    hook.tell(ALERT)
    assert hook.stop(_LONG_S)
    assert "was killed: it took longer than 2 s" in caplog.text
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert _ends(pid)


@pytest.mark.parametrize("message", ["a\0b", "x" * 500_000, "\ud800"])
def test_a_command_is_told_of_any_message(message: str, tmp_path: Path) -> None:
    """What no environment variable can hold is in its standard input."""
    hook = Hook(write_to(tmp_path / "told"))
    hook.tell({**ALERT, "message": message})
    assert hook.stop(_LONG_S)
    _, _, text = (tmp_path / "told").read_text(encoding="utf-8").partition("|")
    assert json.loads(text)["message"] == message


def test_a_command_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its status and what it had to say."""
    hook = Hook([sys.executable, "-c", "import sys; sys.exit('no route to host')"])
    hook.tell(ALERT)
    hook.tell(ALERT)
    assert hook.stop(_LONG_S)
    assert caplog.text.count("ended with status 1: no route to host") == 1


def test_a_command_that_runs_when_the_run_ends_is_killed() -> None:
    """After the time that is left for it."""
    hook = Hook([sys.executable, "-c", "import time; time.sleep(600)"])
    hook.tell(ALERT)
    hook.stop(0.5)
    assert hook.stop(_LONG_S)


@pytest.mark.parametrize("target", [7, "", [], [7], "llmtrack-no-such-command --x", ["/nowhere/command"], "'"])
def test_what_cannot_be_called_is_refused_at_once(target: Any) -> None:
    """When the run is opened, not at the first alert."""
    with pytest.raises(UsageError, match="on_alert"):
        Hook(target)


def test_a_hook_without_an_alert_has_no_thread() -> None:
    """A run that goes well pays nothing."""
    threads = threading.active_count()
    assert Hook(print).stop(0.0)
    assert threading.active_count() == threads


def _ends(pid: int) -> bool:
    """Wait for a process that was killed: it may still be on its way."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], _LONG_S)[0])
    finally:
        os.close(process)
