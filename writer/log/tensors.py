"""Take a value that `log` was given: a copy at once, but for a GPU tensor without waiting for the GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from llmtrack.writer.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class PendingValue:
    """A number that is not known yet; `float()` waits for it, which the drain thread does."""

    __slots__ = ()

    def __float__(self) -> float:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether `float()` will not wait."""
        raise NotImplementedError


class DeviceValue(PendingValue):
    """A number on its way from a device."""

    __slots__ = ("_copied", "_host")

    def __init__(self, tensor: Tensor) -> None:
        import torch

        source = tensor.detach()
        if source.is_cuda:
            # Pinned, or the copy would wait; the event marks its end on the stream that computed the value.
            self._host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._copied: torch.cuda.Event | None = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied.record()
        else:
            self._host = source.clone()
            self._copied = None

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)

    def is_ready(self) -> bool:
        """Return whether the copy has ended."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]  # torch's own


def take_value(name: str, value: object) -> float | PendingValue:
    """Return a copy of a value, which the caller may change afterwards.

    Args:
        name: The metric's name, for the error.
        value: A number, a NumPy scalar, or a tensor with one element on any device.

    Raises:
        UsageError: It is no number.
    """
    if isinstance(value, PendingValue):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"metric {name!r} is a tensor of shape {tuple(value.shape)}", hint="log one number: reduce it first"
            )
        return float(value.detach()) if value.device.type == "cpu" else DeviceValue(cast("Tensor", value))
    if not isinstance(value, str | bytes | complex):
        try:
            given: Any = value  # what has no float() is refused below
            return float(given)
        except (TypeError, ValueError, OverflowError):
            pass
    raise UsageError(
        f"metric {name!r} is {value!r}, which is no number", hint="log floats, NumPy scalars or 0-d tensors"
    )
