"""Begins the process anew, with the same number and the same arguments, to give back the memory of a tracker's library.

A library that has sent something is 150 MB that Python never gives back, and nobody knows what it has lost after a
month. What a watch must not forget is on disk; what it has said it would sum up at the end goes through a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from llmtrack.sync.replay.replay import Report
from llmtrack.writer.log.publish import publish

_VARIABLE: Final = "LLMTRACK_SYNC_RENEWED"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def used_bytes() -> int:
    """Return the memory that this process has; 0 when there is no telling."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def renew(file: Path, reports: dict[str, Report]) -> None:
    """Begin anew; returns only when that is not possible.

    Signals that come meanwhile wait until `welcome` lets them in.

    Args:
        file: For what is to be remembered; the next life removes it.
        reports: What was done so far, by run.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        publish(file, json.dumps({run_id: asdict(report) for run_id, report in reports.items()}).encode())
        os.execve(sys.executable, sys.orig_argv, os.environ | {_VARIABLE: str(file)})  # noqa: S606 - ourselves
    except (OSError, TypeError, ValueError):  # it was only for the sake of memory
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def remembered() -> dict[str, Report]:
    """Return what an earlier life of this process did, by run."""
    name = os.environ.pop(_VARIABLE, None)
    if name is None:
        return {}
    file = Path(name)
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(file.read_bytes())
        file.unlink()
        return {run_id: Report(**report) for run_id, report in content.items()}
    return {}


def welcome() -> None:
    """Let signals in, once there is somebody who handles them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
