"""The last of a run's live curve, for detectors to learn from when a process goes on with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtrack.writer.errors import LlmtrackError
from llmtrack.writer.format import OPEN_SUFFIX, PART_FILE, segment_folder
from llmtrack.writer.lineage.path import Stretch, path
from llmtrack.writer.lineage.records import Records
from llmtrack.writer.log.arrays import one, strings
from llmtrack.writer.log.stream import read_part

from .watch import HistoryRow

_ROWS: Final = 2000  # that are wanted: what detectors remember
_PARTS: Final = 4  # that are looked at for them, at most
_TAIL_BYTES: Final = 16 << 20  # of an open part: its last rows
_COLUMNS: Final = ("seq", "tokens", "name", "value")


def read_history(root: Path, run_id: str, segment: int, tokens: int, metrics: Collection[str]) -> list[HistoryRow]:
    """Read the last rows before a place of a run, along its path, oldest first.

    What is read is bounded, whatever the run has behind it. What cannot be read is left out.

    Args:
        root: The root.
        run_id: The run of the place.
        segment: Its segment.
        tokens: Its tokens.
        metrics: The metrics that are wanted.
    """
    rows: list[HistoryRow] = []
    parts_left = _PARTS
    for stretch in path(Records(root).start_of, run_id, segment, tokens):
        for part in _newest_parts(root, stretch):
            rows = [*_rows_of(part, stretch, metrics), *rows]
            parts_left -= 1
            if len(rows) >= _ROWS or not parts_left:
                return rows[-_ROWS:]
    return rows


def _newest_parts(root: Path, stretch: Stretch) -> Iterator[Path]:
    """Yield the parts of metrics of a segment, the newest first; of one that is open and sealed the sealed one."""
    folder = segment_folder(root, stretch.run_id, stretch.segment)
    names: dict[int, str] = {}
    try:
        found = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return
    for name in found:  # X.parquet comes after X.arrows
        match = PART_FILE.fullmatch(name)
        if match and match[1] == "metrics":
            names[int(match[2])] = name
    for number in sorted(names, reverse=True):
        yield folder / names[number]


def _rows_of(part: Path, stretch: Stretch, metrics: Collection[str]) -> list[HistoryRow]:
    try:
        table = _read_open(part) if part.suffix == OPEN_SUFFIX else _read_sealed(part, metrics)
        lowest, highest = (one(limit, pa.int64())[0] for limit in (stretch.lo, stretch.hi))
        keep = pc.and_(
            pc.is_in(table["name"], value_set=strings(sorted(metrics))),
            pc.and_(pc.greater(table["tokens"], lowest), pc.less_equal(table["tokens"], highest)),
        )
        points: list[dict[str, Any]] = table.filter(keep).sort_by("seq").to_pylist()
    except (OSError, LlmtrackError, pa.ArrowException):
        return []  # `llmtrack verify` tells of damage; here it is only a little less to learn from
    rows: dict[int, HistoryRow] = {}
    for point in points:
        row = rows.setdefault(point["seq"], (point["tokens"], {}))
        row[1][point["name"]] = point["value"]
    return list(rows.values())[-_ROWS:]


def _read_open(part: Path) -> pa.Table:
    begin = max(part.stat().st_size - _TAIL_BYTES, 0)
    return read_part(part, offset=begin).table.select(_COLUMNS)


def _read_sealed(part: Path, metrics: Collection[str]) -> pa.Table:
    """Read the row groups that end the series of each metric: a part is sorted by name, then by `seq`."""
    with pq.ParquetFile(part) as file:
        column = file.schema_arrow.get_field_index("name")
        wanted: dict[int, None] = {}
        enough = dict.fromkeys(metrics, _ROWS)
        for number in reversed(range(file.num_row_groups)):
            group = file.metadata.row_group(number)
            limits = group.column(column).statistics
            for name, left in enough.items():
                if left > 0 and (limits is None or limits.min <= name <= limits.max):
                    wanted[number] = None
                    if limits is not None and limits.min == name == limits.max:
                        enough[name] -= group.num_rows
        return file.read_row_groups(sorted(wanted), columns=list(_COLUMNS), use_threads=False)
