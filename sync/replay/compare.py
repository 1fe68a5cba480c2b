"""Compares what a tracker holds of a run with what the log says should be there, with bounded memory.

Per key a count and a sum of hashes tell whether two sets of records are equal. Only where they are not, the hashes of
what the tracker holds are kept, nine bytes a record, for a bounded number of keys at a time.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct
from typing import Final, TypeVar

from llmtrack.sync.sink import Record, Sink, TrackerRun

from .patience import Patience

T = TypeVar("T")

_IDENTITY: Final = Struct("<qqd")
_HASH_BITS: Final = 0xFFFF_FFFF_FFFF_FFFF
_GROUP_RECORDS: Final = 4_000_000  # 36 MB
_SAMPLE: Final = 8  # one key in so many is read whole when not all are
_SHOWN_KEYS: Final = 3
_MATCHED: Final = 1
_MISPLACED: Final = 2
_TOLD: Final = 3

Records = Callable[[], Iterable[Record]]  # starts from the beginning at each call


@dataclass(frozen=True)
class Difference:
    """What does not agree.

    Attributes:
        lacking: Records of the log that the tracker does not hold.
        misplaced: Records there that belong to another part of the same run of the log.
        foreign: Records there that are not from this log.
        lacking_at: Of each key that lacks some: how many, and the fewest and the most tokens of them.
        foreign_at: Of each key that has some: how many.
    """

    lacking: int = 0
    misplaced: int = 0
    foreign: int = 0
    lacking_at: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    foreign_at: Mapping[str, int] = field(default_factory=dict)

    def tell_lacking(self) -> str:
        """Return which records are lacking, for a person."""
        counts = {key: count for key, (count, _, _) in self.lacking_at.items()}
        first = min(low for _, low, _ in self.lacking_at.values())
        last = max(high for _, _, high in self.lacking_at.values())
        where = f"at {first}" if first == last else f"between {first} and {last}"
        return f"{_most(counts)}, {where} tokens"

    def tell_foreign(self) -> str:
        """Return which records are not from this log, for a person."""
        return _most(self.foreign_at)


@dataclass
class Digests:
    """By key, how many records there are and the sum of their hashes: whatever their order, equal when they are."""

    by_key: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, records: Iterable[Record]) -> None:
        """Take records in."""
        for record in records:
            count, total = self.by_key.get(record.key, (0, 0))
            self.by_key[record.key] = (count + 1, (total + _hash(record)) & _HASH_BITS)

    def count(self) -> int:
        """Return how many records were taken in."""
        return sum(count for count, _ in self.by_key.values())


class Comparison:
    """What the tracker holds of a run beside what the log says; reads all of both once when it is made.

    Args:
        sink: The tracker.
        run: The run there.
        patience: What to do about a tracker that does not answer.
        expected: What should be there.
        on_read: Called with numbers of records that were read back, from several threads.
        wanted: The digests of what is expected, if they were made when it was sent.

    Raises:
        SinkError: The tracker does not answer, or refused.
    """

    def __init__(
        self,
        sink: Sink,
        run: TrackerRun,
        patience: Patience,
        expected: Records,
        on_read: Callable[[int], None],
        *,
        wanted: Digests | None = None,
    ) -> None:
        self._sink = sink
        self._run = run
        self._patience = patience
        self._expected = expected
        self._held = _read_digests(sink, run, patience, on_read)
        if wanted is None:
            wanted = Digests()
            wanted.add(expected())
        self._differing = sorted(
            key for key in {*wanted.by_key, *self._held.by_key} if wanted.by_key.get(key) != self._held.by_key.get(key)
        )

    @property
    def counts(self) -> dict[str, int]:
        """How many records the tracker holds, by key."""
        return {key: count for key, (count, _) in self._held.by_key.items()}

    def difference(self, others: Records, told: Records) -> Difference:
        """Return what does not agree.

        Args:
            others: The records of all other parts of the run of the log: what is misplaced is one of them.
            told: The records of the run's own story, which may be there and need not.
        """
        lacking: dict[str, tuple[int, int, int]] = {}
        foreign: dict[str, int] = {}
        misplaced = 0
        for there in self._groups():
            for record in self._expected():
                if record.key in there.keys and not there.match(record, _MATCHED):
                    count, low, high = lacking.get(record.key, (0, record.tokens, record.tokens))
                    lacking[record.key] = (count + 1, min(low, record.tokens), max(high, record.tokens))
            if there.unmatched():
                for record in told():
                    there.match(record, _TOLD)
                misplaced += sum(there.match(record, _MISPLACED) for record in others() if record.points)
                foreign |= there.unmatched()
        missing = sum(count for count, _, _ in lacking.values())
        return Difference(missing, misplaced, sum(foreign.values()), lacking, foreign)

    def lacking(self) -> Iterator[Record]:
        """Yield the records that the tracker does not hold."""
        for there in self._groups():
            for record in self._expected():
                if record.key in there.keys and not there.match(record, _MATCHED):
                    yield record

    def _groups(self) -> Iterator[_Held]:
        """Read back the differing keys, as many at a time as fit into memory."""
        group: list[str] = []
        records = 0
        for key in self._differing:
            count = self._held.by_key.get(key, (0, 0))[0]
            if group and records + count > _GROUP_RECORDS:
                yield _Held(self._sink, self._run, self._patience, group)
                group, records = [], 0
            group.append(key)
            records += count
        if group:
            yield _Held(self._sink, self._run, self._patience, group)


def compare_beyond(
    sink: Sink,
    run: TrackerRun,
    patience: Patience,
    expected: Iterable[Record],
    *,
    told: Iterable[Record],
    counts: Mapping[str, int],
    newest: Mapping[str, Record],
    sample: bool,
    on_read: Callable[[int], None],
) -> dict[str, int] | None:
    """Read back only what came after an earlier comparison.

    A key to which one record came is not read when that is the newest one of which the tracker's list of runs tells:
    its content was seen there.

    Args:
        sink: The tracker.
        run: The run there.
        patience: What to do about a tracker that does not answer.
        expected: What should have come since.
        told: What may have come since, and need not.
        counts: How many records it held then, by key.
        newest: The newest record by key, as the tracker told it after everything was accepted.
        sample: Read all of a random eighth of the keys; of the others see that there are as many as there should be.
        on_read: Called with numbers of records that were read back, from several threads.

    Returns:
        How many records it holds now, by key; None when that is not what it held plus what was expected, in the order
        of their times: then everything has to be compared.
    """
    wanted = Digests()
    wanted.add(expected)
    beside = frozenset((record.key, *record[1:4]) for record in told)
    beside_keys = {key for key, *_ in beside}
    newer = Digests()
    newer.add(newest.values())
    seen = {key for key, one in wanted.by_key.items() if one == newer.by_key.get(key)}
    unseen = sorted(wanted.by_key.keys() - seen)
    read_whole = set(random.sample(unseen, -(-len(unseen) // _SAMPLE)) if sample else unseen) | beside_keys

    def digest(key: str) -> tuple[Digests, int]:
        found, more = Digests(), 0
        if key not in read_whole:
            count = wanted.by_key[key][0]
            last = list(islice(sink.read(run, key, skip=counts.get(key, 0) + count - 1), 2))
            on_read(len(last))
            if len(last) == 1:
                found.by_key[key] = wanted.by_key[key]
            return found, more
        for record in sink.read(run, key, skip=counts.get(key, 0)):
            if record[:4] in beside:
                more += 1
            else:
                found.add([record])
        on_read(found.count() + more)
        return found, more

    found = Digests({key: wanted.by_key[key] for key in seen})
    held = {**counts, **{key: counts.get(key, 0) + 1 for key in seen}}
    for digests, more in _in_lanes(sink, patience, digest, unseen):
        found.by_key.update(digests.by_key)
        for key, (count, _) in digests.by_key.items():
            held[key] = counts.get(key, 0) + count + more
    return held if found == wanted else None


class _Held:
    """The hashes of some keys' records in the tracker, each of which can be matched once."""

    def __init__(self, sink: Sink, run: TrackerRun, patience: Patience, keys: list[str]) -> None:
        def load(key: str) -> tuple[str, array[int]]:
            return key, array("q", sorted(_hash(record) for record in sink.read(run, key)))

        self.keys = frozenset(keys)
        self._hashes = dict(_in_lanes(sink, patience, load, keys))
        self._matched = {key: bytearray(len(hashes)) for key, hashes in self._hashes.items()}

    def match(self, record: Record, by: int) -> bool:
        """Return whether the record is there and was not matched yet, or by an equal record in the same way."""
        hashes = self._hashes.get(record.key)
        if hashes is None:
            return False
        wanted = _hash(record)
        at = bisect_left(hashes, wanted)
        if at == len(hashes) or hashes[at] != wanted or self._matched[record.key][at] not in {0, by}:
            return False
        self._matched[record.key][at] = by
        return True

    def unmatched(self) -> dict[str, int]:
        """Return how many records of each key were not matched; keys without any are left out."""
        return {key: left for key, matched in self._matched.items() if (left := matched.count(0))}


