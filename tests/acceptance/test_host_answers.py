"""The word of a host to one worker holds for the whole fleet: a refusal, and its robots.txt."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic

import pytest

from tests.acceptance.support_calls import Caller, Json
from tests.acceptance.support_fleet import serving_direct
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import eventually

PAUSE = 5
TASKS = 20
ROBOTS = b"User-agent: *\nDisallow: /private\n"


class StrictSite(ThreadingHTTPServer):
    """A site with a robots.txt that refuses the first page and asks for a pause. `asked` are the
    paths and times of all requests."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.origin = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, float]] = []
        self.refused_at = 0.0
        self._lock = Lock()

    def refuses(self, path: str) -> bool:
        """Note a request, and tell whether it is refused."""
        with self._lock:
            self.asked.append((path, monotonic()))
            refuses = path != "/robots.txt" and not self.refused_at
            if refuses:
                self.refused_at = monotonic()
            return refuses


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StrictSite

    def do_GET(self) -> None:
        refuses = self.server.refuses(self.path)
        body = ROBOTS if self.path == "/robots.txt" else b"page"
        self.send_response(429 if refuses else 200)
        if refuses:
            self.send_header("Retry-After", str(PAUSE))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.full
@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_host_says_holds_for_all_workers(binding: str, tmp_path: Path) -> None:
    with (
        StrictSite() as site,
        in_background(site),
        serving_direct(binding, tmp_path / "data", workers=4, retry_base=0.01) as (api, _),
        Caller(api) as caller,
    ):
        polite = {"politeness": {"robots": True, "per_host": 4}, "max_attempts": 1}
        first = caller.submit(f"{site.origin}/refused", **polite)

        def is_refused() -> bool | None:
            waiting: Json = caller.results(first)[0].get("waiting") or {}
            return waiting.get("reason") == "retry_after" or None

        eventually(is_refused, "the first task is refused")
        pages = [f"{site.origin}/{number}" for number in range(TASKS)]
        private = [f"{site.origin}/private/{number}" for number in range(TASKS)]
        job = caller.submit(*pages, *private, **polite)

        assert caller.wait(first)["stats"]["successful"] == 1
        assert caller.wait(job)["stats"]["successful"] == TASKS
        codes = {row["error"]["code"] for row in caller.results(job) if row["status"] == "failed"}

    assert codes == {"robots_disallowed"}
    paths = [path for path, _ in site.asked]
    assert sorted(paths) == sorted(
        ["/robots.txt", *["/refused"] * 2, *(f"/{number}" for number in range(TASKS))]
    )
    times = sorted(at for path, at in site.asked if path != "/robots.txt")
    assert times[1] >= site.refused_at + PAUSE
