"""The history counts every request that reached the origin, whatever its connections do.

An origin that ends a connection goes on reading it: a request that crosses the end on its way has
been sent. So it counts all that a client sends, and not only what it answers.
"""

from __future__ import annotations

import random
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller
from tests.nasty.answer import End
from tests.nasty.certificate import Certificate
from tests.nasty.origin import Inbox, Line, PlainLine, TlsLine

PATIENCE = 1.0
"""Seconds after which a call is given up."""
MOST_FAULTS = 5
"""A page that was asked for so often is answered well."""
BATCH = 5_000
REFUSED_ONE_IN = 50
UNSHAKEN_ONE_IN = 20
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage"
HEAD = PAGE[:-4]
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\npage"
_PATH = re.compile(rb"GET /(\d+) ")


class Fault(msgspec.Struct, frozen=True):
    """The behaviour of an origin: `first` it sends at once, `last` after some seconds. Then,
    however the connection ends, no other request of it is answered."""

    first: bytes
    end: End = End.STAYS
    seconds: float = 0.0
    last: bytes = b""


FAULTS = {
    "closed before the answer": Fault(b"", End.FIN),
    "reset before the head": Fault(b"", End.RESET),
    "closed in the head": Fault(PAGE[:20], End.FIN),
    "reset in the head": Fault(PAGE[:20], End.RESET),
    "reset after the head": Fault(HEAD, End.RESET),
    "closed in the body": Fault(PAGE[:-1], End.FIN),
    "reset in the body": Fault(PAGE[:-1], End.RESET),
    "reset where the end is the body's": Fault(UNTIL_END, End.RESET),
    "closed where the end is the body's": Fault(UNTIL_END, End.FIN),
    "half-closed with the answer": Fault(PAGE, End.FIN),
    "closed when idle": Fault(PAGE, End.FIN, 0.002),
    "more than was asked for": Fault(PAGE + b"POISON"),
    "pushed when idle": Fault(PAGE, End.STAYS, 0.002, b"POISON\r\n"),
    "silent": Fault(b""),
    "silent in the head": Fault(PAGE[:20]),
    "silent in the body": Fault(PAGE[:-1]),
    "late": Fault(b"", End.STAYS, 1.5 * PATIENCE, PAGE),
    "late, and closed": Fault(PAGE[:-1], End.FIN, 1.5 * PATIENCE, PAGE[-1:]),
}
TLS_FAULTS = FAULTS | {
    "cut off before the answer": Fault(b"", End.BARE_FIN),
    "cut off in the head": Fault(PAGE[:20], End.BARE_FIN),
    "cut off in the body": Fault(PAGE[:-1], End.BARE_FIN),
    "cut off where the end is the body's": Fault(UNTIL_END, End.BARE_FIN),
    "cut off with the answer": Fault(PAGE, End.BARE_FIN),
    "cut off when idle": Fault(PAGE, End.BARE_FIN, 0.002),
}
UNSHAKEN = "cut off in the handshake"


class UnsteadySite:
    """A site whose connections break by chance. `requests` counts those that were read whole, and
    `met` the faults."""

    def __init__(
        self, listener: socket.socket, seed: int, context: ssl.SSLContext | None = None
    ) -> None:
        scheme = "http" if context is None else "https"
        self.origin = "{}://{}:{}".format(scheme, *listener.getsockname())
        self.requests = 0
        self.met: Counter[str] = Counter()
        self._listener = listener
        self._context = context
        self._faults = FAULTS if context is None else TLS_FAULTS
        self._deck: list[str] = []
        self._visits: Counter[bytes] = Counter()
        self._draw = random.Random(f"{seed} {scheme}")
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Accept connections until the listener is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            line = self._line(connection)
            if line is None:
                return
            inbox = Inbox(line)
            while (fault := self._drawn(inbox.head())) is None:
                line.send(PAGE)
            with suppress(OSError):  # the client may be gone
                self._play(fault, line)
            while True:
                self._count(inbox.head())

    def _line(self, connection: socket.socket) -> Line | None:
        """Shake hands, or cut the connection off."""
        if self._context is None:
            return PlainLine(connection)
        with self._lock:
            is_cut = self._draw.random() * UNSHAKEN_ONE_IN < 1
            self.met[UNSHAKEN] += is_cut
        if is_cut:
            connection.recv(65_536)
            return None
        return TlsLine(connection, self._context)

    def _count(self, head: bytes) -> bytes:
        found = _PATH.match(head)
        assert found is not None, head
        with self._lock:
            self.requests += 1
        return found[1]

    def _drawn(self, head: bytes) -> Fault | None:
        """Count a request, and draw what becomes of it: in half of all cases nothing bad, else each
        fault once before any comes again, so that few requests meet them all."""
        page = self._count(head)
        with self._lock:
            self._visits[page] += 1
            if self._visits[page] > MOST_FAULTS or self._draw.random() < 0.5:
                return None
            if not self._deck:
                self._deck = self._draw.sample(list(self._faults), len(self._faults))
            name = self._deck.pop()
            self.met[name] += 1
            return self._faults[name]

    @staticmethod
    def _play(fault: Fault, line: Line) -> None:
        if fault.seconds:
            line.send(fault.first)
            threading.Event().wait(fault.seconds)
            line.send(fault.last, fault.end)
        else:
            line.send(fault.first, fault.end)


@contextmanager
def unsteady_site(seed: int, context: ssl.SSLContext | None = None) -> Iterator[UnsteadySite]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        site = UnsteadySite(listener, seed, context)
        thread = threading.Thread(target=site.serve, daemon=True)
        thread.start()
        yield site
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def refusing_origin() -> Iterator[str]:
    """An origin that nobody listens at."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        yield "http://{}:{}".format(*unheard.getsockname())


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize(
    "tasks",
    [
        400,
        pytest.param(1_000, marks=pytest.mark.extended),
        pytest.param(10_000, marks=(pytest.mark.full, pytest.mark.timeout(1_800))),
    ],
)
def test_the_requests_at_the_origin_are_those_in_the_histories(
    tmp_path: Path, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.authority))
    flags = ("--gateway", "direct", "--allow-private", "--workers", "64")
    with (
        unsteady_site(tasks) as plain,
        unsteady_site(tasks, certificate.server_context()) as tls,
        refusing_origin() as nobody,
        boot(tmp_path, *flags, retry_base=0.01, retry_cap=0.02, gateway_timeout=PATIENCE) as server,
        Caller(server.api) as caller,
    ):
        origins = [plain.origin, tls.origin]
        urls = [
            f"{nobody if number % REFUSED_ONE_IN == 0 else origins[number % 2]}/{number}"
            for number in range(tasks)
        ]
        jobs = [
            caller.submit(*urls[start : start + BATCH], max_attempts=10)
            for start in range(0, tasks, BATCH)
        ]
        sent: Counter[int] = Counter()
        ends: Counter[str] = Counter()
        for job in jobs:
            caller.wait(job, seconds=1_500)
            for row in caller.results(job, limit=1_000):
                row["job_id"] = job["job_id"]
                counts = [event.get("sent", 1) for event in caller.history(row)]
                if row["url"].startswith(nobody):
                    assert counts == [0] * 10, row
                sent.update(counts)
                ends[row["status"]] += 1

    assert ends.total() == tasks
    assert ends["successful"] > tasks * 0.9  # on a busy machine some run out of attempts
    assert sum(count * times for count, times in sent.items()) == plain.requests + tls.requests
    assert sent.keys() == {0, 1, 2}
    assert plain.met.keys() == FAULTS.keys()
    assert tls.met.keys() == {*TLS_FAULTS, UNSHAKEN}
