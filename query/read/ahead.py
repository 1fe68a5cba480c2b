"""Several questions to the storage at once: a network file system takes its time to answer each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_THREADS: Final = 4
_LEAST: Final = 16  # for fewer, threads take longer to start
_TOGETHER: Final = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def ahead(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield what a function returns for each item, in their order; of many, several threads ask for the next ones.

    The results wait until they are taken: they should be small, or few.
    """
    if len(items) < _LEAST:
        yield from map(function, items)
        return
    some = max(min(_TOGETHER, len(items) // (4 * _THREADS)), 1)
    pieces = [items[first : first + some] for first in range(0, len(items), some)]
    with ThreadPoolExecutor(_THREADS, "llmtrack-ahead") as pool:
        for results in pool.map(lambda piece: list(map(function, piece)), pieces):
            yield from results
