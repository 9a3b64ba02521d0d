"""Slots for files of tasks: asked for, filled through their links, and left alone by strangers."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message
from zenrows.batch.models import CreateJobInputResponse

from conveyor.http import middleware
from conveyor.ports.inputs import CsvSpec, InputType
from tests.unit.http_api import ORIGIN, Api, open_api, problem_of
from tests.unit.input_slots import (
    CSV,
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


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(
        tmp_path / "data", max_request_bytes=MAX_REQUEST, max_input_bytes=LIMIT
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    ("document", "content_type"),
    [
        (CSV, "text/csv"),
        ({"type": "jsonl"}, "application/x-ndjson"),
        ({"type": "urls"}, "text/plain"),
    ],
)
async def test_a_slot_is_made_and_told(
    api: Api, document: dict[str, Any], content_type: str
) -> None:
    slot = await make(api, document)

    parsed = CreateJobInputResponse.model_validate(slot)
    assert slot["upload"]["headers"] == {"Content-Type": content_type}
    assert slot["upload"]["url"].startswith(
        f"{ORIGIN}/v1/job_inputs/{parsed.file_input_id}/content?"
    )
    assert str(parsed.upload.url) == slot["upload"]["url"]
    now = api.clock.now() / 1_000
    assert parsed.upload.expires_at.timestamp() - now == HALF_AN_HOUR
    assert parsed.expires_at.timestamp() - now == DAY
    kept = await noted(api, slot)
    assert (kept.type, kept.content_type, kept.size) == (document["type"], content_type, None)


async def test_a_slot_belongs_to_its_maker_and_keeps_its_spec(api: Api) -> None:
    spec = {"delimiter": "|", "quote": "'", "header": True, "fields": {"url": "u"}}
    kept = await noted(api, await make(api, {"type": "csv", "csv": spec}))

    assert kept.type is InputType.CSV
    assert kept.csv == CsvSpec(url="u", delimiter="|", quote="'", header=True)
    assert kept.caller == (api.service.identify("key-of-alice")).caller_id


async def test_a_slot_needs_a_key_and_a_sound_document(api: Api) -> None:
    problem_of(await api.bare.post("/v1/job_inputs", json=CSV), status=401, code="unauthenticated")
    problem_of(
        await api.client.post("/v1/job_inputs", content=b"type=csv"),
        status=415,
        code="unsupported_media_type",
    )
    refused = await api.client.post("/v1/job_inputs", json={"type": "csv"})
    assert problem_of(refused, status=400, code="invalid_argument")["detail"].startswith("csv: ")


async def test_a_file_is_stored_byte_for_byte(api: Api) -> None:
    slot = await make(api)

    response = await put(api, slot, FILE)

    assert (response.status_code, response.content) == (200, b"")
    assert await stored(api, slot) == FILE
    assert (await noted(api, slot)).size == len(FILE)


async def test_an_empty_file_is_an_upload(api: Api) -> None:
    slot = await make(api)

    assert (await put(api, slot, b"")).status_code == 200

    assert await stored(api, slot) == b""
    assert (await noted(api, slot)).size == 0


async def test_a_second_upload_takes_the_place_of_the_first(api: Api) -> None:
    slot = await make(api)
    await put(api, slot, FILE)

    assert (await put(api, slot, b"https://other.test/\n")).status_code == 200

    assert await stored(api, slot) == b"https://other.test/\n"
    assert (await noted(api, slot)).size == 20
    assert len(files(api)) == 1


async def test_a_file_is_bounded_by_its_own_limit(api: Api) -> None:
    slot = await make(api)
    assert LIMIT > MAX_REQUEST

    assert (await put(api, slot, b"x" * LIMIT)).status_code == 200

    assert (await noted(api, slot)).size == LIMIT
    response = await api.client.post("/v1/job_inputs", content=b"x" * (MAX_REQUEST + 1))
    problem_of(response, status=413, code="payload_too_large")
    response = await api.client.post(slot["upload"]["url"], content=b"x" * (MAX_REQUEST + 1))
    problem_of(response, status=413, code="payload_too_large")


async def test_an_announced_excess_is_refused_unread(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_UNREAD", 0)
    slot = await make(api)
    await put(api, slot, FILE)
    read = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield b"x"

    response = await put(api, slot, content(), Content_Length=str(LIMIT + 1))

    problem = problem_of(response, status=413, code="payload_too_large")
    assert f"{LIMIT} bytes (CONVEYOR_MAX_INPUT_BYTES)" in problem["detail"]
    assert response.headers["Connection"] == "close"
    assert read == 0
    assert await stored(api, slot) == FILE


async def test_an_unannounced_excess_is_read_no_further(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_UNREAD", 0)
    slot = await make(api)
    await put(api, slot, FILE)
    read = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1_000
            yield b"x" * 1_000

    response = await put(api, slot, content())

    problem = problem_of(response, status=413, code="payload_too_large")
    assert f"{LIMIT} bytes (CONVEYOR_MAX_INPUT_BYTES)" in problem["detail"]
    assert read == 5_000
    assert await stored(api, slot) == FILE
    assert (await noted(api, slot)).size == len(FILE)
    assert len(files(api)) == 1


async def test_a_file_passes_through_without_being_held(tmp_path: Path) -> None:
    pieces, size = 400, 65_536

    async def content() -> AsyncIterator[bytes]:
        for _ in range(pieces):
            yield bytes(size)

    async with open_api(tmp_path / "data") as api:
        slot = await make(api)
        tracemalloc.start()
        try:
            assert (await put(api, slot, content())).status_code == 200
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert (await noted(api, slot)).size == pieces * size
        assert peak < pieces * size // 8


@pytest.mark.parametrize("sent", ["", "text/plain", "text/csv; charset=utf-8", "TEXT/CSV"])
async def test_another_content_type_is_refused_and_the_right_one_named(api: Api, sent: str) -> None:
    slot = await make(api)

    response = await put(api, slot, FILE, Content_Type=sent)

    problem = problem_of(response, status=403, code="permission_denied")
    assert problem["detail"] == "this upload link takes a file sent as Content-Type: text/csv"
    assert await stored(api, slot) is None
    assert (await put(api, slot, FILE)).status_code == 200


async def test_plain_bytes_are_taken_from_clients_that_know_no_better(api: Api) -> None:
    slot = await make(api)

    response = await put(api, slot, FILE, Content_Type="application/octet-stream")

    assert response.status_code == 200
    assert await stored(api, slot) == FILE


async def test_a_content_type_is_given_once(api: Api) -> None:
    slot = await make(api)
    url = slot["upload"]["url"]
    types = [("Content-Type", "text/csv")] * 2

    for headers in (types, []):
        response = await api.bare.put(url, content=FILE, headers=headers)
        problem_of(response, status=403, code="permission_denied")
    assert files(api) == []


async def test_a_slot_that_was_removed_takes_nothing(api: Api) -> None:
    slot = await make(api)
    await api.binding.inputs.drop_input(slot["file_input_id"])

    problem_of(await put(api, slot, FILE), status=404, code="file_input_not_found")
    response = await api.bare.put(
        "/v1/job_inputs/x/content", content=FILE, headers=slot["upload"]["headers"]
    )
    problem_of(response, status=404, code="file_input_not_found")
    assert files(api) == []


@pytest.mark.parametrize("end", ["removed", "past its time"])
async def test_a_slot_that_ends_during_an_upload_keeps_nothing(api: Api, end: str) -> None:
    slot = await make(api)

    async def content() -> AsyncIterator[bytes]:
        yield FILE
        if end == "removed":
            await api.binding.inputs.drop_input(slot["file_input_id"])
        else:
            api.clock.shift(DAY)
        yield FILE

    response = await put(api, slot, content())

    problem_of(response, status=404, code="file_input_not_found")
    assert files(api) == []


async def test_an_upload_that_breaks_off_leaves_the_earlier_file(api: Api) -> None:
    slot = await make(api)
    await put(api, slot, FILE)
    answers: list[Message] = []
    messages: list[Message] = [
        {"type": "http.request", "body": b"x" * 1_000, "more_body": True},
        {"type": "http.request", "body": b"x" * 1_000, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    url = httpx.URL(slot["upload"]["url"])
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "PUT",
        "scheme": "http",
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query,
        "headers": [(b"host", b"127.0.0.1:9000"), (b"content-type", b"text/csv")],
    }
    transport = api.bare._transport
    assert isinstance(transport, httpx.ASGITransport)
    await transport.app(scope, receive, send)

    assert (answers, messages) == ([], [])
    assert await stored(api, slot) == FILE
    assert (await noted(api, slot)).size == len(FILE)
    assert len(files(api)) == 1
