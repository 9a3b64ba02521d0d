"""The history counts every request that reached the origin, whatever its connections do."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

import pytest

from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller

RESET = struct.pack("ii", 1, 0)


class UnsteadySite:
    """A site whose connections break by chance. `requests` counts those that were read whole."""

    def __init__(self, listener: socket.socket, seed: int) -> None:
        self.origin = "http://{}:{}".format(*listener.getsockname())
        self.requests = 0
        self._listener = listener
        self._draw = random.Random(seed)
        self._lock = Lock()

    def serve(self) -> None:
        """Accept connections until the listener is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while self._read_request(connection):
                with self._lock:
                    self.requests += 1
                    whim = self._draw.random()
                body = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage"
                if whim < 0.1:
                    return  # unheard: nothing was answered
                if whim < 0.2:
                    connection.sendall(body[:20])
                    return
                if whim < 0.3:
                    connection.sendall(body[:-1])
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                connection.sendall(body)
                if whim < 0.4:
                    return  # announced to stay, and closed

    @staticmethod
    def _read_request(connection: socket.socket) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = connection.recv(65_536)
            if not data:
                return False
            head += data
        return True


@contextmanager
def unsteady_site(seed: int) -> Iterator[UnsteadySite]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        site = UnsteadySite(listener, seed)
        thread = Thread(target=site.serve, daemon=True)
        thread.start()
        yield site
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize(
    "tasks", [400, pytest.param(10_000, marks=(pytest.mark.full, pytest.mark.timeout(900)))]
)
def test_the_requests_at_the_origin_are_those_in_the_histories(tmp_path: Path, tasks: int) -> None:
    flags = ("--gateway", "direct", "--allow-private", "--workers", "8")
    with (
        unsteady_site(tasks) as site,
        boot(tmp_path, *flags, retry_base=0.01, retry_cap=0.02) as server,
        Caller(server.api) as caller,
    ):
        job = caller.submit(
            *(f"{site.origin}/{number}" for number in range(tasks)), max_attempts=10
        )
        run = caller.wait(job, seconds=600)
        rows = caller.results(job, limit=1_000)
        sent: list[int] = []
        for row in rows:
            row["job_id"] = job["job_id"]
            sent += [event.get("sent", 1) for event in caller.history(row)]

    assert run["stats"]["successful"] == len(rows) == tasks
    assert sum(sent) == site.requests
    assert {1, 2} <= set(sent) <= {0, 1, 2}
