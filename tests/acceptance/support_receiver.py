"""A receiver of events, on loopback."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from tests.acceptance.support_wire import eventually


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
        eventually(lambda: len(self.got) >= count or None, f"{count} events came")

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
