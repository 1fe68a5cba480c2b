"""Metrics of all ranks -> one row on rank 0: added up on the device, one collective a log step, no wait.

Every rank adds up on its device (`window`). At a log step it packs what it has into one vector of doubles, and one
all-gather brings the vectors of all ranks to each (`reduction`). What is reduced from them goes to the host by a copy
that no thread waits for: the drain thread takes the row when it is there.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import TYPE_CHECKING, Any, Final, SupportsFloat, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrack.writer.errors import UsageError
from llmtrack.writer.run import Run

from .cadence import Cadence
from .gather import IdsOfRanks
from .metric import Kind, Metric
from .reduction import Ranks, Reduction, is_distributed
from .scalar import take_scalar
from .setups import compare_setup
from .throughput import (
    DATA_WAIT_S,
    MAX_MEMORY_BYTES,
    MEASURED,
    MFU,
    SLOWEST_TOKENS_PER_S,
    STEP_TIME_S,
    TOKENS_PER_S,
    Throughput,
)
from .window import Window

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_log = logging.getLogger("llmtrack")

# Looking these up in the enumeration takes as long as adding a value up.
_MEAN: Final = Kind.MEAN
_SUM: Final = Kind.SUM
_LAST: Final = Kind.LAST


class Reducer:
    """Reduces metrics over micro-batches and ranks, and logs them at every `every`-th step.

    Every rank of the group makes one, and gives the same metrics in every window, in any order; a rank that has no
    value for one (a loss that only the last pipeline stage knows) gives None. A metric that no rank had a value for is
    not logged. Values stay on their device, and no call waits for it, for another rank or for a disk.

    Args:
        run: What `open_run` returned on this rank.
        every: Log at steps that this divides; for metrics that belong to no group of the cadence.
        cadence: When the others are logged: each group of metrics at its own steps, all that are due at a step with
            one collective. Alerts of the run begin a burst.
        group: The ranks to reduce over; rank 0 of the run must be in it. Default: all.
        device: Where to add up; default: the current CUDA device where the group can use it, else the CPU.
        throughput: Measures the speed of this rank; what it finds is logged with the other metrics.
        max_metrics: Most metrics that a group of the cadence may have. Its first log step, when the ranks do not know
            yet that they agree, sends room for so many.

    Raises:
        UsageError: `every` or `max_metrics` below 1; a rank outside the group; a cadence for a part of the ranks.
    """

    def __init__(
        self,
        run: Run,
        every: int = 10,
        *,
        cadence: Cadence | None = None,
        throughput: Throughput | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        max_metrics: int = 256,
    ) -> None:
        if every < 1 or max_metrics < 1:
            raise UsageError(f"every={every}, max_metrics={max_metrics}", hint="both are at least 1")
        self.every: Final = every
        self.cadence: Final = cadence
        self.throughput: Final = throughput
        self._run = run
        self._ranks = Ranks.of(group)
        if cadence is not None and is_distributed() and len(self._ranks) < dist.get_world_size():
            raise UsageError(
                "a cadence needs all ranks, because all must know of a burst",
                hint="leave group out, and give None on ranks that have no value of their own",
            )
        self._device = _device(device, group)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's own
        self._max_metrics = max_metrics
        groups = [None] if cadence is None else [None, *(g.name for g in cadence.groups.values() if g.metrics)]
        self._windows = {name: Window(name, max_metrics, self._device) for name in groups}
        self._metrics: dict[str, Metric] = {}
        setup = _setup(every, max_metrics, cadence)
        self._setup = float(int(setup[-12:], 16))
        if is_distributed():
            compare_setup(self._ranks.numbers, setup)
        self._reduction: Reduction | None = None
        self._arrived: tuple[Reduction, ...] = ()  # the newest first; a GPU may not be done with it
        self._known_meshes: set[DeviceMesh] = set()
        self._steps = 0  # that this reducer has seen the end of
        self._tokens = 0
        # Disabled, or a rank that knows of no other: nobody would log what is reduced.
        self._is_off = run.segment == 0
        self._alert = 0  # the step of an alert that the other ranks do not know of, plus one
        self._ids = IdsOfRanks(run, self._ranks, self._device, self._stream)
        run.on_alert(self._take_note_of_alert)

    def mean(self, name: str, value: Tensor | SupportsFloat | None, weight: Tensor | SupportsFloat = 1.0) -> None:
        """Add a value to a mean over micro-batches and ranks, weighted: sum of weight * value over sum of weights.

        Args:
            name: The metric.
            value: 0-d tensor of any type on any device, or a number; None when this rank has none.
            weight: For a loss that is a mean over tokens, the number of those tokens.

        Raises:
            UsageError: The name was given with another kind before, there is no room for it, or the value is no
                number.
        """
        if value is None:
            self._given(name, _MEAN)
            return
        number, by = take_scalar(name, value), take_scalar(name, weight)
        self._given(name, _MEAN).add(number, by)

    def sum(self, name: str, value: Tensor | SupportsFloat | None) -> None:
        """Add a value to a sum over micro-batches and ranks.

        Raises:
            UsageError: As `mean`.
        """
        number = None if value is None else take_scalar(name, value)
        metric = self._given(name, _SUM)
        if number is not None:
            metric.add(number, 1.0)

    def min(self, name: str, value: Tensor | SupportsFloat | None, *, names_rank: bool = True) -> None:
        """Take a value into a minimum over micro-batches and ranks; NaN wins.

        Args:
            name: The metric; ``<name>_rank`` is the rank that had it.
            value: 0-d tensor, number, or None when this rank has none.
            names_rank: Log the rank too.

        Raises:
            UsageError: As `mean`.
        """
        self._take(Kind.MIN, name, value, names_rank=names_rank)

    def max(self, name: str, value: Tensor | SupportsFloat | None, *, names_rank: bool = True) -> None:
        """Take a value into a maximum over micro-batches and ranks; see `min`.

        Raises:
            UsageError: As `mean`.
        """
        self._take(Kind.MAX, name, value, names_rank=names_rank)

    def last(self, name: str, value: Tensor | SupportsFloat | None) -> None:
        """Keep the newest value of one that is the same on all ranks already; the lowest rank that has one is asked.

        Raises:
            UsageError: As `mean`.
        """
        number = None if value is None else take_scalar(name, value)
        metric = self._given(name, _LAST)
        if number is not None:
            metric.keep(number)

    def grad_norm(self, value: Tensor | SupportsFloat | None, name: str = "train/grad_norm") -> None:
        """Keep what `clip_grad_norm_` returned: the global norm before clipping, whatever the parallelism.

        Under FSDP2 that is a DTensor which holds the norm of this rank's shards; they are put together with the other
        metrics, without a collective of their own.

        Args:
            value: A plain tensor or number that is global already, or a DTensor over the ranks of this reducer.
            name: The metric.

        Raises:
            UsageError: As `mean`; or a DTensor whose placement is no norm, or which is over other ranks.
        """
        partial = _partial_norm(value)
        if partial is None:
            self.last(name, value)
            return
        shards, order = partial
        self._check_mesh(name, shards)
        # Where the norm is replicated along a dimension of the mesh, the first of its copies speaks for all.
        coordinate = tuple(shards.device_mesh.get_coordinate() or ())
        speaks = all(
            at == 0 or placement.is_partial() for at, placement in zip(coordinate, shards.placements, strict=True)
        )
        norm = shards.to_local().detach() if speaks else None
        if math.isinf(order):
            self.max(name, norm, names_rank=False)
            return
        metric = self._given(name, Kind.NORM, order)
        if norm is not None:
            metric.keep(take_scalar(name, norm.to(torch.float64).abs().pow(order)))

    def _check_mesh(self, name: str, shards: DTensor) -> None:
        mesh = shards.device_mesh
        if mesh in self._known_meshes:
            return
        ranks = mesh.mesh.flatten().tolist()
        if sorted(ranks) != sorted(self._ranks.numbers):
            raise UsageError(
                f"{name} is a norm over the ranks {ranks}, and this reducer is over {list(self._ranks.numbers)}",
                hint="put it together first: reducer.grad_norm(norm.full_tensor())",
            )
        self._known_meshes.add(mesh)

    def step(
        self,
        step: SupportsIndex,
        tokens: SupportsIndex,
        batch_ids: object = None,
        position: SupportsIndex | None = None,
    ) -> None:
        """End a step on every rank; at a log step reduce what was given since the last one, and log it.

        Args:
            step: The optimiser step that ended.
            tokens: Tokens seen by the run, this step included.
            batch_ids: What this rank trained on in the step, or all of them; see `Run.batches`. After an alert, rank 0
                gets those that other ranks gave, too.
            position: In the order of the data.

        Raises:
            UsageError: Ranks, or log steps, have given different metrics: raised on every rank at the next log step,
                and at once where there is one rank. Tokens that go backwards.
        """
        if self._is_off:
            return
        at, seen = _integer("step", step), _integer("tokens", tokens)
        self._steps += 1
        if self.throughput is not None:
            self.throughput.end_step(seen)
        if batch_ids is not None or position is not None:
            self._ids.keep(at, seen, batch_ids, None if position is None else _integer("position", position))
        self._ids.take()
        if self.cadence is None and at % self.every:
            return
        due = [window for window in self._windows.values() if self._is_due(window, at)]
        if due:
            self._reduce(at, seen, due, is_full=True)

    def flush(self, step: SupportsIndex, tokens: SupportsIndex) -> None:
        """Reduce and log windows that are not full, on every rank: before a checkpoint, so that none straddles it.

        Raises:
            UsageError: As `step`.
        """
        windows = [window for window in self._windows.values() if window.began_at < self._steps]
        self._ids.take()
        if windows:
            self._reduce(_integer("step", step), _integer("tokens", tokens), windows, is_full=False)

    def newest(self) -> tuple[int, dict[str, float]]:
        """Return the newest log step whose metrics have arrived, and these, on every rank; for the console, no wait.

        That is the log step before the last one, as a rule; (0, {}) when there is none yet.
        """
        for reduction in self._arrived:
            if reduction.is_ready():
                return reduction.step, reduction.resolve()
        return 0, {}

    def data_wait(self) -> AbstractContextManager[None]:
        """Count the time in the block as waiting for data: ``with reducer.data_wait(): batch = next(batches)``."""
        return nullcontext() if self.throughput is None else self.throughput.data_wait()

    def pause(self) -> AbstractContextManager[None]:
        """Leave the time in the block out of the throughput: an evaluation, a checkpoint."""
        return nullcontext() if self.throughput is None else self.throughput.pause()

    def _is_due(self, window: Window, step: int) -> bool:
        if window.group is None or self.cadence is None:
            return step % self.every == 0
        return self.cadence.due(window.group, step)

    def _reduce(self, step: int, tokens: int, windows: list[Window], *, is_full: bool) -> None:
        if tokens < self._tokens:
            raise UsageError(f"tokens go backwards: {tokens} after {self._tokens}")
        if self._ranks.is_alone and is_distributed():
            raise UsageError(
                "the reducer was made before the process group", hint="call init_process_group, then make the Reducer"
            )
        self._tokens = tokens
        self._finish_last(step)
        if self._is_off:
            return
        self._measure(tokens, windows)
        alert, self._alert = self._alert, 0
        if self.cadence is not None and self.cadence.take_request():
            alert = alert or step + 1
        try:
            self._ids.step(step)
            reduction = Reduction(
                windows,
                self._ranks,
                self._stream,
                step=step,
                setup=self._setup,
                is_full=is_full,
                alert=alert,
            )
        except (RuntimeError, ValueError) as error:  # torch has either for a group that is gone
            self._give_up(step, error)
            return
        for window in windows:
            for name in window.strays:
                del self._metrics[name]
            window.begin(self._steps)
        self._run.log_later(reduction, step, tokens)
        self._reduction = reduction
        if len(self._ranks) == 1:
            self._finish_last(step)
        elif reduction.out_of_place:
            _log.warning("llmtrack: at step %d, on this rank, %s", step, reduction.out_of_place)

    def _measure(self, tokens: int, windows: list[Window]) -> None:
        """Give the window that throughput belongs to what was measured in it, if it is one of these."""
        if self.throughput is None or self._window_of(TOKENS_PER_S) not in windows:
            return
        speed = self.throughput.measure(tokens, len(self._ranks))
        self.last(TOKENS_PER_S, speed.tokens_per_s)
        self.min(SLOWEST_TOKENS_PER_S, speed.own_tokens_per_s)
        self.last(STEP_TIME_S, speed.step_time_s)
        self.max(DATA_WAIT_S, speed.data_wait_s)
        self.last(MFU, speed.mfu)
        self.max(MAX_MEMORY_BYTES, speed.max_memory_bytes)

    def _finish_last(self, step: int) -> None:
        """Take note of what the last reduction has shown to all ranks; it ended long ago."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        try:
            reduction.wait()
            alert = reduction.alert()
        except RuntimeError as error:
            self._give_up(step, error)
            return
        reduction.agree()
        self._arrived = (reduction, *self._arrived[:1])
        if alert:
            self._ids.want(alert - 1)
            self._begin_burst(step)

    def _begin_burst(self, step: int) -> None:
        """Log more for a while, on all ranks, and say so in the log."""
        if self.cadence is None:
            return
        self.cadence.begin_burst(step)
        denser = ", ".join(group.name for group in self.cadence.groups.values() if group.burst)
        if denser:
            message = f"{denser} at every step from {step + 1} to {self.cadence.burst_until_step}"
            self._run.context(message, step, self._tokens)

    def _take_note_of_alert(self) -> None:
        """Let the other ranks know at the next log step; on whatever thread the alert was raised."""
        self._alert = self._run.alert_step + 1

    def _give_up(self, step: int, error: Exception) -> None:
        """Reduce no more: a rank is gone, and the trainer's own collectives are to say so, not this."""
        self._is_off = True
        message = f"from step {step} on nothing is reduced over the ranks: {error}"
        _log.warning("llmtrack: %s", message)
        self._run.alert("reducer", message, step, self._tokens, level="error")

    def _take(self, kind: Kind, name: str, value: Tensor | SupportsFloat | None, *, names_rank: bool) -> None:
        number = None if value is None else take_scalar(name, value)
        metric = self._given(name, kind)
        metric.names_rank = names_rank
        if number is not None:
            metric.take(number)

    def _given(self, name: str, kind: Kind, order: float = 2.0) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            _check_name(name)
            metric = self._metrics[name] = self._window_of(name).metric(name, kind, order)
        elif metric.kind is not kind or metric.order != order:
            raise UsageError(f"{metric} was given as {kind.value} now", hint="give it another name")
        metric.was_given = True
        return metric

    def _window_of(self, name: str) -> Window:
        if self.cadence is None:
            return self._windows[None]
        # What is measured together is logged together.
        is_measured = self.throughput is not None and name in MEASURED
        return self._windows[self.cadence.group_of(TOKENS_PER_S if is_measured else name)]


