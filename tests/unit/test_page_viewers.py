"""Who looks at a page: nobody is asked on the developer's own machine, and everybody elsewhere."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from conveyor.http.pages.session import Sessions
from conveyor.http.pages.viewer import Viewer

pytestmark = pytest.mark.anyio


def request(*headers: tuple[str, str]) -> Request:
    """Build a request for the overview with these headers."""
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "method": "GET", "path": "/dashboard", "headers": raw})


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.8.9.1:1", "[::1]:8080"])
async def test_a_loopback_host_of_a_loopback_server_shows_all_callers(host: str) -> None:
    viewer = await Sessions(on_loopback=True).identify(request(("Host", host)))
    assert viewer == Viewer(caller_id=None, acts=True)


async def test_a_server_that_others_reach_asks_also_on_loopback() -> None:
    sessions = Sessions(on_loopback=False)
    assert await sessions.identify(request(("Host", "localhost:8080"))) is None


@pytest.mark.parametrize("host", ["conveyor.example", "10.0.0.1:8080", "localhost.evil.example"])
async def test_another_host_asks(host: str) -> None:
    assert await Sessions(on_loopback=True).identify(request(("Host", host))) is None


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "x-forwarded-proto"]
)
async def test_a_request_that_a_proxy_passed_on_asks(header: str) -> None:
    found = await Sessions(on_loopback=True).identify(
        request(("Host", "localhost:8080"), (header, "127.0.0.1"))
    )
    assert found is None


async def test_two_hosts_or_none_ask() -> None:
    sessions = Sessions(on_loopback=True)
    assert await sessions.identify(request()) is None
    twice = request(("Host", "localhost"), ("Host", "localhost"))
    assert await sessions.identify(twice) is None
