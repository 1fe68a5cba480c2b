"""Measure what a watch costs while nothing happens, and how soon a row is in the tracker after its flush.

    python benchmarks/bench_watch.py                      # 1,000 finished runs: minutes for sending them first
    python benchmarks/bench_watch.py --runs 100 --idle-s 60

Prints Markdown. CPU is what the process used, whatever else the machine did; times depend on the machine's load, which
is printed too. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

import llmtrack

_RENEWED_BYTES = 210e6
_RESTS = 3  # stretches in a row
_REST_S = 10.0
_REST_SHARE = 0.01  # of a core
_SYNC = (sys.executable, "-c", "from llmtrack.sync.cli import main; main()")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="finished runs in the root")
    parser.add_argument("--idle-s", type=float, default=120.0, help="how long the idle watch is measured")
    parser.add_argument("--rows", type=int, default=20, help="rows whose way is measured, for each kind of watching")
    parser.add_argument("--keep", type=Path, help="a folder that keeps root, database and state for the next time")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        _make_runs(folder / "root", options.runs)
        print(f"{options.runs} finished runs; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        print("| watch | CPU of one core | RSS | own memory | threads | open files |\n|---|---|---|---|---|---|")
        for name, more in (("events", ()), ("--poll 15", ("--poll", "15"))):
            with _watch(folder, *more) as (process, _):
                _wait_until_idle(folder, process)
                _wait_until_renewed(process)
                print(f"| {name} {_idle(process, options.idle_s)}", flush=True)
        print("\n| watch | median | slowest of | rows |\n|---|---|---|---|")
        for name, more in (("events", ()), ("--poll 2", ("--poll", "2"))):
            with _watch(folder, *more) as (process, _):
                _wait_until_idle(folder, process)
                delays = _delays(folder, options.rows)
                print(f"| {name} | {median(delays):.1f} s | {max(delays):.1f} s | {len(delays)} |", flush=True)


def _make_runs(root: Path, runs: int) -> None:
    root.mkdir(exist_ok=True)
    first = root / "run_id=done-0000"
    if not first.exists():
        with llmtrack.open_run(root, run_id="done-0000", project="bench") as run:
            for step in range(1, 21):
                run.log({"train/loss": 1.0 / step}, step=step, tokens=step * 100)
    for number in range(1, runs):
        copy = root / f"run_id=done-{number:04d}"
        if not copy.exists():
            shutil.copytree(first, copy)


@contextlib.contextmanager
def _watch(folder: Path, *options: str) -> Iterator[tuple[psutil.Process, Path]]:
    database = folder / "mlflow.db"
    place = ["--to", "mlflow", "--tracking-uri", f"sqlite:///{database}", "--state", str(folder / "state")]
    with (folder / "watch.log").open("ab") as log:
        process = subprocess.Popen([*_SYNC, str(folder / "root"), *place, "--watch", *options], stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid), database
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_until_idle(folder: Path, process: psutil.Process) -> None:
    """Wait until all runs are known to be there, and the process has been at rest for some seconds."""
    (path,) = _until(lambda: list((folder / "state").glob("*/root-*.owner")))
    record = path.with_suffix(".json")
    runs = len(list((folder / "root").glob("run_id=*")))
    _until(lambda: _complete(record) >= runs)
    rests = 0
    while rests < _RESTS:
        before = process.cpu_times()
        time.sleep(_REST_S)  # the stretch that is measured
        after = process.cpu_times()
        # One that is starved by others and asks for the rest of the runs has more.
        used_s = after.user + after.system - before.user - before.system
        rests = rests + 1 if used_s < _REST_SHARE * _REST_S else 0


def _wait_until_renewed(process: psutil.Process) -> None:
    """Wait until a watch that has sent something has given back the tracker's library."""
    deadline = time.monotonic() + 180
    while process.memory_info().rss > _RENEWED_BYTES and time.monotonic() < deadline:
        time.sleep(1)
    time.sleep(30)  # beginning anew, and asking whether all is there


def _complete(record: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(record.read_bytes())
        return sum(bool(run["complete"]) or run["last_success"] is not None for run in content["runs"].values())
    return 0


def _until(happened: Any) -> Any:
    while not (result := happened()):
        time.sleep(0.5)
    return result


def _idle(process: psutil.Process, seconds: float) -> str:
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    used = after.user + after.system - before.user - before.system
    memory = process.memory_full_info()
    return (
        f"| {max(0.0, 100 * used / took):.2f} % | {memory.rss / 1e6:.0f} MB | {memory.uss / 1e6:.0f} MB"
        f" | {process.num_threads()} | {process.num_fds()} |"
    )


def _delays(folder: Path, rows: int) -> list[float]:
    """Return for some rows how many seconds after their flush they are in the database."""
    run_id = f"live-{dt.datetime.now(dt.UTC):%H%M%S}"
    run = llmtrack.open_run(folder / "root", run_id=run_id, project="bench")
    delays = []
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)) as con:
        for step in range(1, rows + 1):
            value = step + 0.125
            run.log({"delay": value}, step=step, tokens=step * 100)
            run.flush()
            began = time.monotonic()
            _wait_for(con, run_id, value)
            delays.append(time.monotonic() - began)
            time.sleep(1.7)  # not in step with anything
    run.finish()
    return delays


def _wait_for(con: sqlite3.Connection, run_id: str, value: float) -> None:
    statement = (
        "SELECT 1 FROM metrics m JOIN tags t ON t.run_uuid = m.run_uuid AND t.key = 'llmtrack.run_id' AND t.value = ?"
        " WHERE m.key = 'delay' AND m.value = ?"
    )
    while True:
        with contextlib.suppress(sqlite3.OperationalError):
            if con.execute(statement, [run_id, value]).fetchone():
                return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
