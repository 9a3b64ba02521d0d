"""The limits of hosts, as a site sees them: over all jobs and workers, on either binding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic, sleep

import pytest

from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_fleet import serving_direct
from tests.acceptance.support_site import in_background

LIMIT, RATE, TASKS = 3, 10, 40


class LoggingSite(ThreadingHTTPServer):
    """A site that notes when requests came, and the most that it had at a time."""

    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.origin = f"http://127.0.0.1:{self.server_port}"
        self.starts: list[float] = []
        self.peak = self._here = 0
        self._lock = Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Note a request."""
        with self._lock:
            self.starts.append(monotonic())
            self._here += 1
            self.peak = max(self.peak, self._here)
        try:
            yield
        finally:
            with self._lock:
                self._here -= 1

    def most_within(self, seconds: float) -> int:
        """Return the most requests that came within so many seconds."""
        return max(
            sum(start <= other < start + seconds for other in self.starts) for start in self.starts
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoggingSite

    def do_GET(self) -> None:
        with self.server.one():
            sleep(0.2)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"page")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_site_never_has_more_than_its_limits(binding: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(f'"127.0.0.1" = {{ rate = {RATE} }}\n')
    with (
        LoggingSite() as site,
        in_background(site),
        serving_direct(
            binding, tmp_path / "data", workers=2, host_limit=LIMIT, hosts=str(hosts)
        ) as (api, _),
        Caller(api) as caller,
    ):
        half = [f"{site.origin}/{number}" for number in range(TASKS // 2)]
        for job in [caller.submit(*half), caller.submit(*half)]:
            assert caller.wait(job)["stats"]["successful"] == TASKS // 2
    assert len(site.starts) == TASKS
    assert site.peak <= LIMIT
    assert site.most_within(0.9) <= RATE


@pytest.mark.extended
@pytest.mark.slow
def test_a_job_makes_only_the_calls_of_its_own_caller_fewer(tmp_path: Path) -> None:
    with boot(tmp_path / "data", "--gateway", "direct", "--allow-private") as server:
        for key, politeness, most in [("polite", {"per_host": 2}, 2), ("rude", None, 12)]:
            with LoggingSite() as site, in_background(site), Caller(server.api, key) as caller:
                half = [f"{site.origin}/{number}" for number in range(6)]
                for job in [caller.submit(*half, politeness=politeness) for _ in range(2)]:
                    assert caller.wait(job)["stats"]["successful"] == 6
                assert len(site.starts) == 12
                assert min(most, 3) <= site.peak <= most
