"""Our OpenAPI document: complete, sound, and true of what the server answers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Ok

from conveyor.domain.errors import ErrorCode
from conveyor.http.app import V1_ROUTES
from conveyor.http.openapi_operations import STREAM_TYPE
from tests.unit.http_api import DOCUMENT, Api, open_api
from tests.unit.spec_document import differences

Request = Case[Any]
SERVER_PATHS = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
LINK_PATHS = {
    "/v1/blobs/{job_id}/{run_id}/{task_id}",
    "/v1/exports/{job_id}/{run_id}/{export_id}",
}
UPLOAD_PATH = "/v1/job_inputs/{input_id}/content"
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {
    f"{result.ok().method.upper()} {result.ok().path}": result.ok()
    for result in SCHEMA.get_all_operations()
    if isinstance(result, Ok)
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


def references(node: Any) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_is_described_and_nothing_else() -> None:
    described = {
        f"{method.upper()} {path}"
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
    }

    served = {f"{method} {path}" for path, methods in V1_ROUTES.items() for method in methods}
    served |= {f"GET {path}" for path in SERVER_PATHS | LINK_PATHS}
    served.add(f"PUT {UPLOAD_PATH}")
    where = "operations() of conveyor/http/openapi_operations.py"
    assert not differences(where, described, served)


def test_every_reference_leads_somewhere_and_everything_is_referred_to() -> None:
    found = set(references(DOCUMENT))
    existing = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "parameters", "responses")
        for name in DOCUMENT["components"][kind]
    }

    assert found <= existing
    unused = existing - found
    assert {name for name in unused if "/responses/" not in name} == set()


def test_every_code_is_named() -> None:
    described = json.dumps(DOCUMENT["components"])

    assert not [code for code in ErrorCode if not re.search(rf"\b{code.value}\b", described)]


def test_ids_of_operations_are_their_own() -> None:
    ids = [
        operation["operationId"]
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
    ]

    assert len(ids) == len(set(ids))


async def test_the_served_document_is_this_one_and_is_valid(api: Api) -> None:
    response = await api.bare.get("/openapi.json")

    assert response.json() == json.loads(json.dumps(DOCUMENT))
    SCHEMA.validate()


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
async def test_generated_requests_get_described_answers(api: Api, mode: GenerationMode) -> None:
    for name, operation in OPERATIONS.items():
        for case in generated(operation, mode):
            if mode is GenerationMode.POSITIVE:
                await point_at_something(api, case)
            if STREAM_TYPE in str(operation.definition.raw["responses"]):
                case.method = "HEAD"  # a stream of a live run has no end
            response = await send(api, case)
            assert response.status_code not in (500, 503), f"{name}: {response.text}"


def generated(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> list[Request]:
    """Requests that the document allows, or forbids; always the same ones."""
    cases: list[Request] = []

    @settings(
        max_examples=5,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Request) -> None:
        cases.append(case)

    with contextlib.suppress(Unsatisfiable):
        collect()
    return cases


async def point_at_something(api: Api, case: Request) -> None:
    """Let the ids in the path, and the URLs of tasks, be such as exist."""
    if case.path_parameters:
        job = await api.submit(2, status="open")
        drained = await api.drain(job, failing=1)
        case.path_parameters = {
            "job_id": job["job_id"],
            "run_id": job["latest_run"]["run_id"],
            "task_id": drained[1].task_id,
            "export_id": job["job_id"],
            "delivery_id": (await api.deliver(job)).delivery_id,
            "input_id": job["job_id"],
        }
        if case.path.endswith("/rerun"):
            await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    tasks = case.body.get("tasks") if isinstance(case.body, dict) else None
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict):
            task["url"] = "https://site.test/"


async def send(api: Api, case: Request) -> httpx.Response:
    """Send a generated request, as near as an HTTP client can."""
    headers = [
        (name.encode(), str(value).encode().replace(b"\n", b"").replace(b"\r", b""))
        for name, value in (case.headers or {}).items()
        if name.lower() != "x-api-key"
    ]
    content: bytes | None = None
    if case.media_type is not None:
        content = json.dumps(case.body, default=str).encode()
        headers.append((b"Content-Type", case.media_type.encode()))
    query = {name: str(value) for name, value in (case.query or {}).items()}
    return await api.client.request(
        case.method, case.formatted_path, params=query, content=content, headers=headers
    )
