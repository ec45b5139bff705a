"""A proxy before a server of objects that loses, repeats, delays and cuts requests and answers.

What happens to a request is one of :data:`FAULTS`, or an answer that is given instead. `lost`, `hang`, `500 after` and
`later` are ambiguous to who asked: the server has carried the request out, or will.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

FAULTS = {
    "drop": "the connection is closed, nothing is sent on",
    "part": "half of the body is sent on, then both connections are closed",
    "lost": "carried out, and the connection is closed instead of an answer",
    "hang": "carried out, and answered only after the client has given up",
    "slow": "sent on a moment later",
    "twice": "sent on two times, and the second answer given",
    "cut": "half of the answer is given, then the connection is closed",
    "later": "answered with 503 at once, and carried out up to two seconds later",
    "500 after": "carried out, and answered with 500",
    "500": "answered so, and not carried out",
    "503": "answered so, and not carried out",
    "409": "answered so, and not carried out",
    "412": "answered so, and not carried out",
    "stale": "a listing is answered as it was answered before",
}
HANG_S = 1.5
_NOT_ALL = {"stale": ("list",), "409": ("if",), "412": ("if",), "part": ("put", "if")}
"""Faults that befall requests of some kinds only: listings, conditional puts, puts."""


class Answer(NamedTuple):
    """What a server says."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Request:
    """What a client asks."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def kind(self) -> str:
        """`put`, `if` (a put on a condition), `list`, `get`, `head`, `delete` or `post`."""
        if self.method == "PUT":
            names = {name.lower() for name in self.headers}
            return "if" if names & {"if-match", "if-none-match", "x-goog-if-generation-match"} else "put"
        listing = self.method == "GET" and ("list-type=" in self.path or "comp=list" in self.path)
        return "list" if listing else self.method.lower()


Choice = Callable[[Request], "str | Answer | None"]
Send = Callable[[int, Request], Answer]


def forward(port: int, request: Request) -> Answer:
    """Have a server carry a request out. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(request.method, request.path, request.body or None, request.headers)
        response = connection.getresponse()
        body = response.read()
        return Answer(response.status, response.getheaders(), body)
    finally:
        connection.close()


@dataclass
class Proxy:
    """A proxy to a port; `choose` says what happens to each request, None for nothing out of the way."""

    upstream: int
    choose: Choice = lambda _: None
    send: Send = forward
    port: int = 0
    happened: list[str] = field(default_factory=list)
    waiting: list[threading.Thread] = field(default_factory=list)
    listed: dict[str, Answer] = field(default_factory=dict)

    def settle(self) -> None:
        """Wait for what was to be carried out later."""
        for thread in self.waiting:
            thread.join()
        self.waiting.clear()

    def answer(self, request: Request) -> tuple[Answer | None, bool]:
        """The answer, None for a closed connection, and whether it is cut."""
        fault = self.choose(request)
        if isinstance(fault, Answer):
            return fault, False
        if fault is not None and request.kind not in _NOT_ALL.get(fault, (request.kind,)):
            fault = None
        if fault is not None:
            self.happened.append(f"{fault} {request.kind}")
        if fault == "drop":
            return None, False
        if fault in ("500", "503", "409", "412"):
            return _plain(int(fault)), False
        if fault == "part":
            self._half(request)
            return None, False
        if fault == "later":
            seconds = 0.2 + 1.8 * (len(self.happened) % 7) / 7
            thread = threading.Thread(target=self._late, args=(request, seconds), daemon=True)
            self.waiting.append(thread)
            thread.start()
            return _plain(503), False
        if fault == "stale" and request.path in self.listed:
            return self.listed[request.path], False
        if fault == "slow":
            time.sleep(0.2)
        answer = self.send(self.upstream, request)
        if fault == "twice":
            answer = self.send(self.upstream, request)
        if request.kind == "list":
            self.listed[request.path] = answer
        if fault == "hang":
            time.sleep(HANG_S)
        if fault in ("lost", "hang"):
            return None, False
        return (_plain(500) if fault == "500 after" else answer), fault == "cut"

    def _late(self, request: Request, seconds: float) -> None:
        time.sleep(seconds)
        with suppress(OSError, http.client.HTTPException):
            self.send(self.upstream, request)

    def _half(self, request: Request) -> None:
        head = [f"{request.method} {request.path} HTTP/1.1"]
        head += [f"{name}: {value}" for name, value in request.headers.items()]
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.upstream)) as upstream:
            upstream.sendall("\r\n".join([*head, "", ""]).encode() + request.body[: len(request.body) // 2])


def _plain(status: int) -> Answer:
    return Answer(status, [("Content-Type", "text/plain")], b"")


@contextmanager
def proxied(upstream: int, choose: Choice, send: Send = forward) -> Iterator[Proxy]:
    """A proxy for the block."""
    proxy = Proxy(upstream, choose, send)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with suppress(ConnectionError, TimeoutError):
                super().handle_one_request()

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers.items()), body)
            if len(body) < int(self.headers.get("Content-Length", 0)):  # who asked is gone
                self.close_connection = True
                return
            try:
                answer, cut = proxy.answer(request)
            except (OSError, http.client.HTTPException):
                answer, cut = _plain(502), False
            if answer is None:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            size = str(len(answer.body))
            for name, value in answer.headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    size = value
                elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", size)
            self.end_headers()
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
            self.close_connection = self.close_connection or cut

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
