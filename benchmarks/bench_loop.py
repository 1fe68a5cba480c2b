"""Measure what 20 metrics a step cost a training loop: without them, with the reducer, by hand, and by hand into wandb.

    python benchmarks/bench_loop.py                         # one rank, then two with gloo: some minutes
    python benchmarks/bench_loop.py --ways none,llmtrack --ranks 1 --pairs 40

The loop trains a small GPT on one thread, about 100 steps a second. Stretches of each way and of the bare loop take
turns in one process, and the median of the ratios of neighbours goes into Markdown tables on stdout;
docs/BENCHMARKS.md says what each figure is. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from measure import figure, machine, markdown_table, waited_for_cpu_s
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from trackers import go_offline, open_wandb

import llmtrack
from llmtrack.examples.pretrain_gpt import GPT, VOCAB_SIZE

_STEP_S: Final = 0.01
_CONTEXT: Final = 32
_TOKENS_PER_STEP: Final = 65_536
_CHILD_LIMIT_S: Final = 1800.0
# Of the 20 metrics so many are weighted means over micro-batches, norms on the device, and numbers of the host.
_MEANS, _NORMS, _NUMBERS = 4, 9, 7
_MANY: Final = 200  # all of them weighted means of tensors

_TITLES: Final = {
    "none": "nothing (the noise)",
    "llmtrack": "**llmtrack**, 20 metrics every 10 steps, 3 of them from each step",
    "llmtrack-all": "llmtrack, 20 metrics every 10 steps, all of them from each step",
    "llmtrack-1": "llmtrack, 20 metrics every step",
    "hand": "by hand: a collective and `.item()` for each tensor, every step",
    "hand-10": "by hand, every 10 steps, from that step alone",
    "wandb": "by hand into wandb offline, every step",
    "llmtrack-200": "llmtrack, 200 metrics every 10 steps, all of them from each step, in a loop of 20 steps/s",
    "hand-200": "by hand, 200 metrics every step, in a loop of 20 steps/s",
}
# The length of a step that a way is compared with, where it is not that of the loop: what is measured in a step of the
# loop is then taken as a share of a longer one.
_STEPS_S: Final = {"llmtrack-200": 0.05, "hand-200": 0.05}


@dataclass
class Values:
    """What a step has to say: means and norms on the device, numbers on the host."""

    means: list[Tensor]
    norms: list[Tensor]
    numbers: list[float]


# Called at the end of each step on every rank.
Way = Callable[[Values, int], None]


def main() -> None:
    """Measure each way on one and on two ranks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", metavar="NAMES", default=",".join(_TITLES), help=f"some of {','.join(_TITLES)}")
    parser.add_argument("--ranks", metavar="NUMBERS", default="1,2", help="sizes of the job (default 1,2)")
    parser.add_argument("--pairs", type=int, default=20, help="stretches of each way (default 20)")
    parser.add_argument("--stretch-s", type=float, default=1.0, help="length of each (default 1.0)")
    parser.add_argument("--quick", action="store_true", help="a glance at everything, for tests: no figures to trust")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _train(json.loads(options.child))
        return
    ways = options.ways.split(",")
    if unknown := [name for name in ways if name not in _TITLES]:
        parser.error(f"no way is called {', '.join(unknown)}; there are {', '.join(_TITLES)}")
    task = {
        "ways": ways,
        "pairs": 1 if options.quick else options.pairs,
        "stretch_s": 0.1 if options.quick else options.stretch_s,
    }
    about, found = machine(), {}
    for ranks in map(int, options.ranks.split(",")):
        print(f"{ranks} rank{'s' if ranks > 1 else ''}", file=sys.stderr, flush=True)
        found[ranks] = _run(task, ranks)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "figures": found}, indent=1), encoding="utf-8")
    for ranks, figures in found.items():
        print(f"### {ranks} rank{'s' if ranks > 1 else ''}\n\n{_table(figures)}\n")