def _device(given: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    if given is None:
        gpu = torch.cuda.is_available() and (not is_distributed() or "nccl" in str(dist.get_backend_config(group)))
        given = "cuda" if gpu else "cpu"
    return torch.empty(0, device=given).device  # with its index


def _setup(every: int, max_metrics: int, cadence: Cadence | None) -> str:
    """Return words that are the same on ranks whose reducers do the same at every step; they end in a digest."""
    groups = () if cadence is None else (cadence.burst_steps, *cadence.groups.values())
    digest = hashlib.blake2b(repr((every, max_metrics, groups)).encode(), digest_size=6).hexdigest()
    table = "no cadence" if cadence is None else f"a cadence of {len(cadence.groups)} groups"
    return f"every={every}, max_metrics={max_metrics}, {table}; digest {digest}"


def _integer(what: str, value: SupportsIndex) -> int:
    """Return a step or tokens; refused are on every rank the values that rank 0's run would refuse."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{what} is {value!r}", hint=f"give {what} as an integer from 0 on")
    return number


def _check_name(name: object) -> None:
    try:
        is_name = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise UsageError(f"a metric is called {name!r}", hint="name it with a string such as 'train/loss'")


def _partial_norm(value: Any) -> tuple[DTensor, float] | None:
    """Return a norm whose parts are still on the ranks, and its order; None for what is global already."""
    module = sys.modules.get("torch.distributed.tensor")  # where nobody imported that, nothing is a DTensor
    kind = getattr(module, "DTensor", None)
    if kind is None or not isinstance(value, kind):
        return None
    partial = [placement for placement in value.placements if placement.is_partial()]
    if not partial:
        return None
    order = getattr(partial[0], "norm_type", None)
    if order is None and getattr(partial[0], "reduce_op", "") == "max":
        order = math.inf
    if order is None:
        raise UsageError(f"a gradient norm is placed as {value.placements}", hint="give what clip_grad_norm_ returned")
    return value, float(order)
