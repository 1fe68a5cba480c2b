"""A watch on a network file system, emulated: no events, attributes that are late, looks that fail, clocks that differ.

What the watch sees goes through `stalefs.c`; trainers write to the same folder as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrack.sync.mlflow.sink import MlflowSink
from tests.faults import wait_until
from tests.watching import difference, expected, statuses, stored

_HERE = Path(__file__).parent
_SYNC = (sys.executable, "-c", "from llmtrack.sync.cli import main; main()")
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
_ENOUGH_S = 300.0  # for what must happen; nothing is asserted about how fast


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulation."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulation needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("stalefs") / "stalefs.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_HERE / "stalefs.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@contextlib.contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_ENVIRONMENT | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _told(log: Path, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [row for row in rows if row["event"] == event]


def test_late_attributes_failing_looks_and_other_clocks_change_nothing(tmp_path: Path, library: Path) -> None:
    """Trainers are killed, roll back, fork and finish on hosts whose clocks are minutes before and behind."""
    root, database, checkpoints = tmp_path / "root", tmp_path / "mlflow.db", tmp_path / "checkpoints"
    root.mkdir()
    checkpoints.mkdir()
    sink = MlflowSink(f"sqlite:///{database}", timeout_s=60)
    sink.open()
    sink.close()

    def train(clock_s: int, rows: int, **how: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        words = [str(root), str(checkpoints), "run", "50", str(rows)]
        clock = {"LD_PRELOAD": str(library), "STALEFS_CLOCK_S": str(clock_s)}
        return _running([sys.executable, str(_HERE / "watched.py"), *words], tmp_path / "trainers.log", clock | how)

    def saved(segment: str) -> list[Path]:
        return sorted(checkpoints.glob(f"run-{segment}-*.json"))

    place = ["--to", "mlflow", "--tracking-uri", f"sqlite:///{database}", "--state", str(tmp_path / "state")]
    options = ["--watch", "--json", "--poll", "0.5", "--lost-after", "86400"]
    remote = {"LD_PRELOAD": str(library), "STALEFS_ROOT": str(root)}
    remote |= {"STALEFS_CACHE_MS": "2000", "STALEFS_SLOW_MS": "1", "STALEFS_FAIL": "200"}
    log = tmp_path / "watch.log"
    with _running([*_SYNC, str(root), *place, *options], log, remote) as watch:
        with train(300, 0):
            wait_until(lambda: len(saved("00001")) >= 2, "it has saved something")
        first, second = saved("00001")[:2]
        with train(-300, 0, RESUME=str(first), ON_ROLLBACK="continue"):
            wait_until(lambda: len(saved("00002")) >= 2, "it went on from the older one")
        with (
            train(0, 30, RESUME=str(second), RECIPE="0.2") as child,
            train(-120, 60, RESUME=str(saved("00002")[1])) as it,
        ):
            assert (child.wait(), it.wait()) == (0, 0)

        def is_there() -> bool:
            done = statuses(database)
            return len(done) == 2 and set(done.values()) == {"FINISHED"} and not _left(root, database)

        deadline_s = time.monotonic() + _ENOUGH_S
        while not is_there() and time.monotonic() < deadline_s:
            time.sleep(0.5)  # between two looks: another process is waited for, which tells nobody
        assert not _left(root, database), log.read_text()[-6000:]
        assert is_there(), (statuses(database), log.read_text()[-6000:])
        watch.send_signal(signal.SIGTERM)
        assert watch.wait() == 0, log.read_text()[-6000:]
    assert {told["mode"] for told in _told(log, "watching")} == {"polling"}
    assert not [told for event in ("stalled", "lost") for told in _told(log, event)]


def _left(root: Path, database: Path) -> Any:
    try:
        return difference(expected(root), stored(database))
    except AssertionError as error:  # a run made twice, so far
        return error
