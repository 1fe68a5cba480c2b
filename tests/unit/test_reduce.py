"""The reducer on one rank: what each kind of metric becomes, and what is refused."""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import llmtrack
from llmtrack.writer.capture.cadence import Cadence, Group
from llmtrack.writer.capture.reduce import Reducer
from llmtrack.writer.run import RecordingRun
from tests.dispatched import Dispatched
from tests.reading import Segment, read_segment

LOSS = torch.tensor(2.0)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Training:
    """A run and the reducer that logs to it."""

    def __init__(self, root: Path, **given: Any) -> None:
        run = llmtrack.open_run(root)
        assert isinstance(run, RecordingRun)
        self.run = run
        self.reducer = Reducer(run, given.pop("every", 1), **given)

    def end(self) -> Segment:
        """Finish the run and read it."""
        self.run.finish()
        return read_segment(self.run.folder)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Yield a function that opens a run with a reducer; finishes what a failed test leaves open."""
    opened: list[Training] = []

    def open_(**given: Any) -> Training:
        opened.append(Training(tmp_path / str(len(opened)), **given))
        return opened[-1]

    yield open_
    for training in opened:
        training.run.finish()


def as_tensor(value: float | None) -> torch.Tensor | None:
    """Return a 0-d tensor with a graph, as a loss is."""
    return None if value is None else torch.tensor(value, dtype=torch.float64, requires_grad=True) * 1


@pytest.mark.parametrize("make", [lambda value: value, as_tensor], ids=["numbers", "tensors"])
def test_each_kind_of_metric_becomes_one_number(train: Callable[..., Training], make: Callable[..., Any]) -> None:
    """Means are weighted; of extremes the rank is named; the newest value is the last one that was given."""
    training = train(every=2)
    reducer = training.reducer
    for step, value, weight in ((1, 3.0, 12), (2, -1.5, 4), (3, 7.0, 1), (4, 5.0, 3)):
        reducer.mean("mean", make(value), weight=weight)
        reducer.sum("sum", make(value))
        reducer.min("min", make(value))
        reducer.max("max", make(value), names_rank=False)
        reducer.last("last", make(value))
        reducer.grad_norm(make(value))
        reducer.step(step, step * 100)
    segment = training.end()
    assert segment.series("mean") == [(3.0 * 12 - 1.5 * 4) / 16, (7.0 + 5.0 * 3) / 4]
    assert segment.series("sum") == [1.5, 12.0]
    assert segment.series("min") == [-1.5, 5.0]
    assert segment.series("min_rank") == [0.0, 0.0]
    assert segment.series("max") == [3.0, 7.0]
    assert segment.series("max_rank") == []
    assert segment.series("last") == segment.series("train/grad_norm") == [-1.5, 5.0]
    assert segment.steps() == [2, 4]


def test_numbers_and_tensors_mix(train: Callable[..., Training]) -> None:
    """Value and weight may each be either, and change from one micro-batch to the next."""
    training = train()
    reducer, three, half = training.reducer, torch.tensor(3), torch.tensor(0.5)
    reducer.mean("mean", 0.5, weight=three)
    reducer.mean("mean", half, weight=three)
    reducer.mean("mean", 2, weight=1)
    reducer.mean("mean", half, weight=2.0)
    for name, values in (("min", (4.0, torch.tensor(2.0), 3.0)), ("max", (1.0, torch.tensor(4.0), 6.0))):
        for value in values:
            getattr(reducer, name)(name, value)
    for value in (torch.tensor(1.0), 2.0):
        reducer.last("number is newer", value)
    for value in (1.0, torch.tensor(2.0)):
        reducer.last("tensor is newer", value)
    reducer.step(1, 1)
    (row,) = training.end().rows()
    assert row.bits.keys() == {"mean", "min", "min_rank", "max", "max_rank", "number is newer", "tensor is newer"}
    segment = training.end()
    assert segment.series("mean") == [(1.5 + 1.5 + 2 + 1.0) / 9]
    assert (segment.series("min"), segment.series("max")) == ([2.0], [6.0])
    assert segment.series("number is newer") == segment.series("tensor is newer") == [2.0]


@pytest.mark.parametrize("weigh", [float, int, torch.tensor], ids=["float", "int", "tensor"])
def test_ten_thousand_bf16_losses_add_up(train: Callable[..., Training], weigh: Callable[..., Any]) -> None:
    """The mean is that of the bf16 values as if they had been added up exactly."""
    randoms = random.Random(5)
    losses = torch.tensor([2.0 + randoms.gauss(0, 0.3) for _ in range(10_000)], dtype=torch.bfloat16)
    weights = [randoms.randrange(4096) for _ in range(10_000)]
    training = train()
    for loss, weight in zip(losses, weights, strict=True):
        training.reducer.mean("train/loss", loss, weight=weigh(weight))
    training.reducer.step(1, 1)
    exact = math.fsum(float(loss) * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert training.end().series("train/loss") == [pytest.approx(exact, rel=1e-14)]


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan), torch.tensor(math.inf)])
@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0)])
def test_a_micro_batch_without_tokens_has_no_say(train: Callable[..., Training], value: Any, weight: Any) -> None:
    """Its loss is 0/0."""
    training = train()
    training.reducer.mean("train/loss", torch.tensor(2.0), weight=torch.tensor(4))
    training.reducer.mean("train/loss", value, weight=weight)
    training.reducer.mean("train/loss", 3.0, weight=4)
    training.reducer.step(1, 1)
    assert training.end().series("train/loss") == [2.5]


@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max", "last"])
@pytest.mark.parametrize("make", [lambda value: value, torch.tensor], ids=["numbers", "tensors"])
def test_nan_is_not_hidden_and_does_not_stay(
    train: Callable[..., Training], kind: str, make: Callable[..., Any]
) -> None:
    """A loss that is NaN shows in its window, whatever else is in it, and not in the next one."""
    training = train(every=3)
    for step, value in enumerate([1.0, 2.0, math.nan, 1.0, 2.0, 2.0], start=1):
        getattr(training.reducer, kind)("a", make(value))
        training.reducer.step(step, step)
    first, second = training.end().series("a")
    assert math.isnan(first)
    assert second == {"mean": 5 / 3, "sum": 5.0, "min": 1.0, "max": 2.0, "last": 2.0}[kind]


def test_a_nan_in_the_middle_of_an_extreme_stays(train: Callable[..., Training]) -> None:
    """Not only when it comes last."""
    training = train()
    for make in (float, torch.tensor):
        for value in (2.0, math.nan, 1.0):
            training.reducer.min(f"min {make.__name__}", make(value))
            training.reducer.max(f"max {make.__name__}", make(value))
    training.reducer.step(1, 1)
    values = [point["value"] for point in training.end()["metrics"] if not point["name"].endswith("rank")]
    assert len(values) == 4
    assert all(math.isnan(value) for value in values)


def test_a_metric_without_a_value_is_not_logged(train: Callable[..., Training]) -> None:
    """None says that this rank has none; where no rank has one there is no point, and no NaN that would alarm."""
    training = train()
    for step in (1, 2):
        for kind in ("mean", "sum", "min", "max", "last", "grad_norm"):
            given = (None, kind) if kind == "grad_norm" else (kind, None)
            getattr(training.reducer, kind)(*given)
        training.reducer.last("a", 1.0 if step == 1 else None)
        training.reducer.step(step, step)
    assert [(row.step, list(row.bits)) for row in training.end().rows()] == [(1, ["a"])]


def test_a_value_is_taken_when_it_is_given(train: Callable[..., Training]) -> None:
    """The loop reuses its tensors: what it does to them later changes nothing."""
    training = train()
    value, weight = torch.tensor(1.0), torch.tensor(3.0)
    training.reducer.mean("mean", value, weight=weight)
    training.reducer.min("min", value)
    training.reducer.last("last", value)
    value += 1
    weight += 1
    training.reducer.step(1, 1)
    segment = training.end()
    assert segment.series("mean") == segment.series("min") == segment.series("last") == [1.0]


def test_no_graph_is_kept(train: Callable[..., Training]) -> None:
    """A loss that is given with its graph does not keep the activations alive."""
    training = train()
    weight = torch.ones((), requires_grad=True)
    loss = weight * 2
    graph = loss.grad_fn
    for kind in ("mean", "sum", "min", "max", "last"):
        getattr(training.reducer, kind)(kind, loss)
    training.reducer.step(1, 1)
    del loss
    assert graph is not None
    loss = weight * 3
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(weight.grad if weight.grad is not None else 0.0) == 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_any_type_with_one_element_are_numbers(
    train: Callable[..., Training], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """As `run.log` takes them."""
    training = train()
    for kind in ("mean", "sum", "min", "max", "last"):
        getattr(training.reducer, kind)(kind, torch.ones(shape, dtype=dtype))
    training.reducer.step(1, 1)
    segment = training.end()
    assert [segment.series(kind) for kind in ("mean", "sum", "min", "max", "last")] == [[1.0]] * 5


@pytest.mark.parametrize(
    "value",
    [
        *("1", b"1", 1j, [1.0], object(), 10**400, torch.zeros(2), torch.zeros(0), torch.tensor(1j)),
        torch.tensor(1.0, device="meta"),
    ],
)
@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max", "last"])
def test_what_is_no_number_is_refused(train: Callable[..., Training], kind: str, value: Any) -> None:
    """At the line that gives it, with the metric's name."""
    training = train()
    with pytest.raises(llmtrack.UsageError, match="'train/loss'"):
        getattr(training.reducer, kind)("train/loss", value)


