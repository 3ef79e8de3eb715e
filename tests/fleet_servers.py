# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A web server with ranges, and a proxy before an S3 server, that make faults as they are told."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

#: What may become of a request: nothing, an answer of a status, an answer that is cut off in its
#: middle, a connection that is closed, or bytes although a range was asked for.
OK, CUT, CLOSED, WHOLE = "ok", "cut", "closed", "whole"
Fault = Callable[["Request"], object]


@dataclass
class Request:
    """A request that came.

    Attributes:
        method: GET and so on.
        path: what is asked for.
        first: first byte of the range, None without one.
        last: last byte of it.
        number: how many of this method and path came before.
    """

    method: str
    path: str
    first: int | None
    last: int | None
    number: int


@dataclass
class Log:
    """Requests so far, and what becomes of the next ones.

    Attributes:
        fault: says what becomes of a request: one of the words above, or a status.
        requests: all of them.
        faults: how many were spoiled.
    """

    fault: Fault = lambda request: OK
    requests: list[Request] = field(default_factory=list)
    faults: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, method: str, path: str, ranges: str | None) -> tuple[Request, object]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", ranges or "")
        first = None if match is None else int(match[1])
        last = int(match[2]) if match and match[2] else None
        with self.lock:
            seen = sum((each.method, each.path) == (method, path) for each in self.requests)
            request = Request(method, path, first, last, seen)
            self.requests.append(request)
            fate = self.fault(request)
            self.faults += fate != OK
        return request, fate


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    log: Log

    def log_message(self, *_):
        """Nothing: tests look at the log."""

    def spoiled(self, fate: object) -> bool:
        """Ends a request that is to get no answer, or a bad one."""
        if fate == CLOSED:
            self.close_connection = True
            return True
        if isinstance(fate, int):
            self.send_response(fate)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return True
        return False

    def body(self, data: bytes, fate: object) -> None:
        self.wfile.write(data[: len(data) // 2] if fate == CUT else data)
        if fate == CUT:
            self.wfile.flush()
            self.close_connection = True


@contextlib.contextmanager
def _served(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients that give up
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def web_server(folder: Path, log: Log, *, lists: bool = True):
    """A server of a directory: its address. Ranges are answered; directories only if it `lists`."""

    class Handler(_Handler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            name = unquote(self.path).lstrip("/")
            path = folder / name
            request, fate = log.add(self.command, name, self.headers.get("Range"))
            if self.spoiled(fate):
                return
            if path.is_dir() and lists:
                names = [f"{each.name}{'/' * each.is_dir()}" for each in sorted(path.iterdir())]
                links = "".join(f'<a href="{name}">x</a>' for name in names)
                return self._answer(200, links.encode(), "text/html", fate)
            if not path.is_file():
                return self._answer(404, b"", "text/plain", fate)
            data = path.read_bytes()
            if request.first is None or fate == WHOLE:
                return self._answer(200, data, "application/octet-stream", fate)
            last = len(data) - 1 if request.last is None else min(request.last, len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {request.first}-{last}/{len(data)}")
            self._rest(data[request.first : last + 1], "application/octet-stream", fate)

        def _answer(self, status, data, kind, fate):
            self.send_response(status)
            self._rest(data, kind, fate)

        def _rest(self, data, kind, fate):
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.body(data, fate)

    with _served(Handler) as address:
        yield address


@contextlib.contextmanager
def s3_server(log: Log):
    """An S3 server (moto) behind a proxy that makes faults: the address of the proxy."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _host, port = server.get_host_and_port()

    class Forwarder(_Handler):
        def forward(self):
            _request, fate = log.add(self.command, self.path, self.headers.get("Range"))
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            if self.spoiled(fate):
                return
            inner = http.client.HTTPConnection("127.0.0.1", port)
            try:
                headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
                inner.request(self.command, self.path, data, headers)
                answer = inner.getresponse()
                content = answer.read()
            finally:
                inner.close()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(key, value)
            given = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", given or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.body(content, fate)

    methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
    kind = type("Handler", (Forwarder,), {f"do_{name}": Forwarder.forward for name in methods})
    try:
        with _served(kind) as address:
            yield address
    finally:
        server.stop()


def every(count: int, fate: object, method: str = "GET") -> Fault:
    """The first `count` requests of each path get a fate, the others none."""
    return lambda each: fate if each.method == method and each.number < count else OK
