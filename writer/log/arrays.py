"""Python values -> Arrow arrays, for what the training process writes.

`pyarrow.array` and `pyarrow.scalar` import pandas wherever it is installed, to look for its types: half a second of the
first flush, and on shared storage many. Nothing here does.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import pyarrow as pa


def strings(values: Sequence[object]) -> pa.StringArray:
    """Return an array of strings and nulls.

    Raises:
        TypeError: A value is neither a string nor None.
        UnicodeEncodeError: A string holds half a surrogate.
    """
    encoded = [b"" if value is None else _utf8(value) for value in values]
    ends = array("i", accumulate(map(len, encoded), initial=0))
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [_validity(values), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    )


def record_batch(row: Mapping[str, object], schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with one row; a column that the row lacks is null.

    Raises:
        TypeError, ValueError, OverflowError, struct.error: A value is not of its column's type.
    """
    return pa.RecordBatch.from_arrays([one(row.get(field.name), field.type) for field in schema], schema=schema)


def one(value: object, kind: pa.DataType) -> pa.Array:
    """Return an array with one value, or null for None; for the types that the log has.

    Raises:
        TypeError, ValueError, OverflowError, struct.error: The value is not of that type.
    """
    if value is None:
        return pa.nulls(1, kind)
    if pa.types.is_string(kind):
        return strings([value])
    if pa.types.is_list(kind):
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r} is no list")
        items = strings(value)
        return pa.ListArray.from_buffers(kind, 1, [None, pa.py_buffer(array("i", (0, len(items))))], children=[items])
    if pa.types.is_boolean(kind):
        data = bytes([bool(value)])
    else:
        data = struct.pack("=d" if pa.types.is_floating(kind) else "=q", value)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(data)])


def _utf8(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value.encode()


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    if None not in values:
        return None
    bits = sum((value is not None) << index for index, value in enumerate(values))
    return pa.py_buffer(bits.to_bytes(len(values) // 8 + 1, "little"))
