"""Reading a root: only what is new, nothing twice, nothing hidden."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrack.query import connect
from llmtrack.query.read import ahead
from llmtrack.query.read.files import Listing, Sealed
from llmtrack.query.read.log import Log, News, _Segment
from llmtrack.query.read.points import Packed
from llmtrack.writer.errors import UsageError
from llmtrack.writer.format import SCHEMAS, SEALED_SUFFIX, part_name, segment_folder
from llmtrack.writer.log.seal import seal_part
from llmtrack.writer.log.stream import PartWriter, _check, _sign, encode_batch, encode_head
from tests.handmade import DAY, write_heartbeat, write_part, write_segment
from tests.oracle import Point, Segment


class Reader:
    """A log that keeps what it hands out, as DuckDB does."""

    def __init__(self, root: Path, log: Log | None = None) -> None:
        self.log = log or Log(root, check=True)
        self.rows: list[dict[str, Any]] = []
        self.news = News()

    def read(self, runs: Sequence[str] | None = None) -> list[float]:
        """Read what is new, and return the values of all points there are in open parts."""
        new: list[dict[str, Any]] = []
        self.news = self.log.read(runs, take_points=lambda packed: new.extend(unpacked(packed)))
        for run_id, segment, part, seq in self.news.taken_back:
            self.rows = [
                row
                for row in self.rows
                if (row["run_id"], row["segment"], row["part"]) != (run_id, segment, part) or row["seq"] < seq
            ]
        self.rows = [row for row in self.rows if (row["run_id"], row["segment"]) not in self.news.gone] + new
        self.new = [row["value"] for row in new]
        return sorted(row["value"] for row in self.rows)

    def values(self) -> list[float]:
        """Return the values of all points, in open parts and sealed ones."""
        sealed = [value for path in self.log.sealed_parts() for value in pq.read_table(path)["value"].to_pylist()]
        return sorted([*sealed, *(row["value"] for row in self.rows)])


def unpacked(packed: Packed) -> list[dict[str, Any]]:
    """Return points as rows with everything that belongs to them."""
    rows: list[dict[str, Any]] = []
    whole = zip(
        packed.rows.to_pylist(), packed.part_of.to_pylist(), packed.shape_of.to_pylist(), packed.points, strict=True
    )
    for coordinates, part, shape, values in whole:
        one = packed.found[part]
        key = {"run_id": one.run_id, "segment": one.segment, "part": one.part}
        named = zip(packed.shapes[shape], values.as_py(), strict=True)
        rows += [{**key, **coordinates, "name": name, "value": value} for name, value in named]
    return rows


def points(first: int, last: int, **more: Any) -> list[dict[str, Any]]:
    """Return rows whose value, tokens and seq are all the same number."""
    return [{"seq": n, "tokens": n, "name": "loss", "value": float(n), **more} for n in range(first, last + 1)]


def append(folder: Path, rows: list[dict[str, Any]], part: int = 1) -> PartWriter:
    """Write a part of metrics of a batch each, and return its writer, still open."""
    writer = PartWriter(folder / part_name("metrics", part), "metrics")
    extend(writer, rows)
    return writer


def extend(writer: PartWriter, rows: list[dict[str, Any]]) -> None:
    """Append rows, each in a batch of its own."""
    for row in rows:
        full = {"time": DAY, "step": row["seq"], **row}
        writer.append(pa.RecordBatch.from_pylist([full], schema=SCHEMAS["metrics"]), row["seq"], row["seq"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a segment that has started."""
    return write_segment(tmp_path, Segment("a", 1))


# What counts as a root


def test_a_root_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    """The message has the folder, and the option and variable that name another."""
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere\n  try: .*--root.*LLMTRACK_DIR"):
        Log(tmp_path / "nowhere")


