"""Measure how fast rows become durable, what sealing takes, and how fast open parts read back.

    python benchmarks/bench_append.py
    python benchmarks/bench_append.py --json figures.json

Every figure is taken in a process of its own; medians of several rounds go into Markdown tables on stdout.
docs/BENCHMARKS.md says what each is. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from measure import Aim, Memory, aims_table, cpu_s, figure, machine, markdown_table, merged_medians
from workload import TOKENS_PER_STEP, metric_names, metric_values

from llmtrack.writer.format import part_name
from llmtrack.writer.log.buffer import Row
from llmtrack.writer.log.rows import RowEncoder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter, read_part
from llmtrack.writer.run import open_run

_WIDTHS: Final = (20, 500)  # metrics in a row
_PART_POINTS_LIMIT: Final = 12_000_000  # more than fit into a part: no value repeats, or compressors would find it
_SUSTAINED_POINTS: Final = 6_000_000
_WAIT_EVERY_POINTS: Final = 500_000  # a trainer is slower: it never has so much waiting
_PART_BYTES: Final = 64 << 20
_BATCH_POINTS: Final = 10_000  # half a second of a run that logs 20 metrics at 1,000 steps/s
_MB: Final = 1e6
_STEP_TIME_NS: Final = (250e6, 5e6)  # mean and spread; even steps would make times compress to nothing


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fortieth of everything, once: no figures to trust")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (default 3)")
    parser.add_argument("--folder", type=Path, help="where the logs go (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every round there, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _measure(json.loads(options.child))
        return
    share = 1 / 40 if options.quick else 1.0
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    about = machine()
    for _ in range(1 if options.quick else options.rounds):
        for task in ("run", "append", "part"):
            for width in _WIDTHS:
                with TemporaryDirectory(prefix="bench-append-", dir=options.folder) as scratch:
                    for step in ("fill", "read", "part") if task == "part" else (task,):
                        child = json.dumps({"task": step, "metrics": width, "share": share, "folder": scratch})
                        command = [sys.executable, __file__, "--child", child]
                        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    figures[f"{task}-{width}"].append(_result(Path(scratch)))
    if options.json:
        options.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1), encoding="utf-8")
    print(_report({name: merged_medians(runs) for name, runs in figures.items()}))


def _measure(task: dict[str, Any]) -> None:
    folder = Path(task["folder"])
    result = _TASKS[task["task"]](folder, task["metrics"], task["share"])
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _result(folder: Path) -> dict[str, float]:
    result: dict[str, float] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def _measure_run(folder: Path, metrics: int, share: float) -> dict[str, float]:
    """Log through `Run` as fast as it is made durable, and wait when much is waiting."""
    rows = int(_SUSTAINED_POINTS * share) // metrics
    names, values = metric_names(metrics), metric_values(rows, metrics)
    wait_every = max(min(_WAIT_EVERY_POINTS // metrics, rows // 4), 1)
    run = open_run(folder / "root", run_id="bench")
    memory = Memory()
    before_cpu_s, started_s = cpu_s(), time.perf_counter()
    for step in range(1, rows + 1):
        run.log(dict(zip(names, values[step - 1].tolist(), strict=True)), step, step * TOKENS_PER_STEP)
        if step % wait_every == 0 and not run.flush(timeout=60.0):
            raise TimeoutError("the log did not become durable")
    if not run.flush(timeout=60.0):
        raise TimeoutError("the log did not become durable")
    durable_s = time.perf_counter() - started_s
    run.finish(timeout=120.0)
    points = rows * metrics
    return {
        "durable_points_per_s": points / durable_s,
        "sealed_points_per_s": points / (time.perf_counter() - started_s),
        "cpu_us_per_row": (cpu_s() - before_cpu_s) / rows * 1e6,
        "memory_mb": memory.added_bytes() / _MB,
    }


def _measure_append(folder: Path, metrics: int, share: float) -> dict[str, float]:
    """Encode and append batches on this thread, and nothing else."""
    batches = [list(rows) for rows in _batches(metrics, int(_SUSTAINED_POINTS * share), single=False)]
    encoder, seq = RowEncoder(), 0
    writer = PartWriter(folder / part_name("metrics", 1), "metrics")
    started_s = time.perf_counter()
    for rows in batches:
        writer.append(encoder.encode(rows, seq + 1), seq + 1, seq + len(rows))
        seq += len(rows)
    writer.close()
    points = seq * metrics
    return {
        "points_per_s": points / (time.perf_counter() - started_s),
        "bytes_per_point": writer.path.stat().st_size / points,
    }


def _fill_part(folder: Path, metrics: int, share: float) -> dict[str, float]:
    """Write a part that is due to be sealed, of fp32 values; in a process of its own, which leaves no memory behind."""
    encoder, seq, tail_offset = RowEncoder(), 0, 0
    writer = PartWriter(folder / part_name("metrics", 1), "metrics")
    for batch in _batches(metrics, int(_PART_POINTS_LIMIT * share), single=True):
        rows, tail_offset = list(batch), writer.bytes
        writer.append(encoder.encode(rows, seq + 1), seq + 1, seq + len(rows))
        seq += len(rows)
        if writer.bytes >= _PART_BYTES * share:
            break
    writer.close()
    return {
        "part_points": seq * metrics,
        "open_bytes_per_point": writer.path.stat().st_size / (seq * metrics),
        "tail_offset": tail_offset,
    }


def _measure_part(folder: Path, metrics: int, share: float) -> dict[str, float]:  # noqa: ARG001  # as the others
    """Seal the part that was filled; before that read it, and its last batch alone."""
    result, path = _result(folder), folder / part_name("metrics", 1)
    times_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        read_part(path, offset=int(result["tail_offset"]))
        times_s.append(time.perf_counter() - started_s)
    result["tail_ms"] = float(np.median(times_s)) * 1e3

    memory = Memory()
    before_cpu_s, started_s = cpu_s(), time.perf_counter()
    sealed = seal_part(path)
    result |= {
        "seal_s": time.perf_counter() - started_s,
        "seal_cpu_s": cpu_s() - before_cpu_s,
        "seal_mb": memory.added_bytes() / _MB,
        "sealed_bytes_per_point": sealed.stat().st_size / result["part_points"],
    }
    return result


def _measure_read(folder: Path, metrics: int, share: float) -> dict[str, float]:  # noqa: ARG001  # as the others
    """Read the part that was filled, with every checksum."""
    result, path = _result(folder), folder / part_name("metrics", 1)
    part_bytes = path.stat().st_size
    started_s = time.perf_counter()
    rows = read_part(path).table.num_rows
    taken_s = time.perf_counter() - started_s
    return result | {"read_points_per_s": rows / taken_s, "read_mb_per_s": part_bytes / taken_s / _MB}


def _batches(metrics: int, points: int, *, single: bool) -> Iterator[Iterator[Row]]:
    """Yield rows as they come out of the buffer, a batch at a time."""
    names, values = metric_names(metrics), metric_values(points // metrics, metrics, single=single)
    rows_a_batch = max(_BATCH_POINTS // metrics, 1)
    times_ns = time.time_ns() + np.cumsum(np.random.default_rng(0).normal(*_STEP_TIME_NS, len(values))).astype(np.int64)

    def rows(first: int) -> Iterator[Row]:
        for step in range(first, min(first + rows_a_batch, len(values) + 1)):
            row = dict(zip(names, values[step - 1].tolist(), strict=True))
            yield int(times_ns[step - 1]), step, step * TOKENS_PER_STEP, row

    for first in range(1, len(values) + 1, rows_a_batch):
        yield rows(first)


def _aims(figures: dict[str, dict[str, float]]) -> str:
    aims = (
        (
            "points/s, durable, of the whole process, 20 metrics a row",
            "run-20",
            "durable_points_per_s",
            500e3,
            False,
        ),
        ("the same, 500 metrics a row", "run-500", "durable_points_per_s", 1e6, False),
        ("bytes/point, sealed, of fp32, 20 metrics a row", "part-20", "sealed_bytes_per_point", 5.0, True),
        ("the same, 500 metrics a row", "part-500", "sealed_bytes_per_point", 5.0, True),
    )
    return aims_table([Aim(what, figures[task][key], aim, at_most) for what, task, key, aim, at_most in aims])


def _report(figures: dict[str, dict[str, float]]) -> str:
    appending = [
        [
            f"{width} metrics a row",
            *(figure(figures[f"run-{width}"][key]) for key in ("durable_points_per_s", "sealed_points_per_s")),
            *(figure(figures[f"run-{width}"][key]) for key in ("cpu_us_per_row", "memory_mb")),
            *(figure(figures[f"append-{width}"][key]) for key in ("points_per_s", "bytes_per_point")),
        ]
        for width in _WIDTHS
    ]
    sealing = [
        [f"{width} metrics a row", *(figure(figures[f"part-{width}"][key]) for _, key in _PART_COLUMNS)]
        for width in _WIDTHS
    ]
    return "\n".join(
        (
            "### Appending: the whole process through `Run.log`, and the drain's work alone on one thread\n",
            markdown_table(
                (
                    "",
                    "points/s, durable",
                    "with sealing",
                    "CPU µs/row with sealing",
                    "+ MB",
                    "encode and append alone, points/s",
                    "bytes/point, open",
                ),
                appending,
            ),
            "\n### Reading and sealing a part of 64 MiB, of fp32 values\n",
            markdown_table(("", *(title for title, _ in _PART_COLUMNS)), sealing),
            "\n### What llmtrack aims at\n",
            _aims(figures),
            "",
        )
    )


_PART_COLUMNS: Final = (
    ("points", "part_points"),
    ("bytes/point, open", "open_bytes_per_point"),
    ("read and verify, points/s", "read_points_per_s"),
    ("MB/s", "read_mb_per_s"),
    ("last batch alone, ms", "tail_ms"),
    ("sealing, s", "seal_s"),
    ("CPU, s", "seal_cpu_s"),
    ("+ MB", "seal_mb"),
    ("bytes/point, sealed", "sealed_bytes_per_point"),
)

_TASKS: Final[dict[str, Callable[[Path, int, float], dict[str, float]]]] = {
    "run": _measure_run,
    "append": _measure_append,
    "fill": _fill_part,
    "read": _measure_read,
    "part": _measure_part,
}


if __name__ == "__main__":
    main()
