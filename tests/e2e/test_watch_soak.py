"""A watch among kills: of the trainer, of itself, of its tracker; with people who query all along.

The short form runs with the other tests. The long one is behind the marker `soak`, and lasts `SOAK_S` seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmtrack import query
from llmtrack.sync.mlflow.sink import MlflowSink
from tests.faults import wait_until
from tests.wandb_server import KEY, WandbServer
from tests.watching import Curves, Key, difference, expected, stored

_TRAINER = Path(__file__).with_name("watched.py")
_SYNC = (sys.executable, "-c", "from llmtrack.sync.cli import main; main()")
_ENOUGH_S = 600.0  # for what must happen at the end; nothing is asserted about how fast


@dataclass
class Count:
    """What was done to whom, for the documents."""

    trainers: int = 0
    rollbacks: int = 0
    forks: int = 0
    syncs_killed: int = 0
    outages: int = 0
    queries: int = 0
    errors: list[str] = field(default_factory=list)


class World:
    """A root, a database behind a tracker, and everybody who is at work on them."""

    to = "mlflow"

    def __init__(self, folder: Path, seed: int, life_s: tuple[float, float]) -> None:
        self.random = random.Random(seed)
        self.life_s = life_s
        self.root, self.checkpoints = folder / "root", folder / "checkpoints"
        self.root.mkdir()
        self.checkpoints.mkdir()
        self.database = folder / "mlflow.db"
        self.uri = f"sqlite:///{self.database}"
        self.state = folder / "state"
        self.log = folder / "sync.log"
        self.count = Count()
        self.over = threading.Event()
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_DISABLE_TELEMETRY": "true"}

    # The trainer.

    def train(self) -> None:
        """Start, kill and resume training, each time in another way, until it is over."""
        while not self.over.is_set():
            process = self._start(0, **self._choose())
            self.over.wait(self.random.uniform(*self.life_s))
            process.send_signal(self.random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            process.wait()
            self.count.trainers += 1
        files = sorted(self.checkpoints.glob("*.json"), key=lambda file: file.stat().st_mtime)
        status = self._start(30, **({"RESUME": str(files[-1])} if files else {})).wait()
        if status:
            self.count.errors.append(f"the last trainer ended with {status}")

    def _choose(self) -> dict[str, str]:
        files = sorted(self.checkpoints.glob("*.json"), key=lambda file: file.stat().st_mtime)
        if not files:
            return {}
        how = self.random.random()
        if how < 0.6:
            return {"RESUME": str(files[-1])}
        if how < 0.7:
            self.count.forks += 1
            return {"RESUME": str(files[-1]), "RECIPE": str(self.random.random())}
        self.count.rollbacks += 1
        older = str(self.random.choice(files[-6:]))
        return {"RESUME": older, "ON_ROLLBACK": "continue" if how < 0.85 else "fork"}

    def _start(self, rows: int, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_TRAINER), str(self.root), str(self.checkpoints), "soak", "20", str(rows)]
        with self.log.with_name("trainer.log").open("ab") as log:
            return subprocess.Popen(command, env=self.environment | environment, stdout=log, stderr=log)

    # The sync.

    def sync(self) -> subprocess.Popen[bytes]:
        """Start a watch."""
        place = ["--to", self.to, "--tracking-uri", self.uri, "--state", str(self.state)]
        options = ["--watch", "--json", "--timeout", "5", "--stalled-after", "5", "--lost-after", "600"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*_SYNC, str(self.root), *place, *options], env=self.environment, stdout=log, stderr=log
            )

    def status(self) -> list[dict[str, object]]:
        """Ask how far it is."""
        done = subprocess.run(
            [*_SYNC, "status", str(self.root), "--state", str(self.state), "--json"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return list(json.loads(done.stdout))

    # The readers.

    def read(self) -> None:
        """Query again and again: nothing fails, and nothing that was there is gone."""
        points = 0
        try:
            with contextlib.closing(query.connect(self.root)) as con:
                while not self.over.wait(0.2):
                    query.refresh(con)
                    (now,) = con.execute("SELECT count(*) FROM metrics").fetchone() or (0,)
                    assert now >= points, f"{points} points, and then {now}"
                    points = now
                    con.execute("SELECT status, tokens FROM runs").fetchall()
                    self.count.queries += 1
        except Exception as error:  # noqa: BLE001 - raised by the test
            self.count.errors.append(repr(error))

    def stored(self) -> Curves:
        """Return what the tracker holds."""
        return stored(self.database)

    def left(self) -> dict[Key, tuple[int, int]]:
        """Return where the tracker holds anything else than what the files say."""
        return difference(expected(self.root), self.stored())

    def is_there(self) -> bool:
        """Return whether the tracker holds exactly what the files say."""
        return not self.left()


class WandbWorld(World):
    """The same with a W&B server in the test's own memory."""

    to = "wandb"

    def __init__(self, folder: Path, seed: int, life_s: tuple[float, float], server: WandbServer) -> None:
        super().__init__(folder, seed, life_s)
        self.server, self.uri = server, server.url
        self.environment |= {"WANDB_API_KEY": KEY, "WANDB_DIR": str(folder), "WANDB_ERROR_REPORTING": "false"}

    def stored(self) -> Curves:
        """Return what the tracker holds."""
        curves: Curves = {}
        hidden = {"tokens_seen", "step", "_timestamp", "_step", "_runtime", "segment", "checkpoint"}
        for run in self.server.find("watched"):
            about = run.about
            if about["kind"] == "replaced":
                continue
            key = str(about["run_id"]), str(about["kind"]), about.get("segment")
            assert key not in curves, f"twice there: {key}"
            curves[key] = Counter(
                (name, row["tokens_seen"], round(row["_timestamp"] * 1000), value)
                for row in run.rows
                for name, value in row.items()
                if name not in hidden and not name.startswith("alert/")
            )
        return curves


