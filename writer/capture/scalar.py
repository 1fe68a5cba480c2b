"""Take one value of a metric: a number of the host at once, one on a GPU as it is."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final, SupportsFloat

import torch
from torch import Tensor

from llmtrack.writer.errors import UsageError

_FLOATS: Final = {
    torch.float32: ctypes.c_float.from_address,
    torch.float64: ctypes.c_double.from_address,
}
_INTEGERS: Final[dict[torch.dtype, Any]] = {
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
    torch.int16: ctypes.c_int16,
    torch.int8: ctypes.c_int8,
    torch.uint8: ctypes.c_uint8,
    torch.bool: ctypes.c_bool,
}
_BITS: Final = struct.Struct("=I")
_FLOAT32: Final = struct.Struct("=f")
_HALF_BITS: Final = struct.Struct("=H")
_FLOAT16: Final = struct.Struct("=e")


def take_scalar(name: str, value: Tensor | SupportsFloat) -> Tensor | float:
    """Return a value as a number, or as a 0-d tensor without its graph where it is on another device.

    What is on the CPU is read from its memory: there is nothing to wait for, and a call of torch, `Tensor.item()` for
    one, takes longer than all else that is done with the value here. Nor is the interpreter's lock given up, as most
    methods of a tensor do: with a busy thread beside (a data loader's), each time costs the trainer up to 5 ms.

    Args:
        name: The metric, for errors.
        value: A number, or a tensor with one element.

    Raises:
        UsageError: It is no number, has more elements, or is a DTensor of which each rank has a part.
    """
    if type(value) is float:
        return value
    if type(value) is not Tensor:
        if type(value) is int or not isinstance(value, Tensor):  # to ask torch takes longer than the rest
            return _number(name, value)
        if hasattr(value, "to_local"):
            value = _local(name, value)
    if value.dim() and value.numel() != 1:
        raise UsageError(f"{name!r} is a tensor of shape {tuple(value.shape)}", hint="reduce it first")
    if not value.is_cpu:
        if value.is_meta:
            raise UsageError(f"{name!r} is a tensor without a value", hint="give one that is on a device")
        value = value.reshape(()) if value.dim() else value
        return value.detach() if value.requires_grad else value
    at = _FLOATS.get(value.dtype)
    try:
        # Half of a conjugated complex number is negative without being stored so, and never the first of its storage.
        if at is not None and not value.storage_offset() and (address := value.data_ptr()):
            return at(address).value
    except RuntimeError:  # a sparse one has no storage
        return _read_rare(name, value)
    return _read_rare(name, value)


def _read_rare(name: str, value: Tensor) -> float:
    dtype = value.dtype
    if value.layout is torch.strided and not (value.storage_offset() and value.is_neg()) and (at := value.data_ptr()):
        if dtype in _FLOATS:
            return _FLOATS[dtype](at).value
        if dtype in _INTEGERS:
            return float(_INTEGERS[dtype].from_address(at).value)
        if dtype in {torch.bfloat16, torch.float16}:
            bits = ctypes.c_uint16.from_address(at).value
            if dtype == torch.float16:
                return float(_FLOAT16.unpack(_HALF_BITS.pack(bits))[0])
            return float(_FLOAT32.unpack(_BITS.pack(bits << 16))[0])  # the upper half of a float32
    if value.is_complex():
        raise UsageError(f"{name!r} is a tensor of {dtype}", hint="give a real number")
    try:
        # One copy more, in the plainest form that there is: no lazy zero, no negative view.
        plain = torch.empty((), dtype=torch.float64, device="cpu").copy_(value.detach().to_dense().reshape(()))
    except RuntimeError as error:
        raise UsageError(f"{name!r} is a tensor without a value to read: {error}", hint="give a plain one") from error
    return ctypes.c_double.from_address(plain.data_ptr()).value


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
    if type(value) is int or not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise UsageError(f"{name!r} is {value!r}, which is no number", hint="give a number, a 0-d tensor, or None")
