"""Points of open parts, packed: the same points, in a tenth of the memory."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from llmtrack.query import connect, refresh
from llmtrack.query.read import points
from llmtrack.query.read.log import Log
from llmtrack.writer.format import SCHEMAS, part_name
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter, read_part
from tests.handmade import DAY, write_part, write_segment
from tests.oracle import Segment

_COLUMNS = "run_id, segment, seq, time, step, tokens, name, value"


def of_duckdb(con: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    """Return all points that a connection has, in order."""
    return con.execute(f"SELECT {_COLUMNS} FROM log.points ORDER BY ALL").fetchall()


def of_parts(*parts: Path) -> list[tuple[Any, ...]]:
    """Return all points of open parts, in order, read one part at a time."""
    rows: list[tuple[Any, ...]] = []
    for part in parts:
        key = (part.parts[-3].removeprefix("run_id="), int(part.parts[-2].removeprefix("segment=")))
        rows += [(*key, *row.values()) for row in read_part(part).table.select(_COLUMNS.split(", ")[2:]).to_pylist()]
    return sorted(rows, key=lambda row: (*row[:6], row[6] is None, row[6] or "", row[7] is None, row[7]))


def rows_of(seqs: range, names: Sequence[str | None], **more: Any) -> list[dict[str, Any]]:
    """Return points, one of each name for each seq."""
    return [{"seq": n, "tokens": n, "name": name, "value": n / 8, **more} for n in seqs for name in names]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a part of some kilobytes packed in many pieces, by several threads, and handed on in between."""
    monkeypatch.setattr(points, "_PIECE_BYTES", 2000)
    monkeypatch.setattr(points, "_INSERT_POINTS", 300)
    monkeypatch.setattr(points, "_THREADS", 3)


@pytest.mark.usefixtures("small_pieces")
def test_a_part_that_is_packed_in_pieces_has_all_of_its_points(tmp_path: Path) -> None:
    """Rows that go over the border of two batches or pieces, names that come later, and one that is null."""
    folder = write_segment(tmp_path, Segment("a", 1))
    rows = [*rows_of(range(1, 200), ["x", "y", "z"]), *rows_of(range(200, 300), ["é", "x"])]
    large = write_part(folder, "metrics", [*rows, *rows_of(range(300, 301), ["x", None])], batch=7)
    other = write_part(write_segment(tmp_path, Segment("b", 1)), "metrics", rows_of(range(1, 50), ["y", "w"]), batch=1)
    with connect(tmp_path) as con:
        assert of_duckdb(con) == of_parts(large, other)


def test_rows_of_two_parts_at_the_same_place_stay_apart(tmp_path: Path) -> None:
    """Even where a segment ends with the very row that the next one begins with."""
    parts = [
        write_part(write_segment(tmp_path, Segment(run, 1)), "metrics", rows_of(range(5, 6), ["x", "y"], time=DAY))
        for run in "ab"
    ]
    with connect(tmp_path) as con:
        assert of_duckdb(con) == of_parts(*parts)
        assert con.execute("SELECT count(*) FROM log.open_rows").fetchall() == [(2,)]


def test_one_row_is_kept_once_whatever_it_has_in_it(tmp_path: Path) -> None:
    """A place for each row; a row whose time, step or tokens differ from its neighbour's is another."""
    folder = write_segment(tmp_path, Segment("a", 1))
    rows = rows_of(range(1, 4), list("abcdef"), time=DAY)
    odd = [{**rows[-1], "time": DAY + dt.timedelta(milliseconds=1)}, {**rows[-1], "step": 9}, {**rows[-1], "tokens": 9}]
    part = write_part(folder, "metrics", [*rows, *odd])
    with connect(tmp_path) as con:
        assert of_duckdb(con) == of_parts(part)
        assert con.execute("SELECT count(*) FROM log.open_rows").fetchall() == [(6,)]


def test_rows_that_look_alike_and_are_not_keep_their_own_names(tmp_path: Path) -> None:
    """The same letters in other names, the same names in another order or twice, a name or a value that is null."""
    shapes: list[list[str | None]] = [
        ["ab", "c"],
        ["a", "bc"],
        ["c", "ab"],
        ["abc"],
        ["a", "a"],
        [None, "c"],
        ["", "abc"],
    ]
    rows: list[dict[str, Any]] = [
        {"seq": seq, "tokens": seq, "time": DAY, "name": name, "value": value}
        for seq, names in enumerate([*shapes, *shapes], start=1)
        for name, value in zip(names, (seq / 8, None), strict=False)
    ]
    part = write_part(write_segment(tmp_path, Segment("a", 1)), "metrics", rows)
    with connect(tmp_path) as con:
        assert of_duckdb(con) == of_parts(part)
        assert con.execute("SELECT count(DISTINCT id), count(*) FROM log.open_shapes").fetchall() == [(7, 13)]


def test_nothing_stays_of_points_that_were_sealed_or_deleted(tmp_path: Path) -> None:
    """Neither in the answer nor in memory; what comes afterwards is there."""
    sealed, kept = (write_segment(tmp_path, Segment(run, 1)) for run in "ab")
    part = write_part(sealed, "metrics", rows_of(range(1, 20), ["x", "y"]))
    other = write_part(kept, "metrics", rows_of(range(1, 5), ["x"]))
    with connect(tmp_path) as con:
        before = of_duckdb(con)
        seal_part(part)
        refresh(con)
        assert of_duckdb(con) == before
        assert con.execute("SELECT count(*) FROM log.open_rows").fetchall() == [(4,)]
        later = write_part(kept, "metrics", rows_of(range(5, 9), ["x", "new"]), part=2)
        refresh(con)
        assert [row for row in of_duckdb(con) if row[0] == "b"] == of_parts(other, later)


def test_a_large_part_takes_little_memory(tmp_path: Path) -> None:
    """Not all of it is decoded at once, and DuckDB keeps a fraction of what the columns take."""
    folder = write_segment(tmp_path, Segment("a", 1))
    writer = PartWriter(folder / part_name("metrics", 1), "metrics")
    names, rows, batches = [f"layer/{index:04}/norm" for index in range(100)], 100, 100
    for batch in range(batches):
        seqs = [batch * rows + row + 1 for row in range(rows) for _ in names]
        columns = [seqs, [DAY] * len(seqs), seqs, seqs, names * rows, [seq / 7 for seq in seqs]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMAS["metrics"], strict=True)]
        writer.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS["metrics"]), seqs[0], seqs[-1])
    writer.close(ended=False)
    count = rows * batches * len(names)
    as_columns = count * (5 * 8 + 4 + len(names[0]))
    before, during = pa.total_allocated_bytes(), [0]
    Log(tmp_path).read(take_points=lambda _: during.append(pa.total_allocated_bytes()))
    assert max(during) - before < as_columns
    with connect(tmp_path) as con:
        assert con.execute("SELECT count(*), count(DISTINCT name) FROM metrics").fetchall() == [(count, len(names))]
        (held,) = con.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchall()[0]
        assert held < as_columns / 4