def test_the_folder_of_a_run_is_no_root(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names a run's own folder is told to name the one above, also from within it."""
    monkeypatch.chdir(folder.parent)
    for root in (folder.parent, Path()):
        with pytest.raises(UsageError, match=f"try: give {tmp_path}"):
            Log(root)


def test_what_is_not_ours_is_ignored(tmp_path: Path, folder: Path) -> None:
    """Files and folders of others in a root, a run and a segment are neither read nor damage."""
    write_part(folder, "metrics", points(1, 2))
    for stray in ("notes.txt", "run_id=", "run_id=a b", "other/segment=00001", "run_id=a/segment=x"):
        (tmp_path / stray).mkdir(parents=True)
    (tmp_path / "run_id=file").write_text("a file")
    for name in ("core.123", "metrics-00001.arrows.tmp", ".metrics-00002.parquet.x1", "strange-00001.arrows"):
        (folder / name).write_bytes(b"no part")
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 2.0]
    assert reader.log.segments() == [("a", 1)]
    assert reader.log.damages() == []


@pytest.mark.usefixtures("folder")
def test_a_segment_without_a_start_stays_visible(tmp_path: Path) -> None:
    """Its folder was claimed and nothing written yet, or what was written is lost: it is there all the same."""
    segment_folder(tmp_path, "a", 2).mkdir()
    write_part(segment_folder(tmp_path, "a", 3), "metrics", points(1, 1))
    reader = Reader(tmp_path)
    assert reader.read() == [1.0]
    assert reader.log.segments() == [("a", 1), ("a", 2), ("a", 3)]


# Only what is new


def test_the_second_read_takes_in_what_was_appended_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    """Points come from the byte where the last read ended; small tables only where they grew."""
    writer = append(folder, points(1, 3))
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 2.0, 3.0]
    reader.read()
    assert not reader.new
    assert not reader.news.rows
    extend(writer, points(4, 5))
    write_part(folder, "checkpoints", [{"seq": 6, "tokens": 5, "ckpt_id": "c"}])
    reader.read()
    assert reader.new == [4.0, 5.0]
    assert list(reader.news.rows) == ["checkpoints"]
    writer.close()


def test_a_torn_tail_is_the_end_so_far(tmp_path: Path, folder: Path) -> None:
    """At every byte of the last batch: what is before is read, nothing is damaged, the rest comes when it is whole."""
    writer = append(folder, points(1, 2))
    writer.close(ended=False)
    whole = writer.path.read_bytes()
    append(folder, points(1, 1), part=9).close(ended=False)
    first_bytes = (folder / part_name("metrics", 9)).stat().st_size
    (folder / part_name("metrics", 9)).unlink()
    for cut in range(first_bytes, len(whole)):
        writer.path.write_bytes(whole[:cut])
        reader = Reader(tmp_path)
        assert reader.read() == [1.0]
        assert reader.log.damages() == []
        writer.path.write_bytes(whole)
        assert reader.read() == [1.0, 2.0]


def test_a_run_that_was_deleted_is_gone(tmp_path: Path, folder: Path) -> None:
    """A later read says which segments went."""
    write_part(folder, "metrics", points(1, 2))
    write_segment(tmp_path, Segment("b", 1, points=[Point(1, "loss", 7.0)]))
    reader = Reader(tmp_path)
    reader.read()
    shutil.rmtree(folder.parent)
    assert reader.read() == [7.0]
    assert reader.log.segments() == [("b", 1)]
    assert reader.news.gone == [("a", 1)]


def test_only_what_is_said_to_have_changed_is_looked_into(tmp_path: Path) -> None:
    """A watcher knows which run it was; a new child of it is found with its parent."""
    for run_id in ("a", "b"):
        write_segment(tmp_path, Segment(run_id, 1, points=[Point(1, "loss", 1.0)]))
    log = Log(tmp_path)
    log.read()
    for run_id in ("a", "b"):
        write_segment(tmp_path, Segment(run_id, 2, 1, (run_id, 1)))
    write_segment(tmp_path, Segment("child", 1, 1, ("a", 1)))
    log.read(changed=["child"])
    assert log.segments() == [("a", 1), ("a", 2), ("b", 1), ("child", 1)]
    log.read()
    assert ("b", 2) in log.segments()


