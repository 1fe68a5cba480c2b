"""One sync per root and tracker: real processes hold the lock, and are killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llmtrack.sync.watch.lock import BusyError, Owner, SyncLock, read_owner, root_key
from llmtrack.writer.errors import UsageError

_HOLD = """
import sys, time
from pathlib import Path
from llmtrack.sync.watch.lock import SyncLock
lock = SyncLock(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the state of one tracker lies; it is not there yet."""
    return tmp_path / "state" / "mlflow-1"


@pytest.fixture
def holder(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that watches."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder), str(tmp_path), "watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _owner_file(folder: Path, root: Path) -> Path:
    return folder / f"root-{root_key(root)}.owner"


def _write_owner(folder: Path, root: Path, owner: Owner, *, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = _owner_file(folder, root)
    path.write_text(json.dumps(asdict(owner)))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("mode", ["watch", "once"])
def test_a_second_sync_says_who_is_at_work_and_since_when(
    folder: Path, tmp_path: Path, holder: subprocess.Popen[str], mode: str
) -> None:
    """Another root, or another tracker, is nobody's business."""
    with pytest.raises(BusyError) as busy:
        SyncLock(folder, tmp_path, mode)
    owner = read_owner(_owner_file(folder, tmp_path))
    assert owner is not None
    assert f"process {holder.pid} on {owner.host}, since 2" in str(busy.value)
    (tmp_path / "other").mkdir()
    SyncLock(folder, tmp_path / "other", mode).release()
    SyncLock(folder.with_name("mlflow-2"), tmp_path, mode).release()


def test_the_lock_of_a_killed_process_is_taken_over(
    folder: Path, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """Its owner file is still there, and names a process that is not."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert read_owner(_owner_file(folder, tmp_path)) is not None
    with SyncLock(folder, tmp_path, "watch"):
        owner = read_owner(_owner_file(folder, tmp_path))
        assert owner is not None
        assert owner.pid == os.getpid()
    assert not _owner_file(folder, tmp_path).exists()


def test_those_that_sync_once_do_not_hinder_each_other(folder: Path, tmp_path: Path) -> None:
    """Each job of a night syncs its own run; a watch has the root for itself."""
    both = SyncLock(folder, tmp_path, "once"), SyncLock(folder, tmp_path, "once")
    with both[0], both[1], pytest.raises(BusyError, match="another llmtrack-sync"):
        SyncLock(folder, tmp_path, "watch")
    SyncLock(folder, tmp_path, "watch").release()


def test_a_root_by_another_name_is_the_same_root(folder: Path, tmp_path: Path) -> None:
    """A link, a dot, a slash at the end."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with SyncLock(folder, real, "watch"), pytest.raises(BusyError):
        SyncLock(folder, Path(f"{link}/."), "watch")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_living_process_is_known_by_its_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[str], number: int
) -> None:
    """A process that has the number of a dead one does not count, nor does one from before the host was started."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    there = read_owner(_owner_file(folder, tmp_path))
    assert there is not None
    with pytest.raises(BusyError, match=f"process {holder.pid} "):
        SyncLock(folder, tmp_path, "watch")
    for gone in (
        replace(there, started=there.started - 1),
        replace(there, boot="earlier"),
        replace(there, pid=2**22 + 1),
    ):
        _write_owner(folder, tmp_path, gone)
        SyncLock(folder, tmp_path, "watch").release()


def test_a_process_that_began_anew_keeps_its_lock(folder: Path, tmp_path: Path) -> None:
    """It has the same number and the same start."""
    _write_owner(folder, tmp_path, Owner.me("watch"))
    SyncLock(folder, tmp_path, "watch").release()


def test_another_host_lives_as_long_as_it_writes(folder: Path, tmp_path: Path) -> None:
    """Nobody here can ask for its process; the time of its file and of ours are by one clock."""
    there = replace(Owner.me("watch"), host="login2", pid=77)
    _write_owner(folder, tmp_path, there, age_s=60)
    with pytest.raises(BusyError, match=r"process 77 on login2, since 2.*\n.*gone, try again in 120 s"):
        SyncLock(folder, tmp_path, "watch")
    _write_owner(folder, tmp_path, there, age_s=600)
    SyncLock(folder, tmp_path, "watch").release()


def test_an_owner_that_was_displaced_by_another_host_is_told(folder: Path, tmp_path: Path) -> None:
    """It was thought dead, because its storage hung for minutes."""
    with SyncLock(folder, tmp_path, "watch") as lock:
        lock._beat_at_s = 0.0
        lock.beat()
        _write_owner(folder, tmp_path, replace(Owner.me("watch"), host="login2"))
        lock._beat_at_s = 0.0
        with pytest.raises(BusyError, match="login2"):
            lock.beat()
    assert _owner_file(folder, tmp_path).exists()  # not ours to remove


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": "a"}', b"\xff\xfe"])
def test_a_damaged_owner_file_counts_as_none(folder: Path, tmp_path: Path, content: bytes) -> None:
    """A disk that was full, or somebody's editor."""
    folder.mkdir(parents=True)
    _owner_file(folder, tmp_path).write_bytes(content)
    with SyncLock(folder, tmp_path, "watch"):
        assert read_owner(_owner_file(folder, tmp_path)) is not None


def test_a_state_folder_that_is_a_file_is_the_users_mistake(tmp_path: Path) -> None:
    """And the remedy is named."""
    (tmp_path / "state").write_text("")
    with pytest.raises(UsageError, match="--state DIR"):
        SyncLock(tmp_path / "state" / "mlflow-1", tmp_path, "watch")