def test_a_tensor_of_inference_mode_is_a_number(train: Callable[..., Training]) -> None:
    """What an evaluation gives in the middle of training."""
    training = train()
    with torch.inference_mode():
        value = torch.tensor(2.0)
        training.reducer.mean("inside", value, weight=3)
        training.reducer.last("inside, last", value)
    training.reducer.mean("outside", value, weight=3)
    training.reducer.max("outside, max", value)
    training.reducer.step(1, 1)
    segment = training.end()
    assert segment.series("inside") == segment.series("outside") == segment.series("outside, max") == [2.0]


def test_steps_are_those_of_the_run(train: Callable[..., Training]) -> None:
    """A restart at step 1,234 logs at 1,240, as the job before would have done."""
    training = train(every=10)
    for step in range(1_234, 1_262):
        training.reducer.sum("steps", 1)
        training.reducer.step(step, step)
    segment = training.end()
    assert segment.steps() == [1_240, 1_250, 1_260]
    assert segment.series("steps") == [7, 10, 10]


def test_a_flush_ends_the_window_at_a_checkpoint(train: Callable[..., Training]) -> None:
    """No point covers what the checkpoint has seen together with what it has not."""
    training = train(every=10)
    reducer = training.reducer
    for step in range(1, 25):
        reducer.sum("steps", 1)
        if step % 10 == 0:
            reducer.last("at log steps", float(step))
        reducer.step(step, step * 100)
        if step in {10, 14}:
            reducer.flush(step, step * 100)  # at 10 there is nothing left
    reducer.flush(24, 2_400)
    segment = training.end()
    assert segment.steps() == [10, 14, 20, 24]
    assert segment.series("steps") == [10, 4, 6, 4]
    assert segment.series("at log steps") == [10.0, 20.0]


