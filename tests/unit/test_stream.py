"""The open part: whatever happens to its bytes, every intact batch is read, and nothing else."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from llmtrack.writer.errors import CorruptSegmentError, FormatError, VersionError
from llmtrack.writer.format import FORMAT_VERSION, SCHEMAS, part_name
from llmtrack.writer.log.stream import Damage, PartWriter, encode_batch, encode_head, read_part
from tests.reading import read_batches
from tests.strategies import write_part

END_BYTES = 8  # of the message that ends a stream
BATCHES = [range(1, 3), range(3, 8), range(8, 9), range(9, 12)]
HEAD_BYTES = len(encode_head("metrics"))


@dataclass(frozen=True)
class Whole:
    """A part of four batches as it was written."""

    data: bytes
    offsets: list[int]

    @property
    def starts(self) -> list[int]:
        """Where each batch begins."""
        return [HEAD_BYTES, *self.offsets[:-1]]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """Return the path of a part to be written."""
    return tmp_path / "metrics-00001.arrows"


def written(path: Path, *, ended: bool) -> Whole:
    """Write the part."""
    offsets = write_part(path, BATCHES, ended=ended)
    return Whole(path.read_bytes(), offsets)


@dataclass(frozen=True)
class Seen:
    """What a read saw: which batches, which damaged ranges, how many torn bytes."""

    batches: list[int]
    damages: list[tuple[int, int]]
    torn_bytes: int


def seen(path: Path, *, live: bool, offset: int = 0) -> Seen:
    """Read a part; a batch is there with all of its rows or not at all."""
    content = read_part(path, offset=offset, live=live)
    seqs = content.table["seq"].to_pylist()
    batches = [index for index, batch in enumerate(BATCHES) if batch.start in seqs]
    assert seqs == [seq for index in batches for seq in BATCHES[index] for _ in range(2)]  # two metrics a row
    values = content.table["value"].to_pylist()
    assert values == [seq + index / 8 for batch in batches for seq in BATCHES[batch] for index in range(2)]
    damages = [(damage.first_byte, damage.end_byte) for damage in content.damages]
    assert content.next_offset + content.torn_bytes == max(path.stat().st_size, offset)
    return Seen(batches, damages, content.torn_bytes)


ALL = [0, 1, 2, 3]


@dataclass(frozen=True)
class Case:
    """One thing that can happen to a part, and what either way of reading makes of it."""

    what: str
    ended: bool
    change: Callable[[Whole], bytes]
    live: Callable[[Whole], Seen]
    strict: Callable[[Whole], Seen] | None = None  # None: as live


def zeros(whole: Whole, first: int, end: int) -> bytes:
    """Return the part with a hole."""
    return whole.data[:first] + bytes(end - first) + whole.data[end:]


def inverted(whole: Whole, first: int, end: int) -> bytes:
    """Return the part with some bytes changed."""
    return whole.data[:first] + bytes(byte ^ 0xFF for byte in whole.data[first:end]) + whole.data[end:]


CASES = [
    Case("nothing", True, lambda whole: whole.data, lambda _: Seen(ALL, [], 0)),
    Case("nothing, and it is open", False, lambda whole: whole.data, lambda _: Seen(ALL, [], 0)),
    Case("it is empty", False, lambda _: b"", lambda _: Seen([], [], 0)),
    Case("only its head is there", False, lambda whole: whole.data[:HEAD_BYTES], lambda _: Seen([], [], 0)),
    Case(
        "its end is cut off in a batch",
        False,
        lambda whole: whole.data[: whole.offsets[2] + 100],
        lambda _: Seen([0, 1, 2], [], 100),
    ),
    Case(
        "its end is cut off in the message that ends it",
        True,
        lambda whole: whole.data[:-3],
        lambda _: Seen(ALL, [], END_BYTES - 3),
    ),
    Case(
        "its last batch is changed, and it is open",
        False,
        lambda whole: inverted(whole, whole.offsets[2] + 300, whole.offsets[2] + 310),
        lambda whole: Seen([0, 1, 2], [], len(whole.data) - whole.offsets[2]),
        lambda whole: Seen([0, 1, 2], [(whole.offsets[2], len(whole.data))], 0),
    ),
    Case(
        "its last batch is changed, and it was ended",
        True,
        lambda whole: inverted(whole, whole.offsets[2] + 300, whole.offsets[2] + 310),
        lambda whole: Seen([0, 1, 2], [(whole.offsets[2], whole.offsets[3])], 0),
    ),
    Case(
        "it is longer than what was written: a hole at its end",
        False,
        lambda whole: whole.data + bytes(5000),
        lambda _: Seen(ALL, [], 5000),
        lambda whole: Seen(ALL, [(whole.offsets[3], whole.offsets[3] + 5000)], 0),
    ),
    Case(
        "a hole where its last batch was",
        False,
        lambda whole: zeros(whole, whole.offsets[2], whole.offsets[3]),
        lambda whole: Seen([0, 1, 2], [], whole.offsets[3] - whole.offsets[2]),
        lambda whole: Seen([0, 1, 2], [(whole.offsets[2], whole.offsets[3])], 0),
    ),
    Case(
        "a hole where two batches were",
        False,
        lambda whole: zeros(whole, whole.offsets[0], whole.offsets[2]),
        lambda whole: Seen([0, 3], [(whole.offsets[0], whole.offsets[2])], 0),
    ),
    Case(
        "two batches far from each other are changed",
        True,
        lambda whole: inverted(
            Whole(inverted(whole, whole.offsets[0] + 99, whole.offsets[0] + 100), whole.offsets),
            whole.offsets[2] + 500,
            whole.offsets[2] + 510,
        ),
        lambda whole: Seen([0, 2], [(whole.offsets[0], whole.offsets[1]), (whole.offsets[2], whole.offsets[3])], 0),
    ),
    Case(
        "a hole where its head was",
        False,
        lambda whole: zeros(whole, 0, HEAD_BYTES),
        lambda _: Seen(ALL, [(0, HEAD_BYTES)], 0),
    ),
    Case(
        "its first half is gone",
        True,
        lambda whole: whole.data[whole.offsets[1] - 10 :],
        lambda _: Seen([2, 3], [(0, 10)], 0),
    ),
    Case(
        "bytes of something else between batches",
        False,
        lambda whole: whole.data[: whole.offsets[1]] + b"\xff" * 4096 + whole.data[whole.offsets[1] :],
        lambda whole: Seen(ALL, [(whole.offsets[1], whole.offsets[1] + 4096)], 0),
    ),
    Case(
        "it is something else",
        False,
        lambda _: b"PAR1" + os.urandom(100) + b"PAR1",
        lambda _: Seen([], [], 108),
        lambda _: Seen([], [(0, 108)], 0),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
@pytest.mark.parametrize("live", [True, False], ids=["live", "strict"])
def test_every_intact_batch_is_read(part: Path, case: Case, live: bool) -> None:
    """What is missing is told with its range, whatever it was that happened."""
    whole = written(part, ended=case.ended)
    part.write_bytes(case.change(whole))
    expected = case.live if live or case.strict is None else case.strict
    assert seen(part, live=live) == expected(whole)


@pytest.mark.parametrize("live", [True, False], ids=["live", "strict"])
def test_a_part_that_is_torn_at_any_byte_is_read_up_to_its_last_whole_batch(part: Path, live: bool) -> None:
    """A kill in the middle of a write is the end so far, and no damage."""
    whole = written(part, ended=True)
    for size in reversed(range(len(whole.data))):
        os.truncate(part, size)
        batches = [index for index, end in enumerate(whole.offsets) if end <= size]
        read_bytes = max([0, HEAD_BYTES * (size >= HEAD_BYTES), *(whole.offsets[index] for index in batches)])
        assert seen(part, live=live) == Seen(batches, [], size - read_bytes)


@pytest.mark.soak
def test_a_long_part_that_is_torn_at_any_of_its_last_bytes_is_read_up_to_there(part: Path) -> None:
    """All of the last 64 KiB of a part, with batches of some KiB."""
    batches = [range(first, first + 40) for first in range(1, 2000, 40)]
    offsets = write_part(part, batches, metrics=20, ended=False)
    size = part.stat().st_size
    assert size > 200_000
    for cut in range(size - 1, size - (64 << 10), -1):
        os.truncate(part, cut)
        whole = [end for end in offsets if end <= cut]
        content = read_part(part, offset=offsets[len(whole) - 5])
        assert content.damages == ()
        assert content.torn_bytes == cut - whole[-1]
        assert content.table.num_rows == 4 * 40 * 20


@pytest.mark.parametrize("live", [True, False], ids=["live", "strict"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "open"])
def test_a_byte_that_was_changed_costs_one_batch_at_most(part: Path, live: bool, ended: bool) -> None:
    """Wherever it is; and the bytes of that batch are told, as damaged, or as torn when they are the last ones."""
    whole = written(part, ended=ended)
    with part.open("r+b", buffering=0) as file:
        for position, byte in enumerate(whole.data):
            for changed in {byte ^ 0xFF, byte ^ 1}:
                os.pwrite(file.fileno(), bytes([changed]), position)
                result = seen(part, live=live)
                lost = [
                    index
                    for index, (first, end) in enumerate(zip(whole.starts, whole.offsets, strict=True))
                    if first <= position < end
                ]
                assert result.batches == [index for index in ALL if index not in lost]
                told = [
                    first <= position < end
                    for first, end in [*result.damages, (len(whole.data) - result.torn_bytes, len(whole.data))]
                ]
                assert any(told), position
            os.pwrite(file.fileno(), bytes([byte]), position)


@pytest.mark.parametrize("live", [True, False], ids=["live", "strict"])
@pytest.mark.parametrize("is_signed", [True, False], ids=["with our checksum", "with a checksum of its own"])
def test_a_part_of_a_newer_format_is_not_read(part: Path, live: bool, is_signed: bool) -> None:
    """The error says which format it is, and what to do."""
    check = b"seq=00000000000000000000-00000000000000000000 bytes=000000000000 crc32=00000000"
    schema = SCHEMAS["metrics"].with_metadata(
        {"llmtrack.format": str(FORMAT_VERSION + 1), "llmtrack.check": check if is_signed else b"sha3"}
    )
    head = bytearray(schema.serialize().to_pybytes())
    if is_signed:
        at = head.index(check)
        head[at : at + len(check)] = check.replace(b"bytes=000000000000", b"bytes=%012d" % len(head))
        head[at : at + len(check)] = bytes(head[at : at + len(check)]).replace(
            b"crc32=00000000", b"crc32=%08x" % zlib.crc32(head)
        )
    part.write_bytes(bytes(head) + b"whatever")
    for offset in (0, len(head)):
        with pytest.raises(
            VersionError, match=f"written in format {FORMAT_VERSION + 1}.*up to format {FORMAT_VERSION}"
        ):
            read_part(part, live=live, offset=offset)


@pytest.mark.parametrize("name", ["metrics-1.arrows", "metrics-00001.arrow", "losses-00001.arrows", "heartbeat.json"])
def test_a_file_of_another_name_is_not_read(tmp_path: Path, name: str) -> None:
    """The name says which columns to expect."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FormatError, match="not a part of an llmtrack log"):
        read_part(tmp_path / name)


