"""One rank of the jobs that test_reducer.py starts: it goes through scenarios and writes what happened in each.

python reducer_ranks.py FOLDER SCENARIO...   with RANK and WORLD_SIZE in the environment; FOLDER is shared by the ranks
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.nn.parallel import DistributedDataParallel

import llmtrack
from llmtrack.writer.capture.cadence import Cadence, Group
from llmtrack.writer.capture.reduce import Reducer
from tests.dispatched import Dispatched

_TIMEOUT = timedelta(seconds=60)
_SEED = 7


class Job:
    """What a scenario is given."""

    def __init__(self, folder: Path, name: str) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.root = folder / name

    @contextlib.contextmanager
    def run(self) -> Iterator[llmtrack.Run]:
        """Open the scenario's run, and finish it."""
        with llmtrack.open_run(self.root, run_id="run") as run:
            yield run


def error_of(act: Callable[[], object]) -> str | None:
    """Return what an act is refused with."""
    try:
        act()
    except llmtrack.UsageError as error:
        return str(error)
    return None


# --- scenarios: what is returned goes to the test, which reads the log too ----------------------------------------


def ragged(job: Job) -> None:
    """3 of 12 and 3 of 4 tokens: the last rank has few."""
    tokens = 4 if job.rank == job.world_size - 1 else 12
    loss = torch.tensor(3.0, requires_grad=True) / tokens
    with job.run() as run:
        reducer = Reducer(run, every=1)
        reducer.mean("tensor weight", loss, weight=torch.tensor(tokens))
        reducer.mean("number weight", loss, weight=tokens)
        reducer.mean("bf16", loss.to(torch.bfloat16), weight=torch.tensor(tokens))
        reducer.mean("numbers", 3 / tokens, weight=tokens)
        reducer.mean("not weighted", loss)
        reducer.sum("tokens", tokens)
        reducer.step(1, 16)


def micro_batches(job: Job) -> list[list[float]]:
    """Ten thousand bf16 losses on each rank, with ragged weights; some without tokens, whose loss is 0/0."""
    randoms = random.Random(job.rank)
    weights = [randoms.choice([0, 1, 7, 4096]) for _ in range(10_000)]
    noise = torch.tensor([2 + randoms.gauss(0, 0.3) for _ in weights], dtype=torch.bfloat16)
    losses = torch.where(torch.tensor(weights) == 0, torch.nan, noise)
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for loss, weight in zip(losses, weights, strict=True):
            reducer.mean("train/loss", loss, weight=weight)
            reducer.mean("by tensor", loss, weight=torch.tensor(weight))
        reducer.step(1, 1)
    return [[float(loss), weight] for loss, weight in zip(losses, weights, strict=True) if weight]


def stages(job: Job) -> None:
    """Only the last pipeline stage knows the loss; nobody knows the accuracy."""
    is_last = job.rank == job.world_size - 1
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in (1, 2):
            reducer.mean("train/loss", torch.tensor(float(step)) if is_last else None, weight=3)
            reducer.last("of the last stage", 7.0 if is_last else None)
            reducer.max("busiest", step if is_last else None)
            reducer.mean("train/accuracy", None)
            reducer.step(step, step)


def extremes(job: Job) -> None:
    """Each rank has its own step time; the third step is NaN on rank 1."""
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in (1, 2, 3):
            took = [1.0, 1.5, 0.25, 0.5][(job.rank + step) % job.world_size]
            took = math.nan if step == 3 and job.rank == 1 else took
            reducer.max("slowest", took)
            reducer.min("fastest", torch.tensor(took))
            reducer.max("unnamed", took, names_rank=False)
            reducer.step(step, step)


def any_order(job: Job) -> None:
    """The ranks give the same metrics, each in an order of its own."""
    names = [f"m{index}" for index in range(20)]
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in (1, 2, 3):
            random.Random(100 * job.rank + step).shuffle(names)
            for name in names:
                reducer.sum(name, int(name[1:]) + step)
            reducer.step(step, step)


def different_from_the_start(job: Job) -> str | None:
    """Rank 1 has a metric more, and lacks one."""
    with job.run() as run:
        reducer = Reducer(run, every=1, max_metrics=2000)  # so many are looked at by torch
        for step in (1, 2):
            reducer.mean("train/loss", float(job.rank))
            reducer.sum("train/aux" if job.rank == 1 else "train/extra", 1.0)
            if problem := error_of(lambda step=step: reducer.step(step, step)):  # type: ignore[misc]
                return f"step {step}: {problem}"
    return None