def test_the_newest_values_can_be_printed(train: Callable[..., Training]) -> None:
    """They are what is logged."""
    training = train(every=2)
    assert training.reducer.newest() == (0, {})
    for step in (1, 2, 3):
        training.reducer.mean("a", torch.tensor(float(step)))
        training.reducer.step(step, step)
    assert training.reducer.newest() == (2, {"a": 1.5})
    assert training.end().series("a") == [1.5]


def test_a_metric_that_is_new_or_missing_is_named(train: Callable[..., Training]) -> None:
    """What is right is logged all the same, and later windows are."""
    training = train()
    reducer = training.reducer
    reducer.mean("a", 1.0)
    reducer.mean("b", 1.0)
    reducer.step(1, 1)
    reducer.mean("a", 2.0)
    reducer.mean("b", 2.0)
    reducer.sum("c", 1.0)
    reducer.max("d", torch.tensor(1.0))
    with pytest.raises(llmtrack.UsageError, match=r"step 2.*sum 'c' is new.*max 'd' is new"):
        reducer.step(2, 2)
    reducer.mean("a", 3.0)
    with pytest.raises(llmtrack.UsageError, match="mean 'b' is missing"):
        reducer.step(3, 3)
    reducer.mean("a", 4.0)
    reducer.mean("b", 4.0)
    reducer.step(4, 4)
    segment = training.end()
    assert segment.series("a") == [1.0, 2.0, 3.0, 4.0]
    assert segment.series("b") == [1.0, 2.0, 4.0]
    assert segment.series("c") == segment.series("d") == []


