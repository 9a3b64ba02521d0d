"""Serve the small site of the demonstration from loopback, as it is or with moods."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any
from urllib.parse import unquote, urlsplit

CHARSETS = {".sjis.html": "Shift_JIS", ".cp1251.html": "windows-1251", ".latin1.html": "iso-8859-1"}
"""Charset of a page that is not UTF-8, by the part of its name that says so."""

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".pdf": "application/pdf",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".xml": "application/xml",
}


def pages() -> dict[str, bytes]:
    """Return every file of the site by its name, sorted."""
    folder: Traversable = files("conveyor") / "demo" / "pages"
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    return {name: (folder / name).read_bytes() for name in names if not name.startswith(".")}


def content_type(name: str) -> str:
    """Return the Content-Type of a file of the site, with its charset."""
    for suffix, charset in CHARSETS.items():
        if name.endswith(suffix):
            return f"text/html; charset={charset}"
    return MEDIA_TYPES[name[name.rindex(".") :]]


class Moods:
    """Troubles of the site by a plan: each page takes its time, some are refused or broken off when
    they are asked for first, and one is asked for too often. `troubles` counts what happened."""

    def __init__(self) -> None:
        self.troubles: Counter[str] = Counter()
        self._asked: set[str] = set()
        self._places = {name: place for place, name in enumerate(pages())}
        self._lock = threading.Lock()

    def meet(self, name: str) -> str | None:
        """Return what happens to this request for a page, after a while; None if it is answered."""
        place = self._places.get(name, 0)
        with self._lock:
            trouble = None if name in self._asked else _PLAN.get(place % len(self._places))
            self._asked.add(name)
            if trouble is not None:
                self.troubles[trouble] += 1
        threading.Event().wait(0.05 if trouble else _SLOWEST * (1 + place % 4) / 4)
        return trouble


BUSY, FLAKY, BROKEN = "429", "503", "broken connection"
_PLAN = {16: BUSY, **dict.fromkeys((2, 8, 13, 21, 27), FLAKY), **dict.fromkeys((5, 24), BROKEN)}
"""The trouble of the first request for a page, by its place."""
_SLOWEST = 0.9
"""Seconds before the slowest pages."""


@contextmanager
def serve_site(host: str = "127.0.0.1", *, moods: Moods | None = None) -> Iterator[str]:
    """Serve the site on a free port and yield its origin, such as `http://127.0.0.1:40123`."""
    server = _Site((host, 0), _Handler)
    server.pages = pages()
    server.moods = moods
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Site(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    pages: dict[str, bytes]
    moods: Moods | None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore visitors that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # A head and its body are two packets: the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    timeout = 30
    server: _Site

    def do_GET(self) -> None:
        """Answer with a page, or 404, or as the site's moods will have it."""
        name = unquote(urlsplit(self.path).path).lstrip("/") or "index.html"
        trouble = self.server.moods.meet(name) if self.server.moods else None
        if trouble == BROKEN:
            self.close_connection = True
        elif trouble is not None:
            self._answer(int(trouble), "sorry.txt", b"not now\n")
        elif (body := self.server.pages.get(name)) is not None:
            self._answer(200, name, body)
        else:
            self._answer(404, "404.txt", b"no such page\n")

    def _answer(self, status: int, name: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type(name))
        self.send_header("Content-Length", str(len(body)))
        if status == int(BUSY):
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the demonstration has its own output."""