def different_later(job: Job) -> list[str | None]:
    """Rank 1 comes up with two metrics in the window right after the first log step, and forgets one after that."""
    problems = []
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in range(1, 7):
            reducer.mean("train/loss", float(step))
            if (step, job.rank) != (5, 1):
                reducer.sum("train/tokens", 1.0)
            if (step, job.rank) == (2, 1):
                reducer.sum("train/new", 1.0)
                reducer.max("train/newer", torch.tensor(1.0))
            problems.append(error_of(lambda step=step: reducer.step(step, step)))  # type: ignore[misc]
    return problems


def different_alike(job: Job) -> list[str | None]:
    """All ranks change their metrics together: that is a mistake, too, and no rank is to blame."""
    problems = []
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in range(1, 6):
            reducer.mean("train/loss", float(step))
            if step != 3:
                reducer.last("train/lr", 0.1)
            problems.append(error_of(lambda step=step: reducer.step(step, step)))  # type: ignore[misc]
    return problems


def different_steps(job: Job) -> str | None:
    """Rank 1 counts its steps from 1 on, and rank 0 from 0 on."""
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in range(12):
            reducer.mean("train/loss", 1.0)
            if problem := error_of(lambda step=step: reducer.step(step + job.rank, step)):  # type: ignore[misc]
                return problem
    return None


def different_setups(job: Job) -> list[str | None]:
    """Each rank makes its reducers in its own way, which shows when they are made; one is the same on both."""
    setups: tuple[dict[str, Any], ...] = (
        {"every": 2 + job.rank},
        {"max_metrics": 100 * (1 + job.rank)},
        {"cadence": Cadence.default() if job.rank else None},
        {"every": 7},
    )
    with job.run() as run:
        return [error_of(lambda given=given: Reducer(run, **given)) for given in setups]  # type: ignore[misc]


def refused(job: Job) -> list[str | None]:
    """Values, names and steps that are none are refused on every rank alike, and leave nothing behind."""
    names: Any = ("", 3, None, "\ud800")
    places: Any = ((1.5, 1), (1, 1.0), (-1, 1), (1, -1))
    with torch.inference_mode(), job.run() as run:
        reducer = Reducer(run, every=1)
        reducer.max("made in inference mode", torch.tensor(1.0))
        with torch.inference_mode(mode=False):
            reducer.min("outside of it", torch.tensor(1.0))
            acts: list[Any] = [
                lambda: reducer.mean("no value", torch.zeros(2)),
                lambda: reducer.mean("no weight", 1.0, weight=torch.zeros(2)),
                *(lambda kind=kind: getattr(reducer, kind)(kind, "1") for kind in ("sum", "min", "max", "last")),
                *(lambda name=name: reducer.sum(name, 1.0) for name in names),
                *(lambda at=at: reducer.step(*at) for at in places),
            ]
            problems = [error_of(act) for act in acts]
            for step in (1, 2):
                reducer.max("made in inference mode", torch.tensor(float(step)))
                reducer.min("outside of it", torch.tensor(float(step)))
                reducer.step(step, step)
    return problems


def collectives(job: Job) -> dict[str, Any]:
    """Metrics of every kind, as many as there may be, in a loop whose calls to torch are counted."""
    value, weight = torch.tensor(2.0, requires_grad=True) * 1, torch.tensor(5)
    counts = {}
    with job.run() as run:
        reducer = Reducer(run, every=5)

        def give(step: int) -> None:
            for index in range(30):
                reducer.mean(f"mean {index}", value, weight=weight if index % 2 else 5)
                reducer.sum(f"sum {index}", value)
                reducer.min(f"min {index}", value)
                reducer.max(f"max {index}", value if index % 2 else 1.0)
                reducer.last(f"last {index}", value)
            reducer.grad_norm(value)
            reducer.step(step, step)

        for step in range(1, 21):
            with Dispatched() as dispatched:
                give(step)
            counts[step] = dict(dispatched.calls)
            dist.barrier()
    return {
        "collectives": {step: sum(n for call, n in calls.items() if "c10d" in call) for step, calls in counts.items()},
        "to numbers": sum(n for calls in counts.values() for call, n in calls.items() if "_local_scalar_dense" in call),
    }


def burst(job: Job) -> list[int]:
    """Rank 0 alone sees an alert; all ranks must find per-layer metrics due at the same steps."""
    groups = (
        Group("optimisation", 3, metrics=("train/*",)),
        Group("per_layer", 12, metrics=("layers/*",), burst=True),
        Group("unused", 2, metrics=("data/*",)),
    )
    cadence = Cadence(groups, burst_steps=5)
    due = []
    with job.run() as run:
        reducer = Reducer(run, cadence=cadence, max_metrics=2000)
        for step in range(1, 31):
            reducer.mean("train/loss", torch.tensor(float(step)), weight=job.rank + 1)
            if cadence.due("per_layer", step):
                due.append(step)
                norms = torch.full((), float(job.rank + 1))
                dist.all_reduce(norms)  # what hangs when the ranks do not agree
                reducer.last("layers/0/norm", norms)
            if step == 13 and job.rank == 0:
                run.alert("spike", "the loss doubled", step, step)
            reducer.step(step, step)
            if step == 20:
                reducer.flush(step, step)
    return due