def test_a_part_that_was_sealed_meanwhile_is_not_found(part: Path) -> None:
    """The reader lists again."""
    with pytest.raises(FileNotFoundError):
        read_part(part)


def test_batches_of_other_columns_whose_head_is_lost_are_an_error(tmp_path: Path) -> None:
    """With the head of our format they cannot be read, and are not guessed at."""
    path = tmp_path / "gaps-00001.arrows"
    write_part(tmp_path / "metrics-00001.arrows", [range(1, 3)])
    path.write_bytes((tmp_path / "metrics-00001.arrows").read_bytes()[HEAD_BYTES:])
    with pytest.raises(CorruptSegmentError, match="its head is lost"):
        read_part(path)


def test_a_read_goes_on_where_the_last_one_stopped(part: Path) -> None:
    """However the file grows, each batch is read once, and as soon as it is whole."""
    whole = written(part, ended=True)
    for step in (1, 7, 100, 1000):
        part.write_bytes(b"")
        batches: list[int] = []
        offset = 0
        with part.open("ab", buffering=0) as file:
            for first in range(0, len(whole.data), step):
                file.write(whole.data[first : first + step])
                content = read_part(part, offset=offset)
                batches += seen(part, live=True, offset=offset).batches
                assert content.damages == ()
                offset = content.next_offset
                size = min(first + step, len(whole.data))
                assert batches == [index for index, end in enumerate(whole.offsets) if end <= size]
        assert offset == len(whole.data)


