"""Faults that are real: storage whose system calls fail, processes that are killed, bytes that are changed."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

_HERE = Path(__file__).parent / "crash"
_PATIENCE_S = 120.0  # for what must happen; nothing is asserted about how fast

# As small as they can be, so that a test meets every limit with few rows.
TINY: dict[str, Any] = {"flush_interval_s": 0.02, "fsync_interval_s": 0.05}


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Have the kernel refuse, with EFBIG, every write of this process beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of a few bytes that can be filled up; skips the test where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def unprivileged(*command: str) -> list[str]:
    """Return a command for which modes of files hold, as they do not for root."""
    drop = "import ctypes, os, sys; [ctypes.CDLL(None).prctl(24, capability) for capability in (1, 2)]; "
    return [sys.executable, "-c", f"{drop}os.execv(sys.argv[1], sys.argv[1:])", *command]


def wait_until(happened: Callable[[], Any], what: str) -> Any:
    """Wait until something holds, and return it."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not (result := happened()):
        assert time.monotonic() < deadline_s, f"did not happen: {what}"
        time.sleep(0.005)
    return result


@dataclass(frozen=True)
class Operation:
    """One system call on a file below the root; `result` is negative for an errno."""

    pid: int
    name: str
    result: int
    path: str


class _Disk:
    """What of a file system survives a loss of power, as far as the calls of a process have asked for it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.durable_names: set[str] = set()
        self.durable_bytes: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._begun: dict[str, tuple[int, set[str]]] = {}  # at the last beginning of an fsync

    def replay(self, done: Operation) -> None:
        """Take account of one operation that succeeded."""
        path = done.path
        match done.name:
            case "open" | "mkdir":
                self.names.add(path)
            case "write":
                self._bytes[path] = self._bytes.get(path, 0) + done.result
            case "syncing":
                below = {name for name in self.names if name.rpartition("/")[0] == path}
                self._begun[path] = (self._bytes.get(path, 0), below)
            case "fsync":
                self.durable_bytes[path], below = self._begun[path]
                self.durable_names |= below & self.names
            case "rename":
                to = f"{path.rpartition('/')[0]}/{path.rpartition('/')[2].split('.')[1]}.parquet"
                self.names = self.names - {path} | {to}
                self.durable_names.discard(path)
                self.durable_bytes[to] = self.durable_bytes.get(path, 0)
            case "unlink":
                self.names.discard(path)
                self.durable_names.discard(path)


class Storage:
    """Storage below a folder that fails as told; see `crash/faultfs.c` for the rules."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.root = folder / "root"
        self._control = folder / "control"
        self._log = folder / "operations"
        self._generation = 0
        self.root.mkdir()
        self.heal()
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTFS_ROOT": str(self.root),
            "FAULTFS_CONTROL": str(self._control),
            "FAULTFS_LOG": str(self._log),
        }

    def fail(self, *rules: str) -> None:
        """Follow these rules from now on, and no earlier ones: ``operation action value [times [after [path]]]``."""
        self._generation += 1
        lines = [" ".join([*rule.split(), *["0", "0", "0", "*"][len(rule.split()) - 2 :]]) for rule in rules]
        new = self._control.with_suffix(".new")
        new.write_text("\n".join([str(self._generation), *lines]) + "\n")
        new.rename(self._control)

    def heal(self) -> None:
        """Work again; what hangs goes on."""
        self.fail()

    def operations(self, name: str | None = None, *, path: str = "") -> list[Operation]:
        """Return what was done since the log was last forgotten, filtered by name and a part of the path."""
        return [
            done
            for done in self._all_operations()
            if done.name != "syncing" and name in (None, done.name) and path in done.path
        ]

    def _all_operations(self) -> list[Operation]:
        if not self._log.exists():
            return []
        fields = (line.split(" ", 3) for line in self._log.read_text().splitlines())
        return [Operation(int(pid), name, int(result), path) for pid, name, result, path in fields]

    def lose_power(self) -> None:
        """Take away what no fsync has made durable, bytes and names; what was removed is gone at once."""
        disk = _Disk()
        for done in self._all_operations():
            if done.result >= 0:
                disk.replay(done)
        for path in sorted(self.root.rglob("*"), reverse=True):
            if str(path) not in disk.durable_names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_file() and path.name != "heartbeat.json":
                os.truncate(path, min(disk.durable_bytes.get(str(path), 0), path.stat().st_size))

    def forget(self) -> None:
        """Start the list of operations afresh."""
        self._log.unlink(missing_ok=True)

    def wait_for(self, name: str, *, path: str = "", times: int = 1, failed: bool = False) -> None:
        """Wait until an operation was seen often enough."""
        wait_until(
            lambda: sum(done.result < 0 or not failed for done in self.operations(name, path=path)) >= times,
            f"{name} {path} in {[(done.name, done.result, done.path) for done in self.operations()]}",
        )


