"""A proxy on loopback that stands before a real server and makes the network as bad as a test wants it.

It sees every request whole, and a test says for each what becomes of it: a fault is before the server took the request,
after it took it (the answer is lost), or in place of it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import urlsplit

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True)
class Fault:
    """What becomes of one request.

    Attributes:
        name: For people.
        status: Answered in place of the server's; None: no answer, the connection is reset.
        body: Of that answer.
        headers: Of that answer.
        taken: The server gets the request all the same, and its answer is lost.
        half: The server gets half of the request's body.
        torn: The caller gets half of the server's answer.
        silent: Nothing is answered until the caller has gone.
    """

    name: str
    status: int | None = None
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    taken: bool = False
    half: bool = False
    torn: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Request:
    """What a caller asked."""

    number: int
    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    @property
    def endpoint(self) -> str:
        """Return the last words of the path, without what is asked for."""
        return "/".join(self.path.partition("?")[0].split("/")[-2:])


Rule = Callable[[Request], Fault | None]


@dataclass
class Proxy:
    """A running proxy; `rule` may be changed at any time."""

    uri: str
    rule: Rule
    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, endpoint: str) -> int:
        """Return how many requests went to an endpoint."""
        return sum(request.endpoint == endpoint for request in self.requests)


def no_fault(request: Request) -> Fault | None:
    """Let everything pass."""
    assert request.number >= 0
    return None


@contextlib.contextmanager
def proxy(target: str, rule: Rule = no_fault, *, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """Run a proxy before a server.

    Args:
        target: ``http://HOST:PORT``.
        rule: Says for each request, from several threads, what becomes of it; None: it passes.
        tls: Speak HTTPS to callers.
    """

    class Handler(_Handler):
        proxy: Proxy
        upstream = urlsplit(target).netloc

    server = _Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    running = Proxy(f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}", rule)
    Handler.proxy = running
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        running.closing.set()
        server.shutdown()
        thread.join()
        server.hang_up()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, object]:
        """Remember the connection."""
        connection, address = super().get_request()
        self._open.append(connection)
        return connection, address

    def hang_up(self) -> None:
        """Close all connections: clients keep them for later, and a thread waits at each."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: that connections break is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    upstream: str
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.proxy.lock:
            request = Request(len(self.proxy.requests), self.command, self.path, body, dict(self.headers.items()))
            self.proxy.requests.append(request)
        fault = self.proxy.rule(request)
        if fault is None:
            self._answer(*self._ask(body))
            return
        self.proxy.faults.append(fault.name)
        if fault.half:
            self._send_half(body)
        if fault.taken or fault.torn:
            status, headers, content = self._ask(body)
            if fault.torn:
                self._answer(status, headers, content, cut=max(1, len(content) // 2))
        if fault.silent:
            self.proxy.closing.wait(30.0)
        if fault.status is None:
            self._reset()
        else:
            self._answer(fault.status, [("Content-Type", "text/html"), *fault.headers], fault.body)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815 - the library's names

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in {*_HOP, "host"}}
        try:
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        except OSError:
            return 502, [], b"no server"
        finally:
            connection.close()

    def _send_half(self, body: bytes) -> None:
        head = f"{self.command} {self.path} HTTP/1.1\r\nHost: {self.upstream}\r\nContent-Type: application/json\r\n"
        host, port = self.upstream.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in {*_HOP, "date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:cut])

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.connection.close()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def log_error(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""