def _most(counts: Mapping[str, int]) -> str:
    """Return the keys that have most, with how many they have."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{key}: {count}" for key, count in ordered[:_SHOWN_KEYS])
    return shown if len(ordered) <= _SHOWN_KEYS else f"{shown} and {len(ordered) - _SHOWN_KEYS} more"


def newest_digest(run: TrackerRun) -> str:
    """Return a digest of what the tracker's list of runs tells of a run's content: it changes when content is lost."""
    digest = hashlib.sha256()
    for key in sorted(run.newest):
        digest.update(key.encode() + b"\0" + _bytes(run.newest[key]))
    return digest.hexdigest()[:16]


def _hash(record: Record) -> int:
    """Return 64 bits of a record's tokens, time and value, which hold for this process only.

    Of bytes, because Python's hashes of numbers collide where it matters (-1 and -2).
    """
    return hash(_bytes(record))


def _bytes(record: Record) -> bytes:
    return _IDENTITY.pack(record.tokens, record.time_ms, record.value + 0.0)  # -0.0 is 0.0 to every SQL database


def _read_digests(sink: Sink, run: TrackerRun, patience: Patience, on_read: Callable[[int], None]) -> Digests:
    def digest(key: str) -> Digests:
        found = Digests()
        found.add(sink.read(run, key))
        on_read(found.count())
        return found

    whole = Digests()
    for found in _in_lanes(sink, patience, digest, patience.call(lambda: sink.keys(run))):
        whole.by_key.update(found.by_key)
    return whole


def _in_lanes(sink: Sink, patience: Patience, function: Callable[[str], T], keys: list[str]) -> Iterator[T]:
    if sink.lanes == 1 or len(keys) == 1:
        yield from (patience.call(lambda key=key: function(key)) for key in keys)  # type: ignore[misc]
        return
    with ThreadPoolExecutor(sink.lanes, thread_name_prefix="llmtrack-read") as pool:
        yield from pool.map(lambda key: patience.call(lambda: function(key)), keys)
