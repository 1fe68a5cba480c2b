"""Take one value of a metric: a number of the host at once, one on a GPU as it is."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final, SupportsFloat

import torch
from torch import Tensor

from llmtrack.writer.errors import UsageError

_C_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
    torch.bool: ctypes.c_bool,
}
_BITS: Final = struct.Struct("=I")
_FLOAT32: Final = struct.Struct("=f")


def take_scalar(name: str, value: Tensor | SupportsFloat) -> Tensor | float:
    """Return a value as a number, or as a 0-d tensor without its graph where it is on another device.

    What is on the CPU is read from its memory: there is nothing to wait for, and a call of torch, `Tensor.item()` for
    one, takes longer than all else that is done with the value here.

    Args:
        name: The metric, for errors.
        value: A number, or a tensor with one element.

    Raises:
        UsageError: It is no number, has more elements, or is a DTensor of which each rank has a part.
    """
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    if not isinstance(value, Tensor):
        return _number(name, value)
    if type(value) is not Tensor and hasattr(value, "to_local"):
        value = _local(name, value)
    if value.dim():
        if value.numel() != 1:
            raise UsageError(f"{name!r} is a tensor of shape {tuple(value.shape)}", hint="reduce it first")
        value = value.reshape(())
    if not value.is_cpu:
        return value.detach() if value.requires_grad else value
    c_type = _C_TYPES.get(value.dtype)
    address = value.data_ptr()
    if c_type is not None and address and not value.is_neg():
        return float(c_type.from_address(address).value)
    return _read_rare(name, value, address)


def _read_rare(name: str, value: Tensor, address: int) -> float:
    if value.dtype == torch.bfloat16 and address:
        bits = ctypes.c_uint16.from_address(address).value << 16  # the upper half of a float32
        return float(_FLOAT32.unpack(_BITS.pack(bits))[0])
    if value.is_complex():
        raise UsageError(f"{name!r} is a tensor of {value.dtype}", hint="give a real number")
    # One copy more, in the plainest form that there is: no lazy zero, no negative view.
    plain = torch.empty((), dtype=torch.float64, device="cpu").copy_(value.detach())
    return float(ctypes.c_double.from_address(plain.data_ptr()).value)


def _local(name: str, shards: Any) -> Tensor:
    """Return the number of a DTensor that is the same on all ranks."""
    if not all(placement.is_replicate() for placement in shards.placements):
        raise UsageError(
            f"{name!r} is a DTensor placed as {shards.placements}: each rank has a part of it",
            hint="give .full_tensor(), or to grad_norm what clip_grad_norm_ returned",
        )
    local: Tensor = shards.to_local()
    return local


def _number(name: str, value: SupportsFloat) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise UsageError(f"{name!r} is {value!r}, which is no number", hint="give a number, a 0-d tensor, or None")
