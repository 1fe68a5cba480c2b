"""Rows of `log` calls -> one Arrow batch, with as little work under the GIL as can be had.

A training loop logs the same names again and again. For each set of names the packing of its values and the Arrow array
of its names are made once; a row then costs one `struct.pack`, and everything a point repeats (seq, time, step, tokens)
is spread from rows to points by Arrow, outside the GIL.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.writer.format import SCHEMAS, TIME

from .arrays import strings
from .buffer import Row

_NS_PER_MS: Final = 1_000_000
_LAYOUTS_LIMIT: Final = 4096  # sets of names kept; more only means that names are made anew at every step


@dataclass(frozen=True)
class _Layout:
    names: pa.StringArray
    values: struct.Struct
    points: int


class RowEncoder:
    """Turns rows into batches of the `metrics` table."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def check(self, row: Row) -> None:
        """Raise if the row cannot be stored.

        Raises:
            TypeError, ValueError, OverflowError, struct.error: A name is no string, a value no number, or a coordinate
                does not fit 64 bits.
            RuntimeError: A value's device failed before the value was copied.
        """
        _, step, tokens, values = row
        array("q", (step, tokens))
        self._layout(tuple(values)).values.pack(*values.values())

    def encode(self, rows: Sequence[Row], seq_first: int) -> pa.RecordBatch:
        """Return one batch with a line for each point; the first row gets `seq_first`, the next one more.

        Raises:
            Exception: As `check`, when any row cannot be stored.
        """
        layouts = [self._layout(tuple(row[3])) for row in rows]
        packed = [layout.values.pack(*row[3].values()) for layout, row in zip(layouts, rows, strict=True)]
        ends = array("i", accumulate((layout.points for layout in layouts), initial=0))
        points = ends[-1]
        row_of_point = pc.list_parent_indices(
            pa.ListArray.from_buffers(
                pa.list_(pa.null()), len(rows), [None, pa.py_buffer(ends)], children=[pa.nulls(points)]
            )
        )

        def spread(values: array[int], kind: pa.DataType) -> pa.Array:
            return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(values)]).take(row_of_point)

        columns = [
            spread(array("q", range(seq_first, seq_first + len(rows))), pa.int64()),
            spread(array("q", [row[0] // _NS_PER_MS for row in rows]), TIME),
            spread(array("q", [row[1] for row in rows]), pa.int64()),
            spread(array("q", [row[2] for row in rows]), pa.int64()),
            pa.concat_arrays([layout.names for layout in layouts]),
            pa.Array.from_buffers(pa.float64(), points, [None, pa.py_buffer(b"".join(packed))]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMAS["metrics"])

    def _layout(self, names: tuple[str, ...]) -> _Layout:
        layout = self._layouts.get(names)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_LIMIT:
                self._layouts.clear()
            layout = _Layout(strings(names), struct.Struct(f"={len(names)}d"), len(names))
            if layout.names.null_count:
                raise TypeError("a metric's name is None")
            self._layouts[names] = layout
        return layout
