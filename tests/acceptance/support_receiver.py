"""A receiver of events, on loopback."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

PATIENCE = 60.0
"""Seconds to wait for events."""


class Receiver(HTTPServer):
    """A receiver that keeps the headers and the body of each event."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Keeping)
        self.status = status
        self.got: list[tuple[dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        """The address of the receiver."""
        return f"http://127.0.0.1:{self.server_port}/hook"

    def gets(self, count: int) -> None:
        """Wait until so many events came."""
        deadline = time.monotonic() + PATIENCE
        while len(self.got) < count:
            assert time.monotonic() < deadline, f"{len(self.got)} of {count} events came"
            time.sleep(0.02)

    def __enter__(self) -> Receiver:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()
        self.server_close()


class Keeping(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((dict(self.headers), body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of tests clean."""
