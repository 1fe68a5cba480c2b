"""Single files and folders of a log, looked at without opening more than needed."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import functools
import json
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from llmtrack.writer.format import HEARTBEAT, PART_FILE, RUN_FOLDER, SCHEMAS, SEGMENT_FOLDER
from llmtrack.writer.log.seal import CHECK_KEY, OURS, digest_of

from .columns import EPOCH

# What a file system says of a path that was there a moment ago; ESTALE is NFS.
VANISHED: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})

_PARQUET_MAGIC: Final = b"PAR1"
_PARQUET_TAIL_BYTES: Final = 8  # the length of the footer, and the magic number
_PARQUET_LEAST_BYTES: Final = 12
# How Thrift writes the key in the footer and, behind it, the eight characters of the value.
_CHECK: Final = CHECK_KEY.encode() + b"\x18\x08"
_FIRST_KEY: Final = b"llmtrack.format\x18"  # the others follow
# The length of a value stands before it, and the end of a pair behind it.
_PAIR: Final = re.compile(rb"llmtrack\.(\w+)\x18[\x80-\xff]{0,3}[\x00-\x7f]([^\x00]*)\x00")
_UNITS_PER_S: Final = {"milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_FOOTER_BYTES: Final = 64 << 10  # of most sealed parts; a larger footer is read by itself


@dataclass(frozen=True)
class Reached:
    """How far a segment is known to have come, and how many points it had to drop on the way, if it said so."""

    time: dt.datetime
    step: int
    tokens: int
    dropped: int | None = None


class Sealed(NamedTuple):
    """What a look at a Parquet file says: all but `fault` is what its footer promises, None where it does not.

    Attributes:
        fault: Why it cannot be read, or must not be; nothing when it can.
        first_tokens: The lowest tokens in it.
        digest: Of its rows, if it has any.
        first_seq: The lowest `seq` in it.
        reached: The furthest place in it.
        names: Its metrics.
    """

    fault: str
    first_tokens: int | None = None
    digest: bytes | None = None
    first_seq: int | None = None
    reached: Reached | None = None
    names: frozenset[str] | None = None


@dataclass
class Listing:
    """The files of one segment.

    Attributes:
        open: Open parts by table and number.
        sealed: Numbers of the sealed parts of metrics.
        has_heartbeat: Whether there is a heartbeat, whatever is in it.
        fault: Why it may not be listed; empty when it was.
    """

    open: dict[tuple[str, int], str] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    has_heartbeat: bool = False
    fault: str = ""


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none when it is not there any more."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - pathlib makes an object of each of 10,000 names
    except OSError as error:
        if error.errno in VANISHED:
            return []
        raise


def list_segment(folder: str) -> Listing:
    """Return the parts in the folder of a segment; what is not ours is left out."""
    listing = Listing()
    try:
        names = list_names(folder)
    except PermissionError as error:
        listing.fault = os.strerror(error.errno or 0)
        return listing
    for name in names:
        if name == HEARTBEAT:
            listing.has_heartbeat = True
        elif (part := PART_FILE.fullmatch(name)) and part[1] in SCHEMAS:
            if part[3] == "arrows":
                listing.open[part[1], int(part[2])] = f"{folder}/{name}"
            elif part[1] == "metrics":
                listing.sealed.add(int(part[2]))
    return listing


def owner_of(path: str) -> tuple[str, int]:
    """Return run and segment from a path; segment 0 stands for what belongs to the run as a whole."""
    names = Path(path).parts
    run_id = next((match[1] for name in names if (match := RUN_FOLDER.fullmatch(name))), "")
    number = next((int(match[1]) for name in names if (match := SEGMENT_FOLDER.fullmatch(name))), 0)
    return run_id, number


def size_of(path: str) -> int:
    """Return the size in bytes; 0 when there is no telling."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - as above
    except OSError:
        return 0


def folder_bytes(folder: str) -> int:
    """Return the bytes of all files in a folder and below; what is gone by then counts nothing."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                total += folder_bytes(entry.path) if entry.is_dir(follow_symlinks=False) else size_of(entry.path)
    except OSError:
        return total
    return total


def modified_s(path: str) -> float:
    """Return when a file was last written, in seconds since 1970; infinity when there is no telling."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - as above
    except OSError:
        return float("inf")


