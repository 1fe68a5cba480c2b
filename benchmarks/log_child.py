"""The process of one logger: run by `bench_log`, it makes the calls and writes what it measured into a file.

python log_child.py '{"tool": "llmtrack", "task": "calls", ...}'
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from loggers import Opened
from measure import Memory, cpu_s, folder_bytes, percentiles_us, sync_folder_files, waited_for_cpu_s
from tools import TOOLS
from trackers import go_offline
from workload import TOKENS_PER_STEP, WORKLOADS, metric_names, metric_values

_STEP_S: Final = 0.01


def main() -> None:
    """Do the task that the command line describes."""
    task = json.loads(sys.argv[1])
    go_offline()
    if task["torch"]:
        import torch

        torch.set_num_threads(1)
    tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "calls": _measure_calls,
        "loop": _measure_loop,
        "kill": _log_until_killed,
        "survivors": _count_survivors,
    }
    result = tasks[task["task"]](task)
    Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")


def _measure_calls(task: dict[str, Any]) -> dict[str, Any]:
    """Make the calls of a workload, until they are durable and the run is closed."""
    workload, folder = WORKLOADS[task["workload"]], Path(task["folder"])
    calls = max(int(workload.calls * task["share"]), 10)
    values = metric_values(calls, workload.metrics, single=task["single"])
    names = metric_names(workload.metrics)
    times_ns = np.zeros(calls, np.int64)
    cpu_s()
    memory = Memory()
    started_s = time.perf_counter()
    run = TOOLS[task["tool"]].open(folder)
    result: dict[str, Any] = {"open_s": time.perf_counter() - started_s}

    before_bytes = folder_bytes(folder)  # an empty database is no cost of a point
    before_cpu_s, before_waited_s, started_s = cpu_s(), waited_for_cpu_s(), time.perf_counter()
    made = _call(run, names, values, times_ns, per_second=workload.per_second, limit_s=task["limit_s"])
    result |= {"loop_s": time.perf_counter() - started_s, "waited_s": waited_for_cpu_s() - before_waited_s}
    run.settle()
    sync_folder_files(folder)
    result |= {
        "durable_s": time.perf_counter() - started_s,
        "durable_cpu_s": cpu_s() - before_cpu_s,
        "open_bytes": folder_bytes(folder) - before_bytes,
        "memory_bytes": memory.added_bytes(),
    }
    run.close()
    result |= {
        "closed_s": time.perf_counter() - started_s,
        "closed_cpu_s": cpu_s() - before_cpu_s,
        "closed_bytes": folder_bytes(folder) - before_bytes,
        "calls": made,
        "points": made * workload.metrics,
        "call_us": percentiles_us(times_ns[:made]),
    }
    return result


def _call(
    run: Opened,
    names: tuple[str, ...],
    values: npt.NDArray[np.float64],
    times_ns: npt.NDArray[np.int64],
    *,
    per_second: float | None,
    limit_s: float,
) -> int:
    """Call `log` once for each row, or until the time is over, and return how often."""
    clock = time.perf_counter_ns
    begin_ns = clock()
    end_ns = begin_ns + int(limit_s * 1e9)
    pause_ns = 0 if per_second is None else int(1e9 / per_second)
    for index in range(len(values)):
        # Made here, because a training loop has just made it too: the values are in the cache.
        row = dict(zip(names, values[index].tolist(), strict=True))
        if pause_ns:
            time.sleep(max(begin_ns + index * pause_ns - clock(), 0) / 1e9)
        before_ns = clock()
        run.log(row, index + 1, (index + 1) * TOKENS_PER_STEP)
        after_ns = clock()
        times_ns[index] = after_ns - before_ns
        if after_ns > end_ns:
            return index + 1
    return len(values)


def _measure_loop(task: dict[str, Any]) -> dict[str, Any]:
    """Run a training loop in stretches with and without logging, and return the ratio of each pair's times."""
    work = _Work()
    metrics = WORKLOADS["W1"].metrics
    names, values = metric_names(metrics), metric_values(10_000, metrics)
    run = TOOLS[task["tool"]].open(Path(task["folder"]))
    step = 0

    def stretch(duration_s: float, *, logs: bool) -> tuple[float, float]:
        """Return seconds a step, as the clock has it and without the time in which the thread had no CPU."""
        nonlocal step
        steps = max(int(duration_s / _STEP_S), 1)
        started_s, waited_s = time.perf_counter(), waited_for_cpu_s()
        for _ in range(steps):
            step += 1
            work.do()
            row = dict(zip(names, values[step % len(values)].tolist(), strict=True))
            if logs:
                run.log(row, step, step * TOKENS_PER_STEP)
        taken_s = time.perf_counter() - started_s
        return taken_s / steps, (taken_s - (waited_for_cpu_s() - waited_s)) / steps

    ratios: list[tuple[float, float]] = []
    for pair in range(task["pairs"]):
        taken: dict[bool, tuple[float, float]] = {}
        for logs in (False, True) if pair % 2 else (True, False):
            stretch(task["settling_s"], logs=logs)
            taken[logs] = stretch(task["stretch_s"], logs=logs)
        ratios.append((taken[True][0] / taken[False][0], taken[True][1] / taken[False][1]))
    run.settle()
    run.close()
    return {"ratios": [ratio for ratio, _ in ratios], "ratios_on_cpu": [ratio for _, ratio in ratios]}


