"""Callers that ask too often are turned away, before anything is done for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from conveyor.dev.rate_limit import MemoryRateLimit
from conveyor.http.app import AppOptions, create_app
from tests.unit.http_api import KEY, ORIGIN, OTHER_KEY, Api, check_described, open_api, problem_of

BURST = 3
TASKS = {"tasks": [{"url": "https://a.test/"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
async def limited(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    """The same service, behind a limit of one request in four seconds."""
    app = create_app(
        api.service,
        registry=CollectorRegistry(),
        ready=lambda: True,
        clock=api.clock,
        options=AppOptions(
            allowed_hosts=["conveyor.test"],
            rate_limit=MemoryRateLimit(api.clock, rate=0.25, burst=BURST),
        ),
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=ORIGIN,
        headers={"X-API-Key": KEY},
        event_hooks={"response": [check_described]},
    ) as client:
        yield client


async def use_up(client: httpx.AsyncClient) -> None:
    for _ in range(BURST):
        assert (await client.get("/v1/jobs")).status_code == 200


async def test_too_many_requests_are_refused_with_whole_seconds_to_wait(
    api: Api, limited: httpx.AsyncClient
) -> None:
    await use_up(limited)
    refused = await limited.get("/v1/jobs")
    problem_of(refused, status=429, code="rate_limited")
    assert refused.headers["Retry-After"] == "4"
    await api.clock.advance(2.5)
    assert (await limited.get("/v1/jobs")).headers["Retry-After"] == "2"
    await api.clock.advance(2)
    assert (await limited.get("/v1/jobs")).status_code == 200


async def test_a_refused_request_does_nothing(api: Api, limited: httpx.AsyncClient) -> None:
    await use_up(limited)
    problem_of(await limited.post("/v1/jobs", json=TASKS), status=429, code="rate_limited")
    assert (await api.client.get("/v1/jobs")).json()["jobs"] == []
    # Before the request is looked at, too: what is wrong with it is not said.
    problem_of(await limited.post("/v1/jobs", json={}), status=429, code="rate_limited")


async def test_callers_do_not_share_a_limit(limited: httpx.AsyncClient) -> None:
    await use_up(limited)
    other = await limited.get("/v1/jobs", headers={"X-API-Key": OTHER_KEY})
    assert other.status_code == 200


async def test_who_has_no_key_uses_up_nobodys_tokens(limited: httpx.AsyncClient) -> None:
    for _ in range(2 * BURST):
        assert (await limited.get("/v1/jobs", headers={"X-API-Key": ""})).status_code == 401
    await use_up(limited)


async def test_what_needs_no_key_is_not_limited(limited: httpx.AsyncClient) -> None:
    await use_up(limited)
    for path in ("/healthz", "/readyz", "/metrics"):
        for _ in range(2 * BURST):
            assert (await limited.get(path)).status_code == 200


async def test_without_a_limit_everything_passes(api: Api) -> None:
    for _ in range(30):
        assert (await api.client.get("/v1/jobs")).status_code == 200
