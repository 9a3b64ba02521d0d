"""The word of a host to one worker holds for the whole fleet: a refusal, and its robots.txt."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Lock
from time import monotonic

import pytest

from tests.acceptance.support_calls import Caller, Json
from tests.acceptance.support_fleet import serving_direct
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import eventually
from tests.acceptance.test_host_limits import LoggingSite

PAUSE = 5
TASKS = 20
GIVEN, LIMIT = 300, 3
"""Pages of a site that refuses nothing, and the calls that each host may have at a time."""
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


class RudeSite(LoggingSite):
    """A site that never gives a page. `answer` is its status, `asks` the way in which it asks for a
    pause; without a status it hangs up. `robots` is the status of its robots.txt."""

    def __init__(self, *, answer: int = 0, asks: str = "", robots: int = 404) -> None:
        super().__init__(_RudeHandler)
        self.answer = answer
        self.asks = asks
        self.robots = robots


class _RudeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RudeSite

    def do_GET(self) -> None:
        with self.server.one():
            status = self.server.robots if self.path == "/robots.txt" else self.server.answer
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        if self.path != "/robots.txt" and self.server.asks == "seconds":
            self.send_header("Retry-After", "2")
        elif self.path != "/robots.txt" and self.server.asks == "date":
            later = datetime.now(UTC) + timedelta(seconds=3)
            self.send_header("Retry-After", format_datetime(later, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def rude_sites() -> list[RudeSite]:
    """A site for each way in which a host refuses."""
    return [
        RudeSite(answer=429),
        RudeSite(answer=429, asks="seconds"),
        RudeSite(answer=503, asks="date"),
        RudeSite(answer=503),
        RudeSite(),
        RudeSite(answer=429, robots=503),
        RudeSite(answer=429, asks="seconds", robots=429),
    ]


@pytest.mark.full
@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("each", [60, 120], ids=["one queue", "host lanes"])
def test_hosts_that_refuse_in_every_form_keep_no_other_from_its_calls(
    binding: str, tmp_path: Path, each: int
) -> None:
    with ExitStack() as stack:
        rude = [stack.enter_context(site) for site in rude_sites()]
        kind = stack.enter_context(LoggingSite())
        for site in (*rude, kind):
            stack.enter_context(in_background(site))
        data = tmp_path / "data"
        api, _ = stack.enter_context(serving_direct(binding, data, workers=4, host_limit=LIMIT))
        caller = stack.enter_context(Caller(api))
        urls = [f"{kind.origin}/{number}" for number in range(GIVEN)]
        urls += [f"{site.origin}/{number}" for site in rude for number in range(each)]
        Random(1).shuffle(urls)
        job = caller.submit(*urls, politeness={"robots": True}, max_attempts=2)

        def is_done() -> bool | None:
            run = caller.get(f"/jobs/{job['job_id']}")["latest_run"]
            return run["stats"]["successful"] == GIVEN or None

        eventually(is_done, "all pages of the site that gives them are scraped", timeout=300)
        rows = caller.results(job, limit=1_000)

    pending = sum(row["status"] == "pending" for row in rows)
    assert pending > each, "sites refuse until the end"
    assert len(kind.starts) == GIVEN + 1, "each page and robots.txt, once"
    assert all(site.starts for site in rude)
    assert max(site.peak for site in (*rude, kind)) <= LIMIT
