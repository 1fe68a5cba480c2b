"""A sealed part has the rows of its open part, or the open part stays."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmtrack.writer.errors import CorruptSegmentError
from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.log.seal import first_seq_of, seal_part, seal_segment, verify_sealed
from llmtrack.writer.log.stream import encode_head
from tests.faults import small_disk
from tests.reading import read_file, read_segment
from tests.strategies import make_rows, write_part


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """Return the path of a part to be written."""
    return tmp_path / "metrics-00001.arrows"


def names_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def flip_byte(path: Path, position: int) -> None:
    """Invert the bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def test_a_sealed_part_has_the_rows_of_its_open_part_sorted_by_name(part: Path) -> None:
    """Nothing is lost or changed, and one metric lies together."""
    write_part(part, [range(1, 100), range(100, 300)], metrics=7)
    before = read_file(part)
    sealed = seal_part(part)
    assert names_of(part.parent) == ["metrics-00001.parquet"]
    after = read_file(sealed)
    assert after == sorted(before, key=lambda record: (record["name"], record["seq"]))
    assert pq.read_schema(sealed).remove_metadata().equals(SCHEMAS["metrics"])


def test_a_sealed_part_says_what_is_in_it(part: Path) -> None:
    """A reader can skip it without looking inside."""
    write_part(part, [range(5, 9)])
    metadata = pq.read_metadata(seal_part(part)).metadata
    said = {key.decode(): value.decode() for key, value in metadata.items() if key.startswith(b"llmtrack.")}
    assert len(said.pop("llmtrack.source_digest")) == 32
    assert len(said.pop("llmtrack.file_crc32")) == 8
    assert said == {
        "llmtrack.format": "1",
        "llmtrack.seq_first": "5",
        "llmtrack.seq_last": "8",
        "llmtrack.tokens_min": "500",
        "llmtrack.tokens_max": "800",
        "llmtrack.step_max": "8",
        "llmtrack.time_max": "8000",
        "llmtrack.rows": "8",
        "llmtrack.names": '["m/1","m/2"]',
    }


def test_a_sealed_part_is_encoded_for_reading_one_metric(part: Path) -> None:
    """Differences of integers, split bytes of values, a dictionary of names, checksums and an index of pages."""
    write_part(part, [range(1, 2000)])
    group = pq.read_metadata(seal_part(part)).row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    for name in ("seq", "time", "step", "tokens"):
        assert "DELTA_BINARY_PACKED" in columns[name].encodings
    assert "BYTE_STREAM_SPLIT" in columns["value"].encodings
    assert columns["name"].has_dictionary_page
    assert all(column.compression == "ZSTD" and column.has_offset_index for column in columns.values())


@pytest.mark.parametrize("what", ["no byte", "its head", "half of its head", "half of its first batch"])
def test_a_part_without_a_row_is_sealed_without_a_row(part: Path, what: str) -> None:
    """A kill in the first moment of a part keeps nobody from sealing it."""
    (first,) = write_part(part, [range(1, 2)], ended=False)
    head_bytes = len(encode_head("metrics"))
    size = {"no byte": 0, "its head": head_bytes, "half of its head": 100, "half of its first batch": first - 50}[what]
    os.truncate(part, size)
    sealed = seal_part(part)
    assert read_file(sealed) == []
    assert first_seq_of(sealed) is None
    verify_sealed(sealed)