def test_only_the_runs_asked_for_and_their_ancestors_are_read(tmp_path: Path) -> None:
    """A child's curve needs the runs it came from; nobody else's files are opened."""
    write_segment(tmp_path, Segment("parent", 1, points=[Point(1, "loss", 1.0)]))
    write_segment(tmp_path, Segment("child", 1, 1, ("parent", 1), [Point(2, "loss", 2.0)]))
    write_segment(tmp_path, Segment("grandchild", 1, 2, ("child", 1), [Point(3, "loss", 3.0)]))
    write_segment(tmp_path, Segment("other", 1, points=[Point(1, "loss", 9.0)]))
    reader = Reader(tmp_path)
    assert reader.read(["grandchild"]) == [1.0, 2.0, 3.0]
    with pytest.raises(UsageError, match="there is no run nobody"):
        reader.read(["nobody"])


# Nothing twice


def test_rows_that_the_next_part_has_again_count_once(tmp_path: Path, folder: Path) -> None:
    """A handle died half way through a write, and the rows went into the next part: they count there."""
    append(folder, points(1, 5)).close(ended=False)
    append(folder, [row | {"value": row["value"] + 100} for row in points(4, 6)], part=2).close()
    assert Reader(tmp_path).read() == [1.0, 2.0, 3.0, 104.0, 105.0, 106.0]


def test_a_part_that_the_next_one_has_whole_counts_for_nothing(tmp_path: Path, folder: Path) -> None:
    """Not one row of it is left."""
    append(folder, points(1, 3)).close(ended=False)
    append(folder, points(1, 4), part=2).close()
    assert Reader(tmp_path).read() == [1.0, 2.0, 3.0, 4.0]
    (folder / part_name("metrics", 2)).rename(folder / part_name("metrics", 12))
    append(folder, [], part=2).close()
    assert Reader(tmp_path).read() == [1.0, 2.0, 3.0, 4.0]


def test_rows_read_before_the_next_part_had_them_again_are_taken_back(tmp_path: Path, folder: Path) -> None:
    """The same when the second part appears between two reads."""
    append(folder, points(1, 5)).close(ended=False)
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 2.0, 3.0, 4.0, 5.0]
    append(folder, [row | {"value": row["value"] + 100} for row in points(4, 6)], part=2).close()
    assert reader.read() == [1.0, 2.0, 3.0, 104.0, 105.0, 106.0]


def test_rows_that_a_sealed_part_has_again_count_once(tmp_path: Path, folder: Path) -> None:
    """The first part is damaged and stays open for ever, the second is sealed."""
    append(folder, points(1, 5)).close(ended=False)
    append(folder, points(4, 6), part=2).close()
    seal_part(folder / part_name("metrics", 2))
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 2.0, 3.0]
    assert reader.values() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_small_tables_do_not_count_doubles_either(tmp_path: Path, folder: Path) -> None:
    """A checkpoint that two parts have is one checkpoint."""
    write_part(folder, "checkpoints", [{"seq": 5, "ckpt_id": "a"}, {"seq": 6, "ckpt_id": "b"}])
    write_part(folder, "checkpoints", [{"seq": 6, "ckpt_id": "b"}, {"seq": 7, "ckpt_id": "c"}], part=2)
    reader = Reader(tmp_path)
    reader.read()
    (rows,) = reader.news.rows["checkpoints"]
    assert sorted(rows["ckpt_id"].to_pylist()) == ["a", "b", "c"]


def test_a_sealed_part_hides_the_open_one(tmp_path: Path, folder: Path) -> None:
    """A crash between the two leaves both: the sealed one is complete."""
    writer = append(folder, points(1, 3))
    writer.close()
    copy = writer.path.read_bytes()
    seal_part(writer.path)
    writer.path.write_bytes(copy)
    reader = Reader(tmp_path)
    assert reader.read() == []
    assert reader.values() == [1.0, 2.0, 3.0]


def test_a_part_that_is_sealed_between_two_reads_is_not_lost_and_not_doubled(tmp_path: Path, folder: Path) -> None:
    """What was read from the open part is taken back, and the sealed one stands for it."""
    writer = append(folder, points(1, 3))
    reader = Reader(tmp_path)
    reader.read()
    writer.close()
    seal_part(writer.path)
    append(folder, points(4, 4), part=2).close()
    assert reader.read() == [4.0]
    assert reader.values() == [1.0, 2.0, 3.0, 4.0]


