"""What every test gets: an environment without the developer's settings, and a check of what it left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# Read when the clients are imported, which may be at collection: nothing here is to call home.
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", WANDB_ERROR_REPORTING="false")

# A shell starts what is to run in the background with Ctrl-C ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is slow for a moment, and that is no failure. Derandomisation under CI stays as Hypothesis has it.
hypothesis.settings.register_profile("llmtrack", deadline=None)
hypothesis.settings.load_profile("llmtrack")

_SETTINGS = ("LLMTRACK_", "SLURM_", "WANDB_", "MLFLOW_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEPT = ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING")

_ENDING_S = 3.0  # how long a thread that is on its way out may take to get there


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Take away what the shell or a Slurm job set, and keep state out of the home folder."""
    for name in list(os.environ):
        if (name.startswith(_SETTINGS) or name in _RANKS) and name not in _KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state-home"))


@pytest.fixture(autouse=True)
def _no_leaks(_environment: None) -> Iterator[None]:
    """Fail a test that leaves a thread running or a file open; set up first, so it looks last."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads and not _belongs_to_a_client(thread)]
    for thread in left:
        thread.join(_ENDING_S)
    running = [thread for thread in left if thread.is_alive()]
    still_open = _open_files() - files
    if still_open:
        gc.collect()  # an unreachable cycle is no leak; only looked at then, because a collection is slow beside torch
        still_open &= _open_files()
    assert not running, f"threads left running: {running}"
    assert not still_open, f"files left open: {sorted(still_open)}"


def _belongs_to_a_client(thread: threading.Thread) -> bool:
    """Return whether a library that we only use started this thread, and keeps it for the life of the process."""
    target = getattr(thread, "_target", None) or type(thread).run
    module = sys.modules.get(getattr(target, "__module__", ""))
    file = getattr(module, "__file__", None)
    return file is not None and "site-packages" in Path(file).parts and "llmtrack" not in Path(file).parts


def _open_files() -> set[str]:
    """Return the regular files that this process holds open, less those that a client's connection pool keeps."""
    return {file.path for file in psutil.Process().open_files() if not file.path.startswith(sys.prefix)}