def test_a_torn_tail_is_left_out(part: Path) -> None:
    """What was cut off by a kill is no damage."""
    first, second = write_part(part, [range(1, 10), range(10, 20)], ended=False)
    os.truncate(part, (first + second) // 2)
    assert {record["seq"] for record in read_file(seal_part(part))} == set(range(1, 10))


def test_a_damaged_part_stays_as_it_is(part: Path) -> None:
    """Readers skip what is damaged and say so; a sealed part could not."""
    first, second, _ = write_part(part, [range(1, 10), range(10, 20), range(20, 30)])
    flip_byte(part, (first + second) // 2)
    with pytest.raises(CorruptSegmentError, match=f"bytes {first} to {second}") as caught:
        seal_part(part)
    assert caught.value.offset == first
    assert names_of(part.parent) == ["metrics-00001.arrows"]


def test_a_disk_without_room_for_the_sealed_part_leaves_the_open_part(tmp_path: Path) -> None:
    """Nothing appears, nothing half written is left, and the rows are where they were."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        part = disk / "metrics-00001.arrows"
        write_part(part, [range(1, 2000)])
        before = read_file(part)
        with pytest.raises(OSError, match="No space left"):
            (disk / "hog").write_bytes(bytes(1 << 20))
        with pytest.raises(OSError, match="No space left"):
            seal_part(part)
        assert names_of(disk) == ["hog", "metrics-00001.arrows"]
        assert read_file(part) == before


def test_any_byte_that_was_changed_in_a_sealed_part_is_found(part: Path) -> None:
    """In pages, statistics, the footer or the checksum itself: Parquet has checksums of pages alone."""
    write_part(part, [range(1, 20)])
    sealed = seal_part(part)
    whole = sealed.read_bytes()
    for position in {*range(0, len(whole), 29), *range(len(whole) - 20, len(whole)), *range(4)}:
        flip_byte(sealed, position)
        with pytest.raises(CorruptSegmentError):
            verify_sealed(sealed)
        sealed.write_bytes(whole)
    verify_sealed(sealed)


def test_parts_that_were_given_up_are_sealed_with_each_row_once(tmp_path: Path) -> None:
    """Rows that were written again in a later part count there alone, so that plain SQL sees each once."""
    write_part(tmp_path / "metrics-00001.arrows", [range(1, 10), range(10, 20)], ended=False)
    write_part(tmp_path / "metrics-00002.arrows", [range(10, 20), range(20, 30)], ended=False)
    write_part(tmp_path / "metrics-00003.arrows", [])
    write_part(tmp_path / "metrics-00004.arrows", [range(10, 20), range(20, 40)])
    assert len(seal_segment(tmp_path)) == 4
    found = [record["seq"] for path in tmp_path.glob("*.parquet") for record in read_file(path)]
    assert sorted(found) == sorted([*range(1, 40)] * 2)  # two metrics a row


def test_a_damaged_part_does_not_let_rows_before_it_appear_twice(tmp_path: Path) -> None:
    """The part before it is sealed without the rows that are intact in the damaged one, and with those that are not."""
    write_part(tmp_path / "metrics-00001.arrows", [range(1, 10), range(10, 20), range(20, 30)], ended=False)
    offsets = write_part(tmp_path / "metrics-00002.arrows", [range(10, 20), range(20, 30), range(30, 40)])
    flip_byte(tmp_path / "metrics-00002.arrows", offsets[0] - 10)
    with pytest.raises(CorruptSegmentError, match="metrics-00002"):
        seal_segment(tmp_path)
    assert names_of(tmp_path) == ["metrics-00001.parquet", "metrics-00002.arrows"]
    assert {record["seq"] for record in read_file(tmp_path / "metrics-00001.parquet")} == set(range(1, 20))


def test_a_copy_of_a_sealed_part_takes_no_row_from_the_parts_before_it(tmp_path: Path) -> None:
    """What looks like a later part with lower rows is none, and an open part under its number is kept."""
    write_part(tmp_path / "metrics-00001.arrows", [range(1, 10)])
    (sealed,) = seal_segment(tmp_path)
    for part, rows in ((2, range(10, 20)), (3, range(20, 30))):
        write_part(tmp_path / f"metrics-0000{part}.arrows", [rows])
    for part in (3, 9):
        (tmp_path / f"metrics-0000{part}.parquet").write_bytes(sealed.read_bytes())
    with pytest.raises(CorruptSegmentError, match=r"is a copy of metrics-00001\.parquet"):
        seal_segment(tmp_path)
    assert {record["seq"] for record in read_file(tmp_path / "metrics-00002.parquet")} == set(range(10, 20))
    assert {record["seq"] for record in read_file(tmp_path / "metrics-00003.arrows")} == set(range(20, 30))


def test_an_open_part_that_was_sealed_is_only_removed(tmp_path: Path) -> None:
    """A kill between the rename and the removal leaves both."""
    path = tmp_path / "metrics-00001.arrows"
    write_part(path, [range(1, 10)])
    data = path.read_bytes()
    sealed = seal_part(path).read_bytes()
    path.write_bytes(data)
    assert seal_segment(tmp_path) == []
    assert names_of(tmp_path) == ["metrics-00001.parquet"]
    assert (tmp_path / "metrics-00001.parquet").read_bytes() == sealed


@pytest.mark.parametrize("how", ["emptied", "changed"])
def test_an_open_part_is_kept_when_its_sealed_part_is_not_whole(tmp_path: Path, how: str) -> None:
    """It is the only whole copy, and is sealed again with all of its rows."""
    for number in (1, 2):
        write_part(tmp_path / f"metrics-0000{number}.arrows", [range(10 * number, 10 * number + 10)])
    before = read_segment(tmp_path)
    data = (tmp_path / "metrics-00001.arrows").read_bytes()
    sealed = seal_part(tmp_path / "metrics-00001.arrows")
    (tmp_path / "metrics-00001.arrows").write_bytes(data)
    if how == "emptied":
        os.truncate(sealed, 0)
    else:
        flip_byte(sealed, 100)
    assert len(seal_segment(tmp_path)) == 2
    assert names_of(tmp_path) == ["metrics-00001.parquet", "metrics-00002.parquet"]
    assert read_segment(tmp_path).rows() == before.rows()


def test_a_row_of_the_encoder_is_a_row_of_the_sealed_part(part: Path) -> None:
    """Times in ms, tokens and steps are those that were logged."""
    write_part(part, [range(3, 5)])
    sealed = read_file(seal_part(part))
    assert sealed == [
        {"seq": seq, "time": time_ns // 1_000_000, "step": step, "tokens": tokens, "name": name, "value": values[name]}
        for name in ("m/1", "m/2")
        for seq, (time_ns, step, tokens, values) in zip((3, 4), make_rows(range(3, 5)), strict=True)
    ]