class _SealsMeanwhile(Log):
    """A log under whose hands a part is sealed, right after it was listed."""

    to_seal: Path | None = None

    def _survey(self, segment: _Segment) -> tuple[Listing, dict[int, Sealed]]:
        survey = super()._survey(segment)
        if self.to_seal is not None:
            seal_part(self.to_seal)
            self.to_seal = None
        return survey


@pytest.mark.parametrize("ended", [False, True])
def test_a_part_that_is_sealed_between_listing_and_reading_is_listed_again(tmp_path: Path, *, ended: bool) -> None:
    """Whether the segment still runs or has ended, its points are there, once."""
    folder = write_segment(tmp_path, Segment("a", 1, exit="finished" if ended else None))
    append(folder, points(1, 3)).close()
    log = _SealsMeanwhile(tmp_path)
    log.to_seal = folder / part_name("metrics", 1)
    reader = Reader(tmp_path, log)
    assert reader.read() == []
    assert reader.values() == [1.0, 2.0, 3.0]
    assert log.damages() == []


# Nothing hidden


def test_a_damaged_batch_is_reported_and_costs_only_itself(tmp_path: Path, folder: Path) -> None:
    """The path, the bytes and the run are said; every other batch is read, also when it comes later."""
    writer = append(folder, points(1, 3))
    content = bytearray(writer.path.read_bytes())
    third = len(encode_head("metrics")) + 2 * (len(content) - len(encode_head("metrics"))) // 3
    content[third - 40] ^= 0x10
    writer.path.write_bytes(content)
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 3.0]
    ((owner, damage),) = reader.log.damages()
    assert owner == ("a", 1)
    assert damage.path == writer.path
    assert 0 < damage.first_byte < third == damage.end_byte
    writer.close()
    writer = append(folder, points(4, 4), part=2)
    writer.close()
    assert reader.read() == [1.0, 3.0, 4.0]
    assert len(reader.log.damages()) == 1


def test_a_last_batch_that_fails_is_torn_until_nobody_can_be_writing_it(tmp_path: Path, folder: Path) -> None:
    """While it may only not be visible as a whole yet it is no damage; minutes later it is, and heals if it was not."""
    writer = append(folder, points(1, 2))
    intact = writer.path.read_bytes()
    writer.path.write_bytes(intact[:-9] + bytes([intact[-9] ^ 1]) + intact[-8:])
    assert (Reader(tmp_path).read(), Log(tmp_path).damages()) == ([1.0], [])
    os.utime(writer.path, (0, 0))
    reader = Reader(tmp_path)
    assert reader.read() == [1.0]
    ((owner, damage),) = reader.log.damages()
    assert (owner, damage.path, damage.end_byte) == (("a", 1), writer.path, len(intact))
    writer.path.write_bytes(intact)
    extend(writer, points(3, 3))
    assert reader.read() == [1.0, 2.0, 3.0]
    assert reader.log.damages() == []
    writer.close(ended=False)


def test_a_part_of_a_newer_format_is_reported_and_the_others_are_read(tmp_path: Path, folder: Path) -> None:
    """One run of a newer llmtrack does not take the others away."""
    write_part(folder, "metrics", points(1, 1))
    newer = write_segment(tmp_path, Segment("b", 1))
    schema = SCHEMAS["metrics"].with_metadata({"llmtrack.format": "99"})
    (newer / part_name("metrics", 1)).write_bytes(schema.serialize().to_pybytes())
    reader = Reader(tmp_path)
    assert reader.read() == [1.0]
    ((owner, damage),) = reader.log.damages()
    assert owner == ("b", 1)
    assert "format 99" in damage.reason


