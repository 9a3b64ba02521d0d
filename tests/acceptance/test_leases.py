"""Short leases, and the end of a server that has requests under way."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.testing.process import ServerProcess
from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_wire import eventually

pytestmark = pytest.mark.server


def test_calls_longer_than_the_visibility_timeout_are_made_once(tmp_path: Path) -> None:
    short = {"visibility_timeout": 1, "permit_lease": 5}
    with (
        boot(tmp_path, "--gateway", "fake", **short) as server,
        Caller(server.api) as caller,
    ):
        rows = caller.scraped(*(f"http://fake.test/{n}?delay=2.5" for n in range(5)))
        assert {row["status"] for row in rows} == {"successful"}
        for row in rows:
            [event] = caller.history(row)
            assert (event["attempt"], event.get("error")) == (1, None)


def test_a_request_cut_off_at_the_end_leaves_no_traceback(tmp_path: Path) -> None:
    with ExitStack() as still_open:
        with boot(tmp_path, "--gateway", "fake") as server, Caller(server.api) as caller:
            address = (urlsplit(server.origin).hostname, server.port)
            connection = still_open.enter_context(socket.create_connection(address, timeout=60))
            connection.sendall(
                b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: k\r\n"
                b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
            )
            caller.get("/jobs")
        assert b"Traceback" not in server.output()


def test_names_that_nobody_answers_for_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Lookups that never return, and would be waited for without end."""
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(
        "import socket, threading\nsocket.getaddrinfo = lambda *_, **__: threading.Event().wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(patched)}
    flags = ("--gateway", "direct")
    with (
        ServerProcess(tmp_path / "data", *flags, environment=environment) as server,
        Caller(server.info.api) as caller,
    ):
        job = caller.submit(*(f"http://name{number}.test/" for number in range(60)))
        eventually(
            lambda: any(row["status"] == "processing" for row in caller.results(job)) or None,
            "names are being looked up",
        )
        server.signal(signal.SIGTERM)
        code, errors = server.wait(60.0)
        assert code == 0
        assert errors.count("\n") == 1