def read_heartbeat(path: str) -> Reached | None:
    """Return what a heartbeat says, or None while it is being rewritten."""
    try:
        beat: dict[str, Any] = json.loads(Path(path).read_bytes())
        return Reached(
            dt.datetime.fromisoformat(beat["time"]), int(beat["step"]), int(beat["tokens"]), int(beat["dropped"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def look_at_sealed(path: str) -> Sealed:
    """Look at the end of a Parquet file: its footer is believed."""
    return _look_at_end(path, parse=False)


def parse_sealed(path: str) -> Sealed:
    """Look at the end of a Parquet file, and see that DuckDB can open it.

    A small file is read whole, and its checksum compared: that takes less time than parsing its footer.
    """
    return _look_at_end(path, parse=True)


def check_sealed(path: str) -> Sealed:
    """Compare the checksum over all bytes of a sealed part, or of a file of evals.

    DuckDB does not look at the checksums of pages: it takes a changed byte for a value.
    """
    try:
        data, _ = _read_end(path)
    except OSError as error:
        return Sealed(os.strerror(error.errno or 0))
    return _tail_fault(data, len(data)) or _check_whole(path, data)


def _look_at_end(path: str, *, parse: bool) -> Sealed:
    try:
        data, size = _read_end(path, _FOOTER_BYTES)
        if fault := _tail_fault(data, size):
            return fault
        footer_bytes = int.from_bytes(data[-8:-4], "little") + _PARQUET_TAIL_BYTES
        if footer_bytes > len(data):
            data, _ = _read_end(path, footer_bytes)
    except OSError as error:
        return Sealed(os.strerror(error.errno or 0))
    if parse and len(data) == size and data.rfind(_CHECK) >= 0:
        return _check_whole(path, data)
    if parse:
        try:
            pq.ParquetFile(pa.BufferReader(_PARQUET_MAGIC + data)).close()
        except (pa.ArrowException, OSError, ValueError) as error:
            return Sealed(str(error).partition("\n")[0])
    return _promises(data[-footer_bytes:])


def _check_whole(path: str, data: bytes) -> Sealed:
    footer_begin = len(data) - _PARQUET_TAIL_BYTES - int.from_bytes(data[-8:-4], "little")
    at = data.rfind(_CHECK, footer_begin)
    if at < 0:  # another program's, whose pages may have checksums
        fault = "fails its checksum" if data.find(OURS, footer_begin) >= 0 else pages_fault(path)
        return Sealed(fault, None, None if fault else digest_of(Path(path)))
    digits = at + len(_CHECK)
    whole = memoryview(data)
    crc = zlib.crc32(whole[digits + 8 :], zlib.crc32(b"00000000", zlib.crc32(whole[:digits])))
    if f"{crc:08x}".encode() != data[digits : digits + 8]:
        return Sealed("fails its checksum")
    return _promises(data[footer_begin:])


def _promises(footer: bytes) -> Sealed:
    """Return what a footer says, without parsing it: a hundredth of the time."""
    begin = footer.rfind(_FIRST_KEY)
    said: dict[bytes, bytes] = dict(_PAIR.findall(footer, begin)) if begin >= 0 else {}
    tokens_max, step_max, time_max = (_integer(said.get(key)) for key in (b"tokens_max", b"step_max", b"time_max"))
    reached = None
    if tokens_max is not None and step_max is not None and time_max is not None:
        with contextlib.suppress(OverflowError):  # beyond the year 9999
            reached = Reached(EPOCH + dt.timedelta(milliseconds=time_max), step_max, tokens_max)
    return Sealed(
        "",
        _integer(said.get(b"tokens_min")),
        said.get(b"source_digest") if said.get(b"rows") != b"0" else None,
        _integer(said.get(b"seq_first")),
        reached,
        _names(said[b"names"]) if b"names" in said else None,
    )


def _integer(text: bytes | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)  # the same in most parts
def _names(text: bytes) -> frozenset[str] | None:
    try:
        return frozenset(json.loads(text))
    except (ValueError, TypeError):
        return None


def _read_end(path: str, most_bytes: int | None = None) -> tuple[bytes, int]:
    """Return the last bytes of a file, or all, and its size.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - pathlib makes an object of each of 10,000 names
        size = os.fstat(file.fileno()).st_size
        wanted = size if most_bytes is None else min(most_bytes, size)
        pieces: list[bytes] = []
        file.seek(size - wanted)
        while wanted and (piece := file.read(wanted)):
            pieces.append(piece)
            wanted -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces), size


def pages_fault(path: str) -> str:
    """Return why a Parquet file cannot be read, by reading it and the checksums of its pages; nothing when it can."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            file.read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is no text any more
        return str(error).partition("\n")[0]
    return ""


def _tail_fault(data: bytes, size: int) -> Sealed | None:
    if size < _PARQUET_LEAST_BYTES:
        return Sealed("is too short for a Parquet file")
    if data[-4:] != _PARQUET_MAGIC or int.from_bytes(data[-8:-4], "little") > size - _PARQUET_LEAST_BYTES:
        return Sealed("has no Parquet footer at its end")
    return None


def sealed_reached(path: str) -> Reached | None:
    """Return the last place in a sealed part that does not say it, from the statistics in its footer; None without."""
    last: dict[str, Any] = {}
    try:
        data, _ = _read_end(path, _FOOTER_BYTES)
        footer_bytes = int.from_bytes(data[-8:-4], "little") + _PARQUET_TAIL_BYTES
        if footer_bytes > len(data):
            data, _ = _read_end(path, footer_bytes)
        # Not `read_metadata`: finding out that a path is a path takes half of its time.
        with pq.ParquetFile(pa.BufferReader(_PARQUET_MAGIC + data)) as file:
            footer = file.metadata
        places = {name: footer.schema.names.index(name) for name in ("time", "step", "tokens")}
        for group in range(footer.num_row_groups):
            row_group = footer.row_group(group)
            for name, index in places.items():
                found = row_group.column(index).statistics.max_raw
                last[name] = found if name not in last else max(last[name], found)
        # As integers: pyarrow imports pandas to make a time. Another program's file may have another unit.
        kind = str(footer.schema.column(places["time"]).logical_type)
        per_s = next((per_s for unit, per_s in _UNITS_PER_S.items() if unit in kind), None)
        if per_s is None:
            return None
        time = EPOCH + dt.timedelta(microseconds=last["time"] * 1_000_000 // per_s)
        return Reached(time, last["step"], last["tokens"])
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, AttributeError):  # damage is types, too
        return None
