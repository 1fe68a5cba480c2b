"""One table of one segment on storage that fails: parts are opened, appended to, given up and followed by new ones."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from errno import EAGAIN, EDQUOT, EINTR, ENOENT, ENOSPC
from pathlib import Path
from time import monotonic
from typing import Final

from llmtrack.writer.format import part_name

from .seal import sealed_last_seq
from .stream import PartWriter, fsync_named, last_seq_of

# Errors after which the same file handle works again; after any other a new part is opened.
_PASSING: Final = frozenset({ENOSPC, EDQUOT, EAGAIN, EINTR})
# A handle that died is replaced at once. When the next dies before anything of it is durable, the storage is ill, and
# each attempt may leave a file: they become rarer, but not so rare that a job that is told to end misses one.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0


@dataclass(frozen=True)
class SyncMark:
    """A promise to be checked: once `fd` is fsynced, the first `messages` messages of the part are durable."""

    appender: Appender
    writer: PartWriter
    messages: int
    fd: int


class Appender:
    """Appends messages to the newest part of one table, in a folder that this process alone created.

    A message is kept until it is known to be durable. When a handle dies (EIO, ESTALE, a folder that was removed) the
    part is left as it is, and all of it that was not yet durable goes into the next part again; readers take rows that
    stand in two parts from the later one. A part that somebody sealed meanwhile, because this process was silent for
    long, is durable: only what is not in the sealed part goes into the next one.

    Args:
        folder: The segment's folder; it and the run's are made again when somebody removed them.
        table: One of `SCHEMAS`.

    Attributes:
        opened_part: A part was opened, whose name in the folder is not durable yet; reset by whoever fsyncs the folder.
        made_folder: The folder was gone and was made again; reset by whoever restores its content.
    """

    def __init__(self, folder: Path, table: str) -> None:
        self.folder = folder
        self.table = table
        self.opened_part = False
        self.made_folder = False
        self._part = 0
        self._writer: PartWriter | None = None
        self._waiting: deque[bytes] = deque()
        self._unsynced: deque[bytes] = deque()
        self._unsynced_bytes = 0
        self._released = 0  # messages of this part that are no longer in `_unsynced`
        self._refused: OSError | None = None  # why the last part was given up
        self._pause_s = 0.0  # before the next part is opened, should this one be given up too
        self._open_from_s = 0.0

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that are written and not yet known to be durable, all of them kept in memory: the caller's to bound."""
        return self._unsynced_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes in the part that is open now."""
        return self._writer.bytes if self._writer else 0

    @property
    def part_batches(self) -> int:
        """Batches in the part that is open now."""
        return self._writer.batches if self._writer else 0

    def append(self, message: bytes) -> None:
        """Write a message, after those that wait.

        Raises:
            OSError: The storage refused. The message is kept; `flush` tries again.
        """
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Write every message that waits.

        Raises:
            OSError: The storage refused; call again later.
        """
        try:
            if self._writer is not None and not self._writer.is_linked():
                self.give_up_part()
            if self._writer is not None:
                self._writer.flush()
            while self._waiting:
                self._write(self._waiting.popleft())
        except OSError as error:
            if error.errno not in _PASSING:
                self.give_up_part(error)
            raise

    def _write(self, message: bytes) -> None:
        if self._writer is None:
            try:
                self._writer = self._open_part()
            except OSError:
                self._waiting.appendleft(message)
                raise
        # From here on the message belongs to the part, whatever part of it the storage takes now.
        self._unsynced.append(message)
        self._unsynced_bytes += len(message)
        self._writer.write(message)

    def _release_oldest(self) -> None:
        self._unsynced_bytes -= len(self._unsynced.popleft())
        self._released += 1

    def _open_part(self) -> PartWriter:
        if self._refused is not None and monotonic() < self._open_from_s:
            raise OSError(self._refused.errno, self._refused.strerror)
        if not self.folder.is_dir():
            # Not the root: where that is gone a file system is not mounted, and its mount point would be filled.
            self.folder.parent.mkdir(exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            self.made_folder = True
        part = self._part + 1
        try:
            writer = PartWriter(self.folder / part_name(self.table, part), self.table)
        except FileExistsError:
            self._part = part
            return self._open_part()
        self._part = part
        self._released = 0
        self.opened_part = True
        return writer

    def give_up_part(self, why: OSError | None = None) -> None:
        """Leave the open part as it is; what is not known to be durable goes into a new one.

        Args:
            why: What the storage said; None when the file is gone.
        """
        writer, self._writer = self._writer, None
        sealed_seq = -1 if writer is None else sealed_last_seq(writer.path)
        while self._unsynced and last_seq_of(self._unsynced[0]) <= sealed_seq:
            self._unsynced.popleft()
        self._waiting.extendleft(reversed(self._unsynced))
        self._unsynced.clear()
        self._unsynced_bytes = 0
        if writer is None:
            return
        self._refused = why or OSError(ENOENT, os.strerror(ENOENT))
        self._open_from_s = monotonic() + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        try:
            writer.close(ended=False)
            if not writer.bytes:  # nobody can have read anything in it
                writer.path.unlink()
                self._part -= 1
        except OSError:
            return  # the handle was dead already: that is why it is given up

    def end_part(self) -> Path | None:
        """Make the open part durable, close it, and return its path; the next message opens another.

        Raises:
            OSError: The storage refused; everything not yet durable waits for the next part.
        """
        self.flush()
        writer = self._writer
        if writer is None:
            return None
        try:
            writer.close()
        except OSError as error:
            self.give_up_part(error)
            raise
        self._writer = None
        self._unsynced.clear()
        self._unsynced_bytes = 0
        self._pause_s = 0.0
        return writer.path

    def sync(self) -> None:
        """Make everything that was appended durable before returning.

        Raises:
            OSError: The storage refused; everything not yet durable waits for the next part.
        """
        self.flush()
        mark = self.mark()
        if mark is None:
            return
        try:
            try:
                fsync_named(mark.fd)
            finally:
                os.close(mark.fd)  # may say, on NFS, what fsync did not
        except OSError as error:
            self.give_up_part(error)
            raise
        self.synced(mark)

    def mark(self) -> SyncMark | None:
        """Return what an fsync from now on makes durable, with a descriptor of its own that the caller closes."""
        if self._writer is None or not self._unsynced:
            return None
        whole = len(self._unsynced) - bool(self._writer.pending)
        return SyncMark(self, self._writer, self._released + whole, os.dup(self._writer.fileno()))

    def synced(self, mark: SyncMark) -> None:
        """Forget the messages that are durable now; of a part that was given up meanwhile all are written again."""
        while mark.writer is self._writer and self._released < mark.messages:
            self._release_oldest()
            self._pause_s = 0.0

    def sync_failed(self, mark: SyncMark, why: OSError) -> None:
        """Write again, in a new part, what the failed fsync should have made durable: its pages may be gone."""
        if mark.writer is self._writer:
            self.give_up_part(why)
