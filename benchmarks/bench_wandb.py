"""How fast the sync into W&B is beside a bare loop of `run.log` on the same rows: rows per second, as a ratio.

    python benchmarks/bench_wandb.py [--rows 20000] [--metrics 20] [--repeats 3]

Both use the real client against the server of the tests, which runs in a process of its own and keeps everything in
memory. The bare loop is what W&B's documentation shows: `init`, `log` for each row, `finish`; its rows lie ready in
memory. The sync reads them from the log, sends them, reads all of them back and compares. Each is a process of its own,
timed from its start to its end, importing included, and in turn; every other pair begins with the sync.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.stream import PartWriter

_BARE = """
import sys, time
import pyarrow as pa
import wandb
rows, metrics, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ready = [
    {"_timestamp": 1767225600.0 + n, "tokens_seen": n * 4096, "step": n, "segment": 1}
    | {f"train/metric_{m}": m + n * 0.1237 for m in range(metrics)}
    for n in range(1, rows + 1)
]
run = wandb.init(project="bench", entity="tester", id=name)
for row in ready:
    run.log(row)
run.finish()
"""


def write_log(root: Path, rows: int, metrics: int) -> None:
    """Write one finished run."""
    folder = segment_folder(root, "run", 1)
    folder.mkdir(parents=True)
    time_of = pa.scalar(1_767_225_600_000, pa.timestamp("ms", "UTC")).as_py()
    start: dict[str, object] = {
        "seq": 1,
        "time": time_of,
        "tokens": 0,
        "step": 0,
        "phase": "start",
        "project": "bench",
        "config": "{}",
    }
    end: dict[str, object] = {
        "seq": rows + 2,
        "time": time_of,
        "tokens": rows * 4096,
        "step": rows,
        "phase": "end",
        "exit": "finished",
    }
    writer = PartWriter(folder / part_name("segments", 1), "segments")
    for seq, record in ((1, start), (rows + 2, end)):
        writer.append(pa.RecordBatch.from_pylist([record], schema=SCHEMAS["segments"]), seq, seq)
    writer.close()
    writer = PartWriter(folder / part_name("metrics", 1), "metrics")
    for first in range(1, rows + 1, 1000):
        steps = [n for n in range(first, min(first + 1000, rows + 1)) for _ in range(metrics)]
        table = {
            "seq": [n + 1 for n in steps],
            "time": pa.array([1_767_225_600_000 + 1000 * n for n in steps], SCHEMAS["metrics"].field("time").type),
            "step": steps,
            "tokens": [n * 4096 for n in steps],
            "name": [f"train/metric_{m}" for m in range(metrics)] * (len(steps) // metrics),
            "value": [at % metrics + n * 0.1237 for at, n in enumerate(steps)],
        }
        writer.append(pa.RecordBatch.from_pydict(table, schema=SCHEMAS["metrics"]), steps[0] + 1, steps[-1] + 1)
    writer.close()


def timed(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Return seconds, by the clock and of the CPU of the process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(
        command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print rows per second of both, and the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    checkout = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_log(place / "root", given.rows, given.metrics)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.wandb_server", "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=checkout
        )
        url = (server.stdout or sys.stdin).readline().strip()
        environment = os.environ | {
            "WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off", "WANDB_DIR": folder,
        }  # fmt: skip
        took: dict[str, list[tuple[float, float]]] = {"bare": [], "sync": []}
        try:
            for n in range(given.repeats):
                code = "from llmtrack.sync.cli import main; main()"
                sync = [sys.executable, "-c", code, "root", "--to", "wandb", "--state", f"state-{n}"]
                commands = {
                    "bare": [sys.executable, "-c", _BARE, str(given.rows), str(given.metrics), f"bare-{n}"],
                    "sync": [*sync, "--wandb-id-prefix", f"n{n}-"],
                }
                for name in ("bare", "sync") if n % 2 == 0 else ("sync", "bare"):
                    took[name].append(timed(commands[name], environment, place))
        finally:
            server.terminate()
            server.wait()
    for name, pairs in took.items():
        clock, cpu = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
        rates = ", ".join(f"{given.rows / pair[0]:.0f}" for pair in pairs)
        print(f"{name}: {given.rows / clock:.0f} rows/s (of {rates}), {cpu / given.rows * 1e6:.0f} us of CPU per row")
    ratios = [bare[0] / sync[0] for bare, sync in zip(took["bare"], took["sync"], strict=True)]
    print(f"sync / bare: {statistics.median(ratios):.2f} (of {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