class _Work:
    """A step's work: half of it Python, half of it in NumPy without the GIL, as much as takes about 10 ms."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).normal(size=(192, 192)).astype(np.float32)
        self._python = self._numpy = 1
        self._python = max(int(_STEP_S / 2 / self._time(self._in_python, 2_000)), 1)
        self._numpy = max(int(_STEP_S / 2 / self._time(self._in_numpy, 20)), 1)

    def do(self) -> None:
        """Do it once."""
        self._in_python(self._python)
        self._in_numpy(self._numpy)

    def _in_python(self, times: int) -> None:
        total = 0
        for number in range(times):
            total += number * number % 7

    def _in_numpy(self, times: int) -> None:
        for _ in range(times):
            np.matmul(self._matrix, self._matrix)

    def _time(self, work: Callable[[int], None], times: int) -> float:
        best_s = float("inf")
        for _ in range(5):
            started_s = time.perf_counter()
            work(times)
            best_s = min(best_s, time.perf_counter() - started_s)
        return best_s / times


def _log_until_killed(task: dict[str, Any]) -> NoReturn:
    """Log until `bench_log` kills this process, noting in a shared file when each call returned."""
    workload = WORKLOADS[task["workload"]]
    names, values = metric_names(workload.metrics), metric_values(workload.calls, workload.metrics)
    with Path(task["progress"]).open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        returned_ns = np.frombuffer(shared, np.int64)
        run = TOOLS[task["tool"]].open(Path(task["folder"]))
        begin_ns = time.monotonic_ns()
        for index in range(len(returned_ns)):
            row = dict(zip(names, values[index % len(values)].tolist(), strict=True))
            if workload.per_second is not None:
                due_ns = begin_ns + int(index * 1e9 / workload.per_second)
                time.sleep(max(due_ns - time.monotonic_ns(), 0) / 1e9)
            run.log(row, index + 1, (index + 1) * TOKENS_PER_STEP)
            returned_ns[index] = time.monotonic_ns()
        while True:
            time.sleep(1.0)


def _count_survivors(task: dict[str, Any]) -> dict[str, Any]:
    """Read what a killed process left with the tool's own reader, and compare it with the calls that had returned."""
    read = TOOLS[task["tool"]].read
    if read is None:
        raise ValueError(f"{task['tool']} keeps nothing")
    returned_ns = np.fromfile(task["progress"], np.int64)
    returned_ns = returned_ns[returned_ns > 0]
    metrics = WORKLOADS[task["workload"]].metrics
    kept = np.bincount(read(Path(task["folder"])), minlength=len(returned_ns) + 1)[1 : len(returned_ns) + 1]
    lost = np.flatnonzero(kept < metrics)
    return {
        "calls": len(returned_ns),
        "kept": float(np.minimum(kept, metrics).sum() / (len(returned_ns) * metrics)),
        "lost_s": max(float(task["killed_ns"] - returned_ns[lost[0]]) / 1e9, 0.0) if len(lost) else 0.0,
    }


if __name__ == "__main__":
    main()
