"""The relay of alerts: a real web server, real commands, and what is written down between two lives of a sync."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmtrack.sync.watch import notify
from llmtrack.sync.watch.notify import Command, Happening, Receiver, Relay, Webhook, level_of, receivers
from llmtrack.writer.errors import UsageError
from tests.faults import wait_until

WORD = "T0P5ECRET"


class Hook:
    """A web hook that answers as told, and remembers what it was sent."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.requests = 0
        self.authorizations: list[str | None] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.requests += 1
                hook.authorizations.append(self.headers["Authorization"])
                status = hook.answers.pop(0) if hook.answers else 200
                if status == 200:
                    hook.got.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the base class calls it so
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{WORD}?key={WORD}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """End."""
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    """A web hook on loopback."""
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_FIRST_PAUSE_S", 0.01)


def _alert(number: int = 1, *, level: str = "warn", age_s: float = 1.0, run_id: str = "run-1") -> Happening:
    return Happening(
        key=f"{run_id}/alert/{number}",
        kind="alert",
        level=level,
        run_id=run_id,
        time=dt.datetime.now(dt.UTC) - dt.timedelta(seconds=age_s),
        text=f"run-1: loss spike {number}",
        facts={"rule": "loss_spike", "value": float("nan"), "score": 9.5, "metric": None},
    )


def _relay(folder: Path, *to: Receiver, least: str = "info", said: list[str] | None = None) -> Relay:
    return Relay(folder / "root.relay", to, least, (said if said is not None else []).append)


def test_a_hook_gets_json_that_slack_and_programs_understand(tmp_path: Path, hook: Hook) -> None:
    """`text` for people; names and values for programs, and valid JSON though a value is NaN."""
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.offer([_alert()])
    relay.stop(60)
    (got,) = hook.got
    assert got["text"] == "run-1: loss spike 1"
    assert (got["event"], got["level"], got["run_id"], got["rule"]) == ("alert", "warn", "run-1", "loss_spike")
    assert (got["value"], got["score"], got["id"]) == ("NaN", 9.5, "run-1/alert/1")
    assert "metric" not in got
    assert "since" not in got


def test_a_name_and_password_in_the_address_are_sent_as_such(tmp_path: Path, hook: Hook) -> None:
    """As curl does."""
    relay = _relay(tmp_path, Webhook(hook.url.replace("//", "//user:pass%40word@")))
    relay.offer([_alert()])
    relay.stop(60)
    assert hook.authorizations == ["Basic dXNlcjpwYXNzQHdvcmQ="]


def test_each_is_sent_once_also_after_a_restart_of_the_sync(tmp_path: Path, hook: Hook) -> None:
    """The log tells of it again and again, and so does every new life of the sync."""
    for _ in range(3):
        relay = _relay(tmp_path, Webhook(hook.url))
        relay.offer([_alert(1), _alert(2)])
        relay.offer([_alert(1)])
        relay.stop(60)
    assert sorted(got["id"] for got in hook.got) == ["run-1/alert/1", "run-1/alert/2"]


def test_what_was_not_delivered_is_delivered_by_the_next_sync(tmp_path: Path, hook: Hook) -> None:
    """The receiver was down, and the sync was killed meanwhile."""
    dead = Webhook("http://127.0.0.1:9/x")
    said: list[str] = []
    relay = _relay(tmp_path, dead, said=said)
    relay.offer([_alert()])
    wait_until(lambda: said, "a word about the receiver")
    relay.stop(0)
    assert relay.waiting() == 1
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.stop(60)
    assert len(hook.got) == 1


def test_a_month_of_alarms_is_not_sent_by_a_first_sync(tmp_path: Path, hook: Hook) -> None:
    """Of a run that is seen for the first time an hour is news; of one that is followed, a day."""
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.offer([_alert(n, age_s=3600 * 24 * n) for n in range(1, 30)] + [_alert(50, age_s=60)], ["run-2"])
    relay.offer([_alert(60, age_s=7200)])
    relay.offer([_alert(70, age_s=90_000)])
    relay.offer([_alert(1, age_s=7200, run_id="run-2"), _alert(1, age_s=7200, run_id="run-3")])
    relay.stop(60)
    assert [got["id"] for got in hook.got] == ["run-1/alert/50", "run-1/alert/60", "run-2/alert/1"]


