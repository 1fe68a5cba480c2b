"""Open part -> sealed part: the same rows as Parquet, sorted by name, published whole; only then the open part goes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtrack.writer.errors import CorruptSegmentError
from llmtrack.writer.format import FORMAT_VERSION, OPEN_SUFFIX, PART_FILE, SCHEMAS, SEALED_SUFFIX

from .arrays import one
from .merge import ROW_GROUP_ROWS, SortedPoints
from .publish import publish, sync_folder
from .stream import RawPart, decode_parts, read_part, read_raw_part

SEALED_TABLES: Final = frozenset({"metrics"})  # the others are rare: a file of their own format would cost more
# Decoded at once: columns take five times the bytes of a message, and many times those of one with little in it.
_MESSAGE_BYTES: Final = 1 << 20
_MESSAGES: Final = 16
DIGEST_KEY: Final = "llmtrack.source_digest"
CHECK_KEY: Final = "llmtrack.file_crc32"
NAMES_KEY: Final = "llmtrack.names"  # tells a reader of one metric which parts to leave shut
_NAMES_BYTES: Final = 16 << 10  # several hundred metrics: beyond that a reader of the footer would pay for them
# How Thrift writes the key and, behind it, the eight characters of the value.
_CHECK: Final = CHECK_KEY.encode() + b"\x18\x08"
OURS: Final = b"llmtrack."  # in the footer of every file that we made, several times
_INTEGERS: Final = ("seq", "time", "step", "tokens")


def seal_part(path: Path, *, before_seq: int | None = None) -> Path:
    """Write the rows of an open part as Parquet, read it back, and remove the open part.

    A crash at any moment leaves the open part, or both, or the sealed part, each of them whole.

    Args:
        path: A part that nobody appends to any more.
        before_seq: Leave out rows from this `seq` on: they stand in the next part too.

    Returns:
        The path of the sealed part.

    Raises:
        CorruptSegmentError: The part is damaged, or the sealed part did not read back. The open part stays.
        VersionError: Written by a newer llmtrack.
        OSError: The storage refused. The open part stays.
    """
    points = _read_sorted(path, before_seq)
    metadata = {
        "llmtrack.format": str(FORMAT_VERSION),
        **{
            f"llmtrack.{column}_{end}": str(extent[at]) if (extent := points.extent[column]) else ""
            for column, ends in (
                ("seq", ("first", "last")),
                ("tokens", ("min", "max")),
                ("step", (None, "max")),
                ("time", (None, "max")),
            )
            for at, end in enumerate(ends)
            if end is not None
        },
        "llmtrack.rows": str(points.points),
        DIGEST_KEY: rows_digest(points.groups()),
        CHECK_KEY: f"{0:08x}",
    }
    names = json.dumps(points.names, separators=(",", ":"))  # ASCII: a name can look like no key of the footer
    if len(names) <= _NAMES_BYTES:
        metadata[NAMES_KEY] = names
    data = bytearray()
    with pq.ParquetWriter(
        _Sink(data),
        SCHEMAS["metrics"].with_metadata(metadata),
        compression="zstd",
        compression_level=3,
        use_dictionary=["name"],
        column_encoding={**dict.fromkeys(_INTEGERS, "DELTA_BINARY_PACKED"), "value": "BYTE_STREAM_SPLIT"},
        # None of `value`: they leave NaN out, and DuckDB concludes that no value is NaN.
        write_statistics=[*_INTEGERS, "name"],
        write_page_index=True,
        write_page_checksum=True,
    ) as writer:
        for group in points.groups():
            writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
    del points
    sealed = path.with_suffix(SEALED_SUFFIX)
    sign(data)
    publish(sealed, memoryview(data), check=verify_sealed)
    del data
    pa.default_memory_pool().release_unused()  # the trainer's memory is not ours to keep
    path.unlink()
    sync_folder(path.parent)
    return sealed


def seal_segment(folder: Path) -> list[Path]:
    """Seal every part of a segment whose writer is gone, and return the sealed parts that are new.

    Raises:
        CorruptSegmentError: A part is damaged, or a copy; the others are sealed all the same.
        VersionError: Written by a newer llmtrack.
        OSError: The storage refused.
    """
    sealed: list[Path] = []
    copies = list_copies(path for path in list_parts(folder) if path.suffix == SEALED_SUFFIX)
    damaged = [CorruptSegmentError(copy, f"is a copy of {original.name}") for copy, original in copies.items()]
    next_seq: int | None = None  # the lowest in the parts that follow
    for stem in sorted({path.stem for path in list_parts(folder)}, key=_part_number, reverse=True):
        open_part, sealed_part = folder / f"{stem}{OPEN_SUFFIX}", folder / f"{stem}{SEALED_SUFFIX}"
        if sealed_part in copies:
            continue  # taken for what it is called, it would end the parts before it where they begin
        before_seq = next_seq
        try:
            first_seq = first_seq_of(open_part if open_part.exists() else sealed_part)
            next_seq = first_seq if first_seq is not None else next_seq
            if sealed_part.exists() and (not open_part.exists() or _is_intact(sealed_part)):
                open_part.unlink(missing_ok=True)
            else:
                sealed.append(seal_part(open_part, before_seq=before_seq))
        except CorruptSegmentError as error:
            damaged.append(error)
    if damaged:
        raise damaged[0]
    return sealed


def list_parts(folder: Path) -> Iterator[Path]:
    """Yield the parts of a segment that can be, or are, sealed."""
    for path in folder.iterdir():
        name = PART_FILE.fullmatch(path.name)
        if name is not None and name[1] in SEALED_TABLES:
            yield path


def list_copies(sealed: Iterable[Path]) -> dict[Path, Path]:
    """Return, of the sealed parts of one segment, those that are another one under a second name, each with that one.

    No two parts that were sealed have a row in common, so somebody copied a file.
    """
    originals: dict[bytes, Path] = {}
    copies: dict[Path, Path] = {}
    for path in sorted(sealed, key=lambda path: _part_number(path.stem)):
        digest = digest_of(path)
        if digest is not None and originals.setdefault(digest, path) != path:
            copies[path] = originals[digest]
    return copies


def digest_of(path: Path) -> bytes | None:
    """Return the digest of its rows that a sealed part has in its footer; None without one, or without a row."""
    try:
        said = pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError, ValueError):  # ValueError: a name that is no text any more
        return None
    return said.get(DIGEST_KEY.encode()) if said.get(b"llmtrack.rows") != b"0" else None


def first_seq_of(path: Path) -> int | None:
    """Return the lowest `seq` in a part, open or sealed; None when it has no rows.

    Raises:
        CorruptSegmentError: A sealed part cannot be read.
    """
    if path.suffix == OPEN_SUFFIX:
        rows = read_part(path, live=False).table
        return rows["seq"][0].as_py() if rows.num_rows else None
    try:
        return int((pq.read_metadata(path).metadata or {})[b"llmtrack.seq_first"] or 0) or None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptSegmentError(path, f"cannot be read: {error}") from error


def sealed_last_seq(open_part: Path) -> int:
    """Return the highest `seq` in what an open part was sealed to; -1 when it was not, or nothing can be read there."""
    sealed = open_part.with_suffix(SEALED_SUFFIX)
    try:
        return int((pq.read_metadata(sealed).metadata or {})[b"llmtrack.seq_last"] or -1)
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return -1


def verify_sealed(path: Path, *, rows: bool = True) -> None:
    """Read a whole Parquet file, and compare its bytes and its rows with what was promised when it was made.

    Args:
        path: A sealed part, or a file of evals.
        rows: Compare the rows of a sealed part, too, and not only the bytes that they are made from.

    Raises:
        CorruptSegmentError: A byte was changed, it cannot be read, or other rows come out of it.
        OSError: The storage refused.
    """
    data = _read(path)
    if data.rfind(OURS) < 0:  # another program's, which promised nothing: only its pages can have checksums
        try:
            pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is no text any more
            raise CorruptSegmentError(path, f"cannot be read: {error}") from error
        return
    digits = _check_digits(data)
    said, data[digits] = bytes(data[digits]), b"0" * 8
    if said != f"{zlib.crc32(data):08x}".encode():
        raise CorruptSegmentError(path, "fails its checksum")
    if not rows:
        return
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            promised = (file.metadata.metadata or {}).get(DIGEST_KEY.encode(), b"").decode()
            groups = (file.read_row_group(index, use_threads=False) for index in range(file.num_row_groups))
            found = rows_digest(groups)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptSegmentError(path, f"cannot be read: {error}") from error
    if found != promised:
        raise CorruptSegmentError(path, f"its rows have the digest {found}, and it was sealed with {promised}")


def sign(data: bytearray) -> None:
    """Fill in the checksum of a Parquet file that was laid out with eight zeros for it under `CHECK_KEY`."""
    digits = _check_digits(data)
    data[digits] = f"{zlib.crc32(data):08x}".encode()


def _read(path: Path) -> bytearray:
    """Return the bytes of a file, to be changed: of what `read_bytes` gives that would be one copy more."""
    with path.open("rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        rest = memoryview(data)
        while rest:
            read = file.readinto(rest)
            if not read:
                raise CorruptSegmentError(path, "became shorter while it was read")
            rest = rest[read:]
    return data


def _check_digits(data: bytearray) -> slice:
    """Return where the digits of the checksum lie; they count as zeros in it."""
    at = data.rfind(_CHECK) + len(_CHECK)
    return slice(at, at + 8)


def _part_number(stem: str) -> int:
    return int(stem.rpartition("-")[2])


def _is_intact(path: Path) -> bool:
    try:
        verify_sealed(path)
    except CorruptSegmentError:
        return False
    return True


def rows_digest(groups: Iterable[pa.Table]) -> str:
    """Return a digest of rows sorted by (name, seq), whatever their row groups: BLAKE2b over each column's bytes."""
    columns = {column: hashlib.blake2b(digest_size=16) for column in (*_INTEGERS, "value")}
    names: dict[str, int] = {}
    for group in groups:
        for column, digest in columns.items():
            for chunk in group[column].chunks:
                width = 8
                data = chunk.buffers()[1]
                digest.update(memoryview(data)[chunk.offset * width : (chunk.offset + len(chunk)) * width])
        for count in group["name"].combine_chunks().value_counts():
            name = count["values"].as_py()
            names[name] = names.get(name, 0) + count["counts"].as_py()
    whole = hashlib.blake2b(repr(list(names.items())).encode(), digest_size=16)
    for digest in columns.values():
        whole.update(digest.digest())
    return whole.hexdigest()


