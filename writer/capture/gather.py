"""What each rank trained on around an alert -> rank 0: one all-gather once something happened, and nobody waits."""

from __future__ import annotations

import json
import zlib
from collections import deque
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrack.writer.log.ids import StepIds, take_ids
from llmtrack.writer.run import Run

from .reduction import Ranks, all_gather

_KEPT_STEPS: Final = 256
_KEPT_IDS: Final = 1 << 17
_AFTER: Final = 8  # steps after the alert whose ids are sent too
_BYTES: Final = 16 << 10  # that a rank sends, at most
_ALL_BYTES: Final = 8 << 20  # that come to each rank, at most
_LENGTH_BYTES: Final = 4


class IdsOfRanks:
    """Keeps the ids of this rank's last steps, and has rank 0 get those of all ranks after an alert.

    Every rank makes one and calls the same methods at the same steps.

    Args:
        run: What `open_run` returned on this rank.
        ranks: Who trains together.
        device: Where the group sends from.
        stream: Where to do that beside the training; None on the CPU.
    """

    def __init__(self, run: Run, ranks: Ranks, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._run = run
        self._ranks = ranks
        self._device = device
        self._stream = stream
        self._rank = None if len(ranks) == 1 else dist.get_rank()
        self._writes = self._rank in {None, 0}  # the run's log
        self._bytes = max(min(_BYTES, _ALL_BYTES // len(ranks)), 256)
        self._steps: deque[StepIds] = deque(maxlen=_KEPT_STEPS)
        self._ids = 0
        self._wanted: list[int] = []  # steps of alerts
        self._sent_step = -1  # the newest step whose ids were gathered
        self._next_step = 0  # when the next gathering may begin
        self._work: dist.Work | None = None
        self._copied: torch.cuda.Event | None = None
        self._gathered: Any = None  # a tensor on its way

    def keep(self, step: int, tokens: int, ids: object, position: int | None) -> None:
        """Take the ids of a step; rank 0's go to the run at once.

        Raises:
            UsageError: They are no ids.
        """
        if self._writes:
            self._run.batches(step, ids, position, rank=self._rank, tokens=tokens)
        if self._rank is None:
            return
        item = StepIds(step, tokens, take_ids(ids), position, self._rank)
        if len(self._steps) == _KEPT_STEPS:
            self._ids -= len(self._steps[0].ids)
        self._steps.append(item)
        self._ids += len(item.ids)
        while self._ids > _KEPT_IDS and len(self._steps) > 1:
            self._ids -= len(self._steps.popleft().ids)

    def want(self, step: int) -> None:
        """Have the ids around a step gathered, when those after it are known; called on every rank."""
        if self._rank is not None:
            self._wanted.append(step)

    def step(self, step: int) -> None:
        """Start what is due, on every rank; at log steps.

        Raises:
            RuntimeError: A rank is gone.
        """
        due = [wanted for wanted in self._wanted if wanted + _AFTER <= step]
        # By the step alone: what has arrived by now differs from rank to rank, and all of them must begin together.
        if not due or step < self._next_step:
            return
        self._take()  # it began steps ago
        self._wanted = [wanted for wanted in self._wanted if wanted not in due]
        self._next_step = step + _AFTER
        message = self._message(max(due))
        self._sent_step = max(self._sent_step, max(due) + _AFTER)
        self._start(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def take(self) -> None:
        """Give the run what has arrived; on rank 0, at any step, without waiting."""
        if self._gathered is not None and self._is_ready():
            self._take()

    def _take(self) -> None:
        if self._gathered is None:
            return
        rows, work, copied = self._gathered, self._work, self._copied
        self._gathered = self._work = self._copied = None
        try:
            if work is not None:
                work.wait()
            if copied is not None:
                copied.synchronize()
        except RuntimeError:  # a rank is gone: the next reduction finds that too, and says so
            return
        if not self._writes:
            return
        sent = dict(zip(self._ranks.numbers, [_decode(bytes(row.tolist())) for row in rows], strict=True))
        own = set(map(_comparable, sent.pop(0, [])))
        for rank, entries in sent.items():
            for entry in entries:
                if _comparable(entry) not in own:  # the same ids on all ranks are those of the whole batch
                    step, tokens, position, ids = entry
                    self._run.batches(step, ids, position, rank=rank, tokens=tokens)

    def _is_ready(self) -> bool:
        if self._copied is not None:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]  # torch's own
        return self._work is None or self._work.is_completed()

    def _message(self, wanted: int) -> bytes:
        """Return the ids of the steps around a step, as many as fit, the nearest first."""
        near = sorted(self._steps, key=lambda item: abs(item.step - wanted))
        entries: list[list[Any]] = [
            [item.step, item.tokens, item.position, list(item.ids)]
            for item in near
            if self._sent_step < item.step <= wanted + _AFTER
        ]
        data = _encode(entries)
        while len(data) > self._bytes - _LENGTH_BYTES and entries:
            if len(entries) > 1:
                entries = entries[: len(entries) // 2]
            else:
                entries[0][3] = entries[0][3][: len(entries[0][3]) // 2]
            data = _encode(entries)
        return (len(data).to_bytes(_LENGTH_BYTES, "little") + data).ljust(self._bytes, b"\0")

    def _start(self, message: Tensor) -> None:
        count = len(self._ranks)
        stream = self._stream
        if stream is None:
            self._gathered = message.new_empty(count, len(message))
            self._work = all_gather(self._gathered.view(-1), message, group=self._ranks.group, async_op=True)
            return
        pinned = message.pin_memory()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            vector = pinned.to(self._device, non_blocking=True)
            gathered = vector.new_empty(count, len(vector))
            work = all_gather(gathered.view(-1), vector, group=self._ranks.group, async_op=True)
            if work is not None:
                work.wait()  # the stream waits, not this thread
            self._gathered = torch.empty(gathered.shape, dtype=gathered.dtype, device="cpu", pin_memory=True)
            self._gathered.copy_(gathered, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied.record(stream)


def _encode(entries: list[list[Any]]) -> bytes:
    return zlib.compress(json.dumps(entries, default=str).encode())


def _decode(message: bytes) -> list[list[Any]]:
    length = int.from_bytes(message[:_LENGTH_BYTES], "little")
    entries: list[list[Any]] = json.loads(zlib.decompress(message[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    return entries


def _comparable(entry: list[Any]) -> tuple[Any, ...]:
    step, _, position, ids = entry
    return step, position, tuple(ids)