def test_a_metric_keeps_its_kind(train: Callable[..., Training]) -> None:
    """One name means one thing."""
    training = train()
    training.reducer.mean("a", 1.0)
    with pytest.raises(llmtrack.UsageError, match="mean 'a'"):
        training.reducer.sum("a", 1.0)


def test_more_metrics_than_there_is_room_for_are_refused(train: Callable[..., Training]) -> None:
    """With the argument that makes room."""
    training = train(max_metrics=2)
    training.reducer.last("a", 1.0)
    training.reducer.last("b", 1.0)
    with pytest.raises(llmtrack.UsageError, match="max_metrics=4"):
        training.reducer.last("c", 1.0)


@pytest.mark.parametrize("given", [{"every": 0}, {"max_metrics": 0}])
def test_settings_that_make_no_sense_are_refused(train: Callable[..., Training], given: dict[str, Any]) -> None:
    """At once."""
    run = train().run
    with pytest.raises(llmtrack.UsageError):
        Reducer(run, **given)


def test_tokens_do_not_go_backwards(train: Callable[..., Training]) -> None:
    """It is refused on every rank alike, before anything is sent."""
    training = train()
    training.reducer.step(1, 100)
    with pytest.raises(llmtrack.UsageError, match="99 after 100"):
        training.reducer.step(2, 99)


def test_a_run_that_is_switched_off_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop needs no `if`."""
    monkeypatch.setenv("LLMTRACK_MODE", "disabled")
    with llmtrack.open_run() as run:
        reducer = Reducer(run, every=1)
        reducer.mean("a", torch.tensor(1.0))
        reducer.step(1, 1)
        reducer.flush(1, 1)


def test_the_default_device_of_torch_does_not_matter(train: Callable[..., Training]) -> None:
    """A trainer that makes the GPU torch's default has host memory where it is needed all the same."""
    training = train(device="cpu")
    with torch.device("meta"):
        for step in (1, 2):
            for kind in ("mean", "sum", "min", "max", "last"):
                getattr(training.reducer, kind)(kind, torch.tensor(2.5, dtype=torch.float16, device="cpu"))
            training.reducer.step(step, step)
        segment = training.end()
    assert segment.series("mean") == segment.series("last") == [2.5, 2.5]


