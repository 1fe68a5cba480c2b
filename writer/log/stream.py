"""The open part: an Arrow IPC stream whose every message carries a checksum of its own bytes.

A plain Arrow reader reads the file, checks nothing, and stops at the first damage. `read_part` verifies every message
before Arrow sees it, and after a damaged one looks for the next intact one.

The checksum stands in the message's custom metadata, in digits of fixed width, so that it can be filled in after Arrow
has laid the message out: it is the CRC-32 of the whole message, header and padding and compressed body, with its own
eight digits read as zeros. `docs/FORMAT.md` has the bytes drawn.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import pyarrow as pa

from llmtrack.writer.errors import CorruptSegmentError, FormatError, VersionError
from llmtrack.writer.format import FORMAT_VERSION, PART_FILE, SCHEMAS

_FORMAT_KEY: Final = b"llmtrack.format"
_CHECK_KEY: Final = "llmtrack.check"
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_END_OF_STREAM: Final = _CONTINUATION + b"\0\0\0\0"
_PREFIX_BYTES: Final = 8  # the continuation marker and the length of the header
_HEADER_LIMIT_BYTES: Final = 1 << 20  # our widest header is 4 KiB: beyond this a length is damage
# A continuation marker with a length that can be one: the bytes of a bad disk are often all ones.
_CANDIDATE: Final = re.compile(rb"\xff{4}(?=[\x00-\xff]{2}[\x00-\x10]\x00)")
_CHECK: Final = re.compile(rb"seq=(\d{20})-(\d{20}) bytes=(\d{12}) crc32=([0-9a-f]{8})")
# One thread: the trainer's cores are not ours, and a flush is small.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_PLAIN: Final = pa.ipc.IpcWriteOptions(use_threads=False)
# Each compressed buffer costs a reader 12 us whatever its size: a segment's start record has 60 of them, and a list of
# 10,000 segments took 9 s to read instead of 0.5 s, and compressed it was not even smaller.
_COMPRESS_FROM_BYTES: Final = 2048
_SMALL_BATCH_ROWS: Final = 64
_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)  # the hand-over to a thread costs more than it saves


@dataclass(frozen=True)
class Damage:
    """Bytes ``[first_byte, end_byte)`` of a file that could not be read."""

    path: Path
    first_byte: int
    end_byte: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: bytes {self.first_byte} to {self.end_byte}: {self.reason}"


@dataclass(frozen=True)
class PartContent:
    """What could be read of one open part.

    Attributes:
        table: Every intact row from the offset on, in the order in which it was written.
        damages: What was skipped.
        next_offset: Where the next read goes on.
        torn_bytes: Bytes beyond `next_offset` that are not a whole batch: the end so far, no error.
    """

    table: pa.Table
    damages: tuple[Damage, ...]
    next_offset: int
    torn_bytes: int


def _check(seq_first: int, seq_last: int, length: int = 0, crc: int = 0) -> bytes:
    return f"seq={seq_first:020d}-{seq_last:020d} bytes={length:012d} crc32={crc:08x}".encode()


def _sign(message: bytearray, seq_first: int, seq_last: int) -> bytes:
    """Fill in the length and the checksum of a message that was laid out with zeros for both."""
    blank = _check(seq_first, seq_last)
    at = message.index(blank)
    message[at : at + len(blank)] = _check(seq_first, seq_last, len(message))
    message[at : at + len(blank)] = _check(seq_first, seq_last, len(message), zlib.crc32(message))
    return bytes(message)


def encode_head(table: str) -> bytes:
    """Return the first message of a part: its schema, format version and checksum."""
    schema = SCHEMAS[table].with_metadata({_FORMAT_KEY: str(FORMAT_VERSION), _CHECK_KEY: _check(0, 0)})
    return _sign(bytearray(schema.serialize().to_pybytes()), 0, 0)


def encode_batch(batch: pa.RecordBatch, seq_first: int, seq_last: int) -> bytes:
    """Return one signed record batch message, to be written with one `write`."""
    sink = pa.BufferOutputStream()
    options = _COMPRESSED if batch.num_rows > 1 and batch.nbytes >= _COMPRESS_FROM_BYTES else _PLAIN
    stream = pa.ipc.new_stream(sink, batch.schema, options=options)
    stream.write_batch(batch, custom_metadata={_CHECK_KEY: _check(seq_first, seq_last)})
    head_bytes = batch.schema.serialize().size  # the stream repeats the schema, which the part has at its head
    return _sign(bytearray(memoryview(sink.getvalue())[head_bytes:]), seq_first, seq_last)


def last_seq_of(message: bytes) -> int:
    """Return the highest `seq` in a message made by `encode_batch`."""
    check = _CHECK.search(message)
    assert check is not None  # noqa: S101  # it was signed
    return int(check[2])


class PartWriter:
    """Appends messages to one new part; only the last message of a part may be incomplete.

    When the storage takes only a piece of a message, the rest stays in `pending` and goes first the next time: nothing
    is cut off, nothing is written twice.

    Args:
        path: Must not exist: no process ever appends to a part of another.
        table: One of `SCHEMAS`.

    Raises:
        FileExistsError: There is such a file already.
        OSError: The storage refused.
    """

    def __init__(self, path: Path, table: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.pending: memoryview = memoryview(encode_head(table))
        self.bytes = 0
        self.batches = 0

    def append(self, batch: pa.RecordBatch, seq_first: int, seq_last: int) -> int:
        """Write one batch, and return the offset in bytes after it.

        Raises:
            OSError: The storage refused; what is missing is in `pending`, and `flush` tries again.
        """
        return self.write(encode_batch(batch, seq_first, seq_last))

    def write(self, message: bytes) -> int:
        """Write one message made by `encode_batch`, and return the offset in bytes after it."""
        self.pending = memoryview(bytes(self.pending) + message) if self.pending else memoryview(message)
        self.batches += 1
        self.flush()
        return self.bytes

    def flush(self) -> None:
        """Write what is pending.

        Raises:
            OSError: The storage refused.
        """
        while self.pending:
            written = os.write(self._fd, self.pending)
            if not written:
                raise OSError(errno.EAGAIN, "the storage took no byte")
            self.bytes += written
            self.pending = self.pending[written:]

    def fileno(self) -> int:
        """Return the file descriptor, e.g. for `os.fsync`."""
        return self._fd

    def is_linked(self) -> bool:
        """Return whether the file still has a name: writes to a deleted file succeed and are lost."""
        return os.fstat(self._fd).st_nlink > 0

    def close(self, *, ended: bool = True) -> None:
        """Close the file; a second time does nothing more than fail.

        Args:
            ended: Mark with Arrow's end-of-stream message that nothing was cut off, and fsync. False leaves the file as
                it is, for a handle that is dead.

        Raises:
            OSError: The end could not be made durable; the file is closed all the same.
        """
        try:
            if ended:
                self.pending = memoryview(bytes(self.pending) + _END_OF_STREAM)
                self.flush()
                fsync_named(self._fd)
        finally:
            fd, self._fd = self._fd, -1  # its number may be another file's as soon as it is closed
            os.close(fd)


def fsync_named(fd: int) -> None:
    """Make a file durable that has a name.

    Raises:
        OSError: The storage refused, or the file was deleted: that can be fsynced, and is lost.
    """
    os.fsync(fd)
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def read_part(path: Path, *, offset: int = 0, live: bool = True) -> PartContent:
    """Read the intact batches of an open part from a byte offset on.

    Args:
        path: A file named as `part_name` does.
        offset: 0, or the `next_offset` of an earlier read.
        live: A writer may still be appending: a last batch that fails its check may only not be visible as a whole yet
            (network file systems show the size before the content), so it counts as torn, not as damaged.

    Raises:
        VersionError: Written by a newer llmtrack.
        CorruptSegmentError: The head is lost and the columns are not those of this format.
        FileNotFoundError: It was sealed meanwhile: list again.
    """
    raw = read_raw_part(path, offset=offset, live=live)
    table, _ = decode_parts([raw])
    return PartContent(table, raw.damages, raw.next_offset, raw.torn_bytes)


@dataclass(frozen=True)
class RawPart:
    """The intact messages of one open part, verified and not decoded.

    Attributes:
        path: The part.
        head: The message with its columns.
        messages: One for each intact batch.
        first_seq: The lowest `seq` in them; None when there are none.
        last_seq: The highest.
        damages: What was skipped.
        next_offset: Where the next read goes on.
        torn_bytes: Bytes beyond `next_offset` that are not a whole batch.
    """

    path: str
    head: bytes
    messages: tuple[memoryview, ...]
    first_seq: int | None
    last_seq: int | None
    damages: tuple[Damage, ...]
    next_offset: int
    torn_bytes: int


def read_raw_part(path: str | os.PathLike[str], *, offset: int = 0, live: bool = True) -> RawPart:
    """Read and verify what `read_part` reads, and leave the decoding to `decode_parts`.

    Raises:
        VersionError: Written by a newer llmtrack.
        FileNotFoundError: It was sealed meanwhile: list again.
    """
    path = os.fspath(path)  # a Path costs as much as reading a small part
    name = PART_FILE.fullmatch(path.rpartition("/")[2])
    if name is None or name[1] not in SCHEMAS:
        raise FormatError(Path(path), "not a part of an llmtrack log")
    with FileIO(path) as file:
        if offset == 0:
            data = file.readall()
            start = data[: _PREFIX_BYTES + (_header_bytes(data, 0) or 0)]
        else:
            start = file.read(_PREFIX_BYTES)
            start += file.read(_header_bytes(start, 0) or 0)
            file.seek(offset)
            data = file.readall()
    head = _checked_head(path, start, name[1])

    damages: list[Damage] = []
    batches: list[_Message] = []
    position = len(head) if offset == 0 and head is start else 0
    for message in _intact_messages(data, position):
        if message.first_byte > position:
            damages.append(Damage(Path(path), offset + position, offset + message.first_byte, "fails its checksum"))
        if message.seq_last:
            batches.append(message)
        position = message.end_byte
    rest = len(data) - position
    if rest and (data.endswith(_END_OF_STREAM) or not (live or _is_incomplete(data, position))):
        damages.append(Damage(Path(path), offset + position, offset + len(data), "fails its checksum"))
        position, rest = len(data), 0
    return RawPart(
        path,
        head,
        tuple(memoryview(data)[batch.first_byte : batch.end_byte] for batch in batches),
        min((batch.seq_first for batch in batches), default=None),
        max((batch.seq_last for batch in batches), default=None),
        tuple(damages),
        offset + position,
        rest,
    )


def decode_parts(parts: Sequence[RawPart]) -> tuple[pa.Table, list[int]]:
    """Decode parts of one table together, in their order; a column that only some of them have is null in the others.

    A stream costs more to open than a small one has in it: 10,000 start records take 0.3 s together, 1 s one by one.

    Returns:
        All rows, and how many of them each part has.

    Raises:
        CorruptSegmentError: The head of a part is lost and the columns are not those of this format.
    """
    tables: list[pa.Table] = []
    rows: list[int] = []
    for head, alike in itertools.groupby(parts, key=lambda part: part.head):
        group = list(alike)
        messages = [message for part in group for message in part.messages]
        try:
            batches = list(pa.ipc.open_stream(b"".join([head, *messages]), options=_READ_OPTIONS))
        except (pa.ArrowInvalid, OSError) as error:
            raise CorruptSegmentError(
                Path(group[0].path), f"its head is lost and its batches do not fit format 1: {error}"
            ) from error
        left = iter(batches)
        rows += [sum(len(batch) for batch in itertools.islice(left, len(part.messages))) for part in group]
        schema = batches[0].schema if batches else pa.ipc.read_schema(pa.py_buffer(head))
        if len(batches) > 1 and sum(map(len, batches)) < _SMALL_BATCH_ROWS * len(batches):
            batches = [pa.concat_batches(batches)]  # a table of thousands of chunks costs more than the copy
        tables.append(pa.Table.from_batches(batches, schema).replace_schema_metadata(None))
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default"), rows


@dataclass(frozen=True)
class _Message:
    """Where a verified message lies; `seq_last` is 0 for the head and for the end of the stream."""

    first_byte: int
    end_byte: int
    seq_first: int
    seq_last: int


def _checked_head(path: str, start: bytes, table: str) -> bytes:
    """Return the head that a file starts with, or the one it should have when that is damaged or not there yet."""
    version, is_intact = _look_at_head(start)
    if version is not None and version > FORMAT_VERSION:
        raise VersionError(
            Path(path),
            f"written in format {version}, and this llmtrack reads up to format {FORMAT_VERSION}",
            hint="upgrade llmtrack where you read",
        )
    return start if is_intact else encode_head(table)


@functools.lru_cache(maxsize=64)  # the same bytes in every part of a table
def _look_at_head(start: bytes) -> tuple[int | None, bool]:
    """Return the format version that a head names, and whether all of it is as it was written."""
    is_signed, is_intact = _CHECK.search(start) is not None, _verify(start, 0) is not None
    if is_signed and not is_intact:
        return None, False
    try:
        version = int((pa.ipc.read_schema(pa.py_buffer(start)).metadata or {})[_FORMAT_KEY])
    except (pa.ArrowException, OSError, KeyError, ValueError):  # Arrow says some damage as OSError
        return None, False
    return version, is_intact


def _header_bytes(data: bytes, position: int) -> int | None:
    """Return the length of the header of the message at a position, or None when there can be no message."""
    if data[position : position + 4] != _CONTINUATION or len(data) < position + _PREFIX_BYTES:
        return None
    length = int.from_bytes(data[position + 4 : position + _PREFIX_BYTES], "little")
    return length if 0 < length <= _HEADER_LIMIT_BYTES else None


def _verify(data: bytes, position: int) -> _Message | None:
    """Return the message at a position if it is all there and every byte of it is as it was written."""
    header_bytes = _header_bytes(data, position)
    if header_bytes is None:
        if len(data) - position == len(_END_OF_STREAM) and data.endswith(_END_OF_STREAM):
            return _Message(position, len(data), 0, 0)
        return None
    body = position + _PREFIX_BYTES + header_bytes
    check = _CHECK.search(data, position + _PREFIX_BYTES, body)
    if check is None:
        return None
    end = position + int(check[3])
    if not body <= end <= len(data):
        return None
    view = memoryview(data)
    crc = zlib.crc32(view[position : check.start(4)])
    crc = zlib.crc32(view[check.end(4) : end], zlib.crc32(b"00000000", crc))
    return _Message(position, end, int(check[1]), int(check[2])) if crc == int(check[4], 16) else None


def _intact_messages(data: bytes, position: int) -> Iterator[_Message]:
    """Yield every intact message; after a damaged one the next continuation marker that starts an intact one counts."""
    while position < len(data):
        message = _verify(data, position)
        if message is not None:
            yield message
            position = message.end_byte
        else:
            candidate = _CANDIDATE.search(data, position + 1)
            position = candidate.start() if candidate else len(data)


def _is_incomplete(data: bytes, position: int) -> bool:
    """Return whether what lies at a position can be the beginning of a message that was not written to its end."""
    rest = data[position:]
    if len(rest) < _PREFIX_BYTES:
        return rest.startswith(_CONTINUATION) or _CONTINUATION.startswith(rest)
    header_bytes = _header_bytes(rest, 0)
    if header_bytes is None:
        return False
    if len(rest) < _PREFIX_BYTES + header_bytes:
        return True
    check = _CHECK.search(rest, _PREFIX_BYTES, _PREFIX_BYTES + header_bytes)
    return check is not None and len(rest) < int(check[3])
