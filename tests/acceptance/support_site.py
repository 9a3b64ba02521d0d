"""A site of the standard library's own HTTP server, on loopback: it sends exactly the given bytes,
with a wrong length on request, and counts its visitors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

_PIECE = 65_536


@dataclass(frozen=True)
class Page:
    """One answer: `body` as it goes over the wire, any coding applied already.

    `content_type` None sends no such header. `chunked` leaves out the length, `announced` is a
    length that is not the true one, `breaks` ends the connection without the last chunk.
    """

    body: bytes | Callable[[], Iterable[bytes]]
    content_type: str | None = "text/html; charset=utf-8"
    coding: str = ""
    status: int = 200
    chunked: bool = False
    announced: int | None = None
    breaks: bool = False
    headers: dict[str, str] = field(default_factory=dict)


class Site:
    """Pages by path; `hits` counts requests by path."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.hits: Counter[str] = Counter()
        self.pages: dict[str, Page] = {}
        self._lock = Lock()

    def put(self, path: str, page: Page) -> str:
        """Serve a page; its URL."""
        self.pages[path] = page
        return self.origin + path

    def enter(self, path: str) -> Page | None:
        """The page that a request asks for, counted."""
        with self._lock:
            self.hits[path] += 1
        return self.pages.get(path.partition("?")[0])


@contextmanager
def serving_site(host: str = "127.0.0.1") -> Iterator[Site]:
    """A site on a free port, for as long as the context is open."""
    with _Server((host, 0), _Handler) as server, in_background(server):
        yield server.site


@contextmanager
def in_background(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve on a thread, for as long as the context is open."""
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def server_activate(self) -> None:
        super().server_activate()
        self.site = Site(f"http://{self.server_address[0]!s}:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        page = self.server.site.enter(self.path)
        if page is None:
            self.send_error(404)
            return
        self.send_response(page.status)
        for name, value in _headers(page).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self._send(page)
        except OSError:
            self.close_connection = True

    def _send(self, page: Page) -> None:
        for piece in _pieces(page.body):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if page.chunked else piece)
        if page.chunked and not page.breaks:
            self.wfile.write(b"0\r\n\r\n")
        if page.breaks or page.announced is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


def _headers(page: Page) -> dict[str, str]:
    headers = dict(page.headers)
    if page.content_type is not None:
        headers["Content-Type"] = page.content_type
    if page.coding:
        headers["Content-Encoding"] = page.coding
    if page.chunked:
        headers["Transfer-Encoding"] = "chunked"
    elif page.announced is not None:
        headers["Content-Length"] = str(page.announced)
    elif isinstance(page.body, bytes):
        headers["Content-Length"] = str(len(page.body))
    return headers


def _pieces(body: bytes | Callable[[], Iterable[bytes]]) -> Iterator[bytes]:
    if not isinstance(body, bytes):
        yield from body()
        return
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]
