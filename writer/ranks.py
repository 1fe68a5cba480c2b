"""Which rank this process is, and rank 0's answer for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import LlmtrackError

_T = TypeVar("_T")


def _distributed() -> Any | None:
    """Return `torch.distributed` if the caller uses it; it is never imported for this."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def rank() -> int:
    """Return the rank of this process: of `torch.distributed`, else `RANK`, else `SLURM_PROCID`, else 0."""
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_rank())
    for name in ("RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def world_size() -> int:
    """Return the number of ranks, from where `rank` has it."""
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_world_size())
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def decide_on_rank_zero(decide: Callable[[], _T]) -> _T | None:
    """Return what `decide` returned on rank 0, on every rank; without `torch.distributed` None on the others.

    Every rank of the default process group must call it.

    Raises:
        LlmtrackError: On every rank, when `decide` raised it on rank 0: a rank that went on alone would hang the rest.
    """
    distributed = _distributed()
    if distributed is None:
        return decide() if rank() == 0 else None
    answer: list[Any] = [None, None]  # what was decided, why nothing was
    cause: BaseException | None = None
    if distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the other ranks are told before it goes on its way
            cause = error
            answer[1] = f"{type(error).__name__}: {error}"
    distributed.broadcast_object_list(answer, src=0)
    if cause is not None:
        raise cause
    if answer[1] is not None:
        raise LlmtrackError(f"rank 0 could not open the run: {answer[1]}")
    decided: _T = answer[0]
    return decided
