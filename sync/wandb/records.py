"""Reads the client's own files back, record by record: the SDK has no reader for them.

A ``.wandb`` file is 7 bytes of header, ``:W&B``, 0xBEE1 and 0, and then blocks of 32 KiB as in LevelDB's log: chunks of
CRC-32, length, kind (whole, first, middle, last) and payload; a record is one protobuf message.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any, Final

from llmtrack.writer.errors import FormatError

_HEADER: Final = b":W&B\xe1\xbe\x00"
_BLOCK_BYTES: Final = 32 * 1024
_CHUNK: Final = Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_payloads(path: Path) -> Iterator[bytes]:
    """Yield every record of a file as it lies there.

    Raises:
        FormatError: Something in it is not as it should be; what came before is.
    """
    with path.open("rb") as file:
        if file.read(len(_HEADER)) != _HEADER:
            raise FormatError(path, "no W&B file")
        begun: list[bytes] = []
        while True:
            at = file.tell()
            left = _BLOCK_BYTES - at % _BLOCK_BYTES
            if left < _CHUNK.size:
                file.seek(left, 1)
                continue
            head = file.read(_CHUNK.size)
            if not head:
                break
            if len(head) < _CHUNK.size:
                raise FormatError(path, "it ends within a chunk", offset=at)
            crc, size, kind = _CHUNK.unpack(head)
            payload = file.read(size)
            if len(payload) < size or zlib.crc32(bytes([kind]) + payload) != crc:
                raise FormatError(path, "a chunk fails its checksum", offset=at)
            if (kind in {_WHOLE, _FIRST}) == bool(begun):
                raise FormatError(path, "a record is not whole", offset=at)
            begun.append(payload)
            if kind in {_WHOLE, _LAST}:
                yield b"".join(begun)
                begun = []
        if begun:
            raise FormatError(path, "the last record is not whole", offset=path.stat().st_size)


ENDED: Final[dict[str, Any]] = {"_ended": True}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in their order, and `ENDED` where the client has ended it."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # made when it is imported

    for payload in read_payloads(path):
        record = messages.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "exit":
            yield ENDED
        elif kind == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
