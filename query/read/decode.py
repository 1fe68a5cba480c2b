"""From the verified bytes of many open parts to one Arrow table, with the keys that the folders' names hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.log.stream import RawPart, decode_parts

from .columns import to_column


@dataclass(frozen=True)
class Found:
    """One open part that was read.

    Attributes:
        run_id: Its run.
        segment: Its segment.
        table: Which table it is a part of.
        part: Its number.
        raw: Its bytes.
        before_seq: Rows from here on stand in a later part again; None when there is none.
    """

    run_id: str
    segment: int
    table: str
    part: int
    raw: RawPart
    before_seq: int | None = None

    @property
    def has_doubles(self) -> bool:
        """Return whether a later part has some of the rows again."""
        return self.before_seq is not None and (self.raw.last_seq or 0) >= self.before_seq


def decode(found: Sequence[Found]) -> tuple[pa.Table, list[tuple[Found, int]]]:
    """Decode parts of one table, at least one, together, with `run_id` and `segment` in front.

    Returns:
        The rows, and how many there are of each part that has any.

    Raises:
        CorruptSegmentError: The head of a part is lost and the columns are not those of this format.
    """
    rows, filled = decode_rows(found)
    lengths = [count for _, count in filled]
    for index, (name, values) in enumerate(
        (
            ("run_id", to_column([one.run_id for one, _ in filled], pa.string())),
            ("segment", to_column([one.segment for one, _ in filled], pa.int64())),
        )
    ):
        rows = rows.add_column(index, pa.field(name, values.type), repeated(values, lengths))
    return rows, filled


def decode_rows(found: Sequence[Found]) -> tuple[pa.Table, list[tuple[Found, int]]]:
    """Decode parts of one table, at least one, together, without saying whose they are.

    Rows that a later part has again are left out. All is one chunk: DuckDB pays for every chunk of every column.

    Returns:
        The rows, and how many there are of each part that has any.

    Raises:
        CorruptSegmentError: The head of a part is lost and the columns are not those of this format.
    """
    rows, counts = decode_parts([one.raw for one in found])
    if any(one.has_doubles for one in found):
        starts = accumulate(counts, initial=0)
        pieces = [
            _before(rows.slice(start, count), one) for one, start, count in zip(found, starts, counts, strict=False)
        ]
        rows, counts = pa.concat_tables(pieces), [len(piece) for piece in pieces]
    rows = _in_columns(rows.combine_chunks(), SCHEMAS[found[0].table])
    return rows, [(one, count) for one, count in zip(found, counts, strict=True) if count]


def _before(rows: pa.Table, one: Found) -> pa.Table:
    return rows.filter(pc.less(rows["seq"], one.before_seq)) if one.has_doubles else rows


def repeated(values: pa.Array, lengths: Sequence[int]) -> pa.Array:
    """Return each value as often as its length says."""
    if not lengths:
        return values
    ends = to_column(list(accumulate(lengths)), pa.int64())
    runs = pa.run_end_encoded(ends.type, values.type)
    return pc.run_end_decode(pa.Array.from_buffers(runs, sum(lengths), [None], children=[ends, values]))


def _in_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows in the columns that we know: one that was not yet written is null, one not yet known is left out."""
    if rows.column_names == schema.names:
        return rows
    columns = [
        rows[column.name] if column.name in rows.column_names else pa.nulls(len(rows), column.type) for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
