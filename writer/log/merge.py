"""The points of one part sorted by (name, seq), a row group at a time, without ever holding them all as columns.

An external merge sort in memory: stretches of the part are sorted one by one and kept in a quarter of the bytes that
their columns take, because all metrics of a row have one `seq`, `time`, `step` and `tokens`. Each group is then picked
together from all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import sleep
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.writer.format import SCHEMAS

from .arrays import one, strings

# A reader of one metric reads whole row groups; smaller ones would cost bytes.
ROW_GROUP_ROWS: Final = 1 << 17
_STRETCH_POINTS: Final = 1 << 18
_PLACE: Final = ("seq", "time", "step", "tokens")
_SCHEMA: Final = SCHEMAS["metrics"]


@dataclass(frozen=True)
class _Stretch:
    """Neighbouring rows of the part, their points sorted by name.

    Attributes:
        rows: ``[rows]``, a column for each of `_PLACE`.
        row_of: ``[points]``, int32: the row that a point is of.
        values: ``[points]``, float64.
        names: Of its points, sorted.
        ends: ``[names + 1]``: where the points of the first so many names end.
    """

    rows: pa.Table
    row_of: pa.Array
    values: pa.Array
    names: list[str]
    ends: Sequence[int]

    def end(self, name: str | None) -> int:
        """Return how many points have a name before this one; all for None."""
        return self.ends[-1 if name is None else bisect_left(self.names, name)]

    def codes(self, names: Sequence[str], first: int, end: int) -> pa.Array:
        """Return the index in `names` of each of the points ``[first, end)``, which are whole names."""
        codes = array("i")
        begin = bisect_left(self.ends, first)
        for name, (starts, ends) in zip(self.names[begin:], pairwise(self.ends[begin:]), strict=False):
            if starts >= end:
                break
            codes.extend(array("i", (bisect_left(names, name),)) * (ends - starts))
        return pa.Array.from_buffers(pa.int32(), end - first, [None, pa.py_buffer(codes)])


class SortedPoints:
    """The points of a part, sorted by (name, seq).

    Args:
        tables: Their columns, in the order of the part, a few rows at a time; each is dropped before the next is asked
            for.

    Attributes:
        points: How many.
        names: Of the metrics, sorted.
        extent: The lowest and the highest of each coordinate (times in ms since 1970); None without any point.

    Raises:
        ValueError: A point has no name.
    """

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._stretches: list[_Stretch] = []
        self._totals: dict[str, int] = {}
        waiting: list[pa.Table] = []
        for table in tables:
            waiting.append(table.select(_SCHEMA.names).cast(_SCHEMA))
            if sum(map(len, waiting)) >= _STRETCH_POINTS:
                self._add(waiting)
        self._add(waiting)
        self.names = sorted(self._totals)
        self.points = sum(self._totals.values())
        self.extent = {column: self._extent(column) for column in _PLACE}

    def groups(self) -> Iterator[pa.Table]:
        """Yield the points, a row group at a time; other threads get their turn in between."""
        waiting: list[pa.Table] = []
        points = 0
        for piece in self._pieces():
            waiting.append(piece)
            points += len(piece)
            while points >= ROW_GROUP_ROWS:
                whole = pa.concat_tables(waiting)
                yield whole.slice(0, ROW_GROUP_ROWS).combine_chunks()
                waiting = [whole.slice(ROW_GROUP_ROWS)]
                points -= ROW_GROUP_ROWS
            sleep(0)
        if points:
            yield pa.concat_tables(waiting).combine_chunks()

    def _add(self, waiting: list[pa.Table]) -> None:
        """Sort what waits, and empty the list."""
        table = pa.concat_tables(waiting) if waiting else _SCHEMA.empty_table()
        waiting.clear()
        if not len(table):
            return
        names = table["name"].combine_chunks().dictionary_encode()
        if names.null_count:
            raise ValueError("a point has no name")
        known = names.dictionary.to_pylist()
        counts = dict.fromkeys(known, 0)
        for count in names.indices.value_counts().to_pylist():
            counts[known[count["values"]]] = count["counts"]
        # A sort by the rank of the name is a counting sort, and stable: `seq` stays in order within a name.
        rank = pc.rank(names.dictionary, sort_keys="ascending").cast(pa.int32())
        order = pc.sort_indices(rank.take(names.indices))
        place = [table[column].combine_chunks() for column in _PLACE]
        values = table["value"].combine_chunks()
        del table, names
        begins = _begins_row(place)
        of_row = pc.cumulative_sum(pa.concat_arrays([one(0, pa.int32()), begins.cast(pa.int32())]))
        is_first = pa.concat_arrays([one(True, pa.bool_()), begins])
        sorted_names = sorted(known)
        self._stretches.append(
            _Stretch(
                pa.table([column.filter(is_first) for column in place], _PLACE),
                of_row.take(order),
                values.take(order),
                sorted_names,
                array("q", accumulate((counts[name] for name in sorted_names), initial=0)),
            )
        )
        for name, count in counts.items():
            self._totals[name] = self._totals.get(name, 0) + count
        sleep(0)

    def _extent(self, column: str) -> tuple[int, int] | None:
        ends = [pc.min_max(stretch.rows[column].cast(pa.int64())).as_py() for stretch in self._stretches]
        ends = [one for one in ends if one["min"] is not None]
        return (min(one["min"] for one in ends), max(one["max"] for one in ends)) if ends else None

    def _pieces(self) -> Iterator[pa.Table]:
        """Yield the points in pieces; one that has several names is no longer than a row group."""
        first = 0
        while first < len(self.names):
            end, points = first + 1, self._totals[self.names[first]]
            while end < len(self.names) and points + self._totals[self.names[end]] <= ROW_GROUP_ROWS:
                points += self._totals[self.names[end]]
                end += 1
            yield from self._pick(self.names[first:end], self.names[end] if end < len(self.names) else None)
            first = end

    def _pick(self, names: list[str], following: str | None) -> Iterator[pa.Table]:
        """Yield the points that have one of these names, neighbours in order; all in one piece if there are several."""
        dictionary = strings(names)
        pieces: list[pa.Table] = []
        for stretch in self._stretches:
            first, end = stretch.end(names[0]), stretch.end(following)
            if first == end:
                continue
            rows = stretch.rows.take(stretch.row_of[first:end])
            codes = stretch.codes(names, first, end)
            piece = rows.append_column("name", codes).append_column("value", stretch.values[first:end])
            if len(names) > 1:
                pieces.append(piece)
            else:
                yield _named(piece, dictionary)
        if pieces:
            whole = pa.concat_tables(pieces).combine_chunks()
            yield _named(whole.take(pc.sort_indices(whole["name"])), dictionary)


def _begins_row(place: list[pa.Array]) -> pa.Array:
    """Return for each point but the first whether it is of another row than the one before it, ``[points - 1]``."""
    changes: pa.Array | None = None
    for column in place:
        change = pc.coalesce(pc.not_equal(column[1:], column[:-1]), one(True, pa.bool_())[0])  # null is another
        changes = change if changes is None else pc.or_(changes, change)
    return changes


def _named(piece: pa.Table, dictionary: pa.Array) -> pa.Table:
    """Return a piece with names in place of their indices."""
    names = [pa.DictionaryArray.from_arrays(chunk, dictionary).cast(pa.string()) for chunk in piece["name"].chunks]
    columns = {
        **dict(zip(piece.column_names, piece.columns, strict=True)),
        "name": pa.chunked_array(names, pa.string()),
    }
    return pa.table([columns[column] for column in _SCHEMA.names], schema=_SCHEMA)
