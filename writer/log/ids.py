"""What travels between the rows for whoever looks at them: ids of batches, and pauses of the training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmtrack.writer.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepIds:
    """What one step, or a part of it, was trained on; in the queue it stands before the row of its step.

    Attributes:
        step: The optimiser step.
        tokens: Tokens seen by the run, as far as known then.
        ids: Of sequences, documents, shards: what the caller calls them by.
        position: In the order of the data; None when unknown.
        rank: Who gave these ids; None where one rank speaks for all.
        is_foreign: They are another rank's, which come after an alert, and belong to steps of the past.
    """

    step: int
    tokens: int
    ids: tuple[str | int, ...]
    position: int | None = None
    rank: int | None = None
    is_foreign: bool = False

    def __len__(self) -> int:
        """Return how much room it takes, in points."""
        return 1 + len(self.ids)


@dataclass(frozen=True, slots=True)
class Pause:
    """The trainer did something else before the next row, and that is why it was slow."""

    def __len__(self) -> int:
        """Return how much room it takes, in points."""
        return 1


Mark = StepIds | Pause


def take_ids(ids: object) -> tuple[str | int, ...]:
    """Return a copy of ids, which the caller may change afterwards.

    Args:
        ids: One id, or any iterable of them: a list, an array of NumPy, a tensor on the CPU. Only the first is looked
            at here; what is no string or integer becomes its text later.

    Raises:
        UsageError: They are no ids, or a tensor on a device, which would have to be waited for.
    """
    if ids is None:
        return ()
    if isinstance(ids, str | int):
        return (ids,)
    if getattr(getattr(ids, "device", None), "type", "cpu") != "cpu":
        raise UsageError("the batch ids are on a device", hint="give those of the host: log() waits for no GPU")
    given: Any = ids  # what is no iterable is refused below
    if hasattr(given, "tolist"):
        given = given.reshape(-1).tolist()
    elif not isinstance(given, Iterable) or isinstance(given, bytes):
        raise UsageError(f"the batch ids are {given!r}", hint="give a list of strings or integers")
    taken = tuple(given)
    if taken and not (isinstance(taken[0], str) or hasattr(taken[0], "__index__")):
        raise UsageError(f"a batch id is {taken[0]!r}", hint="give a list of strings or integers")
    return taken
