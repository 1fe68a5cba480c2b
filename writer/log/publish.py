"""The one way in which a whole file appears in a root; nobody else calls rename."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final
from uuid import uuid4

# What a file system answers that cannot fsync a folder; it has then nothing to offer that we could wait for.
_NO_FOLDER_FSYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


def publish(path: Path, data: bytes | memoryview, *, check: Callable[[Path], None] | None = None) -> None:
    """Make a file appear whole, durable and at once, or not at all.

    It is written under a hidden name that ends in ``.tmp``, which no glob for ``*.parquet`` matches, fsynced, renamed,
    and its folder fsynced. A file that has the name already is replaced as atomically. A process that is killed leaves
    at most a ``.tmp`` behind.

    Args:
        path: Where it appears; the folder exists.
        data: All of its bytes.
        check: Called with the temporary file when it is on storage; what this raises keeps the file from appearing.

    Raises:
        OSError: The storage refused; nothing appeared and the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb", buffering=0) as file:  # not mkstemp: nobody else could read its 0o600
            _write_all(file, memoryview(data))
            os.fsync(file.fileno())
        if check is not None:
            check(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_all(file: FileIO, rest: memoryview) -> None:
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError(errno.EAGAIN, "the storage took no byte")
        rest = rest[written:]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: The storage failed; a file system without fsync for folders is no failure.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(fd)
