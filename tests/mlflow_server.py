"""A real `mlflow server` on loopback, over SQLite or PostgreSQL, that a test can kill and start again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

_POSTGRES: Final = "/usr/lib/postgresql/*/bin/initdb"
_NOBODY: Final = "nobody"


def free_port() -> int:
    """Return a port on loopback that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class MlflowServer:
    """A server, running from `start` until `stop` or `kill`.

    Args:
        store: Where it keeps runs, as ``--backend-store-uri``.
        folder: Its current folder, and where it says what it does.
    """

    def __init__(self, store: str, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[str] | None = None
        self._drain: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return once it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
        command += ["--port", str(self._port), "--backend-store-uri", self._store]
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env=os.environ | settings,
            text=True,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if "startup complete" in line:
                break
        else:
            self._process.stderr.close()
            self._process.wait()
            raise AssertionError("".join(said))
        self._drain = _drain(self._process.stderr)

    def kill(self) -> None:
        """Let it die at once, with all of its workers."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._drain is None:
            return
        os.killpg(self._process.pid, number)
        self._process.wait()
        self._drain.wait()
        self._process = None


def _drain(stream: IO[str]) -> subprocess.Popen[bytes]:
    drain = subprocess.Popen(["cat"], stdin=stream, stdout=subprocess.DEVNULL)  # so that it never waits for us
    stream.close()
    return drain


@contextlib.contextmanager
def serving_mlflow(store: str, folder: Path) -> Iterator[MlflowServer]:
    """Run a server."""
    server = MlflowServer(store, folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def missing_postgres() -> str:
    """Return why there can be no PostgreSQL here; empty when there can."""
    if not _binaries():
        return "PostgreSQL's programs are not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _other_user() is None:
        return "PostgreSQL does not run as root, and there is no user nobody"
    return ""


@contextlib.contextmanager
def serving_postgres() -> Iterator[str]:
    """Run a PostgreSQL of our own on loopback, with an empty database; yields its address as SQLAlchemy takes it."""
    user = _other_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="llmtrack-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data, port = folder / "data", free_port()
        _run(["initdb", "-D", str(data), "-U", "llmtrack", "--auth=trust", "--no-sync"], user, folder)
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
        _run(["pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start"], user, folder)
        try:
            _run(["createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "llmtrack", "mlflow"], user, folder)
            yield f"postgresql+psycopg2://llmtrack@127.0.0.1:{port}/mlflow"
        finally:
            _run(["pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop"], user, folder)
    finally:
        shutil.rmtree(folder)


def _run(command: list[str], user: str | None, folder: Path) -> None:
    binaries = _binaries()
    assert binaries is not None
    with (folder / "said").open("ab") as said:
        done = subprocess.run(
            [binaries / command[0], *command[1:]],
            user=user,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, (folder / "said").read_text()


def _binaries() -> Path | None:
    found = sorted(Path("/").glob(_POSTGRES.lstrip("/")))
    if found:
        return found[-1].parent
    there = shutil.which("initdb")
    return Path(there).parent if there else None


def _other_user() -> str | None:
    import pwd

    for name in ("postgres", _NOBODY):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    return None
