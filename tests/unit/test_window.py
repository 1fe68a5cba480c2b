"""Adding up on a device: what a GPU is given, here on the CPU, against the same numbers added up in Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import llmtrack
from llmtrack.writer.capture.metric import DEPTH, EMPTY, Kind
from llmtrack.writer.capture.scalar import take_scalar
from llmtrack.writer.capture.window import ENTRY, Window
from tests.dispatched import Dispatched

CPU = torch.device("cpu")


def halves(window: Window) -> dict[str, tuple[float, float]]:
    """Return the two halves that a rank sends for each metric."""
    vector = torch.tensor(window.numbers(), dtype=torch.float64)
    if window.is_on_device:
        window.add_to(vector)
    rows = vector.view(-1, ENTRY)[: len(window.metrics)].tolist()
    return {metric.name: (row[1], row[2]) for metric, row in zip(window.sorted(), rows, strict=True)}


def tensor(value: float) -> Tensor:
    """Return a number as it lies on a GPU."""
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("seed", range(20))
def test_tensors_and_numbers_add_up_alike(seed: int) -> None:
    """Whatever comes first, however often, and with weights of either kind; in three windows, one after another."""
    randoms = random.Random(seed)
    on_device, on_host = Window(None, 8, CPU), Window(None, 8, CPU)
    kinds = [Kind.MEAN, Kind.SUM, Kind.MIN, Kind.MAX, Kind.LAST, Kind.MEAN]
    pairs = [
        tuple(window.metric(f"m{index}", kind, 2.0) for window in (on_device, on_host))
        for index, kind in enumerate(kinds)
    ]
    for _ in range(3):
        for _ in range(randoms.choice([1, 5, DEPTH * 8])):
            given, plain = randoms.choice(pairs)
            value, weight = randoms.randrange(-50, 50) / 4, float(randoms.randrange(4))
            if weight == 0 and given.kind is Kind.MEAN:
                value = math.nan
            as_tensor = value if randoms.random() < 0.3 else tensor(value)
            given.was_given = plain.was_given = True
            if given.kind in {Kind.MEAN, Kind.SUM}:
                weight = 1.0 if given.kind is Kind.SUM else weight
                given.add(as_tensor, weight if randoms.random() < 0.5 else tensor(weight))
                plain.add(value, weight)
            elif given.kind is Kind.LAST:
                given.keep(as_tensor)
                plain.keep(value)
            else:
                given.take(as_tensor)
                plain.take(value)
        sent, expected = halves(on_device), halves(on_host)
        for index, kind in enumerate(kinds):
            if kind in EMPTY and expected[f"m{index}"][1] == 0:
                assert sent.pop(f"m{index}")[1] == expected.pop(f"m{index}")[1]  # no value: the first half is none
        assert sent == expected
        on_device.begin(0)
        on_host.begin(0)


@pytest.mark.parametrize("metrics", [3, 60])
def test_a_value_on_the_device_takes_one_operation_and_a_log_step_a_handful(metrics: int) -> None:
    """Whatever the number of metrics; and what goes to the CPU is waited for, or it would be read too early."""
    window = Window(None, metrics, CPU)
    means = [window.metric(f"m{index}", Kind.MEAN, 2.0) for index in range(metrics)]
    halves(window)  # the first time makes what is kept
    one = tensor(1.0)
    with Dispatched() as dispatched:
        for mean in means:
            mean.add(one, 3.0)
    assert dispatched.calls == {"aten.copy_.default": metrics}
    assert not dispatched.non_blocking
    vector = torch.tensor(window.numbers(), dtype=torch.float64)
    with Dispatched() as dispatched:
        window.add_to(vector)
    assert dispatched.calls.total() < 30


def test_a_nan_of_a_former_window_is_gone() -> None:
    """Where it lay, a number is next time, or nothing."""
    window = Window(None, 2, CPU)
    mean, low = window.metric("mean", Kind.MEAN, 2.0), window.metric("low", Kind.MIN, 2.0)
    for value in (math.nan, 1.0):
        mean.add(tensor(value), 2.0)
        low.take(tensor(value))
    assert all(math.isnan(first) for first, _ in halves(window).values())
    window.begin(0)
    mean.add(tensor(3.0), 2.0)
    low.take(tensor(3.0))
    assert halves(window) == {"mean": (6.0, 2.0), "low": (3.0, 1.0)}


def test_a_norm_is_kept_as_its_power() -> None:
    """So that the powers of all shards can be added up."""
    window = Window(None, 1, CPU)
    window.metric("norm", Kind.NORM, 3.0).keep(tensor(8.0))
    assert halves(window) == {"norm": (8.0, 1.0)}


def test_what_the_ranks_did_not_agree_on_changes_nothing() -> None:
    """It has a place of its own, which nobody reads."""
    window = Window("group", 1, CPU)
    window.metric("a", Kind.MEAN, 2.0).add(tensor(1.0), 1.0)
    window.agree({"a"})
    for _ in range(DEPTH + 1):
        window.metric("b", Kind.MEAN, 2.0).add(tensor(5.0), 1.0)
        window.metric("c", Kind.MAX, 2.0).take(tensor(5.0))
    assert window.out_of_place(is_full=False) == "mean 'b' is new, max 'c' is new"
    assert halves(window) == {"a": (1.0, 1.0)}
    assert window.room == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float64, math.pi),
        (torch.float32, 0.10000000149011612),
        (torch.bfloat16, 0.10009765625),
        (torch.bfloat16, -math.inf),
        (torch.float16, 0.0999755859375),
        (torch.float8_e5m2, 0.09375),
        (torch.int64, -(2**53)),
        (torch.int32, -7.0),
        (torch.int8, -7.0),
        (torch.uint8, 200.0),
        (torch.bool, 1.0),
    ],
)
def test_a_tensor_of_the_cpu_is_read_exactly(dtype: torch.dtype, value: float) -> None:
    """Whatever its type; as `item()` would say, and without a call of that."""
    scalar = torch.tensor(value, dtype=dtype)
    assert take_scalar("a", scalar) == scalar.item() == value
    assert type(take_scalar("a", scalar)) is float


def test_views_of_all_sorts_are_read_as_torch_does() -> None:
    """Elements of a larger tensor, negatives that were not computed, zeros that take no memory."""
    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert take_scalar("a", whole[1, 2]) == 6.0
    assert take_scalar("a", whole.t()[3, 2]) == 11.0
    negative = torch.tensor(1 + 2j).conj().imag
    assert negative.is_neg()
    assert take_scalar("a", negative) == -2.0
    zero = torch._efficientzerotensor(())
    assert take_scalar("a", zero) == 0.0
    assert take_scalar("a", torch.nn.Parameter(torch.tensor(2.5))) == 2.5
    assert math.isnan(float(take_scalar("a", torch.tensor(math.nan))))


def test_a_sparse_tensor_is_read() -> None:
    """It has no memory of the usual kind."""
    assert take_scalar("a", torch.tensor([3.0]).to_sparse()) == 3.0


def test_a_complex_tensor_is_refused() -> None:
    """Half of it would be dropped."""
    with pytest.raises(llmtrack.UsageError, match="complex64"):
        take_scalar("a", torch.tensor(1 + 2j))