def _run(task: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Start the ranks of a job, and return what rank 0 measured."""
    with TemporaryDirectory(prefix="bench-loop-") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps({**task, "folder": folder})],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            if sum(abs(child.wait(_CHILD_LIMIT_S)) for child in children):
                raise SystemExit("a rank failed")
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    child.kill()
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        return result


def _table(figures: dict[str, list[dict[str, float]]]) -> str:
    columns = [
        "",
        "slowdown",
        "without waits for a CPU",
        "CPU of the calls, µs a step",
        "of a step",
        "CPU of the process, µs a step",
    ]
    rows = []
    medians = {
        name: {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
        for name, pairs in figures.items()
    }
    clock_us = medians["none"]["calls_us"] if "none" in medians else 0.0
    for name, found in medians.items():
        calls_us = found["calls_us"] - clock_us
        step_s = _STEPS_S.get(name, _STEP_S)
        rows.append(
            [
                _TITLES[name],
                f"{(found['wall'] - 1) * 100 * _STEP_S / step_s:.2f} %",
                f"{(found['on_cpu'] - 1) * 100 * _STEP_S / step_s:.2f} %",
                figure(calls_us),
                f"{calls_us / (step_s * 1e6) * 100:.2f} %",
                figure(found["process_us"]),
            ]
        )
    return markdown_table(columns, rows)


# --- one rank -----------------------------------------------------------------------------------------------------


def _train(task: dict[str, Any]) -> None:
    """Train in stretches with and without each way, and have rank 0 write the figures."""
    go_offline()
    torch.set_num_threads(1)
    folder, rank, world_size = Path(task["folder"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder / 'store'}", world_size=world_size, rank=rank)
    loop = _Loop(world_size)
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in task["ways"]:
        place = folder / name
        place.mkdir(exist_ok=True)
        way, close = _WAYS[name](place)
        loop.stretch(task["stretch_s"], way)  # what a first call makes
        for pair in range(task["pairs"]):
            taken = {}
            for logs in (False, True) if pair % 2 else (True, False):
                taken[logs] = loop.stretch(task["stretch_s"], way if logs else None)
            bare, logged = taken[False], taken[True]
            figures[name].append(
                {
                    "wall": logged.wall_s / bare.wall_s,
                    "on_cpu": logged.on_cpu_s / bare.on_cpu_s,
                    "calls_us": logged.calls_s * 1e6,
                    "step_us": bare.on_cpu_s * 1e6,
                    "process_us": (logged.process_s - bare.process_s) * 1e6,
                }
            )
        close()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(figures), encoding="utf-8")
    if world_size > 1:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Stretch:
    """Seconds a step: by the clock, without waits for a CPU, CPU time of the calls that log, and of the process."""

    wall_s: float
    on_cpu_s: float
    calls_s: float
    process_s: float


class _Loop:
    """A training loop of about 100 steps a second."""

    def __init__(self, world_size: int) -> None:
        torch.manual_seed(0)
        gpt = GPT(_CONTEXT, width=64, layers=2, heads=2)
        self._model = DistributedDataParallel(gpt) if world_size > 1 else gpt
        self._optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
        self._step = 0
        self._sequences = 8
        for _ in range(3):
            self._tokens = torch.randint(VOCAB_SIZE, (self._sequences, _CONTEXT + 1))
            began_s = time.thread_time()
            for _ in range(20):
                self._take_step(None)
            took_s = (time.thread_time() - began_s) / 20
            self._sequences = max(round(self._sequences * _STEP_S / took_s), 1)
            if world_size > 1:
                agreed = torch.tensor(self._sequences)
                dist.broadcast(agreed, 0)
                self._sequences = int(agreed)

    def stretch(self, duration_s: float, way: Way | None) -> _Stretch:
        """Train for a while."""
        steps = max(int(duration_s / _STEP_S), 1)
        if dist.is_initialized():
            dist.barrier()
        calls_s = 0.0
        wall_s, waited_s, process_s = _clocks()
        for _ in range(steps):
            calls_s += self._take_step(way)
        now = _clocks()
        taken_s = now[0] - wall_s
        return _Stretch(
            taken_s / steps, (taken_s - (now[1] - waited_s)) / steps, calls_s / steps, (now[2] - process_s) / steps
        )

    def _take_step(self, way: Way | None) -> float:
        """Take a step, and return the CPU seconds that logging took of this thread."""
        self._step += 1
        loss = self._model(self._tokens[:, :-1], self._tokens[:, 1:])
        loss.backward()
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(gradients)  # noqa: SLF001  # what clip_grad_norm_ calls
        self._optimizer.step()
        self._optimizer.zero_grad()
        values = Values([loss] * _MEANS, [norms[index % len(norms)] for index in range(_NORMS)], [0.5] * _NUMBERS)
        began_s = time.thread_time()
        if way is not None:
            way(values, self._step)
        return time.thread_time() - began_s


def _clocks() -> tuple[float, float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), waited_for_cpu_s(), usage.ru_utime + usage.ru_stime


def _nothing(_folder: Path) -> tuple[Way, Callable[[], object]]:
    return lambda values, step: None, lambda: None  # noqa: ARG005  # the shape of a way


def _open_reducer(folder: Path, every: int, *, gives_all: bool = False) -> tuple[Way, Callable[[], object]]:
    run = llmtrack.open_run(folder)
    reducer = llmtrack.Reducer(run, every=every)
    means = [f"train/mean {index}" for index in range(_MEANS)]
    norms = [f"train/norm {index}" for index in range(_NORMS)]
    numbers = [f"train/number {index}" for index in range(_NUMBERS)]

    def log(values: Values, step: int) -> None:
        whole = gives_all or step % every == 0
        for name, value in zip(means if whole else means[:1], values.means, strict=False):
            reducer.mean(name, value, weight=4096)
        for name, value in zip(norms if whole else norms[:1], values.norms, strict=False):
            reducer.last(name, value)
        for name, number in zip(numbers if whole else numbers[:1], values.numbers, strict=False):
            reducer.last(name, number)
        reducer.step(step, step * _TOKENS_PER_STEP)

    return log, run.finish


def _open_many(folder: Path) -> tuple[Way, Callable[[], object]]:
    run = llmtrack.open_run(folder)
    reducer = llmtrack.Reducer(run, every=10)
    names = [f"train/mean {index}" for index in range(_MANY)]

    def log(values: Values, step: int) -> None:
        loss = values.means[0]
        for name in names:
            reducer.mean(name, loss, weight=4096)
        reducer.step(step, step * _TOKENS_PER_STEP)

    return log, run.finish


def _open_many_by_hand(_folder: Path) -> tuple[Way, Callable[[], object]]:
    def log(values: Values, _step: int) -> None:
        _reduce_by_hand(Values([values.means[0]] * _MANY, [], []))

    return log, lambda: None


def _reduce_by_hand(values: Values) -> dict[str, float]:
    """Do what trainers do: a collective for each value, and a wait for each."""
    row = {}
    for index, value in enumerate(values.means):
        total = torch.stack([value.detach() * 4096, torch.tensor(4096.0)])
        if dist.is_initialized():
            dist.all_reduce(total)
        row[f"train/mean {index}"] = (total[0] / total[1]).item()
    for index, value in enumerate(values.norms):
        if dist.is_initialized():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        row[f"train/norm {index}"] = value.item()
    for index, number in enumerate(values.numbers):
        row[f"train/number {index}"] = number
    return row


def _open_by_hand(_folder: Path, every: int = 1) -> tuple[Way, Callable[[], object]]:
    def log(values: Values, step: int) -> None:
        if step % every == 0:
            _reduce_by_hand(values)

    return log, lambda: None


def _open_wandb_by_hand(folder: Path) -> tuple[Way, Callable[[], object]]:
    if os.environ["RANK"] != "0":
        return _open_by_hand(folder)
    tool = open_wandb(folder)

    def log(values: Values, step: int) -> None:
        tool.log(_reduce_by_hand(values), step, step * _TOKENS_PER_STEP)

    def close() -> None:
        tool.settle()
        tool.close()

    return log, close


_WAYS: Final[dict[str, Callable[[Path], tuple[Way, Callable[[], object]]]]] = {
    "none": _nothing,
    "llmtrack": lambda folder: _open_reducer(folder, 10),
    "llmtrack-all": lambda folder: _open_reducer(folder, 10, gives_all=True),
    "llmtrack-1": lambda folder: _open_reducer(folder, 1),
    "hand": _open_by_hand,
    "hand-10": lambda folder: _open_by_hand(folder, 10),
    "wandb": _open_wandb_by_hand,
    "llmtrack-200": _open_many,
    "hand-200": _open_many_by_hand,
}


if __name__ == "__main__":
    main()