def _read_sorted(path: Path, before_seq: int | None) -> SortedPoints:
    """Read an open part that has no damage; of its rows those before a `seq`."""
    raw = read_raw_part(path, live=False)
    if raw.damages:
        raise CorruptSegmentError(
            path,
            "; ".join(f"bytes {damage.first_byte} to {damage.end_byte}: {damage.reason}" for damage in raw.damages),
            offset=raw.damages[0].first_byte,
            hint="leave it open: readers skip what is damaged, and say so",
        )
    try:
        return SortedPoints(_tables(raw, before_seq))
    except (pa.ArrowException, KeyError, ValueError) as error:  # no part of ours: its checksums are right
        raise CorruptSegmentError(path, f"cannot be sealed: {error}") from error


def _tables(raw: RawPart, before_seq: int | None) -> Iterator[pa.Table]:
    """Yield the rows of a part, a few messages at a time."""
    messages: list[memoryview] = []
    for at, message in enumerate(raw.messages, start=1):
        messages.append(message)
        if len(messages) == _MESSAGES or sum(map(len, messages)) >= _MESSAGE_BYTES or at == len(raw.messages):
            table, _ = decode_parts([replace(raw, messages=tuple(messages))])
            messages.clear()
            yield table if before_seq is None else table.filter(pc.less(table["seq"], one(before_seq, pa.int64())[0]))


class _Sink(io.RawIOBase):
    """What pyarrow writes a file to: it is not copied once more."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._data += piece
        return len(piece)

    def tell(self) -> int:
        return len(self._data)
