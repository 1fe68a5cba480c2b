"""What llmtrack-sync costs beside MLflow's bare client sending the same points, in one run on one machine.

    python benchmarks/bench_sync.py                   # a server over HTTP and a local database; many minutes
    python benchmarks/bench_sync.py --to http --points 1000000
    python benchmarks/bench_sync.py --to http --points 50000 --rounds 5 --only bare-1,full    # medians: a busy machine
    python benchmarks/bench_sync.py --json figures.json

The bare client is the loop that anybody would write: MLflow's own `log_batch`, batches of a thousand, points prepared
before the clock starts; once in one thread, and once in as many as the sync has lanes. It reads nothing back. Each
candidate runs in a process of its own; the clock of the sync starts before its imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from workload import TOKENS_PER_STEP, metric_names, metric_values

from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter

_METRICS: Final = 20
_EPOCH_MS: Final = 1_767_225_600_000
_ROW_MS: Final = 100
_PART_ROWS: Final = 25_000
_BATCH: Final = 1000
_LANES: Final = 4
_QUIET: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


def main() -> None:
    """Measure, and print a table for each kind of tracker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=300_000)
    parser.add_argument("--to", default="http,embedded")
    parser.add_argument("--only", default="bare-1,bare-4,off,fast,full", help="candidates, in this order")
    parser.add_argument("--rounds", type=int, default=1, help="so often, in turn; medians are shown")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare", nargs=3, metavar=("URI", "ROOT", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        _send_bare(options.bare[0], Path(options.bare[1]), int(options.bare[2]))
        return
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="llmtrack-bench-") as name:
        folder = Path(name)
        root = folder / "root"
        _write_log(root, options.points)
        for kind in options.to.split(","):
            figures += _measure(kind, root, folder, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def _measure(kind: str, root: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    only, points = options.only.split(","), options.points
    store = f"sqlite:///{folder / kind}.db"
    with _serving(store, folder) if kind == "http" else contextlib.nullcontext((store, None)) as (uri, server):
        for number in range(options.rounds):
            for candidate in only:
                if candidate == "bare-4" and kind == "embedded":
                    continue  # in one process the inserting holds the interpreter
                command = _command(f"{candidate}-{number}", uri, root, folder)
                said = {"to": kind, "candidate": candidate, "round": number}
                figures.append(said | _run(command, server))
                if candidate == "full" and number == options.rounds - 1:
                    figures.append(said | {"candidate": "again, nothing new"} | _run(command, server))
                    _append_row(root, points // _METRICS)
                    figures.append(said | {"candidate": "one new row"} | _run(command, server))
    records = points + points // _METRICS
    bare = {one["round"]: one["wall_s"] for one in figures if one["candidate"] == "bare-1"}
    print(
        f"\n{kind}: {points} points and {points // _METRICS} values of the optimiser step; medians of {options.rounds}"
    )
    print("| | s | records/s | times bare client | CPU s, client | CPU s, server | MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for candidate in dict.fromkeys(one["candidate"] for one in figures):
        taken = [one for one in figures if one["candidate"] == candidate]
        wall_s, client_s, server_s, mb = (
            statistics.median(one[name] for one in taken)
            for name in ("wall_s", "client_cpu_s", "server_cpu_s", "rss_mb")
        )
        whole = candidate in only
        ratios = [bare[one["round"]] / one["wall_s"] for one in taken if one["round"] in bare]
        ratio = f"{statistics.median(ratios):.2f}" if whole and ratios else ""
        ratio += f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratio and len(ratios) > 1 else ""
        rate = f"{records / wall_s:,.0f}" if whole else ""
        costs = f"{client_s:.1f} | {server_s:.1f} | {mb:.0f}"
        print(f"| {candidate} | {wall_s:.1f} | {rate} | {ratio} | {costs} |", flush=True)
    return figures


def _command(candidate: str, uri: str, root: Path, folder: Path) -> list[str]:
    how = candidate.rpartition("-")[0]
    if how.startswith("bare-"):
        return [__file__, "--bare", uri, str(root), how.removeprefix("bare-")]
    state = folder / f"state-{candidate}-{uri.partition(':')[0]}"
    place = ["--to", "mlflow", "--tracking-uri", uri, "--state", str(state), "--verify", how, "--json"]
    # Each round of each way to verify gets runs of its own: another project in the same log.
    return ["-c", _SYNC.format(project=f"bench-{candidate}"), str(root), *place]


_SYNC: Final = """
from llmtrack.sync import cli
from llmtrack.sync.replay import classify
read = classify.read_runs
classify.read_runs = lambda *a: [__import__("dataclasses").replace(run, project={project!r}) for run in read(*a)]
cli.main()
"""


def _run(command: list[str], server: psutil.Process | None) -> dict[str, Any]:
    before_s, began = _server_s(server), time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, *command], stdout=said, stderr=said, env=os.environ | _QUIET)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - began
        said.seek(0)
        output = said.read().decode()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(output)
    if (inner := _line(output)) is not None:
        wall_s = inner  # without the bare client's preparations
    return {
        "wall_s": wall_s,
        "client_cpu_s": used.ru_utime + used.ru_stime,
        "server_cpu_s": _server_s(server) - before_s,
        "rss_mb": used.ru_maxrss / 1024,
    }


def _line(output: str) -> float | None:
    words = output.split()
    return float(words[-1]) if words[:1] == ["bare"] else None


def _server_s(server: psutil.Process | None) -> float:
    if server is None:
        return 0.0
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


@contextlib.contextmanager
def _serving(store: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--backend-store-uri", store],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=os.environ | _QUIET,
            start_new_session=True,
        )
    try:
        while "startup complete" not in (folder / "server.log").read_text():
            if process.poll() is not None:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def _send_bare(uri: str, root: Path, threads: int) -> None:
    """Send what the log has with MLflow's client, the optimiser step included, and print how long that took."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name("bare")
    experiment = found.experiment_id if found else client.create_experiment("bare")
    ref = client.create_run(experiment).info.run_id
    seconds = 0.0
    waiting: queue.Queue[list[Any] | None] = queue.Queue(2 * threads)

    def send() -> None:
        while (batch := waiting.get()) is not None:
            client.log_batch(ref, metrics=batch)

    for part in sorted(root.glob("*/*/metrics-*.parquet")):
        rows = pq.read_table(part).sort_by("seq")
        columns = [rows[name].to_pylist() for name in ("name", "value", "tokens", "step")]
        times = rows["time"].cast(pa.int64()).to_pylist()
        metrics, last = [], None
        for name, value, tokens, step, ms in zip(*columns, times, strict=True):
            if step != last:
                metrics.append(Metric("step", float(step), ms, tokens))
                last = step
            metrics.append(Metric(name, value, ms, tokens))
        began = time.monotonic()  # what was done so far is not sending
        workers = [threading.Thread(target=send) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for at in range(0, len(metrics), _BATCH):
            waiting.put(metrics[at : at + _BATCH])
        for _ in workers:
            waiting.put(None)
        for worker in workers:
            worker.join()
        seconds += time.monotonic() - began
    print("bare", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, seconds)


def _write_log(root: Path, points: int) -> None:
    """Write a run of twenty metrics, sealed, that ended with a checkpoint."""
    folder = segment_folder(root, "run", 1)
    folder.mkdir(parents=True)
    names, rows = metric_names(_METRICS), points // _METRICS
    values = metric_values(rows, _METRICS, single=True)
    start = {"seq": 1, "time": _EPOCH_MS, "step": 0, "tokens": 0, "phase": "start", "project": "p"}
    _write(folder, "segments", 1, pa.RecordBatch.from_pylist([start], schema=SCHEMAS["segments"]), (1, 1))
    for part, first in enumerate(range(0, rows, _PART_ROWS), start=1):
        last = min(first + _PART_ROWS, rows)
        writer = PartWriter(folder / part_name("metrics", part), "metrics")
        for at in range(first, last, 500):
            end = min(at + 500, last)
            writer.append(_rows(names, values[at:end], at), at + 2, end + 1)
        writer.close()
        seal_part(folder / part_name("metrics", part))
    _write_checkpoint(folder, 1, rows)


def _append_row(root: Path, rows: int) -> None:
    folder = segment_folder(root, "run", 1)
    part = 1 + len(list(folder.glob("metrics-*")))
    row = rows + len(list(folder.glob("metrics-*.arrows")))  # one for each time that this was measured
    values = metric_values(1, _METRICS, single=True)
    _write(folder, "metrics", part, _rows(metric_names(_METRICS), values, row), (row + 2, row + 2))


def _rows(names: tuple[str, ...], values: Any, first: int) -> pa.RecordBatch:
    step = np.repeat(np.arange(first, first + len(values)) + 1, len(names))
    columns = {
        "seq": pa.array(step + 1),
        "time": pa.array(_EPOCH_MS + _ROW_MS * step, pa.timestamp("ms", "UTC")),
        "step": pa.array(step),
        "tokens": pa.array(step * TOKENS_PER_STEP),
        "name": pa.array(names * len(values)),
        "value": pa.array(values.ravel()),
    }
    return pa.record_batch(columns)


def _write_checkpoint(folder: Path, part: int, step: int) -> None:
    seq = step + 2
    row = {"seq": seq, "time": _EPOCH_MS + _ROW_MS * seq, "step": step, "tokens": step * TOKENS_PER_STEP}
    rows = pa.RecordBatch.from_pylist([row | {"ckpt_id": "c"}], schema=SCHEMAS["checkpoints"])
    _write(folder, "checkpoints", part, rows, (seq, seq))


def _write(folder: Path, table: str, part: int, rows: pa.RecordBatch, seqs: tuple[int, int]) -> None:
    writer = PartWriter(folder / part_name(table, part), table)
    writer.append(rows, *seqs)
    writer.close()


if __name__ == "__main__":
    main()
