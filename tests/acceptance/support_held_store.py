"""A way to the object store that stops in the middle of a packed write until its writer is gone."""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CHUNK = 65_536
PHASES = ("before", "middle", "after")
"""Before the store has got a byte of a write, after half of it, and before its answer."""
_PACKED_WRITE = re.compile(rb"PUT [^ ]*/segments/")


class HeldStore:
    """Passes connections on to a store. Once it is armed with a phase, it stops the next packed
    write there and sets `reached`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "", parts.port or 0)
        self.reached = threading.Event()
        self.writes = 0
        self._lock = threading.Lock()
        self._phase: str | None = None

    def arm(self, phase: str) -> None:
        """Stop the next packed write."""
        with self._lock:
            self.reached.clear()
            self._phase = phase

    def next_phase(self) -> str | None:
        """Return where a packed write that begins now is to stop, if anywhere."""
        with self._lock:
            self.writes += 1
            phase, self._phase = self._phase, None
            return phase


class _Way(socketserver.BaseRequestHandler):
    """One connection."""

    store: HeldStore

    def handle(self) -> None:
        client: socket.socket = self.request
        with (
            socket.create_connection(self.store.address) as upstream,
            suppress(ConnectionError, BrokenPipeError),
        ):
            holds_answer = threading.Event()
            # It ends with the connection, as the thread of this one does, and not with a test.
            name = f"{threading.current_thread().name}, back"
            back = threading.Thread(
                target=self._back, args=(upstream, client, holds_answer), name=name
            )
            back.start()
            try:
                self._there(client, upstream, holds_answer)
            finally:
                with suppress(OSError):
                    upstream.shutdown(socket.SHUT_RDWR)
                back.join()

    def _there(
        self, client: socket.socket, upstream: socket.socket, holds_answer: threading.Event
    ) -> None:
        while data := client.recv(CHUNK):
            if _PACKED_WRITE.match(data):
                phase = self.store.next_phase()
                if phase == "after":
                    holds_answer.set()
                elif phase is not None:
                    if phase == "middle":
                        upstream.sendall(data[: len(data) // 2])
                    self.store.reached.set()
                    while client.recv(CHUNK):
                        """Nothing goes on."""
                    return
            upstream.sendall(data)

    def _back(
        self, upstream: socket.socket, client: socket.socket, holds_answer: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := upstream.recv(CHUNK):
                if holds_answer.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    self.store.reached.set()
                    return
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def held_store(url: str) -> Iterator[tuple[HeldStore, str]]:
    """Pass connections on to the store at a URL; the way, and its own URL."""
    store = HeldStore(url)
    handler = type("_WayToStore", (_Way,), {"store": store})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield store, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
