"""The ids of the last steps' batches: kept in memory, written around an alert."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from llmtrack.writer.log.buffer import Record
from llmtrack.writer.log.ids import StepIds

_KEPT_IDS: Final = 1 << 17  # of all steps: about 10 MB of integers
_KEPT_STEPS: Final = 1024
_LEAST_STEPS: Final = 2
_LONGEST_ID: Final = 200  # characters
_HASH_BYTES: Final = 8


@dataclass(slots=True)
class _Batch:
    """What is known of one step, of one rank or of all."""

    step: int
    tokens: int
    rank: int | None
    ids: list[str | int] = field(default_factory=list)
    position: int | None = None


class BatchRing:
    """Keeps what the last steps were trained on, and says which of it belongs to an alert.

    Used on the thread that writes the log. Memory is bounded by the number of steps and of ids; the last two steps are
    kept whatever they have.

    Args:
        before: Steps that are written from before an alert, at least; from the last row on in any case.
        after: Steps that are written from after it.
    """

    def __init__(self, before: int = 16, after: int = 8) -> None:
        self._before = before
        self._after = after
        self._batches: OrderedDict[tuple[int, int | None], _Batch] = OrderedDict()
        self._ids = 0
        self._written_step = -1  # the newest step whose batches are in the log
        self._wanted_step = -1  # up to which they are wanted
        self._step = self._step_before = -1  # of the last rows: what came between them is in the mean of the last

    def __len__(self) -> int:
        """Return how many batches are kept."""
        return len(self._batches)

    def put(self, item: StepIds) -> None:
        """Keep the ids of a step; what comes in parts (micro-batches) is put together."""
        key = (item.step, item.rank)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(item.step, item.tokens, item.rank)
        batch.ids.extend(item.ids)
        batch.position = item.position if batch.position is None else batch.position
        self._ids += len(item.ids)
        while len(self._batches) > _LEAST_STEPS and (self._ids > _KEPT_IDS or len(self._batches) > _KEPT_STEPS):
            _, oldest = self._batches.popitem(last=False)
            self._ids -= len(oldest.ids)

    def see_row(self, step: int, tokens: int) -> None:
        """Take note of a row: the ids of its step came before it, and its tokens are theirs."""
        if step != self._step:
            self._step_before, self._step = self._step, step
        if self._batches:
            newest = next(reversed(self._batches.values()))
            if newest.step == step:
                newest.tokens = tokens

    def around(self, step: int) -> tuple[str | None, list[str]]:
        """Return the hash of the batch of a step, and its ids followed by those of the step before.

        A loss is made by its own batch on weights that the batch before has changed: both are suspects.
        """
        steps: list[int] = []
        mine: list[list[str]] = [[], []]
        for batch in reversed(self._batches.values()):
            if batch.step > step or (len(steps) == len(mine) and batch.step not in steps):
                continue
            if batch.step not in steps:
                steps.append(batch.step)
            mine[steps.index(batch.step)][:0] = _texts(batch)
        return hash_of(mine[0]), mine[0] + mine[1]

    def want(self, step: int) -> None:
        """Have the batches written from before an alert at a step to after it."""
        begin = min(step - self._before, self._step_before)
        self._written_step = max(self._written_step, begin - 1)
        self._wanted_step = step + self._after

    def records(self, time_ms: int) -> Iterator[Record]:
        """Yield what is wanted and not written yet, as records of the table `batches`."""
        if self._written_step >= self._wanted_step:
            return
        for batch in self._batches.values():
            if self._written_step < batch.step <= self._wanted_step:
                yield _record(batch, time_ms)
        newest = max((batch.step for batch in self._batches.values()), default=self._written_step)
        self._written_step = max(self._written_step, min(newest, self._wanted_step))

    def foreign(self, item: StepIds, time_ms: int) -> Record:
        """Return the record of another rank's ids, which come when they are wanted."""
        return _record(_Batch(item.step, item.tokens, item.rank, list(item.ids), item.position), time_ms)


def _record(batch: _Batch, time_ms: int) -> Record:
    texts = _texts(batch)
    return Record(
        "batches",
        {
            "time": time_ms,
            "step": batch.step,
            "tokens": batch.tokens,
            "batch_hash": hash_of(texts),
            "batch_ids": texts,
            "position": batch.position,
            "rank": batch.rank,
        },
    )


def _texts(batch: _Batch) -> list[str]:
    return [_short(str(one)) for one in batch.ids]


def _short(text: str) -> str:
    if len(text) <= _LONGEST_ID:
        return text
    return f"{text[: _LONGEST_ID - 17]}#{blake2b(text.encode('utf-8', 'replace'), digest_size=8).hexdigest()}"


def hash_of(texts: list[str]) -> str | None:
    """Return what names a set of ids, whatever their order; None for none."""
    if not texts:
        return None
    data = "\0".join(sorted(texts)).encode("utf-8", "backslashreplace")
    return blake2b(data, digest_size=_HASH_BYTES).hexdigest()