class TrainerDiedError(Exception):
    """The training process ended before it answered; `status` is negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with {status}")
        self.status = status


class Trainer:
    """A training process of its own; see `crash/trainer.py` for what it can do."""

    def __init__(self, trainers: Trainers, requests: BinaryIO, answers: BinaryIO, stderr: Path) -> None:
        self._trainers = trainers
        self._requests = requests
        self._answers = answers
        self._stderr = stderr
        self.status: int | None = None
        self.pid: int = self.answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that has the process do something and gives its answer."""
        return functools.partial(self._request, name)

    def _request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.send(name, *args, **kwargs)
        return self.answer()

    def send(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Have the process do something, and do not wait for its answer."""
        data = pickle.dumps((name, args, kwargs))
        with suppress(BrokenPipeError):  # it has died, as its answer will say
            self._requests.write(len(data).to_bytes(8, "little") + data)

    def answer(self) -> Any:
        """Return the answer to what was sent.

        Raises:
            TrainerDiedError: The process has ended.
            Exception: What the process raised.
        """
        ready, _, _ = select.select([self._answers], [], [], _PATIENCE_S)
        assert ready, "the training process did not answer"
        size = int.from_bytes(self._answers.read(8), "little")
        data = self._answers.read(size)
        if not size or len(data) < size:
            if self.status is None:
                self.status = self._trainers.read_status()
                self._requests.close()
                self._answers.close()
            raise TrainerDiedError(self.status)
        kind, value = pickle.loads(data)  # noqa: S301  # from our own child
        if kind == "raised":
            raise value
        return value

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end of the process, and return its status."""
        while self.status is None:
            with suppress(TrainerDiedError):
                self.answer()
        return self.status

    def end(self) -> None:
        """Make sure that the process is gone."""
        if self.status is None:
            with suppress(ProcessLookupError):
                self.kill()
            self.wait()

    def leave(self) -> int:
        """Let the interpreter end as after the last line of a script, and return the status."""
        self._request("exit")
        return self.wait()

    def warnings(self) -> list[str]:
        """Return what the process printed on stderr, a line each."""
        return self._stderr.read_text().splitlines() if self._stderr.exists() else []


class Trainers:
    """A process with llmtrack loaded that forks trainers, one at a time: a fork costs less than an interpreter."""

    def __init__(self, storage: Storage) -> None:
        folder = storage.root.parent  # in no checkout: asking git about one takes longer than a test
        script = shutil.copy(_HERE / "trainer.py", folder)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            # Python 3.12 warns of every fork beside threads: forking trainers is what these tests are about.
            [
                sys.executable,
                "-W",
                "error",
                "-W",
                "ignore:This process:DeprecationWarning",
                script,
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            cwd=folder,
            env={**os.environ, **storage.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    def fork(self, stderr: Path) -> Trainer:
        """Start a training process."""
        their_requests, our_requests = os.pipe()
        our_answers, their_answers = os.pipe()
        socket.send_fds(self._socket, [pickle.dumps({"stderr": str(stderr)})], [their_requests, their_answers])
        os.close(their_requests)
        os.close(their_answers)
        requests, answers = open(our_requests, "wb", buffering=0), open(our_answers, "rb")  # noqa: PTH123, SIM115  # pipes
        return Trainer(self, requests, answers, stderr)

    def read_status(self) -> int:
        """Return how the last training process ended."""
        data = self._socket.recv(1 << 16)
        assert data, "the process that forks trainers has died"
        status: int = pickle.loads(data)  # noqa: S301  # from our own child
        return status

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait(_PATIENCE_S)


@functools.cache
def _storage() -> tuple[Storage, Trainers]:
    """Return the storage and the trainers of this test session; both end with it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("storage that fails on request needs Linux and a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="llmtrack-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "faultfs.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(_HERE / "faultfs.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    storage = Storage(folder, library)
    trainers = Trainers(storage)
    atexit.register(trainers.close)
    return storage, trainers


@contextmanager
def failing_storage() -> Iterator[tuple[Storage, Callable[..., Trainer]]]:
    """Yield storage that works and is empty, and what starts a training process on it; ends what was started."""
    storage, trainers = _storage()
    storage.heal()
    storage.forget()
    started: list[Trainer] = []

    def start() -> Trainer:
        trainer = trainers.fork(storage.root.parent / f"stderr-{len(started)}")
        started.append(trainer)
        return trainer

    try:
        yield storage, start
    finally:
        storage.heal()
        for trainer in started:
            trainer.end()
        for left in storage.root.parent.glob("stderr-*"):
            left.unlink()
        shutil.rmtree(storage.root)
        storage.root.mkdir()


def errno_of(name: str) -> int:
    """Return an errno by its name."""
    return int(getattr(errno, name))
