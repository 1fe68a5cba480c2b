"""Single files and folders of a log, looked at without opening more than needed."""

from __future__ import annotations

import datetime as dt
import errno
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
from llmtrack.writer.log.seal import CHECK_KEY, DIGEST_KEY, OURS, digest_of

from .columns import EPOCH

# What a file system says of a path that was there a moment ago; ESTALE is NFS.
VANISHED: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})

_PARQUET_MAGIC: Final = b"PAR1"
_PARQUET_TAIL_BYTES: Final = 8  # the length of the footer, and the magic number
_PARQUET_LEAST_BYTES: Final = 12
# How Thrift writes the key in the footer and, behind it, the eight characters of the value.
_CHECK: Final = CHECK_KEY.encode() + b"\x18\x08"
_TOKENS_MIN: Final = re.compile(rb"llmtrack\.tokens_min\x18[\x01-\x13](\d{1,19})")
_DIGEST: Final = re.compile(DIGEST_KEY.encode().replace(b".", rb"\.") + rb"\x18\x20([0-9a-f]{32})")
_NO_ROWS: Final = b"llmtrack.rows\x18\x010"
_UNITS_PER_S: Final = {"milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_FOOTER_BYTES: Final = 64 << 10  # of most sealed parts; a larger footer is read by itself


class Sealed(NamedTuple):
    """What a look at a Parquet file says.

    Attributes:
        fault: Why it cannot be read, or must not be; nothing when it can.
        first_tokens: The lowest tokens in it; None when it does not say.
        digest: Of its rows; None when it does not say, or has none.
    """

    fault: str
    first_tokens: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True)
class Reached:
    """How far a segment is known to have come, and how many points it had to drop on the way, if it said so."""

    time: dt.datetime
    step: int
    tokens: int
    dropped: int | None = None


@dataclass
class Listing:
    """The files of one segment.

    Attributes:
        open: Open parts by table and number.
        sealed: Numbers of the sealed parts of metrics.
        has_heartbeat: Whether there is a heartbeat, whatever is in it.
    """

    open: dict[tuple[str, int], str] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    has_heartbeat: bool = False


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
    for name in list_names(folder):
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
    """Look at the end of a Parquet file, and parse its footer: what passes, DuckDB can open."""
    return _look_at_end(path, parse=True)


def _look_at_end(path: str, *, parse: bool) -> Sealed:
    try:
        data, size = _read_end(path, _FOOTER_BYTES)
    except OSError as error:
        return Sealed(os.strerror(error.errno or 0))
    if fault := _tail_fault(data[-_PARQUET_TAIL_BYTES:], size):
        return Sealed(fault)
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    if footer_bytes + _PARQUET_TAIL_BYTES > len(data):
        data, _ = _read_end(path, footer_bytes + _PARQUET_TAIL_BYTES)
    if parse:
        try:
            pq.ParquetFile(pa.BufferReader(_PARQUET_MAGIC + data)).close()
        except (pa.ArrowException, OSError, ValueError) as error:
            return Sealed(str(error).partition("\n")[0])
    return Sealed("", *_promises(data[-_PARQUET_TAIL_BYTES - footer_bytes :]))


def check_sealed(path: str) -> Sealed:
    """Compare the checksum over all bytes of a sealed part, or of a file of evals.

    DuckDB does not look at the checksums of pages: it takes a changed byte for a value.
    """
    try:
        data, _ = _read_end(path)
    except OSError as error:
        return Sealed(os.strerror(error.errno or 0))
    if fault := _tail_fault(data[-_PARQUET_TAIL_BYTES:], len(data)):
        return Sealed(fault)
    footer_begin = len(data) - _PARQUET_TAIL_BYTES - int.from_bytes(data[-8:-4], "little")
    footer = data[footer_begin:]
    at = footer.rfind(_CHECK)
    if at < 0:  # another program's, whose pages may have checksums
        fault = "fails its checksum" if OURS in footer else pages_fault(path)
        return Sealed(fault, None, None if fault else digest_of(Path(path)))
    digits = footer_begin + at + len(_CHECK)
    whole = memoryview(data)
    crc = zlib.crc32(whole[digits + 8 :], zlib.crc32(b"00000000", zlib.crc32(whole[:digits])))
    is_intact = f"{crc:08x}".encode() == data[digits : digits + 8]
    return Sealed("" if is_intact else "fails its checksum", *_promises(footer))


def _promises(footer: bytes) -> tuple[int | None, bytes | None]:
    """Return the lowest tokens and the digest that a footer has, without parsing it: a tenth of a millisecond."""
    first, digest = _TOKENS_MIN.search(footer), _DIGEST.search(footer)
    has_rows = digest is not None and _NO_ROWS not in footer
    return int(first[1]) if first else None, digest[1] if digest is not None and has_rows else None


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


def _tail_fault(tail: bytes, size: int) -> str:
    if size < _PARQUET_LEAST_BYTES:
        return "is too short for a Parquet file"
    if tail[4:] != _PARQUET_MAGIC or int.from_bytes(tail[:4], "little") > size - _PARQUET_LEAST_BYTES:
        return "has no Parquet footer at its end"
    return ""


def sealed_first_seq(path: str) -> int | None:
    """Return the lowest `seq` of a sealed part from its footer; None when it does not say."""
    try:
        return int((pq.read_metadata(path).metadata or {})[b"llmtrack.seq_first"])
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None


def sealed_reached(path: str) -> Reached | None:
    """Return the last place in a sealed part from the statistics in its footer; None when it has none."""
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
