"""Relays what a person on call wants to know: alerts, stalls, crashes, restarts, finishes; each once, none of it old.

    STATE/<sink>-<digest of the tracker>/root-<digest of the root>.relay    what was delivered, and what waits: JSON

What is to be relayed is written down before it is sent, and once more when it was taken; so a sync that is killed
loses nothing, and repeats at most what was on its way. Delivery has a thread of its own for each receiver and waits for
one that does not answer, which holds up nothing else. The address of a receiver is a secret, and is never shown.
"""

from __future__ import annotations

import base64
import datetime as dt
import http.client
import json
import os
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from llmtrack.query.text.console import plain
from llmtrack.writer.errors import UsageError
from llmtrack.writer.log.publish import publish

LEVELS: Final = ("info", "warn", "error")

_FORMAT: Final = 1
_OLD_S: Final = 86_400.0  # what happened longer ago is no news, even of a run that we follow
_FIRST_OLD_S: Final = 3600.0  # likewise of a run that we see for the first time
_KEPT_S: Final = 3 * 86_400.0  # what was delivered is remembered beyond the time at which it would be old
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 300.0
_TRIES: Final = 5  # of what a receiver refuses, as opposed to one that does not answer
_ANSWER_S: Final = 15.0
_COMMAND_S: Final = 60.0
_BUSY: Final = frozenset({408, 425, 429})  # refusals that mean: later
_OTHER_WORDS: Final = {"warning": "warn", "critical": "error", "fatal": "error", "debug": "info"}


@dataclass(frozen=True)
class Happening:
    """Something that a person may want to know.

    Attributes:
        key: What makes it one thing and no other, in this root, for ever.
        kind: alert, cleared, stalled, lost, resumed, crashed, preempted, restarted or finished.
        level: info, warn or error.
        run_id: The run.
        time: When it happened.
        text: For people, in one line.
        facts: For programs; JSON.
    """

    key: str
    kind: str
    level: str
    run_id: str
    time: dt.datetime
    text: str
    facts: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Return what receivers get: `text` is what Slack, Mattermost and the like show."""
        return {
            "text": self.text,
            "event": self.kind,
            "level": self.level,
            "run_id": self.run_id,
            "time": plain(self.time),
            "id": self.key,
            **{key: plain(value) for key, value in self.facts.items() if value is not None},
        }


class RefusedError(Exception):
    """A receiver got it and refused; trying again may not help."""


class Receiver(Protocol):
    """Where messages go.

    Attributes:
        name: What may be said of it: no secret.
        key: Under which delivery to it is remembered.
    """

    name: str
    key: str

    def deliver(self, message: dict[str, Any]) -> None:
        """Hand over one message.

        Raises:
            RefusedError: It was refused.
            OSError: It could not be handed over now.
        """
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET, and the message would be lost: better say that the address is not right."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Follow nothing."""


class Webhook:
    """Posts JSON to a URL.

    Raises:
        UsageError: It is not the URL of a web server.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError("--notify takes the address of a web hook", hint="--notify https://host/path")
        self._url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._headers = {"Content-Type": "application/json", "User-Agent": "llmtrack-sync"}
        if parts.username is not None:
            words = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._is_slack = parts.hostname == "hooks.slack.com"  # which takes no fields that it does not know
        self.name = f"{parts.scheme}://{parts.hostname}"
        self.key = "notify"

    def deliver(self, message: dict[str, Any]) -> None:
        """Post one message."""
        body = {"text": message["text"]} if self._is_slack else message
        request = urllib.request.Request(  # noqa: S310 - its scheme was looked at
            self._url,
            json.dumps(body).encode(),
            self._headers | {"Idempotency-Key": message["id"]},
        )
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as answer:
                answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code >= 500 or error.code in _BUSY:  # noqa: PLR2004 - of the server, by RFC 9110
                raise OSError(f"status {error.code}") from None
            raise RefusedError(f"status {error.code}") from None
        except urllib.error.URLError as error:
            raise OSError(getattr(error.reason, "strerror", None) or type(error.reason).__name__) from None
        except (http.client.HTTPException, ValueError) as error:  # an answer that is none; it may name the address
            raise OSError(type(error).__name__) from None


class Command:
    """Runs a command without a shell, with the message on its standard input as JSON.

    Raises:
        UsageError: It cannot be split into words.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--on-alert: {error}", hint="--on-alert '/path/to/program --option'") from error
        if not self._words:
            raise UsageError("--on-alert takes a command", hint="--on-alert '/path/to/program --option'")
        self.name = Path(self._words[0]).name  # its arguments may be secrets
        self.key = "on_alert"

    def deliver(self, message: dict[str, Any]) -> None:
        """Run it once."""
        process = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what it says is for its own log: it may hold secrets
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(message).encode(), timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RefusedError(f"did not end within {_COMMAND_S:.0f} s") from None
        if process.returncode:
            raise RefusedError(f"ended with {process.returncode}")


