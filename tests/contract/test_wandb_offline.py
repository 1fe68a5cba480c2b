"""W&B's offline files: read back record by record with other code, and uploaded by the real ``wandb sync``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrack.sync.cli import main
from tests.contract.conftest import Log, evaluate, read_log
from tests.wandb_server import ENTITY, Run, WandbServer

wandb = pytest.importorskip("wandb", reason="the W&B client is not installed")


class Offline:
    """A log, and the folder of W&B's files."""

    def __init__(self, log: Log, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.log = log
        self.folder = folder
        self.state = folder.parent / "state"
        self._capsys = capsys

    @property
    def arguments(self) -> list[str]:
        """What every call of the command gets."""
        place = ["--wandb-offline", str(self.folder), "--state", str(self.state)]
        return [str(self.log.root), "--to", "wandb", *place, "--json"]

    def sync(self, expect: int = 0) -> list[dict[str, Any]]:
        """Run the command in this process."""
        with pytest.raises(SystemExit) as ended:
            main(self.arguments)
        out, err = self._capsys.readouterr()
        assert ended.value.code == expect, f"{out}{err}"
        return list(json.loads(out))

    def folders(self) -> list[Path]:
        """Return the folders that ``wandb sync`` is to take, in their order."""
        return sorted(self.folder.glob("wandb/offline-run-*"))

    def upload(self, server: WandbServer) -> dict[str, Run]:
        """Call ``wandb sync`` as a person would, and return the runs by id."""
        command = [sys.executable, "-m", "wandb", "sync", "-p", self.log.project, "-e", ENTITY]
        environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key}
        done = subprocess.run(
            [*command, *map(str, self.folders())],
            env=environment,
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {run.name: run for run in server.find(self.log.project)}


@pytest.fixture
def offline(log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Offline:
    """The log, and a folder that is not there yet."""
    return Offline(log, tmp_path / "offline", capsys)


def messages(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield field number and content of each record of a file, by the description of its layout alone."""
    content = path.read_bytes()
    assert content[:7] == b":W&B\xe1\xbe\x00"
    at, begun = 7, b""
    while at < len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        crc, size, kind = (
            int.from_bytes(content[at : at + 4], "little"),
            int.from_bytes(content[at + 4 : at + 6], "little"),
            content[at + 6],
        )
        payload = content[at + 7 : at + 7 + size]
        assert zlib.crc32(bytes([kind]) + payload) == crc
        begun += payload
        if kind in {1, 4}:
            fields = dict(_fields(begun))
            yield from (
                (number, body) for number, body in fields.items() if isinstance(body, bytes) and number not in {16, 200}
            )
            begun = b""
        at += 7 + size


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, with a decoder of protobuf's wire format and nothing of wandb."""
    rows = []
    for number, body in messages(path):
        if number == 2:  # Record.history
            items = [dict_of(item) for field, item in _fields(body) if field == 1]
            rows.append({_text(item.get(1) or item[2]): json.loads(item[16]) for item in items})
    return rows


def dict_of(body: Any) -> dict[int, Any]:
    """Return the fields of a message, the last of each number."""
    return dict(_fields(body))


def _text(body: Any) -> str:
    return bytes(body).decode()


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = body[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(body):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = varint() if key & 7 == 2 else (8 if key & 7 == 1 else 4)
            yield key >> 3, body[at : at + size]
            at += size


def logged(log: Log, belongs: Any) -> list[dict[str, Any]]:
    """Return the rows of the log, each call one."""
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    for row in read_log(log.root):
        if belongs(row):
            place = {"tokens_seen": row.tokens, "step": row.step, "segment": row.segment, "_timestamp": row.ms / 1000}
            calls.setdefault((row.segment, row.seq), place)[row.name] = row.value
    return list(calls.values())


def bare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what W&B adds."""
    return [{key: value for key, value in row.items() if key not in {"_step", "_runtime"}} for row in rows]


def test_the_files_hold_every_settled_row_and_upload_exactly(offline: Offline, wandb_server: WandbServer) -> None:
    """Several syncs, several files of one run: read with other code they hold the log, and so does the server then."""
    segment = offline.log.segment(config={"lr": 0.1, "model": {"d": 8}}).train(0, 3000).checkpoint(2000)
    offline.sync()
    segment.train(3000, 4000).checkpoint(3500)
    offline.log.segment(after=("run", 1, 3500)).train(3500, 5000).end("finished", 5000)
    offline.sync()
    evaluate(offline.log, "ckpt-1-2000", 0.25)
    offline.sync()
    assert offline.sync()[0]["points_sent"] == 0
    live = logged(offline.log, lambda row: row.segment == 2 or row.tokens <= 3500)
    left = logged(offline.log, lambda row: row.segment == 1 and row.tokens > 3500)
    files = [path for folder in offline.folders() for path in folder.glob("*.wandb")]
    by_run: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        by_run.setdefault(path.stem.removeprefix("run-"), []).extend(bare(rows_of(path)))
    told = [row for row in by_run["run"] if "checkpoint" in row]
    assert [row for row in by_run["run"] if "checkpoint" not in row] == live
    assert [(row["tokens_seen"], row["eval/mmlu/acc"]) for row in told] == [(2000, 0.25)]
    assert by_run["run-s1-x3500"] == left
    runs = offline.upload(wandb_server)
    assert bare(runs["run"].rows) == by_run["run"]
    assert [row["_step"] for row in runs["run"].rows] == list(range(len(by_run["run"])))
    assert bare(runs["run-s1-x3500"].rows) == left
    assert (runs["run"].overwritten, runs["run"].holes, runs["run"].state) == (0, 0, "finished")
    assert (runs["run"].values["lr"], runs["run"].values["model"]) == (0.1, {"d": 8})
    assert (runs["run"].about["status"], runs["run-s1-x3500"].job_type) == ("finished", "superseded")
    assert {run.group for run in runs.values()} == {"run"}
    assert runs["run"].summary["train/loss"]["last"] == live[-1]["train/loss"]


def test_files_that_were_taken_away_are_not_written_again(offline: Offline) -> None:
    """Uploaded and deleted: only what is new is written."""
    segment = offline.log.segment().train(0, 500).checkpoint(500)
    offline.sync()
    shutil.rmtree(offline.folder / "wandb")
    shutil.rmtree(offline.state)
    segment.train(500, 700).checkpoint(700)
    (row,) = offline.sync()
    assert row["points_sent"] == 2 * 20
    rows = [row for folder in offline.folders() for path in folder.glob("*.wandb") for row in rows_of(path)]
    assert bare(rows) == logged(offline.log, lambda row: row.tokens > 500)


def test_provisional_points_wait_because_nothing_can_be_taken_back(offline: Offline) -> None:
    """The sync says so."""
    offline.log.segment().train(0, 500).checkpoint(300)
    (row,) = offline.sync()
    assert row["points_held"] == 2 * 20


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.soak)])
def test_a_sync_killed_at_any_moment_writes_every_row_once(offline: Offline, kills: int) -> None:
    """A file counts once it is in the ledger, and is in the ledger before it is where `wandb sync` looks."""
    segment = offline.log.segment()
    for n in range(kills):
        segment.train(n * 3000, n * 3000 + 3000).checkpoint(n * 3000 + 2500)
        process = subprocess.Popen(
            [sys.executable, "-c", "from llmtrack.sync.cli import main; main()", *offline.arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if list(offline.folder.glob(".llmtrack/staging/*/wandb/*/*.wandb" if n % 2 else ".llmtrack/*/run.rows")):
                break
            time.sleep(0.002)  # between two looks: another process is waited for, which tells nobody
        process.kill()
        process.wait()
    offline.sync()
    rows = [row for folder in offline.folders() for path in folder.glob("*.wandb") for row in rows_of(path)]
    assert bare(rows) == logged(offline.log, lambda row: row.tokens <= kills * 3000 - 500)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which tells of system calls, is not installed")
def test_no_network_call_is_made(offline: Offline, tmp_path: Path) -> None:
    """Not one connection or message to anything but a socket of this machine, and not one name is looked up."""
    offline.log.segment().train(0, 300).checkpoint(300)
    trace = tmp_path / "trace"
    watched = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg,bind", "-o", str(trace)]
    if subprocess.run([*watched, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")
    code = "from llmtrack.sync.cli import main; main()"
    done = subprocess.run(
        [*watched, sys.executable, "-c", code, *offline.arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    probes = ("bind(", "::1")  # Go sees whether there is IPv6, and says nothing to anybody
    assert [line for line in lines if "AF_INET" in line and not all(part in line for part in probes)] == []
    assert offline.folders()


def test_nothing_about_this_machine_is_in_the_files(offline: Offline, tmp_path: Path) -> None:
    """Neither host name nor path: what `wandb sync` uploads later is what the log says."""
    offline.log.segment().train(0, 300).checkpoint(300)
    offline.sync()
    content = b"".join(path.read_bytes() for path in (offline.folder / "wandb").rglob("*") if path.is_file())
    secrets = [os.uname().nodename, str(tmp_path), str(Path.cwd()), sys.executable, "node-1"]
    assert [secret for secret in secrets if len(secret) > 2 and secret.encode() in content] == []


def test_two_syncs_into_one_folder_do_not_mix(offline: Offline, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one is told to wait."""
    import fcntl

    offline.log.segment().train(0, 100).checkpoint(100)
    (offline.folder / ".llmtrack").mkdir(parents=True)
    with (offline.folder / ".llmtrack" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as ended:
            main(offline.arguments)
    assert ended.value.code == 1
    assert "another llmtrack-sync" in capsys.readouterr().err
