"""A value is copied when it is logged, and a tensor on a device without waiting for the device."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.tensors import DeviceValue, take_value

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_with_one_element_is_a_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of any type, and of any shape that has one element."""
    assert take_value("a", torch.ones(shape, dtype=dtype)) == 1.0


def test_a_value_is_a_copy() -> None:
    """The caller's tensor or array is used again."""
    tensor, array = torch.tensor(1.0, requires_grad=True), np.array(1.0)
    taken = take_value("a", tensor), take_value("b", array)
    with torch.no_grad():
        tensor += 1
    array += 1
    assert taken == (1.0, 1.0)
    assert all(type(value) is float for value in taken)


@pytest.mark.parametrize("value", ["1", b"1", 1j, None, [1.0], {}, torch.zeros(2), torch.zeros(0), object()])
def test_what_is_no_number_is_refused_with_the_name_of_its_metric(value: Any) -> None:
    """At once, where the mistake is."""
    with pytest.raises(UsageError, match="'train/loss'"):
        take_value("train/loss", value)


def test_a_value_on_another_device_is_taken_later() -> None:
    """The drain waits for it, not the training loop."""
    value = take_value("a", torch.ones((), device="meta"))
    assert isinstance(value, DeviceValue)
    with pytest.raises(RuntimeError):  # a tensor without content never comes
        float(value)


def test_a_device_value_is_a_copy_too() -> None:
    """Whatever the tensor is, and whatever it becomes."""
    tensor = torch.tensor([[math.pi]], dtype=torch.float64, requires_grad=True)
    value = DeviceValue(tensor)
    with torch.no_grad():
        tensor += 1
    assert float(value) == math.pi


@needs_cuda
def test_a_value_on_a_gpu_is_copied_without_a_synchronisation() -> None:
    """`torch` itself raises where the host would wait."""
    tensor = torch.tensor(math.pi, dtype=torch.float64, device="cuda")
    take_value("a", tensor)  # the first pinned memory
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = take_value("a", tensor)
        tensor += 1
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert float(value) == math.pi


def test_numbers_need_no_torch() -> None:
    """A trainer in JAX, or none at all, never pays for its import."""
    script = (
        "import sys; from llmtrack.writer.log.tensors import take_value; take_value('a', 1);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