class Relay:
    """Hands happenings to receivers, each once.

    Args:
        file: Where it is written down what was delivered and what waits.
        receivers: Where to.
        min_level: Nothing below it.
        say: Called with what a person should know of the relay itself, from its threads.
    """

    def __init__(self, file: Path, receivers: Sequence[Receiver], min_level: str, say: Callable[[str], None]) -> None:
        self._file = file
        self._receivers = list(receivers)
        self._least = LEVELS.index(min_level)
        self._say = say
        self._condition = threading.Condition()
        self._stopped = False
        self._runs: dict[str, float] = {}  # since when we know them
        self._done: dict[str, float] = {}  # when it was seen, by key
        self._waiting: dict[str, list[dict[str, Any]]] = {receiver.key: [] for receiver in self._receivers}
        self._load()
        self._threads = [
            threading.Thread(target=self._main, args=(receiver,), name=f"llmtrack-{receiver.key}", daemon=True)
            for receiver in self._receivers
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, happenings: Iterable[Happening], runs: Iterable[str] = ()) -> None:
        """Take what is new of what happened, and let the rest go.

        Args:
            happenings: Everything that is known, old and new.
            runs: All runs that were looked at, also those of which there is nothing to tell.
        """
        if not self._receivers:
            return
        now = time.time()
        with self._condition:
            new = [one for one in happenings if one.key not in self._done]
            first = {one.run_id for one in new} - self._runs.keys()
            known = set(runs) - self._runs.keys() | first
            if not new and not known:
                return
            self._runs |= dict.fromkeys(known, now)
            for one in sorted(new, key=lambda one: one.time):
                self._done[one.key] = now
                age_s = now - one.time.timestamp()
                is_old = age_s > (_FIRST_OLD_S if one.run_id in first else _OLD_S)
                if not is_old and LEVELS.index(level_of(one.level)) >= self._least:
                    for waiting in self._waiting.values():
                        waiting.append(one.message() | {"since": now})
            self._save()
            self._condition.notify_all()

    def forget(self, runs: Iterable[str]) -> None:
        """Hear that runs are gone."""
        with self._condition:
            for run_id in runs:
                self._runs.pop(run_id, None)

    def waiting(self) -> int:
        """Return how many messages are not delivered."""
        with self._condition:
            return sum(map(len, self._waiting.values()))

    def stop(self, patience_s: float) -> None:
        """End; what is not delivered within some seconds waits for the next sync."""
        deadline_s = time.monotonic() + patience_s
        with self._condition:
            self._condition.wait_for(lambda: not any(self._waiting.values()), patience_s)
            self._stopped = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()) + 0.1)

    def _main(self, receiver: Receiver) -> None:
        pause_s, tries = _FIRST_PAUSE_S, 0
        while (message := self._next(receiver)) is not None:
            content = {key: value for key, value in message.items() if key != "since"}
            try:
                receiver.deliver(content)
            except (OSError, RefusedError) as error:
                tries += isinstance(error, RefusedError)
                if tries < _TRIES and time.time() - message["since"] < _OLD_S:
                    if pause_s == _FIRST_PAUSE_S:
                        self._say(f"{receiver.name} did not take a message ({error}); it is tried again")
                    self._rest(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                self._say(f"gave up on a message for {receiver.name} ({error}): {message['text']}")
            except Exception as error:  # noqa: BLE001 - the thread outlives it: the next message must go out
                self._say(f"a message for {receiver.name} could not be made ({type(error).__name__})")
            pause_s, tries = _FIRST_PAUSE_S, 0
            with self._condition:
                self._waiting[receiver.key].pop(0)
                self._save()
                self._condition.notify_all()

    def _next(self, receiver: Receiver) -> dict[str, Any] | None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._waiting[receiver.key])
            return None if self._stopped else self._waiting[receiver.key][0]

    def _rest(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped, seconds)

    def _load(self) -> None:
        try:
            content = json.loads(self._file.read_bytes())
            if content["format"] != _FORMAT:
                return
            self._runs = {str(run): float(at) for run, at in content["runs"].items()}
            self._done = {str(key): float(at) for key, at in content["done"].items()}
            for key, waiting in content["waiting"].items():
                if key in self._waiting:
                    self._waiting[key] = [dict(one) for one in waiting if one["text"] and float(one["since"])]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return  # lost or damaged: then only what is an hour old at most is news

    def _save(self) -> None:
        now = time.time()
        self._done = {key: at for key, at in self._done.items() if now - at < _KEPT_S}
        content = {"format": _FORMAT, "runs": self._runs, "done": self._done, "waiting": self._waiting}
        try:
            publish(self._file, json.dumps(content).encode())
        except OSError as error:
            self._say(f"{self._file} cannot be written ({error.strerror}): after a restart messages may be repeated")


def level_of(text: str) -> str:
    """Return the level that a word stands for; an unknown one is a warning."""
    word = text.lower()
    word = _OTHER_WORDS.get(word, word)
    return word if word in LEVELS else "warn"


def receivers(notify: str | None, on_alert: str | None) -> list[Receiver]:
    """Return the receivers that the options name.

    Raises:
        UsageError: One of them cannot be used.
    """
    return [*([Webhook(notify)] if notify else []), *([Command(on_alert)] if on_alert else [])]