def _until_it_is_there(world: World) -> None:
    deadline_s = time.monotonic() + _ENOUGH_S
    # What is in the database is not accepted before its answer has come.
    while (left := world.left()) or any(row["waiting"] for row in world.status()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{left}\n{world.status()}\n{world.log.read_text()[-4000:]}")
        time.sleep(0.5)  # between two looks: another process is waited for, which tells nobody


def _once_more(world: World) -> None:
    """A sync of its own finds nothing to send."""
    place = ["--to", world.to, "--tracking-uri", world.uri, "--state", str(world.state), "--lost-after", "600"]
    done = subprocess.run(
        [*_SYNC, str(world.root), *place, "--json"], env=world.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [row for row in json.loads(done.stdout) if row["points_sent"] or row["error"]] == []


@contextlib.contextmanager
def _at_work(world: World) -> Iterator[list[threading.Thread]]:
    threads = [threading.Thread(target=world.train), threading.Thread(target=world.read)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        world.over.set()
        for thread in threads:
            thread.join()


def _lock_out(database: Path, seconds: float) -> None:
    """Let nobody write to a database for a while."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=60)) as con:
        con.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)  # the outage itself
        con.execute("ROLLBACK")


def test_after_kills_and_an_outage_the_tracker_holds_what_the_path_says(tmp_path: Path) -> None:
    """The trainer restarts, rolls back and forks; the watch is killed twice; the database is locked for a while."""
    seed = random.SystemRandom().randrange(1_000_000)
    print("seed", seed)  # noqa: T201 - shown on failure
    world = World(tmp_path, seed, (3.0, 6.0))
    sink = MlflowSink(world.uri, timeout_s=60)
    sink.open()
    sink.close()
    sync = world.sync()
    try:
        with _at_work(world):
            wait_until(lambda: stored(world.database), "something is there")
            sync.kill()
            sync.wait()
            sync = world.sync()
            _lock_out(world.database, world.random.uniform(5, 10))
            sync.kill()
            sync.wait()
            sync = world.sync()
            wait_until(lambda: world.count.trainers >= 6, "it was restarted some times")
        assert world.count.errors == []
        _until_it_is_there(world)
        sync.send_signal(signal.SIGTERM)
        assert sync.wait() == 0, world.log.read_text()[-4000:]
    finally:
        sync.kill()
        sync.wait()
    _once_more(world)
    assert world.is_there()


# --- the long form ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(world: World, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = world.environment | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (world.database.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--backend-store-uri", f"sqlite:///{world.database}"],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=world.database.parent,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.soak
def test_for_long_and_with_a_server_that_comes_and_goes(tmp_path: Path) -> None:
    """As above, with a real server that is killed too, for `SOAK_S` seconds (600)."""
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1_000_000)
    world = World(tmp_path, seed, (5.0, 40.0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world.uri = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + float(os.environ.get("SOAK_S", "600"))
    stack = contextlib.ExitStack()
    stack.enter_context(_server(world, port))
    wait_until(lambda: _answers(port), "the server answers")
    sync = world.sync()
    try:
        with _at_work(world):
            while time.monotonic() < until_s:
                world.over.wait(world.random.uniform(5, 30))
                if world.random.random() < 0.6:
                    sync.kill()
                    sync.wait()
                    sync = world.sync()
                    world.count.syncs_killed += 1
                if world.random.random() < 0.3:
                    stack.close()
                    world.over.wait(world.random.uniform(1, 20))
                    stack.enter_context(_server(world, port))
                    world.count.outages += 1
        assert world.count.errors == []
        _until_it_is_there(world)
        sync.send_signal(signal.SIGTERM)
        assert sync.wait() == 0, world.log.read_text()[-4000:]
        _once_more(world)
        assert world.is_there()
    finally:
        sync.kill()
        sync.wait()
        stack.close()
    _print(world, seed)


def _print(world: World, seed: int) -> None:
    there = world.stored()
    points = sum(sum(curve.values()) for curve in there.values())
    runs = len({key[0] for key in there})
    print(f"seed {seed}: {world.count}; {runs} runs, {len(there)} in the tracker, {points} points")  # noqa: T201


@pytest.mark.soak
def test_into_weights_and_biases_for_long_with_a_server_that_comes_and_goes(tmp_path: Path) -> None:
    """As above, into the other tracker, whose client has processes of its own, for `SOAK_S` seconds (600)."""
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1_000_000)
    until_s = time.monotonic() + float(os.environ.get("SOAK_S", "600"))
    with WandbServer(remember=False) as server:
        world = WandbWorld(tmp_path, seed, (5.0, 40.0), server)
        sync = world.sync()
        try:
            with _at_work(world):
                while time.monotonic() < until_s:
                    world.over.wait(world.random.uniform(10, 40))
                    if world.random.random() < 0.5:
                        sync.kill()
                        sync.wait()
                        sync = world.sync()
                        world.count.syncs_killed += 1
                    if world.random.random() < 0.3:
                        server.down()
                        world.over.wait(world.random.uniform(1, 20))
                        server.up()
                        world.count.outages += 1
            assert world.count.errors == []
            _until_it_is_there(world)
            sync.send_signal(signal.SIGTERM)
            assert sync.wait() == 0, world.log.read_text()[-4000:]
            _once_more(world)
            assert world.is_there()
        finally:
            sync.kill()
            sync.wait()
        _print(world, seed)
