"""The log as somebody reads it who has only pyarrow and the page on the format: none of our own reading code."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

DROPPED = "tracker/dropped"  # the writer's own metric
_PART = re.compile(r"([a-z]+)-([0-9]+)\.(arrows|parquet)")


class Row(NamedTuple):
    """One row of `log`, with the values as bits: NaN is equal to itself, and -0.0 is not 0.0."""

    seq: int
    step: int
    tokens: int
    bits: dict[str, int]


@dataclass(frozen=True)
class Segment:
    """What a segment's folder holds: the records of each table in the order of `seq`, none of them twice."""

    tables: dict[str, list[dict[str, Any]]]

    def __getitem__(self, table: str) -> list[dict[str, Any]]:
        return self.tables.get(table, [])

    def rows(self) -> list[Row]:
        """Return the rows of metrics in order, without the writer's own."""
        rows: dict[int, Row] = {}
        for point in self["metrics"]:
            if point["name"] != DROPPED:
                row = rows.setdefault(point["seq"], Row(point["seq"], point["step"], point["tokens"], {}))
                assert point["name"] not in row.bits, f"point twice: {point}"
                row.bits[point["name"]] = bits(point["value"])
        return list(rows.values())

    def series(self, name: str) -> list[float]:
        """Return the values of one metric in order."""
        return [point["value"] for point in self["metrics"] if point["name"] == name]

    def steps(self) -> list[int]:
        """Return the step of every row of metrics, in order."""
        return [row.step for row in self.rows()]

    @property
    def end(self) -> dict[str, Any]:
        """The end record, of which there is one."""
        (end,) = [record for record in self["segments"] if record["phase"] == "end"]
        return end


def bits(value: float) -> int:
    """Return the 64 bits of a double as an integer."""
    return int(struct.unpack("=q", struct.pack("=d", value))[0])


def read_segment(folder: Path) -> Segment:
    """Read every table of a segment, each row once.

    Of a part that is open and sealed the sealed one counts, and rows of a part from the first `seq` of a later part on
    were written again there.
    """
    parts: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):  # X.parquet comes after X.arrows
        if name := _PART.fullmatch(path.name):
            parts.setdefault(name[1], {})[int(name[2])] = path
    tables: dict[str, list[dict[str, Any]]] = {}
    for table, numbered in parts.items():
        records: list[dict[str, Any]] = []
        before_seq: float = float("inf")
        for number in sorted(numbered, reverse=True):
            content = [record for record in read_file(numbered[number]) if record["seq"] < before_seq]
            before_seq = min([before_seq, *(record["seq"] for record in content)])
            records += content
        tables[table] = sorted(records, key=lambda record: record["seq"])
    return Segment(tables)


def read_file(path: Path) -> list[dict[str, Any]]:
    """Return the records of one file, an open part up to where it is torn; `time` in ms since the epoch."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            return _records(file.read())
    return [record for batch in read_batches(path) for record in _records(batch)]


def _records(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    columns = [
        (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in rows.columns
    ]
    names = rows.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an open part as plain pyarrow reads them, up to where it is torn."""
    with path.open("rb") as file:
        try:
            stream = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            return  # killed before the head was written
        while True:
            try:
                yield stream.read_next_batch()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return


def find_segment(root: Path) -> Path:
    """Return the folder of the only segment below a root."""
    (folder,) = root.glob("run_id=*/segment=*")
    return folder
