"""The last value of one metric of every run, from the ends of the newest parts: points before them are not read."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.query.read.columns import to_column
from llmtrack.query.read.files import check_sealed, size_of
from llmtrack.query.read.log import Log
from llmtrack.query.sql.views import log_of
from llmtrack.writer.errors import FormatError
from llmtrack.writer.format import OPEN_SUFFIX, SEALED_SUFFIX
from llmtrack.writer.log.stream import decode_parts, read_raw_part

_TAIL_BYTES: Final = 256 << 10  # of an open part: the last second of a busy run, the last hour of most
_PARTS: Final = 5  # of one run that may have it: where the newest have nothing, the run does not log the metric
# Where the curve of each run runs, its newest stretch first.
_SPANS: Final = """
    SELECT run_id, source_run, segment, lo, hi
    FROM log.spans
    WHERE hi > lo AND NOT yields
    ORDER BY run_id, hi DESC
"""
_LAST_SEALED: Final = """
    SELECT f.path, max_by({{'tokens': p.tokens, 'step': p.step, 'value': p.value}}, (p.tokens, p.seq)) AS last
    FROM read_parquet([{paths}], filename = true, hive_partitioning = false) p
    JOIN (VALUES {bounds}) f (path, lo, hi) ON f.path = p.filename
    WHERE p.name = ? AND p.tokens > f.lo AND p.tokens <= f.hi
    GROUP BY f.path
"""


@dataclass(frozen=True)
class _Part:
    path: str
    lo: int
    hi: int

    @property
    def is_sealed(self) -> bool:
        return self.path.endswith(SEALED_SUFFIX)


class LastValue(NamedTuple):
    """The last point of a curve."""

    tokens: int
    step: int
    value: float


def last_values(con: duckdb.DuckDBPyConnection, name: str, run_ids: Collection[str]) -> dict[str, LastValue]:
    """Return the last point on the curve of each run; nothing of one whose newest parts have none.

    Args:
        con: Made by `connect`; points are not needed.
        name: The metric.
        run_ids: Of which runs.
    """
    log = log_of(con)
    spans: dict[str, list[tuple[str, int, int, int]]] = defaultdict(list)
    for run_id, *span in con.execute(_SPANS).fetchall():
        if run_id in run_ids:
            spans[run_id].append((span[0], span[1], span[2], span[3]))
    waiting = {run_id: itertools.islice(_newest_first(log, places, name), _PARTS) for run_id, places in spans.items()}
    found: dict[str, LastValue] = {}
    while waiting:  # most runs have it in their newest part
        asked = {run_id: part for run_id, parts in waiting.items() if (part := next(parts, None)) is not None}
        sealed = _last_sealed(con, [part for part in asked.values() if part.is_sealed], name)
        for run_id, part in asked.items():
            last = sealed.get(part) if part.is_sealed else _last_open(part, name)
            if last is not None:
                found[run_id] = last
        waiting = {run_id: waiting[run_id] for run_id in asked if run_id not in found}
    return found


def _newest_first(log: Log, places: Sequence[tuple[str, int, int, int]], name: str) -> Iterator[_Part]:
    """Yield the parts that may have the metric."""
    for source_run, segment, lo, hi in places:
        for path, names in log.newest_parts(source_run, segment):
            if names is not None and name not in names:
                continue
            if path.endswith(SEALED_SUFFIX):
                sealed = path
            elif size_of(path):
                yield _Part(path, lo, hi)
                continue
            else:  # sealed since the log was read
                sealed = path.removesuffix(OPEN_SUFFIX) + SEALED_SUFFIX
            if not check_sealed(sealed).fault:
                yield _Part(sealed, lo, hi)


def _last_sealed(con: duckdb.DuckDBPyConnection, parts: Sequence[_Part], name: str) -> dict[_Part, LastValue]:
    if not parts:
        return {}
    alike: dict[str, list[_Part]] = defaultdict(list)
    for part in parts:
        alike[part.path].append(part)  # of a parent that several runs came from
    found: dict[_Part, LastValue] = {}
    while alike:
        some = [same.pop() for same in alike.values()]
        # As text: DuckDB imports pandas to look at a list, which takes longer than the query.
        paths = {part: "'" + part.path.replace("'", "''") + "'" for part in some}
        bounds = (f"({path}, CAST({part.lo} AS BIGINT), CAST({part.hi} AS BIGINT))" for part, path in paths.items())
        query = _LAST_SEALED.format(paths=", ".join(paths.values()), bounds=", ".join(bounds))
        by_path = {part.path: part for part in some}
        for path, last in con.execute(query, [name]).fetchall():
            found[by_path[path]] = LastValue(last["tokens"], last["step"], last["value"])
        alike = {path: same for path, same in alike.items() if same}
    return found


def _last_open(part: _Part, name: str) -> LastValue | None:
    offsets = [0]
    if (size := size_of(part.path)) > 2 * _TAIL_BYTES:
        offsets.insert(0, size - _TAIL_BYTES)
    for offset in offsets:
        try:
            rows, _ = decode_parts([read_raw_part(part.path, offset=offset)])
        except (FormatError, OSError):  # gone, or of a newer version: `damages` says so
            return None
        tokens = rows["tokens"]
        bounds = [to_column([bound], pa.int64())[0] for bound in (part.lo, part.hi)]
        inside = pc.and_(pc.greater(tokens, bounds[0]), pc.less_equal(tokens, bounds[1]))
        kept = rows.filter(pc.and_(pc.equal(rows["name"], to_column([name], pa.string())[0]), inside))
        if len(kept):
            last = kept.slice(len(kept) - 1)  # a writer refuses tokens that go backwards: the last row is the furthest
            return LastValue(*(last[column][0].as_py() for column in LastValue._fields))
    return None
