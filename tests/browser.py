"""A headless Chromium, spoken to through a pair of pipes: no driver, no port, no library."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_HANGS_S: Final = 60.0  # nothing that a test waits for takes nearly as long
_OPTIONS: Final = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--no-default-browser-check"),
    *(
        "--disable-extensions",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        "--mute-audio",
    ),
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Return the path of a Chromium; None when there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one Chromium, by the DevTools protocol.

    Attributes:
        errors: What the page wrote to its console as errors, and exceptions that nobody caught.
        requests: Every URL that the page asked for, those that it was kept from too.
    """

    def __init__(self, program: str, profile: Path) -> None:
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        # Chromium takes its commands from file descriptor 3 and answers on 4.
        become = "import os, sys; from fcntl import F_DUPFD, fcntl; "
        become += "a, b = (fcntl(int(one), F_DUPFD, 10) for one in sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4); "
        become += "os.execv(sys.argv[3], sys.argv[3:])"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", become, str(commands_out), str(answers_in)),
                *(program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(commands_out, answers_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        page = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and everything that it started."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        for fd in (self._commands, self._answers):
            os.close(fd)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait(10)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command, and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._commands, rest) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, ready: str = "") -> None:
        """Open a file, and wait until an expression is true."""
        self.errors.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.theme(dark=dark)
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()
        self.wait(ready or "true")

    def theme(self, *, dark: bool) -> None:
        """Prefer a dark theme, or a light one."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true, frame by frame."""
        self.run(
            "new Promise((done, fail) => { const until = Date.now() + 50000; const look = () => { "
            f"if ({expression}) done(true); else if (Date.now() > until) fail('never true'); "
            "else requestAnimationFrame(look); }; look(); })"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press or release the mouse: mouseMoved, mousePressed, mouseReleased."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Press at one place, move and release at another."""
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.mouse("mouseMoved", x0, y0)
        self.mouse("mousePressed", x0, y0, **held)
        for part in (0.3, 0.7, 1.0):
            self.mouse("mouseMoved", x0 + (x1 - x0) * part, y0 + (y1 - y0) * part, **held)
        self.mouse("mouseReleased", x1, y1, **held)

    def key(self, key: str, *, text: str = "") -> None:
        """Press and release a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + _HANGS_S
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], max(0, until - time.monotonic()))
            assert readable, "the browser does not answer"
            some = os.read(self._answers, 1 << 20)
            assert some, "the browser ended"
            self._rest += some
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
            self.errors.append(str(parameters["entry"]))


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    started = Browser(program, profile)
    try:
        yield started
    finally:
        started.close()