def ids(job: Job) -> None:
    """Each rank has ids of its own, and in the end the same; rank 0 alone knows of a spike in the loss."""
    with job.run() as run:
        reducer = Reducer(run, every=2)
        for step in range(1, 121):
            loss = 5.0 if step == 80 else 2.0 + 0.01 * (step * 7919 % 13)
            reducer.mean("train/loss", loss)
            names = [f"all-{step}"] if step > 86 else [f"rank {job.rank} step {step} {part}" for part in range(2)]
            reducer.step(step, step * 10, batch_ids=names, position=step)
            if job.rank == 0 and step == 80:
                run.flush()  # the spike is seen before the next log step
            dist.barrier()


def many_alerts(job: Job) -> None:
    """Rank 0 raises alerts one after another, and on the last rank what was gathered seems never to arrive."""
    with job.run() as run:
        reducer = Reducer(run, every=1)
        if job.rank == job.world_size - 1:
            # What arrives late on one rank only cannot be had in another way.
            reducer._ids._is_ready = lambda: False  # type: ignore[method-assign]  # of this one object
        for step in range(1, 61):
            reducer.mean("train/loss", float(step))
            if job.rank == 0 and step in {10, 11, 20, 33}:
                run.alert("spike", f"at step {step}", step, step)
            reducer.step(step, step, batch_ids=[f"rank {job.rank} step {step}"])


def killed_while_gathering(job: Job) -> None:
    """The last rank is killed where the ids around an alert are gathered."""
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step in range(1, 31):
            if job.rank == 0 and step == 10:
                run.alert("spike", "the loss doubled", step, step)
            if step == 18:  # eight steps after the alert
                assert reducer._reduction is not None
                reducer._reduction.wait()
                dist.barrier()
                if job.rank == job.world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == 19:
                assert reducer._ids._work is not None
                while not reducer._ids._work.is_completed():  # it fails before anything else asks for it
                    time.sleep(0.01)
            reducer.mean("train/loss", float(step))
            reducer.step(step, step, batch_ids=[f"rank {job.rank} step {step}"])
            run.log({"of rank 0": float(step)}, step=step, tokens=step)


def checkpointed(job: Job) -> tuple[int, dict[str, float]]:
    """A checkpoint comes in the middle of a window; what has arrived at the end can be printed."""
    with job.run() as run:
        reducer = Reducer(run, every=10)
        for step in range(1, 21):
            reducer.mean("train/loss", float(step), weight=1 + job.rank)
            reducer.sum("steps", 1)
            reducer.step(step, step)
            if step == 14:
                reducer.flush(step, step)
        return reducer.newest()


def _group(*ranks: int) -> Any:
    """Return a group of these ranks; on others, something that torch takes for one."""
    return dist.new_group(list(ranks))


def subgroups(job: Job) -> str | None:
    """Tensor parallelism over pairs: ranks 0 and 2 have the same part of the model, and so have 1 and 3."""
    replicas = [_group(0, 2), _group(1, 3)]
    pair = _group(0, 1)
    with job.run() as run:
        reducer = Reducer(run, every=1, group=replicas[job.rank % 2])
        for step in (1, 2):
            reducer.mean("train/loss", torch.tensor(float(job.rank)), weight=1 + job.rank)
            reducer.max("slowest", job.rank)
            reducer.step(step, step)
        outside = error_of(lambda: Reducer(run, group=pair))
        with_cadence = error_of(lambda: Reducer(run, group=replicas[job.rank % 2], cadence=Cadence.default()))
    return f"{outside} {with_cadence}"


def destroyed(job: Job) -> None:
    """The trainer leaves a group before the run is finished."""
    group = _group(*range(job.world_size))
    with job.run() as run:
        reducer = Reducer(run, every=1, group=group)
        for step in (1, 2, 3):
            reducer.max("slowest", job.rank)
            reducer.step(step, step)
        dist.barrier()
        dist.destroy_process_group(group)


def _model() -> nn.Sequential:
    torch.manual_seed(_SEED)
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 8))


def _batch(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3 + rank + micro, 8, generator=generator)


