"""Receivers of events, on loopback."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Lock, Thread

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


class SlowReceiver(ThreadingHTTPServer):
    """A receiver that takes its time to answer, so that a kill may come in between. `got` has the
    bodies of each event, one a request, by its id."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(("127.0.0.1", 0), _Receiving)
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self.lock = Lock()
        self._draw = draw

    @property
    def url(self) -> str:
        """The address of the receiver."""
        return f"http://127.0.0.1:{self.server_port}/hook"

    def keep(self, event: str, body: bytes) -> float:
        """Keep an event; return for how many seconds the answer is to wait."""
        with self.lock:
            self.got[event].append(body)
            return self._draw.random() * 0.1


class _Receiving(BaseHTTPRequestHandler):
    server: SlowReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.keep(self.headers["X-ZenRows-Event-Id"], body))
        try:
            self.send_response(204)
            self.end_headers()
        except OSError:
            self.close_connection = True  # whoever waited for the answer was killed

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of tests clean."""
