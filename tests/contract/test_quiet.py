"""Nobody but the tracker hears of a sync: no telemetry, no report of errors, no look for a newer version."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from tests.contract.conftest import Bench, evaluate

# Says what Python connects to and which names it looks up. What a client's own service does, the proxy tells.
_WATCHED: Final = """
import sys, json
def note(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        address = args[1] if event == "socket.connect" else args[0]
        host = address[0] if isinstance(address, tuple) else address
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(host.decode() if isinstance(host, bytes) else host) + "\\n")
sys.addaudithook(note)
from llmtrack.sync.cli import main
main(sys.argv[2:])
"""


class _Recorder(BaseHTTPRequestHandler):
    """A proxy that takes down who is called, and connects nobody."""

    called: list[str]

    def do_CONNECT(self) -> None:
        self.called.append(self.path)
        self.send_error(502)

    do_GET = do_POST = do_HEAD = do_CONNECT  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def _recording() -> Iterator[tuple[str, list[str]]]:
    called: list[str] = []
    handler = type("Handler", (_Recorder,), {"called": called})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as recorder:
        thread = threading.Thread(target=recorder.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{recorder.server_address[1]}", called
        finally:
            recorder.shutdown()
            thread.join()


def _sync(bench: Bench, folder: Path, **more: str) -> tuple[set[str], list[str]]:
    """Sync in a process with nearly no environment; return the names and addresses it used, and whom it called."""
    hosts = folder / "hosts"
    with _recording() as (proxy, called):
        # Clients are silent by themselves where a variable says that this is a test, or a continuous integration.
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "WANDB_API_KEY") if name in os.environ}
        environment |= {"HOME": str(folder), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | more
        environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), proxy)
        command = [sys.executable, "-c", _WATCHED, str(hosts), *bench.arguments]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {json.loads(line) for line in hosts.read_text().splitlines()} if hosts.exists() else set(), called


def test_a_sync_calls_nobody_but_the_tracker(bench: Bench, tmp_path: Path) -> None:
    """With points, checkpoints, alerts, evaluations and tables, so that all of the client is at work."""
    bench.log.segment().train(0, 300).alert(200).checkpoint(200)
    evaluate(bench.log, "ckpt-1-200", 0.5)
    hosts, called = _sync(bench, tmp_path)
    assert called == []
    assert [host for host in hosts if host.startswith("/") is False and not _is_loopback(host)] == []


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def test_whoever_asks_for_the_clients_telemetry_gets_it(local: Bench, tmp_path: Path) -> None:
    """And so the test above would see it."""
    local.log.segment().train(0, 300).checkpoint(200)
    evaluate(local.log, "ckpt-1-200", 0.5)
    _, called = _sync(local, tmp_path, MLFLOW_DISABLE_TELEMETRY="false")
    assert [address for address in called if "telemetry" in address]