def ddp(job: Job) -> list[list[float]]:
    """A compiled model under DDP with gradient accumulation; returns each step's true loss and gradient norm."""
    plain, truth = _model(), []
    model = DistributedDataParallel(torch.compile(_model(), backend="aot_eager", dynamic=True))
    with job.run() as run:
        reducer = Reducer(run, every=2)
        for step in range(1, 5):
            for micro in range(3):
                batch = _batch(job.rank, step, micro)
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss = model(batch).square().mean()
                    (loss / 3).backward()
                reducer.mean("train/loss", loss, weight=len(batch))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            reducer.grad_norm(norm)
            reducer.step(step, step * 100)
            model.zero_grad()

            plain.zero_grad()
            losses = []
            for rank in range(job.world_size):
                for micro in range(3):
                    batch = _batch(rank, step, micro)
                    loss = plain(batch).square().mean()
                    (loss / 3 / job.world_size).backward()
                    losses.append((float(loss), len(batch)))
            total = math.fsum(loss * weight for loss, weight in losses)
            truth.append([total, sum(weight for _, weight in losses), float(nn.utils.get_total_norm(_grads(plain)))])
    return truth


def _grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def fsdp(job: Job) -> dict[str, Any]:
    """FSDP2 on one and on two dimensions; returns the norms of the same gradients without shards."""
    meshes = {"shards": init_device_mesh("cpu", (job.world_size,))}
    if job.world_size == 4:
        meshes["replicas of shards"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    truth: dict[str, Any] = {}
    with job.run() as run:
        reducer = Reducer(run, every=1)
        for step, order in enumerate((2.0, 1.0, math.inf, 3.0)):
            for name, mesh in meshes.items():
                model = _model()
                for layer in (model[0], model[2], model):
                    fully_shard(layer, mesh=mesh)
                model(_batch(job.rank, step, 0)).square().mean().backward()
                of_shards = _norm_of_shards(model, mesh, order)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
                reducer.grad_norm(norm, f"{name} {order}")
                reducer.grad_norm(of_shards, f"{name} {order}, of shards")
                plain = _model()
                for rank in range(job.world_size):
                    (plain(_batch(rank, step, 0)).square().mean() / job.world_size).backward()
                truth[f"{name} {order}"] = float(nn.utils.get_total_norm(_grads(plain), order))
        reducer.step(1, 1)
        if job.world_size == 4:
            stage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
            model = _model()
            fully_shard(model, mesh=stage)
            model(_batch(job.rank, 9, 0)).square().mean().backward()
            norm = _norm_of_shards(model, stage, 2.0)
            truth["error"] = error_of(lambda: reducer.grad_norm(norm, "of one stage"))
    return truth


def _norm_of_shards(model: nn.Module, mesh: DeviceMesh, order: float) -> DTensor:
    """Return the norm as torch before 2.13 gives it: this rank's part, still to be put together."""
    parts = [grad.to_local().norm(order) for grad in _grads(model) if isinstance(grad, DTensor)]
    placements = [*[Replicate()] * (mesh.ndim - 1), _NormPartial(order)]
    return DTensor.from_local(torch.linalg.vector_norm(torch.stack(parts), order), mesh, placements)


def killed(job: Job) -> None:
    """Rank 1 is killed in the middle of a step, or stops; the others go on until their own collective fails."""
    how = os.environ["KILLED_HOW"]
    started_s = 0.0
    gradients = torch.zeros(1000)
    try:
        with contextlib.nullcontext() if how.startswith("without") else job.run() as run:
            reducer = None if run is None else Reducer(run, every=2)
            for step in range(1, 1000):
                if step == 8:
                    started_s = time.monotonic()
                    if job.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL if "killed" in how else signal.SIGSTOP)
                dist.all_reduce(gradients)
                if reducer is not None:
                    reducer.max("slowest", job.rank)
                    reducer.step(step, step)
    finally:
        if job.rank == 0:
            (job.root.parent / f"{how}.json").write_text(json.dumps(time.monotonic() - started_s), encoding="utf-8")


_SCENARIOS: dict[str, Callable[[Job], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        *(ragged, micro_batches, stages, extremes, any_order, different_from_the_start, different_later),
        *(
            different_alike,
            different_setups,
            refused,
            collectives,
            burst,
            ids,
            many_alerts,
            checkpointed,
            subgroups,
            destroyed,
            ddp,
            fsdp,
            killed,
            killed_while_gathering,
            different_steps,
        ),
    )
}


def main() -> None:
    """Go through the scenarios that the command line names, on this rank."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT_S", _TIMEOUT.total_seconds())))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder / 'store'}", timeout, world_size, rank)
    results = {}
    for name in names:
        results[name] = _SCENARIOS[name](Job(folder, name))
        dist.barrier()
    (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
