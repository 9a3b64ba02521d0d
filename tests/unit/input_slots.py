"""Slots for files over HTTP, and the few steps that most of their tests take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from conveyor.ports.inputs import JobInput
from conveyor.records.blob_keys import input_key
from tests.disk import files_below
from tests.unit.http_api import Api

LIMIT = 4_096
"""Most bytes of a file; other requests hold fewer (MAX_REQUEST)."""

MAX_REQUEST = 1_024
HALF_AN_HOUR = 1_800.0
DAY = 86_400.0
CSV: dict[str, Any] = {"type": "csv", "csv": {"fields": {"url": 0}}}

FILE = b"https://site.test/1\nhttps://site.test/2\n"


async def make(api: Api, document: dict[str, Any] = CSV) -> dict[str, Any]:
    """A slot of Alice's; the answer."""
    response = await api.client.post("/v1/job_inputs", json=document)
    assert response.status_code == 201, response.text
    body: dict[str, Any] = response.json()
    return body


async def put(
    api: Api,
    slot: dict[str, Any],
    content: bytes | AsyncIterator[bytes],
    **headers: str,
) -> httpx.Response:
    """Send a file as the answer said, but for `headers`; without a key."""
    upload = slot["upload"]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.bare.request(
        upload["method"], upload["url"], content=content, headers={**upload["headers"], **named}
    )


async def stored(api: Api, slot: dict[str, Any]) -> bytes | None:
    """The file in a slot."""
    pieces = await api.binding.blobs.open(input_key(slot["file_input_id"]))
    return None if pieces is None else b"".join([piece async for piece in pieces])


async def noted(api: Api, slot: dict[str, Any]) -> JobInput:
    """The slot as it is kept."""
    kept = await api.binding.inputs.get_input(slot["file_input_id"])
    assert kept is not None
    return kept


def files(api: Api) -> list[Path]:
    """Every file of a body, and whatever was left beside them."""
    return list(files_below(api.directory / "blobs"))
