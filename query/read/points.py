"""New points of open parts, packed for a database in memory: a sixth of what they take as columns, for it and for us.

All metrics of a row have one `seq`, `time`, `step` and `tokens`, which are kept once; names are kept as numbers.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.writer.format import TIME

from .columns import to_column, to_table
from .decode import Found, decode_rows, repeated

# As messages; ten times that as columns. Small enough for the processor's cache, and for several threads at once.
_PIECE_BYTES: Final = 1 << 20
_PIECE_PARTS: Final = 500
_THREADS: Final = min(4, os.cpu_count() or 1)
_INSERT_POINTS: Final = 1 << 19  # at once: DuckDB fills row groups of 122,880
_COORDINATES: Final = ("seq", "time", "step", "tokens")

NAMES: Final = pa.schema([("id", pa.int64()), ("name", pa.string())])
PARTS: Final = pa.schema([("id", pa.int64()), ("run_id", pa.string()), ("segment", pa.int64()), ("part", pa.int64())])
PLACES: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("part_id", pa.int64()),
        ("seq", pa.int64()),
        ("time", TIME),
        ("step", pa.int64()),
        ("tokens", pa.int64()),
    ]
)
VALUES: Final = pa.schema([("place_id", pa.int64()), ("name_id", pa.int32()), ("value", pa.float64())])


Insert = Callable[[str, pa.Table], None]  # the name of a table, and new rows of it


@dataclass(frozen=True)
class Packed:
    """Points of some parts, at least one.

    Attributes:
        found: The parts, of which each has points.
        places: ``[rows]``: `seq`, `time`, `step`, `tokens`, in the order of the log.
        part_of: ``[rows]``, int64: the index in `found` of the part that a row is of.
        ends: The number of rows of the first part, of the first two, …
        place_of: ``[points]``, int64: the index of a point's row.
        names: Of the metrics; None stands for a name that is null.
        name_of: ``[points]``, int32: the index of a point's name.
        values: ``[points]``, float64.
    """

    found: Sequence[Found]
    places: pa.Table
    part_of: pa.Array
    ends: Sequence[int]
    place_of: pa.Array
    names: Sequence[str | None]
    name_of: pa.Array
    values: pa.Array


def pack(found: Sequence[Found]) -> Packed | None:
    """Decode and pack the points of some parts; None when they have none.

    Raises:
        CorruptSegmentError: The head of a part is lost and the columns are not those of this format.
    """
    rows, filled = decode_rows(found)
    if not filled:
        return None
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    lengths = [count for _, count in filled]
    part_of = repeated(to_column(range(len(filled)), pa.int64()), lengths)
    begins = _begins(part_of)
    for name in _COORDINATES:
        begins = pc.or_(begins, _begins(columns[name]))
    place_of = pc.cumulative_sum(pa.concat_arrays([to_column([0], pa.int64()), begins.cast(pa.int64())]))
    is_first = pa.concat_arrays([to_column([1], pa.int64()).cast(pa.bool_()), begins])
    names = columns["name"].dictionary_encode()
    known, name_of = names.dictionary.to_pylist(), names.indices
    if name_of.null_count:
        name_of = pc.fill_null(name_of, to_column([len(known)], pa.int64()).cast(pa.int32())[0])
        known.append(None)
    last_points = to_column([end - 1 for end in accumulate(lengths)], pa.int64())
    return Packed(
        [one for one, _ in filled],
        pa.table([columns[name].filter(is_first) for name in _COORDINATES], _COORDINATES),
        part_of.filter(is_first),
        [place + 1 for place in place_of.take(last_points).to_pylist()],
        place_of,
        known,
        name_of,
        columns["value"],
    )


def pack_ahead(found: Sequence[Found]) -> Iterator[tuple[Sequence[Found], Callable[[], Packed | None]]]:
    """Yield parts, a piece at a time, and what waits for them to be packed; the next ones are packed meanwhile.

    A part that is large comes in several pieces.
    """
    pieces = list(_pieces(found))
    if len(pieces) <= 1:  # a thread takes longer to start
        yield from ((piece, lambda piece=piece: pack(piece)) for piece in pieces)
        return
    waiting: deque[tuple[Sequence[Found], Future[Packed | None]]] = deque()
    with ThreadPoolExecutor(_THREADS, "llmtrack-pack") as pool:
        for piece in pieces:
            waiting.append((piece, pool.submit(pack, piece)))
            if len(waiting) > _THREADS:
                first, future = waiting.popleft()
                yield first, future.result
        for first, future in waiting:
            yield first, future.result


def _pieces(found: Sequence[Found]) -> Iterator[list[Found]]:
    piece: list[Found] = []
    piece_bytes = 0
    for one in found:
        messages: list[memoryview] = []
        for message in one.raw.messages:
            messages.append(message)
            piece_bytes += message.nbytes
            if piece_bytes >= _PIECE_BYTES:
                yield [*piece, replace(one, raw=replace(one.raw, messages=tuple(messages)))]
                piece, piece_bytes, messages = [], 0, []
        if messages:
            piece.append(replace(one, raw=replace(one.raw, messages=tuple(messages))))
            if len(piece) >= _PIECE_PARTS:
                yield piece
                piece, piece_bytes = [], 0
    if piece:
        yield piece


def _begins(column: pa.Array) -> pa.Array:
    """Return for each value but the first whether it differs from the one before; null differs from everything."""
    changes = pc.not_equal(column[1:], column[:-1])
    return pc.fill_null(changes, to_column([1], pa.int64()).cast(pa.bool_())[0]) if changes.null_count else changes


def _range(begin: int, end: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), end - begin, [None, pa.py_buffer(array("q", range(begin, end)))])


class Packer:
    """Numbers the parts, rows and names of one database, and hands on tables in which numbers stand for them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int, int], int] = {}
        self._names: dict[tuple[str | None], int] = {}
        self._rows = 0
        self._waiting: list[tuple[pa.Table, pa.Table]] = []
        self._waiting_points = 0

    def add(self, packed: Packed, insert: Insert) -> None:
        """Take in points; they are handed on when there are many, or with `flush`."""
        part_keys = [(one.run_id, one.segment, one.part) for one in packed.found]
        parts = _number(part_keys, self._parts, "open_parts", PARTS, insert)
        names = _number([(name,) for name in packed.names], self._names, "open_names", NAMES, insert)
        first = to_column([self._rows], pa.int64())[0]
        ids = _range(self._rows, self._rows + len(packed.places))
        places = [ids, parts.take(packed.part_of), *packed.places.columns]
        values = [pc.add(packed.place_of, first), names.cast(pa.int32()).take(packed.name_of), packed.values]
        self._waiting.append((pa.table(places, schema=PLACES), pa.table(values, schema=VALUES)))
        self._rows += len(packed.places)
        self._waiting_points += len(packed.values)
        if self._waiting_points >= _INSERT_POINTS:
            self.flush(insert)

    def flush(self, insert: Insert) -> None:
        """Hand on what waits."""
        if self._waiting:
            places, values = zip(*self._waiting, strict=True)
            self._waiting.clear()
            self._waiting_points = 0
            insert("open_places", pa.concat_tables(places))
            insert("open_values", pa.concat_tables(values))


def _number(
    keys: Sequence[tuple[object, ...]], known: dict[Any, int], table: str, schema: pa.Schema, insert: Insert
) -> pa.Array:
    """Return the number of each key; those that are new are handed on."""
    new = [key for key in dict.fromkeys(keys) if key not in known]
    known.update((key, number) for number, key in enumerate(new, start=len(known)))
    if new:
        insert(table, to_table(schema, [(known[key], *key) for key in new]))
    return to_column([known[key] for key in keys], pa.int64())
