"""Measure what logging costs a training loop, and what is left of it after `kill -9`, beside today's trackers.

    python benchmarks/bench_log.py                          # everything, about an hour
    python benchmarks/bench_log.py --only llmtrack,queue,json --rounds 5 --json figures.json
    python benchmarks/bench_log.py --rounds 0 --json figures.json    # the tables again

Every run of a logger is a process of its own. All are measured in turn, several rounds of it, and the medians go into
Markdown tables on stdout; docs/BENCHMARKS.md says what each figure is. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import psutil
from log_report import Figures, report
from measure import machine
from tools import TOOLS, Tool
from workload import WORKLOADS

_CHILD: Final = Path(__file__).with_name("log_child.py")
_CHILD_LIMIT_S: Final = 300.0
_FIRST_CALL_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: Times that everything is measured.
        share: Part of each workload's calls.
        limit_s: Time after which a loop of calls ends early.
        pairs: Stretches of the training loop with and without logging, a round.
        stretch_s: Length of each.
        settling_s: Not measured at the start of each: what a logger does in the background for the stretch before must
            not fall into this one, and llmtrack writes twice a second.
        sizes: Workloads that are logged again with fp32 values.
        kills: Processes killed, a round and a workload.
        killed: Workloads whose processes are killed.
        kill_after_s: Earliest and latest time of it.
        torch: Import torch first, as a trainer does.
    """

    rounds: int
    share: float = 1.0
    limit_s: float = 20.0
    pairs: int = 8
    stretch_s: float = 1.5
    settling_s: float = 0.7
    sizes: tuple[str, ...] = ("W1", "W2")
    kills: int = 2
    killed: tuple[str, ...] = ("W3", "W1")
    kill_after_s: tuple[float, float] = (2.0, 4.0)
    torch: bool = True


_QUICK: Final = Effort(
    rounds=1,
    share=0.02,
    pairs=1,
    stretch_s=0.1,
    settling_s=0.0,
    sizes=("W1",),
    kills=1,
    killed=("W3",),
    kill_after_s=(0.6, 0.7),
    torch=False,
)


def main() -> None:
    """Measure the tools that were asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--quick", action="store_true", help="a glance at everything, for tests: no figures to trust")
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (default 3)")
    parser.add_argument("--pairs", type=int, default=8, help="stretches of the training loop, a round (default 8)")
    parser.add_argument("--skip", metavar="TASKS", default="", help="some of calls,loop,kill")
    parser.add_argument("--folder", type=Path, help="where the logs go (default: the system's temporary folder)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep every figure of every round there, beside those it has already"
    )
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(TOOLS)
    unknown = [name for name in names if name not in TOOLS]
    if unknown:
        parser.error(f"no tool is called {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    effort = _QUICK if options.quick else Effort(options.rounds, pairs=options.pairs)
    figures = _read_figures(options.json)
    for number in range(effort.rounds):
        for name in names:
            for task in ("calls", "loop", "kill"):
                if task in options.skip.split(","):
                    continue
                print(f"round {number + 1} of {effort.rounds}: {name}, {task}", file=sys.stderr, flush=True)
                with TemporaryDirectory(prefix="bench-log-", dir=options.folder) as scratch:
                    try:
                        _MEASURES[task](TOOLS[name], effort, Path(scratch), figures[name])
                    except ToolFailedError as error:
                        print(f"{name} failed: {error}", file=sys.stderr)
            if options.json:
                about = {**machine(), "effort": asdict(effort)}
                options.json.write_text(json.dumps({"about": about, "figures": figures}), encoding="utf-8")
    print(report({name: figures[name] for name in TOOLS if name in figures}))


def _read_figures(path: Path | None) -> Figures:
    figures: Figures = defaultdict(lambda: defaultdict(list))
    if path is not None and path.exists():
        for name, found in json.loads(path.read_text(encoding="utf-8"))["figures"].items():
            figures[name].update(found)
    return figures


class ToolFailedError(Exception):
    """A logger's process ended before it had measured anything."""


