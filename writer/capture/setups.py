"""Reducers that were made differently on two ranks: found out when they are made, without a collective.

What they send would not have the same length, or would come at other steps: a backend answers that by killing the
process, or by a hang in whatever the trainer asks of the group next.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

import torch.distributed as dist

from llmtrack.writer.errors import UsageError

_log = logging.getLogger("llmtrack")
_made: Final[Counter[str]] = Counter()  # reducers of this process, by their ranks


def compare_setup(ranks: tuple[int, ...], setup: str) -> None:
    """Compare how this rank's reducer is set up with the first one of these ranks, through the job's key-value store.

    The store is where the ranks met, so there is one wherever there is a process group; it answers at once.

    Args:
        ranks: Who reduces together.
        setup: In words, and the same for reducers that fit together.

    Raises:
        UsageError: Another rank's is set up otherwise.
    """
    place = f"llmtrack/reducer/{','.join(map(str, ranks))}"
    _made[place] += 1
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # no other way to it in any torch
    try:
        first = bytes(store.compare_set(f"{place}/{_made[place]}", "", setup)).decode()
    except (RuntimeError, AttributeError, TypeError) as error:  # a store that cannot compare, or is gone
        _log.debug("llmtrack: the reducers of the ranks are not compared: %s", error)
        return
    if first != setup:
        raise UsageError(
            f"this rank's reducer was made with {setup}, and another rank's with {first}",
            hint="make it in the same way on every rank",
        )
