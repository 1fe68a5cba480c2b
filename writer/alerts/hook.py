"""Tell somebody of an alert: a callable or a command, on a thread of its own, with a bound on everything."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

from llmtrack.writer.errors import UsageError

_log = logging.getLogger("llmtrack")

Alert = Mapping[str, object]
OnAlert = Callable[[Alert], object] | str | Sequence[str]

_WAITING: Final = 32  # alerts: whoever is told of more at once is told too much
_COMMAND_S: Final = 30.0
_ENV_PREFIX: Final = "LLMTRACK_ALERT_"
_LONGEST_VARIABLE: Final = 16_384  # bytes; a process with more than 128 KiB in one does not start
_SHOWN_OUTPUT: Final = 400  # characters of what a command that failed had to say


class Hook:
    """Calls a function, or runs a command, for every alert that is raised.

    `tell` never waits: a function that hangs keeps its thread and no other, a command that hangs is killed with all
    that it started, and alerts that come meanwhile wait up to a bound and are then left to the log.

    Args:
        target: A function that takes the alert as a dict, or a command. A command gets the alert as JSON on its
            standard input, and its columns as environment variables: ``LLMTRACK_ALERT_MESSAGE`` and so on. A string
            is split as a shell would, and no shell is started.
        command_s: Seconds after which a command is killed.

    Raises:
        UsageError: It is neither.
    """

    def __init__(self, target: OnAlert, *, command_s: float = _COMMAND_S) -> None:
        self._call = target if callable(target) else None
        self._command = [] if callable(target) else _words(target)
        self._command_s = command_s
        self._alerts: SimpleQueue[Alert | None] = SimpleQueue()  # its put is safe in a signal handler
        self._thread: Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_warned = False
        self._is_over = False

    def tell(self, alert: Alert) -> None:
        """Pass an alert on, and return at once; on any thread."""
        if self._is_over:
            return
        if self._thread is None:
            self._thread = Thread(target=self._main, name="llmtrack-on-alert", daemon=True)
            self._thread.start()
        if self._alerts.qsize() < _WAITING:
            self._alerts.put(dict(alert))
        else:
            self._warn("it has not come back from earlier alerts; this one and more are only in the log")

    def stop(self, timeout: float) -> bool:
        """Wait for what is on its way, for at most `timeout` seconds; then kill the command that still runs."""
        self._is_over = True
        if self._thread is None:
            return True
        self._alerts.put(None)
        self._thread.join(max(timeout, 0.0))
        process = self._process
        if process is not None:
            _kill(process)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while (alert := self._alerts.get()) is not None:
            try:
                if self._call is not None:
                    self._call(alert)
                else:
                    self._run(alert)
            except BaseException:  # noqa: BLE001  # whatever a caller's function does, sys.exit too: the next is to be told
                _log.exception("llmtrack: on_alert failed")

    def _run(self, alert: Alert) -> None:
        plain = {name: _plain(value) for name, value in alert.items()}
        variables = {
            f"{_ENV_PREFIX}{name.upper()}": _variable(value)
            for name, value in plain.items()
            if isinstance(value, str | int | float)
        }
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,  # what it starts is killed with it
        )
        self._process = process
        try:
            _, said = process.communicate(json.dumps(plain).encode() + b"\n", timeout=self._command_s)
            if process.returncode:
                text = said.decode("utf-8", "replace").strip()[-_SHOWN_OUTPUT:]
                self._warn(f"{self._command[0]} ended with status {process.returncode}: {text or 'it said nothing'}")
        except subprocess.TimeoutExpired:
            self._warn(f"{self._command[0]} was killed: it took longer than {self._command_s:.0f} s")
            _kill(process)
        finally:
            self._process = None
            _close(process)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("llmtrack: on_alert: %s", message)


def _words(command: str | Sequence[str]) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else list(map(os.fspath, command))
    except (TypeError, ValueError):
        words = []
    if not words or not words[0]:
        raise UsageError(f"on_alert={command!r}", hint="give a function of one argument, or a command")
    if shutil.which(words[0]) is None:
        raise UsageError(f"on_alert: there is no command {words[0]!r}", hint="give its path")
    return words


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command that takes too long, and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Leave neither a zombie nor an open pipe behind."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    for pipe in (process.stdin, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _variable(value: object) -> str:
    """Return a value as an environment variable can hold it; its standard input has all of it."""
    return os.fsdecode(str(value).encode("utf-8", "replace").replace(b"\0", b"?")[:_LONGEST_VARIABLE])


def _plain(value: object) -> Any:
    """Return a value as JSON has it; a float that JSON has not as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