def test_a_minimum_level_keeps_the_rest_away(tmp_path: Path, hook: Hook) -> None:
    """And what was kept away is not sent by a later sync with a lower one."""
    relay = _relay(tmp_path, Webhook(hook.url), least="error")
    relay.offer([_alert(1, level="warn"), _alert(2, level="error"), _alert(3, level="CRITICAL"), _alert(4, level="?")])
    relay.stop(60)
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.offer([_alert(1, level="warn")])
    relay.stop(60)
    assert [got["id"] for got in hook.got] == ["run-1/alert/2", "run-1/alert/3"]
    assert [level_of(word) for word in ("info", "Warning", "critical", "odd")] == ["info", "warn", "error", "warn"]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_hook_that_is_busy_is_asked_again(tmp_path: Path, hook: Hook, status: int) -> None:
    """More often than one that refuses."""
    hook.answers = [status] * 8
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.offer([_alert(1), _alert(2)])
    wait_until(lambda: len(hook.got) == 2, "both were delivered")
    relay.stop(60)
    assert hook.requests == 10


@pytest.mark.parametrize("status", [400, 401, 404, 410, 302])
def test_a_hook_that_refuses_does_not_stop_the_next_message(tmp_path: Path, hook: Hook, status: int) -> None:
    """It is given up after some tries, and said, without the address."""
    hook.answers = [status] * 5
    said: list[str] = []
    relay = _relay(tmp_path, Webhook(hook.url), said=said)
    relay.offer([_alert(1, age_s=2), _alert(2)])
    relay.stop(60)
    assert [got["id"] for got in hook.got] == ["run-1/alert/2"]
    assert any("gave up" in text and f"status {status}" in text for text in said)
    assert WORD not in "".join(said)


@pytest.mark.parametrize(
    "url",
    [f"http://127.0.0.1:9/{WORD}", f"http://no-such-host.invalid/{WORD}", f"http://user:{WORD}@127.0.0.1:9/"],
)
def test_no_secret_is_said_whatever_goes_wrong(tmp_path: Path, url: str) -> None:
    """The path and the query of a hook's address are its password."""
    said: list[str] = []
    relay = _relay(tmp_path, Webhook(url), said=said)
    relay.offer([_alert()])
    wait_until(lambda: said, "a word about it")
    relay.stop(0)
    assert WORD not in "".join(said)


def test_an_address_that_is_none_is_refused_without_being_said() -> None:
    """It may be one with a typing error, and a secret in it."""
    for wrong in (f"ftp://x/{WORD}", f"hooks.example.org/{WORD}", WORD):
        with pytest.raises(UsageError) as refused:
            Webhook(wrong)
        assert WORD not in str(refused.value)


def test_a_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    """Without a shell: what is in the message is never looked at by one."""
    out = tmp_path / "out file"
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {shlex.quote(str(out))}"
    relay = _relay(tmp_path, Command(command))
    relay.offer([_alert(1, age_s=2), _alert(2)])
    relay.stop(60)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["run-1/alert/1", "run-1/alert/2"]


def test_a_command_that_fails_is_run_again_and_given_up(tmp_path: Path) -> None:
    """One that is not there, too; its arguments are not said."""
    said: list[str] = []
    code = f"import sys; sys.exit(3)  # {WORD}"
    relay = _relay(tmp_path, Command(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"), said=said)
    relay.offer([_alert()])
    relay.stop(60)
    assert relay.waiting() == 0
    assert "ended with 3" in said[-1]
    assert WORD not in "".join(said)
    for wrong in ("", "'unclosed"):
        with pytest.raises(UsageError, match="--on-alert"):
            Command(wrong)


def test_two_receivers_do_not_wait_for_each_other(tmp_path: Path, hook: Hook) -> None:
    """One is down; each remembers for itself what it got."""
    said: list[str] = []
    relay = _relay(tmp_path, Webhook(hook.url), Command("/no/such/program"), said=said)
    relay.offer([_alert()])
    wait_until(lambda: hook.got, "the hook got it")
    relay.stop(0)
    assert "No such file" in said[0]


@pytest.mark.parametrize("content", ["", "{", '{"format": 9}', '{"format": 1, "runs": []}'])
def test_a_lost_memory_lets_only_the_last_hour_through(tmp_path: Path, hook: Hook, content: str) -> None:
    """A repeated message is better than none, and a month of them worse than both."""
    (tmp_path / "root.relay").write_text(content)
    relay = _relay(tmp_path, Webhook(hook.url))
    relay.offer([_alert(1, age_s=4000), _alert(2)])
    relay.stop(60)
    assert [got["id"] for got in hook.got] == ["run-1/alert/2"]


def test_without_a_receiver_nothing_is_written(tmp_path: Path) -> None:
    """Nobody asked for it."""
    relay = _relay(tmp_path, *receivers(None, None))
    relay.offer([_alert()])
    relay.stop(0)
    assert list(tmp_path.iterdir()) == []