def test_damage_is_told_once_while_a_part_grows(part: Path) -> None:
    """When the next intact batch shows that it is damage, and no unfinished write."""
    whole = written(part, ended=True)
    damaged = inverted(whole, whole.offsets[0] + 300, whole.offsets[0] + 310)
    told: list[Damage] = []
    offset = 0
    for size in [*whole.offsets, len(damaged)]:
        part.write_bytes(damaged[:size])
        content = read_part(part, offset=offset)
        told += content.damages
        offset = content.next_offset
    assert [(damage.first_byte, damage.end_byte) for damage in told] == [(whole.offsets[0], whole.offsets[1])]
    assert str(told[0]) == f"{part}: bytes {whole.offsets[0]} to {whole.offsets[1]}: fails its checksum"


def test_a_plain_reader_reads_an_intact_part(part: Path) -> None:
    """Nothing of ours is needed."""
    written(part, ended=True)
    with part.open("rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.replace_schema_metadata(None).equals(read_part(part).table)
    assert table.schema.remove_metadata().equals(SCHEMAS["metrics"])


def test_a_part_full_of_ones_is_searched_in_no_time(part: Path) -> None:
    """What a dead block of a disk reads as looks like the beginning of a message at every byte."""
    whole = written(part, ended=True)
    part.write_bytes(whole.data[: whole.offsets[0]] + b"\xff" * (8 << 20) + whole.data[whole.offsets[0] :])
    assert seen(part, live=True) == Seen(ALL, [(whole.offsets[0], whole.offsets[0] + (8 << 20))], 0)


@pytest.mark.parametrize("table", [table for table in SCHEMAS if table != "evals"])
def test_every_table_is_written_and_read(tmp_path: Path, table: str) -> None:
    """With nulls wherever a record says nothing."""
    path = tmp_path / part_name(table, 1)
    writer = PartWriter(path, table)
    rows = [dict.fromkeys(SCHEMAS[table].names) | {"seq": seq, "tokens": seq} for seq in (1, 2)]
    for row in rows:
        batch = pa.RecordBatch.from_pylist([row], schema=SCHEMAS[table])
        end = writer.append(batch, row["tokens"] or 0, row["tokens"] or 0)
        assert end == path.stat().st_size == writer.bytes
    assert writer.batches == 2
    writer.close()
    assert read_part(path).table.to_pylist() == rows


def test_a_part_is_never_appended_to_by_another_writer(part: Path) -> None:
    """A file that is there is somebody's."""
    written(part, ended=True)
    before = part.read_bytes()
    with pytest.raises(FileExistsError):
        PartWriter(part, "metrics")
    assert part.read_bytes() == before


def test_a_batch_says_which_rows_are_in_it(part: Path) -> None:
    """In its custom metadata, for whoever looks for a row."""
    written(part, ended=True)
    with part.open("rb") as file:
        stream = pa.ipc.open_stream(file)
        for batch in BATCHES:
            metadata = stream.read_next_batch_with_custom_metadata().custom_metadata
            assert metadata["llmtrack.check"].startswith(b"seq=%020d-%020d " % (batch.start, batch.stop - 1))


def test_a_large_batch_is_compressed_and_a_record_is_not(part: Path) -> None:
    """Each compressed buffer costs a reader time, which thousands of small records would feel."""
    record = pa.RecordBatch.from_pylist([{"seq": 1, "name": "x" * 10_000}], schema=SCHEMAS["metrics"])
    assert len(encode_batch(record, 1, 1)) > 10_000
    many = pa.RecordBatch.from_pylist([{"seq": 1, "name": "x" * 100}] * 1000, schema=SCHEMAS["metrics"])
    assert len(encode_batch(many, 1, 1)) < 10_000
    written(part, ended=True)
    assert len(list(read_batches(part))) == len(BATCHES)
