"""A server that takes small files of tasks, and the steps from a slot to the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.support_bindings import FLEET, Serving
from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller, Json, as_json
from tests.acceptance.support_client import FLEET_SETTINGS
from tests.acceptance.support_fleet import fleet
from tests.patient import SECONDS

MAX_ROWS = 60
MAX_BYTES = 40_000
MAX_REQUEST = 8_192
LARGE_FROM = 40
"""Tasks of a file from which its rows are written after the answer."""

BY_INDEX: Json = {"type": "csv", "csv": {"fields": {"url": 0}}}
JSONL: Json = {"type": "jsonl"}
URLS: Json = {"type": "urls"}
GOOD: dict[str, bytes] = {
    "csv": b"http://fake.test/good,id\n",
    "jsonl": b'{"url": "http://fake.test/good"}\n',
    "urls": b"http://fake.test/good\n",
}

LIMITS: dict[str, Any] = {
    "max_input_rows": MAX_ROWS,
    "max_input_bytes": MAX_BYTES,
    "max_request_bytes": MAX_REQUEST,
    "async_threshold": LARGE_FROM,
}


@contextmanager
def taking_files(binding: str, directory: Path) -> Iterator[Serving]:
    """A server of a binding over the fake gateway, with these limits."""
    if binding == FLEET:
        with fleet(directory, **FLEET_SETTINGS | LIMITS) as running:
            yield running
        return
    flags = ("--gateway", "fake", "--workers", "50")
    with boot(directory, *flags, **LIMITS, shutdown_grace=0.1) as server:
        yield server


def make(caller: Caller, document: Json) -> Json:
    """A slot; the answer."""
    response = caller.http.post("/job_inputs", json=document)
    assert response.status_code == 201, response.text
    return as_json(response)


def put(slot: Json, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    """Send a file as the answer said, but for `headers`, with nothing else of the caller's."""
    upload = slot["upload"]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(
        upload["method"],
        upload["url"],
        content=content,
        headers={**upload["headers"], **named},
        timeout=SECONDS,
        trust_env=False,
        verify=False,  # plain HTTP on loopback, and loading certificates takes long
    )


def filled(caller: Caller, document: Json, content: bytes) -> Json:
    """A slot with a file in it; the answer that made it."""
    slot = make(caller, document)
    response = put(slot, content)
    assert (response.status_code, response.content) == (200, b""), response.text
    return slot


def submit(caller: Caller, slot: Json, **fields: Any) -> httpx.Response:
    """Submit the file in a slot; whatever comes back."""
    return caller.http.post("/jobs", json={"file_input_id": slot["file_input_id"], **fields})


def rows_of(caller: Caller, slot: Json, *, status: int = 201) -> list[Json]:
    """Submit the file in a slot, and the rows once all of it has been scraped."""
    response = submit(caller, slot)
    assert response.status_code == status, response.text
    job = as_json(response)
    assert caller.wait(job)["status"] == "completed"
    return caller.results(job, limit=1_000)
