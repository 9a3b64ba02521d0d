"""Submits that name an uploaded file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.domain import ids
from conveyor.ports.inputs import CsvSpec, InputType, JobInput
from conveyor.records.blob_keys import input_key
from tests.unit.http_api import KEY, OTHER_KEY, Api, open_api, problem_of
from tests.unit.large_api import (
    rows_of,
    staged_files,
    staged_rows,
    tasks_of,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def slot(
    api: Api,
    content: bytes | None,
    *,
    key: str = KEY,
    form: InputType = InputType.URLS,
    csv: CsvSpec | None = None,
) -> str:
    """An upload slot, filled unless `content` is None; its id."""
    now = api.clock.now()
    made = JobInput(
        input_id=api.clock.new_id(),
        caller=api.service.identify(key).caller_id,
        type=form,
        content_type="text/plain",
        created_at=now,
        upload_until=now + 1_000,
        expires_at=now + 60_000,
        csv=csv,
    )
    await api.binding.inputs.create_input(made)
    if content is not None:
        size = await api.binding.blobs.put(input_key(made.input_id), content)
        assert await api.binding.inputs.input_uploaded(made.input_id, size=size)
    return made.input_id


def list_of(count: int) -> bytes:
    return b"".join(b"https://site.test/%d\n" % number for number in range(count))


async def submit_file(api: Api, input_id: str, **fields: Any) -> httpx.Response:
    return await api.client.post("/v1/jobs", json={"file_input_id": input_id, **fields})


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 20_000])
async def test_a_file_that_is_submitted_again_under_its_key_makes_nothing(
    api: Api, count: int
) -> None:
    document = {"file_input_id": await slot(api, list_of(count))}
    keyed = {"Idempotency-Key": "order-1"}
    first = await api.client.post("/v1/jobs", json=document, headers=keyed)
    again = await api.client.post("/v1/jobs", json=document, headers=keyed)
    assert first.status_code == again.status_code == (202 if count > 2 else 201)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.content == first.content
    jobs = (await api.client.get("/v1/jobs")).json()["jobs"]
    assert [job["job_id"] for job in jobs] == [first.json()["job_id"]]


@pytest.mark.slow
async def test_a_small_file_is_written_at_once(api: Api) -> None:
    input_id = await slot(api, list_of(5))

    response = await submit_file(api, input_id, name="n")

    assert response.status_code == 201
    job = response.json()
    assert job["accepted_tasks"] == 5
    rows = await rows_of(api, job)
    assert [row.spec.url for row in rows] == [f"https://site.test/{index}" for index in range(5)]
    assert api.binding.queues.depth(f"run-{job['latest_run']['run_id']}") == 5


@pytest.mark.slow
async def test_a_small_file_whose_tasks_may_come_later(api: Api) -> None:
    response = await submit_file(api, await slot(api, list_of(5)), **{"async": True})

    assert response.status_code == 202
    assert len(staged_rows(api, response.json())) == 5


@pytest.mark.slow
async def test_a_large_file(api: Api) -> None:
    response = await submit_file(api, await slot(api, list_of(25_000)))

    assert response.status_code == 202
    job = response.json()
    run_id = job["latest_run"]["run_id"]
    assert job["latest_run"]["stats"]["total"] == 25_000
    assert staged_rows(api, job) == [
        (ids.task_id(run_id, index), f"https://site.test/{index}") for index in range(25_000)
    ]


async def test_a_csv_file_under_its_spec_and_the_jobs_params(api: Api) -> None:
    content = b"id;where\r\na;https://site.test/1\r\n\r\nb;'https://site.test/;2'\r\n"
    spec = CsvSpec(url="where", external_id="id", delimiter=";", quote="'", header=True)
    input_id = await slot(api, content, form=InputType.CSV, csv=spec)

    job = (await submit_file(api, input_id, zenrows_params={"wait": 5})).json()

    rows = await rows_of(api, job)
    assert [(row.spec.external_id, row.spec.url) for row in rows] == [
        ("a", "https://site.test/1"),
        ("b", "https://site.test/;2"),
    ]


@pytest.mark.slow
async def test_a_bad_file_leaves_nothing_but_its_slot(api: Api) -> None:
    input_id = await slot(api, list_of(20_000) + b"gopher://x/\n")

    response = await submit_file(api, input_id)

    problem = problem_of(response, status=400, code="invalid_argument")
    assert "20001" in problem["detail"].replace(",", "") or problem["invalid_tasks"]
    assert [path.name for path in staged_files(api)] == [input_id]
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}
    await api.binding.blobs.put(input_key(input_id), list_of(1))
    assert (await submit_file(api, input_id)).status_code == 201


async def test_a_file_over_the_limits(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_input_rows=100, max_input_bytes=10_000) as api:
        long = await submit_file(api, await slot(api, list_of(101)))
        wide = await submit_file(api, await slot(api, b"https://site.test/" + b"x" * 10_000))

        assert "CONVEYOR_MAX_INPUT_ROWS" in long.json()["detail"], long.text
        assert long.status_code in (400, 413)
        assert "CONVEYOR_MAX_INPUT_BYTES" in wide.json()["detail"], wide.text
        assert wide.status_code in (400, 413)


async def test_a_file_that_is_not_there(api: Api) -> None:
    foreign = await slot(api, list_of(1), key=OTHER_KEY)
    empty = await slot(api, None)
    lost = await slot(api, list_of(1))
    await api.binding.blobs.delete(input_key(lost))
    stale = await slot(api, list_of(1))

    for input_id in (foreign, api.clock.new_id(), "../etc/passwd", ""):
        response = await submit_file(api, input_id)
        problem_of(response, status=404, code="file_input_not_found")
    for input_id in (empty, lost):
        response = await submit_file(api, input_id)
        problem_of(response, status=409, code="file_input_not_uploaded")
    await api.clock.advance(60)
    problem_of(await submit_file(api, stale), status=404, code="file_input_not_found")


async def test_a_job_that_takes_no_file(api: Api) -> None:
    input_id = await slot(api, list_of(1))

    response = await submit_file(api, input_id, status="open")
    problem_of(response, status=409, code="file_input_unsupported_for_job_type")
    both = await submit_file(api, input_id, tasks=tasks_of(1))
    problem_of(both, status=400, code="invalid_argument")
