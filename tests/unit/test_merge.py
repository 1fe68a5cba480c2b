"""The points of a part come out sorted, whatever their number and however uneven their names, in little memory."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from llmtrack.writer.errors import CorruptSegmentError
from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.log.merge import ROW_GROUP_ROWS, SortedPoints
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter
from tests.strategies import write_part


def points_of(names: list[str], *, points_a_row: int) -> pa.Table:
    """Return points in the order in which they were logged."""
    rows = [index // points_a_row for index in range(len(names))]
    columns = {
        "seq": [row + 1 for row in rows],
        "time": [row * 7 for row in rows],
        "step": [row // 3 for row in rows],
        "tokens": [row * 100 for row in rows],
        "name": names,
        "value": [float(index) for index in range(len(names))],
    }
    return pa.table(columns, schema=SCHEMAS["metrics"])


def in_pieces(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    """Yield a table a few rows at a time."""
    for first in range(0, len(table), rows):
        yield table.slice(first, rows)


def uneven_names(points: int) -> list[str]:
    """Return names of which one is longer than a row group, and many are rare."""
    randoms = random.Random(3)
    names = ["loss/ä"] * 6 + ["a", "z", "rare", "rare"]
    picked = (randoms.choice(names) for _ in range(points))
    return [f"rare/{randoms.randrange(2000)}" if name == "rare" else name for name in picked]


@pytest.mark.parametrize("points_a_row", [1, 7])
def test_points_are_sorted_by_name_and_stay_in_order_within_one(points_a_row: int) -> None:
    """All columns go along, a row group at a time; what does not divide evenly comes last."""
    table = points_of(uneven_names(400_000), points_a_row=points_a_row)
    found = SortedPoints(in_pieces(table, 9_999))
    groups = list(found.groups())
    assert [len(group) for group in groups] == [ROW_GROUP_ROWS] * 3 + [400_000 - 3 * ROW_GROUP_ROWS]
    expected = table.append_column("at", pa.array(range(len(table)))).sort_by(
        [("name", "ascending"), ("at", "ascending")]
    )
    assert pa.concat_tables(groups).combine_chunks().equals(expected.drop_columns(["at"]).combine_chunks())
    assert found.points == 400_000
    for column, extent in found.extent.items():  # of a table in which all of them rise
        assert extent == tuple(table[column].cast(pa.int64()).take([0, len(table) - 1]).to_pylist())
    assert list(found.extent) == ["seq", "time", "step", "tokens"]
    assert found.names == sorted(set(table["name"].to_pylist()))
    assert pa.concat_tables(found.groups()).equals(pa.concat_tables(groups))


def test_no_point_at_all_is_fine() -> None:
    """A part may have been opened and never written to."""
    found = SortedPoints(iter([SCHEMAS["metrics"].empty_table()]))
    assert (list(found.groups()), found.points, set(found.extent.values())) == ([], 0, {None})


def test_what_is_null_stays_null() -> None:
    """Where another program wrote the part: also beside a zero, which lies in the same bytes."""
    table = points_of(["a", "b"] * 4, points_a_row=2)
    tokens = pa.array([0, 0, None, None, None, 5, 5, None], pa.int64())
    table = table.set_column(table.column_names.index("tokens"), "tokens", tokens)
    (group,) = SortedPoints([table]).groups()
    assert group["tokens"].to_pylist() == [0, None, None, 5, 0, None, 5, None]


def test_points_that_are_alike_but_for_one_column_keep_it() -> None:
    """A row is one only if all of its place is the same, and not only `seq`."""
    table = points_of(["a"] * 6, points_a_row=6)
    for column in ("time", "step", "tokens"):
        kind = table.schema.field(column).type
        changed = table.set_column(table.column_names.index(column), column, pa.array([1, 1, 2, 2, 1, 1], kind))
        (group,) = SortedPoints([changed]).groups()
        assert group.equals(changed)


def test_a_part_with_a_point_without_a_name_stays_open(tmp_path: Path) -> None:
    """No writer of ours makes one; it cannot be sorted, and is kept."""
    batch = points_of(["a", "b"], points_a_row=2).set_column(4, "name", pa.array(["a", None], pa.string()))
    writer = PartWriter(tmp_path / "metrics-00001.arrows", "metrics")
    writer.append(batch.combine_chunks().to_batches()[0], 1, 1)
    writer.close()
    with pytest.raises(CorruptSegmentError, match="a point has no name"):
        seal_part(writer.path)
    assert writer.path.exists()


def test_a_sealed_part_is_the_same_whatever_the_batches_were(tmp_path: Path) -> None:
    """Byte for byte: its digest and checksum can be compared."""
    sealed = []
    for number, batches in enumerate(([range(1, 601)], [range(1, 7), range(7, 8), range(8, 601)])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_part(folder / "metrics-00001.arrows", batches, metrics=30)
        sealed.append(seal_part(folder / "metrics-00001.arrows").read_bytes())
    assert sealed[0] == sealed[1]


_SEAL_AND_SAY_THE_PEAK = """
import sys
from pathlib import Path
import pyarrow as pa
from llmtrack.writer.log.seal import seal_part
from tests.strategies import write_part
path, rows = Path(sys.argv[1]), int(sys.argv[2])
write_part(path, [range(first, first + 2000) for first in range(1, rows, 2000)], metrics=20)
before = pa.total_allocated_bytes()
seal_part(path)
print(pa.default_memory_pool().max_memory() - before)
"""


def test_sealing_never_holds_all_points_as_columns(tmp_path: Path) -> None:
    """A point more takes 18 bytes more at the peak: its columns alone take 60, and a sort of them three times that."""
    peaks = []
    for rows in (30_000, 60_000):
        command = [sys.executable, "-c", _SEAL_AND_SAY_THE_PEAK, str(tmp_path / "metrics-00001.arrows"), str(rows)]
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
        )
        peaks.append(int(said.stdout))
        (tmp_path / "metrics-00001.parquet").unlink()
    assert (peaks[1] - peaks[0]) / (30_000 * 20) < 24
