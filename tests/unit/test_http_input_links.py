"""Upload links: their owner, their lifetime, and links that open nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.inputs import JobInput
from conveyor.service import Service, ServiceOptions
from tests.unit.http_api import ORIGIN, Api, open_api, problem_of
from tests.unit.input_slots import (
    DAY,
    FILE,
    HALF_AN_HOUR,
    LIMIT,
    MAX_REQUEST,
    files,
    make,
    noted,
    put,
    stored,
)
from tests.webhooks import loopback_webhooks


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(
        tmp_path / "data", max_request_bytes=MAX_REQUEST, max_input_bytes=LIMIT
    ) as opened:
        yield opened


async def test_a_link_never_outlives_its_slot(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", input_ttl=60.0) as api:
        slot = await make(api)

        assert slot["upload"]["expires_at"] == slot["expires_at"]


async def test_only_our_own_links_open_a_slot(api: Api) -> None:
    slot, other = await make(api), await make(api)
    url = httpx.URL(slot["upload"]["url"])
    query = dict(url.params)
    forged = [
        url.copy_with(path=f"/v1/job_inputs/{other['file_input_id']}/content"),
        url.copy_with(query=None),
        url.copy_set_param("signature", ""),
        url.copy_set_param("signature", "0" * len(query["signature"])),
        url.copy_set_param("signature", query["signature"].upper()),
        url.copy_set_param("signature", "é"),
        url.copy_set_param("expires", str(int(query["expires"]) + 1)),
        url.copy_set_param("expires", "0" + query["expires"]),
        url.copy_set_param("expires", "-1"),
        url.copy_set_param("expires", "9" * 5_000),
    ]

    for link in forged:
        response = await api.bare.put(link, content=FILE, headers=slot["upload"]["headers"])
        problem = problem_of(response, status=403, code="permission_denied")
        assert problem["detail"] == "the upload link is not valid"
    doubled = await api.bare.put(
        f"{url}&signature={query['signature']}", content=FILE, headers=slot["upload"]["headers"]
    )
    problem_of(doubled, status=400, code="invalid_argument")
    assert files(api) == []


async def test_links_of_an_older_secret_are_honoured_and_foreign_ones_are_not(api: Api) -> None:
    slot = await make(api)
    query = dict(parse_qsl(urlsplit(slot["upload"]["url"]).query))
    renewed = dataclasses.replace(api.binding, root_secret=b"another root secret")

    def open_under(*older: bytes) -> Coroutine[Any, Any, JobInput]:
        options = ServiceOptions(public_origin=ORIGIN, older_secrets=older)
        service = Service(
            renewed,
            options,
            api.clock,
            webhooks=loopback_webhooks(api.clock),
        )
        return service.inputs.open_upload(slot["file_input_id"], **query, content_type="text/csv")

    assert await open_under(api.binding.root_secret) == await noted(api, slot)
    with pytest.raises(ConveyorError) as refused:
        await open_under()
    assert refused.value.code is ErrorCode.PERMISSION_DENIED


async def test_a_result_link_opens_no_slot(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    page = (await api.client.get(f"/v1/jobs/{job['job_id']}/results")).json()
    query = urlsplit(page["results"][0]["result_url"]).query
    slot = await make(api)
    link = httpx.URL(slot["upload"]["url"]).copy_with(query=query.encode())

    response = await api.bare.put(link, content=FILE, headers=slot["upload"]["headers"])

    problem_of(response, status=403, code="permission_denied")


async def test_a_link_ends_before_its_slot(api: Api) -> None:
    slot = await make(api)
    await api.clock.advance(HALF_AN_HOUR - 1)
    assert (await put(api, slot, FILE)).status_code == 200

    await api.clock.advance(1)
    response = await put(api, slot, b"late")

    problem = problem_of(response, status=403, code="permission_denied")
    assert problem["detail"] == "the upload link has expired"
    assert await stored(api, slot) == FILE
    await api.clock.advance(DAY - HALF_AN_HOUR)
    problem_of(await put(api, slot, b"later"), status=404, code="file_input_not_found")
    assert await stored(api, slot) == FILE


async def test_a_web_page_of_another_origin_uploads_nothing(api: Api) -> None:
    slot = await make(api)

    for headers in ({"Origin": "http://evil.test"}, {"Host": "evil.test"}):
        response = await put(api, slot, FILE, **headers)
        problem_of(response, status=403, code="permission_denied")
    assert files(api) == []


async def test_a_link_takes_only_put(api: Api) -> None:
    slot = await make(api)

    for method in ("GET", "POST", "DELETE"):
        response = await api.client.request(method, slot["upload"]["url"])
        problem_of(response, status=405, code="method_not_allowed")
        assert response.headers["Allow"] == "PUT"