def _run(tool: Tool, effort: Effort, scratch: Path, **task: Any) -> dict[str, Any]:
    """Run a task in a process of its own, in a new folder, and return what it measured."""
    with _start(tool, effort, scratch, **task) as child:
        try:
            _, errors = child.communicate(timeout=_CHILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill_all(child.pid)
            raise ToolFailedError(f"not done after {_CHILD_LIMIT_S:.0f} s") from None
    if child.returncode != 0:
        raise ToolFailedError(errors.decode(errors="replace").strip()[-400:])
    result: dict[str, Any] = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    return result


def _start(tool: Tool, effort: Effort, scratch: Path, **task: Any) -> subprocess.Popen[bytes]:
    folder = scratch / "log"
    folder.mkdir(exist_ok=True)
    task = {
        "tool": tool.name,
        "folder": str(folder),
        "result": str(scratch / "result.json"),
        "torch": effort.torch,
        **task,
    }
    return subprocess.Popen(
        [sys.executable, str(_CHILD), json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=scratch,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # the loop's work has one thread
    )


def _measure_calls(tool: Tool, effort: Effort, scratch: Path, figures: dict[str, list[Any]]) -> None:
    sizes = () if tool.read is None else effort.sizes
    for name, single in (*((name, False) for name in WORKLOADS), *((name, True) for name in sizes)):
        part = scratch / f"{name}-{single}"
        part.mkdir()
        task = {"task": "calls", "workload": name, "share": tool.share * effort.share, "single": single}
        result = _run(tool, effort, part, limit_s=effort.limit_s, **task)
        figures[f"{name}-single" if single else name].append(result)


def _measure_loop(tool: Tool, effort: Effort, scratch: Path, figures: dict[str, list[Any]]) -> None:
    task = {"pairs": effort.pairs, "stretch_s": effort.stretch_s, "settling_s": effort.settling_s}
    figures["loop"].append(_run(tool, effort, scratch, task="loop", **task))


def _measure_kill(tool: Tool, effort: Effort, scratch: Path, figures: dict[str, list[Any]]) -> None:
    if tool.read is None:
        return
    for name in effort.killed:
        for number in range(effort.kills):
            part = scratch / f"{name}-{number}"
            part.mkdir()
            progress = part / "progress"
            progress.write_bytes(bytes(8 * WORKLOADS[name].calls))
            task: dict[str, Any] = {"workload": name, "progress": str(progress)}
            with _start(tool, effort, part, task="kill", **task) as child:
                killed_ns = _kill_in_the_middle(child, progress, effort)
            result = _run(tool, effort, part, task="survivors", killed_ns=killed_ns, **task)
            figures[f"kill-{name}"].append(result)


def _kill_in_the_middle(child: subprocess.Popen[bytes], progress: Path, effort: Effort) -> int:
    """Kill a logging process and its helpers once it has logged for a while; return when, on the monotonic clock."""
    returned_ns = np.memmap(progress, np.int64, mode="r")
    started_s = time.monotonic()
    while not returned_ns[0]:
        if child.poll() is not None or time.monotonic() - started_s > _FIRST_CALL_LIMIT_S:
            _kill_all(child.pid)
            errors = child.stderr.read() if child.stderr else b""
            raise ToolFailedError(f"made no call: {errors.decode(errors='replace').strip()[-400:]}")
        time.sleep(0.001)
    end_s = time.monotonic() + random.uniform(*effort.kill_after_s)
    while time.monotonic() < end_s and not returned_ns[-1]:
        time.sleep(0.001)
    killed_ns = time.monotonic_ns()
    _kill_all(child.pid)
    return killed_ns


def _kill_all(pid: int) -> None:
    """Send SIGKILL to a process and its helpers, as the end of a job does."""
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in processes:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue  # it went with another


_MEASURES: Final = {"calls": _measure_calls, "loop": _measure_loop, "kill": _measure_kill}


if __name__ == "__main__":
    main()