def test_columns_that_came_and_went_are_no_damage(tmp_path: Path) -> None:
    """A part of an older llmtrack has a column less, one of a newer has one more: null, and left out."""
    for number, schema in (
        (1, SCHEMAS["checkpoints"].remove(6)),
        (2, SCHEMAS["checkpoints"].append(pa.field("new", pa.string()))),
    ):
        segment = write_segment(tmp_path, Segment("b", number))
        row = {"seq": 5, "time": DAY, "step": 1, "tokens": 9, "ckpt_id": "c", "path": "p", "bytes": 7, "new": "x"}
        batch = pa.RecordBatch.from_pylist([{key: row[key] for key in schema.names}], schema=schema)
        metadata = {"llmtrack.format": "1", "llmtrack.check": _check(0, 0)}
        head = _sign(bytearray(schema.with_metadata(metadata).serialize().to_pybytes()), 0, 0)
        (segment / part_name("checkpoints", 1)).write_bytes(head + encode_batch(batch, 5, 5))
    reader = Reader(tmp_path)
    reader.read()
    rows = [row for table in reader.news.rows["checkpoints"] for row in table.to_pylist()]
    assert [(row["segment"], row["ckpt_id"], row["bytes"]) for row in rows] == [(1, "c", None), (2, "c", 7)]
    assert reader.log.damages() == []


def test_a_part_that_cannot_be_opened_is_reported_until_it_can(tmp_path: Path, folder: Path) -> None:
    """An error of the storage is damage as long as it lasts."""
    path = folder / part_name("metrics", 1)
    path.mkdir()
    reader = Reader(tmp_path)
    reader.read()
    ((_, damage),) = reader.log.damages()
    assert (damage.path, damage.reason) == (path, "Is a directory")
    path.rmdir()
    write_part(folder, "metrics", points(1, 1))
    assert reader.read() == [1.0]
    assert reader.log.damages() == []


def _sealed(folder: Path) -> Path:
    append(folder, points(1, 500)).close()
    return seal_part(folder / part_name("metrics", 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "no Parquet footer"),
        (lambda data: data[:5], "too short"),
        (lambda _: b"", "too short"),
        (lambda data: data[:-8] + struct.pack("<I", 1 << 30) + data[-4:], "no Parquet footer"),
        (lambda data: data[:900] + bytes([data[900] ^ 1]) + data[901:], "fails its checksum"),
        (lambda data: data[:-60] + bytes([data[-60] ^ 1]) + data[-59:], "fails its checksum"),
    ],
)
def test_a_damaged_sealed_part_is_reported_and_not_read(tmp_path: Path, folder: Path, damage: Any, reason: str) -> None:
    """Cut, emptied, or one bit of it changed: no wrong value, and the file is named."""
    sealed = _sealed(folder)
    intact = sealed.read_bytes()
    sealed.write_bytes(damage(intact))
    reader = Reader(tmp_path)
    assert reader.read() == []
    assert reader.values() == []
    ((owner, found),) = reader.log.damages()
    assert owner == ("a", 1)
    assert found.path == sealed
    assert reason in found.reason
    sealed.write_bytes(intact)  # it was a copy under way
    reader.read()
    assert reader.values() == [float(n) for n in range(1, 501)]
    assert reader.log.damages() == []


def test_a_part_whose_footer_is_damaged_is_left_out_unchecked_too(tmp_path: Path, folder: Path) -> None:
    """Nobody compares checksums then, but DuckDB would not open it, and any query would fail."""
    sealed = _sealed(folder)
    content = bytearray(sealed.read_bytes())
    footer_bytes = int.from_bytes(content[-8:-4], "little")
    content[-8 - footer_bytes : 40 - 8 - footer_bytes] = b"\xff" * 40
    sealed.write_bytes(content)
    with connect(tmp_path, check=False) as con:
        assert con.execute("SELECT count(*) FROM metrics").fetchall() == [(0,)]
        assert con.execute("SELECT path FROM damages").fetchall() == [(str(sealed),)]


def test_a_damaged_sealed_part_does_not_hide_an_intact_open_one(tmp_path: Path, folder: Path) -> None:
    """Where both are there, one of them is enough."""
    writer = append(folder, points(1, 3))
    writer.close()
    copy = writer.path.read_bytes()
    sealed = seal_part(writer.path)
    sealed.write_bytes(sealed.read_bytes()[:-1])
    writer.path.write_bytes(copy)
    reader = Reader(tmp_path)
    assert reader.read() == [1.0, 2.0, 3.0]
    assert len(reader.log.damages()) == 1


