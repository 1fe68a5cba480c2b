"""New points of open parts, packed: a tenth of what they take as columns, for a database in memory and for us.

All metrics of a row have one `seq`, `time`, `step` and `tokens`, which are kept once, and its values are one list.
Which metrics these are is the row's shape: a run has few shapes, and names are kept once for each.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

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

PARTS: Final = pa.schema([("id", pa.int64()), ("run_id", pa.string()), ("segment", pa.int64()), ("part", pa.int64())])
SHAPES: Final = pa.schema([("id", pa.int64()), ("position", pa.int64()), ("name", pa.string())])  # position: from 1
ROWS: Final = pa.schema(
    [
        ("part_id", pa.int64()),
        ("seq", pa.int64()),
        ("time", TIME),
        ("step", pa.int64()),
        ("tokens", pa.int64()),
        ("shape_id", pa.int64()),
        ("points", pa.list_(pa.float64())),
    ]
)

_Key = TypeVar("_Key")
Insert = Callable[[str, pa.Table], None]  # the name of a table, and new rows of it
Shape = tuple[str | None, ...]  # the metrics of a row, as they were logged; None stands for a name that is null


@dataclass(frozen=True)
class Packed:
    """Points of some parts, at least one.

    Attributes:
        found: The parts, of which each has points.
        rows: ``[rows]``: `seq`, `time`, `step`, `tokens`, in the order of the log.
        part_of: ``[rows]``, int64: the index in `found` of the part that a row is of.
        ends: The number of rows of the first part, of the first two, …
        shapes: Of the rows.
        shape_of: ``[rows]``, int32: the index of a row's shape.
        points: ``[rows]``, lists of float64: the values of a row, in the order of its shape.
    """

    found: Sequence[Found]
    rows: pa.Table
    part_of: pa.Array
    ends: Sequence[int]
    shapes: Sequence[Shape]
    shape_of: pa.Array
    points: pa.Array


def pack(found: Sequence[Found]) -> Packed | None:
    """Decode and pack the points of some parts; None when they have none.

    Raises:
        CorruptSegmentError: The head of a part is lost and the columns are not those of this format.
    """
    points, filled = decode_rows(found)
    if not filled:
        return None
    columns = {name: points[name].combine_chunks() for name in points.column_names}
    part_of = repeated(to_column(range(len(filled)), pa.int64()), [count for _, count in filled])
    begins = _begins(columns["seq"])
    for column in (columns["time"], columns["step"], columns["tokens"], *([part_of] if len(filled) > 1 else [])):
        begins = pc.or_(begins, _begins(column))
    firsts = pc.add(pc.indices_nonzero(begins).cast(pa.int64()), to_column([1], pa.int64())[0])
    firsts = pa.concat_arrays([to_column([0], pa.int64()), firsts])
    bounds = pa.concat_arrays([firsts, to_column([len(points)], pa.int64())])
    shapes, shape_of = _shapes(columns["name"], bounds)
    parts = pc.run_end_encode(part_of.take(firsts))
    return Packed(
        [one for one, _ in filled],
        pa.table([columns[name].take(firsts) for name in _COORDINATES], _COORDINATES),
        pc.run_end_decode(parts),
        parts.run_ends.to_pylist(),
        shapes,
        shape_of,
        pa.ListArray.from_arrays(bounds.cast(pa.int32()), columns["value"]),
    )


def _shapes(names: pa.Array, bounds: pa.Array) -> tuple[list[Shape], pa.Array]:
    """Return the shapes of the rows that lie between bounds, and which one each row has."""
    known = names.dictionary_encode()
    alphabet, numbers = known.dictionary.to_pylist(), known.indices
    if numbers.null_count:
        numbers = pc.fill_null(numbers, to_column([len(alphabet)], pa.int64()).cast(numbers.type)[0])
        alphabet.append(None)
    # The numbers of a row's names, as they lie in memory, taken for a word: Arrow tells words apart, and no lists.
    width = numbers.type.bit_width // 8
    ends = pc.multiply(bounds, to_column([width], pa.int64())[0]).buffers()[1]
    letters = numbers.buffers()[1].slice(numbers.offset * width)
    words = pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, [None, ends, letters]).dictionary_encode()
    shapes = [tuple(alphabet[number] for number in memoryview(word).cast("i")) for word in words.dictionary.to_pylist()]
    return shapes, words.indices


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


class Packer:
    """Numbers the parts and shapes of one database, and hands on tables in which numbers stand for them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int, int], int] = {}
        self._shapes: dict[Shape, int] = {}
        self._waiting: list[pa.Table] = []
        self._waiting_points = 0

    def add(self, packed: Packed, insert: Insert) -> None:
        """Take in points; they are handed on when there are many, or with `flush`."""
        keys = [(one.run_id, one.segment, one.part) for one in packed.found]
        parts, new_parts = _number(keys, self._parts)
        if new_parts:
            insert("open_parts", to_table(PARTS, [(number, *key) for key, number in new_parts]))
        shapes, new_shapes = _number(packed.shapes, self._shapes)
        if new_shapes:
            names = [(number, *one) for shape, number in new_shapes for one in enumerate(shape, start=1)]
            insert("open_shapes", to_table(SHAPES, names))
        columns = [parts.take(packed.part_of), *packed.rows.columns, shapes.take(packed.shape_of), packed.points]
        self._waiting.append(pa.table(columns, schema=ROWS))
        self._waiting_points += len(packed.points.values)
        if self._waiting_points >= _INSERT_POINTS:
            self.flush(insert)

    def flush(self, insert: Insert) -> None:
        """Hand on what waits."""
        if self._waiting:
            rows = pa.concat_tables(self._waiting)
            self._waiting.clear()
            self._waiting_points = 0
            insert("open_rows", rows)


def _number(keys: Sequence[_Key], known: dict[_Key, int]) -> tuple[pa.Array, list[tuple[_Key, int]]]:
    """Return the number of each key, and the keys that are new with theirs."""
    new = [key for key in dict.fromkeys(keys) if key not in known]
    known.update((key, number) for number, key in enumerate(new, start=len(known)))
    return to_column([known[key] for key in keys], pa.int64()), [(key, known[key]) for key in new]
