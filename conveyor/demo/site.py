"""Serve the small site of the demonstration from loopback."""

from __future__ import annotations

import threading
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


@contextmanager
def serve_site(host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the site on a free port and yield its origin, such as `http://127.0.0.1:40123`."""
    server = _Site((host, 0), _Handler)
    server.pages = pages()
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore visitors that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Site

    def do_GET(self) -> None:
        """Answer with a page, or 404."""
        name = unquote(urlsplit(self.path).path).lstrip("/") or "index.html"
        body = self.server.pages.get(name)
        status = 200 if body is not None else 404
        body = body if body is not None else b"no such page\n"
        self.send_response(status)
        self.send_header("Content-Type", content_type(name if status == 200 else "404.txt"))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the demonstration has its own output."""