def test_a_sealed_part_that_was_copied_counts_once_and_hides_nothing(tmp_path: Path, folder: Path) -> None:
    """Under another number it would double its rows, and end the parts before it where it begins."""
    sealed = _sealed(folder)
    append(folder, points(501, 503), part=2).close(ended=False)
    reader = Reader(tmp_path)
    reader.read()
    copies = [Path(shutil.copy(sealed, folder / part_name("metrics", part, ".parquet"))) for part in (2, 9)]
    for late in (reader, Reader(tmp_path)):
        late.read()
        assert sorted(late.values()) == [float(n) for n in range(1, 504)]
        assert [(damage.path, damage.reason) for _, damage in late.log.damages()] == [
            (copy, f"is a copy of {sealed.name}") for copy in copies
        ]


def test_parquet_of_another_program_is_read_without_a_checksum(tmp_path: Path, folder: Path) -> None:
    """Who did not seal it promised nothing of it."""
    rows = [{"time": DAY, "step": 0, **row} for row in points(1, 2)]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS["metrics"]), folder / part_name("metrics", 1, ".parquet"))
    reader = Reader(tmp_path)
    reader.read()
    assert reader.values() == [1.0, 2.0]


def test_what_was_set_aside_stays_aside(tmp_path: Path, folder: Path) -> None:
    """A part that turned out unreadable in a query is not taken in again by the next read."""
    sealed = _sealed(folder)
    reader = Reader(tmp_path)
    reader.read()
    reader.log.set_aside(str(sealed), "cannot be decoded")
    reader.read()
    assert reader.log.sealed_parts() == []
    assert [damage.reason for _, damage in reader.log.damages()] == ["cannot be decoded"]


# How far a segment came


def test_a_heartbeat_that_is_being_rewritten_does_not_take_the_last_one_away(tmp_path: Path, folder: Path) -> None:
    """Torn or empty, it says nothing; what it said before counts."""
    beat = write_heartbeat(folder, DAY, tokens=700, dropped=3)
    log = Log(tmp_path)
    log.read()
    for torn in (b"", beat.read_bytes()[:20], b"null", b'{"time": "yesterday", "step": 1}'):
        beat.write_bytes(torn)
        log.read()
        ((run_id, segment, place),) = log.reached()
        assert (run_id, segment, place.time, place.tokens, place.dropped) == ("a", 1, DAY, 700, 3)


def test_the_last_point_counts_where_it_is_beyond_the_heartbeat(tmp_path: Path, folder: Path) -> None:
    """A killed run came as far as its last point on disk, not as far as it said half a minute before."""
    write_heartbeat(folder, DAY, tokens=2)
    write_part(folder, "metrics", points(1, 9, time=DAY + dt.timedelta(seconds=20)))
    reader = Reader(tmp_path)
    reader.read()
    ((_, _, place),) = reader.log.reached()
    assert (place.tokens, place.time) == (9, DAY + dt.timedelta(seconds=20))


def test_a_dead_segment_that_was_sealed_says_how_far_it_came(tmp_path: Path, folder: Path) -> None:
    """Its heartbeat may be gone; the statistics in the footer are enough, and no point is read."""
    _sealed(folder)
    log = Log(tmp_path)
    log.read()
    ((_, _, place),) = log.reached()
    assert (place.tokens, place.step) == (500, 500)


def test_many_segments_are_read_by_several_threads_and_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their damage and their copies, as one after the other."""
    for number in range(1, 41):
        folder = write_segment(
            tmp_path, Segment("a", number, points=[Point(number, "loss", float(number))]), sealed=True
        )
        part = folder / part_name("metrics", 1, SEALED_SUFFIX)
        if number % 7 == 0:
            part.write_bytes(part.read_bytes()[:-9] + b"!" * 9)
        if number % 9 == 0:
            shutil.copy(part, folder / part_name("metrics", 2, SEALED_SUFFIX))
    logs = []
    for ahead_from in (16, 1000):
        monkeypatch.setattr(ahead, "_LEAST", ahead_from)
        logs.append(Log(tmp_path, check=True))
        logs[-1].read()
    at_once, one_by_one = logs
    assert at_once.sealed_parts() == one_by_one.sealed_parts()
    assert len(at_once.sealed_parts()) == 35
    assert at_once.damages() == one_by_one.damages()
    assert len(at_once.damages()) == 9
    assert at_once.first_tokens() == one_by_one.first_tokens()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmtrack-ahead")]
