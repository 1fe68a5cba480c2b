"""One sync per root and tracker: who is at it, since when, and whether that process still lives.

    STATE/<sink>-<digest of the tracker>/root-<digest of the root>.lock     held with flock, and empty
    STATE/<sink>-<digest of the tracker>/root-<digest of the root>.owner    who: JSON, rewritten while it lives

The kernel lets go of a lock when its process dies, however it dies. Where a file system has no locks, or has them for
one host only, the owner file decides: a process of this host is asked for by its number and its start, so that another
one with the same number does not count; one of another host lives as long as it rewrites the file, by the file
server's own clock. Nothing but work depends on it: what two syncs send at a time is in the tracker once all the same.
"""

from __future__ import annotations

import datetime as dt
import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.publish import publish

BEAT_S: Final = 15.0  # how often an owner says that it lives
_DEAD_S: Final = 120.0  # of another host, without a word: attributes are up to a minute old, and a beat may be late
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_CLOCK_TICKS_FIELD: Final = 19  # start of a process in /proc/PID/stat, counted behind its name


class BusyError(UsageError):
    """Another sync is at work on the same root and tracker."""


@dataclass(frozen=True)
class Owner:
    """A process that syncs.

    Attributes:
        host: Its host.
        boot: Which start of that host.
        pid: Its number there.
        started: When it started, in the kernel's ticks: with `pid` and `boot` it means one process and no other.
        since: ISO 8601, UTC.
        mode: watch or once.
    """

    host: str
    boot: str
    pid: int
    started: int
    since: str
    mode: str

    @classmethod
    def me(cls, mode: str) -> Owner:
        """Return this process."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()) or 0, now, mode)

    def lives(self) -> bool | None:
        """Return whether the process runs; None when it is of another host."""
        if self.host != socket.gethostname():
            return None
        return self.boot == _boot() and _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def root_key(root: Path) -> str:
    """Return what stands for a root in the names of files."""
    return hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


class SyncLock:
    """Holds a root and a tracker for this process; a context manager.

    Args:
        folder: Of the tracker, in the state folder.
        root: The folder of the runs.
        mode: watch: nobody else may sync; once: others that sync once may.

    Raises:
        BusyError: Somebody else has it; says who, and since when.
        UsageError: The state folder cannot be used.
    """

    def __init__(self, folder: Path, root: Path, mode: str) -> None:
        self._file = folder / f"root-{root_key(root)}.lock"
        self._owner_file = self._file.with_suffix(".owner")
        self._root = root
        self._me = Owner.me(mode)
        self._beat_at_s = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def beat(self) -> None:
        """Say that this process lives; does so now and then, however often it is called.

        Raises:
            BusyError: Another host has taken it meanwhile.
        """
        if self._me.mode != "watch" or time.monotonic() < self._beat_at_s:
            return
        there = read_owner(self._owner_file)
        if there is not None and there != self._me and there.lives() is not False:
            raise self._busy(there)
        with suppress(OSError):  # the folder of the state is full or away: others find out by the next beat
            self._write()

    def release(self) -> None:
        """Let go."""
        if self._fd < 0:
            return
        if self._me.mode == "watch" and read_owner(self._owner_file) == self._me:
            with suppress(OSError):
                self._owner_file.unlink()
        os.close(self._fd)
        self._fd = -1

    def _take(self) -> None:
        is_watch = self._me.mode == "watch"
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_EX if is_watch else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy(read_owner(self._owner_file)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        there = read_owner(self._owner_file)
        if there is not None:
            lives = there.lives()
            is_me = lives and there.pid == os.getpid()  # in an earlier life
            if not is_me and (lives or (lives is None and not self._is_quiet(there))):
                raise self._busy(there)
        if is_watch:
            try:
                self._write()
            except OSError as error:
                raise _unusable(self._file.parent, error) from error

    def _is_quiet(self, owner: Owner) -> bool:
        """Return whether an owner on another host has not written for long, by the clock that both files have."""
        probe = self._owner_file.with_name(f".{uuid4().hex}.tmp")
        try:
            probe.touch()
            age_s = probe.stat().st_mtime - self._owner_file.stat().st_mtime
        except OSError:
            return read_owner(self._owner_file) != owner
        finally:
            probe.unlink(missing_ok=True)
        return age_s > _DEAD_S

    def _write(self) -> None:
        publish(self._owner_file, json.dumps(asdict(self._me)).encode())
        self._beat_at_s = time.monotonic() + BEAT_S

    def _busy(self, owner: Owner | None) -> BusyError:
        who = f"llmtrack-sync --watch, {owner}," if owner else "another llmtrack-sync (one that ends by itself)"
        hint = "wait for it to end, or end it"
        if owner is not None and owner.lives() is None:
            hint = f"end it there; if that host is gone, try again in {_DEAD_S:.0f} s"
        return BusyError(f"{who} is at work on {self._root} and this tracker", hint=hint)


def read_owner(path: Path) -> Owner | None:
    """Return who wrote an owner file; None when there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
        return Owner(
            host=str(content["host"]),
            boot=str(content["boot"]),
            pid=int(content["pid"]),
            started=int(content["started"]),
            since=str(content["since"]),
            mode=str(content["mode"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when a process of this host started, in ticks since the boot; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[_CLOCK_TICKS_FIELD])
    except (OSError, ValueError, IndexError):
        return 0 if _is_there(pid) else None


def _is_there(pid: int) -> bool:
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the state folder {folder} cannot be used: {error.strerror or error}",
        hint="give a writable folder with --state DIR",
    )