def test_a_process_group_that_came_later_is_an_error(train: Callable[..., Training], tmp_path: Path) -> None:
    """Each rank would have logged its own values as those of all."""
    training = train()
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    try:
        training.reducer.mean("a", 1.0)
        with pytest.raises(llmtrack.UsageError, match="made before the process group"):
            training.reducer.step(1, 1)
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_is_gone_ends_the_reducer_and_not_the_training(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    """What was reduced before is in the log, and that nothing was since."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    try:
        training = train()
        training.reducer.mean("a", 1.0)
        training.reducer.step(1, 1)
    finally:
        dist.destroy_process_group()
    for step in (2, 3):
        training.reducer.mean("a", 2.0)
        training.reducer.step(step, step)
    segment = training.end()
    assert segment.series("a") == [1.0]
    assert [(alert["rule"], alert["step"]) for alert in segment["alerts"]] == [("reducer", 2)]


def give(reducer: Reducer, metrics: int, step: int) -> None:
    """Give a step's metrics as a loop on the CPU does."""
    for index in range(metrics):
        reducer.mean(f"train/{index}", LOSS, weight=4096)
    reducer.step(step, step)


def count_calls(act: Callable[[], object]) -> int:
    """Return how many functions are called on this thread, those of C included."""
    calls = 0

    def see(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    gc.disable()  # what it calls is no work of the step
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_the_work_of_a_step_grows_by_the_same_for_each_metric(train: Callable[..., Training]) -> None:
    """Two hundred metrics take ten times what twenty take, a handful of calls each; a step that logs nothing, nothing.

    What that takes in time is measured by benchmarks/bench_loop.py.
    """
    taken = {}
    for metrics in (20, 110, 200):
        training = train(every=10)
        for step in range(1, 11):
            give(training.reducer, metrics, step)
        taken[metrics] = [
            count_calls(lambda step=step: give(training.reducer, metrics, step))  # type: ignore[misc]  # noqa: B023  # called here
            for step in range(11, 31)
        ]
    for between, log_step in ((0, 9), (10, 19)):
        steps = {metrics: (calls[between], calls[log_step]) for metrics, calls in taken.items()}
        for at in (0, 1):
            few, more, most = (steps[metrics][at] for metrics in (20, 110, 200))
            assert most - more == more - few
        assert (steps[200][0] - steps[20][0]) / 180 <= 14
        assert (steps[200][1] - steps[20][1]) / 180 <= 24
        assert steps[20][0] <= 20 * 14 + 20


def test_values_on_the_cpu_ask_torch_for_nothing(train: Callable[..., Training]) -> None:
    """No operation is dispatched for a value, and on one rank none at a log step."""
    training = train(every=2)
    give(training.reducer, 20, 1)  # the first time each metric gets its place on the device
    with Dispatched() as dispatched:
        for step in range(2, 5):
            give(training.reducer, 20, step)
    assert not dispatched.calls
    assert training.end().series("train/7") == [2.0] * 2


@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max", "last", "grad_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_value_on_the_cpu_lets_no_other_thread_in(
    train: Callable[..., Training], kind: str, dtype: torch.dtype
) -> None:
    """A loader's busy thread would keep the trainer waiting for 5 ms, for each metric again."""
    call = getattr(train(every=10).reducer, kind)
    value = torch.ones(1, dtype=dtype)
    arguments = (value,) if kind == "grad_norm" else ("a", value)
    call(*arguments)
    may_run, interval_s, others = threading.Event(), sys.getswitchinterval(), []

    def run_once() -> None:
        may_run.wait()
        others.append(threading.current_thread())

    thread = threading.Thread(target=run_once)
    thread.start()
    gc.disable()
    sys.setswitchinterval(3600)  # only a thread that gives the lock up loses it
    try:
        may_run.set()
        for _ in range(5_000):
            call(*arguments)
        has_run = list(others)
    finally:
        sys.setswitchinterval(interval_s)
        gc.enable()
        thread.join()
    assert not has_run


CADENCE = (
    Group("optimisation", 2, metrics=("train/*",)),
    Group("per_layer", 4, metrics=("layers/*",), burst=True),
    Group("by hand", 3),
)


def test_groups_are_logged_at_steps_of_their_own(train: Callable[..., Training]) -> None:
    """All that are due at a step make one row; what belongs to no group comes every `every` steps."""
    cadence = Cadence(CADENCE)
    training = train(every=3, cadence=cadence)
    for step in range(1, 9):
        training.reducer.sum("train/steps", 1)
        training.reducer.sum("steps", 1)
        if cadence.due("per_layer", step):
            training.reducer.last("layers/0/norm", float(step))
        training.reducer.step(step, step)
    assert [(row.step, sorted(row.bits)) for row in training.end().rows()] == [
        (2, ["train/steps"]),
        (3, ["steps"]),
        (4, ["layers/0/norm", "train/steps"]),
        (6, ["steps", "train/steps"]),
        (8, ["layers/0/norm", "train/steps"]),
    ]


def test_an_alert_makes_a_burst(train: Callable[..., Training]) -> None:
    """Groups that are marked for it are due at every step for a while, from the step after the next log step on."""
    cadence = Cadence(CADENCE, burst_steps=3)
    training = train(cadence=cadence)
    for step in range(1, 13):
        if cadence.due("per_layer", step):
            training.reducer.last("layers/0/norm", float(step))
        training.reducer.sum("train/steps", 1)
        if step == 5:
            training.run.alert("spike", "the loss doubled", step, step)
            training.run.alert("note", "nothing to worry about", step, step, level="info")
        training.reducer.step(step, step)
    assert training.end().series("layers/0/norm") == [4.0, 6.0, 7.0, 8.0, 12.0]


@needs_cuda
def test_a_gpu_is_never_waited_for(train: Callable[..., Training]) -> None:
    """`torch` itself raises where the host would wait."""
    training = train(every=2)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            loss = torch.full((), 2.0, device="cuda", requires_grad=True) * 1
            for kind in ("mean", "sum", "min", "max", "last"):
                getattr(training.reducer, kind)(kind, loss)
            training.reducer.mean("weighted", loss, weight=torch.tensor(3, device="cuda"))
            training.reducer.mean("number", 1.0, weight=4)
            training.reducer.grad_norm(loss.detach())
            training.reducer.step(step, step)

    steps(1, 5)  # the first pinned memory
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(5, 101)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    segment = training.end()
    assert segment.steps() == list(range(2, 101, 2))
    assert segment.series("weighted") == [2.0] * 50
    assert segment.series("sum") == [4.0] * 50
