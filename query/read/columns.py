"""Arrow columns out of a few Python values.

`pyarrow.array` would do, and imports pandas where that is installed: a third of a second of every command.
"""

from __future__ import annotations

import datetime as dt
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa

EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def to_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of strings, 64-bit integers or timestamps with milliseconds; None is null."""
    validity = pa.py_buffer(_bitmap(values)) if None in values else None
    if pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode() for value in values]
        offsets = array("i", accumulate(map(len, texts), initial=0))
        return pa.Array.from_buffers(
            kind, len(values), [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
        )
    numbers = array("q", map(_integer, values))
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(numbers)])


def to_table(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Return rows as a table."""
    by_column = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.Table.from_arrays(
        [to_column(values, field.type) for values, field in zip(by_column, schema, strict=True)], schema=schema
    )


def _integer(value: int | dt.datetime | None) -> int:
    if isinstance(value, dt.datetime):
        return (value - EPOCH) // dt.timedelta(milliseconds=1)
    return value or 0


def _bitmap(values: Sequence[Any]) -> bytes:
    bits = bytearray((len(values) + 7) // 8)
    for index, value in enumerate(values):
        if value is not None:
            bits[index // 8] |= 1 << index % 8
    return bytes(bits)
