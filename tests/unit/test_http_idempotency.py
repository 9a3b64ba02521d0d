"""Idempotency keys over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest

from conveyor.ports.records import ClaimedKey
from tests.unit.http_api import KEY, Api, open_api, problem_of

DOCUMENT = {"tasks": [{"url": "https://a.test/"}]}
KEYED = {"Idempotency-Key": "order-1"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def count_jobs(api: Api) -> int:
    """Count Alice's jobs, 100 at most."""
    return len((await api.client.get("/v1/jobs", params={"limit": "100"})).json()["jobs"])


@pytest.mark.guarantee("G14")
async def test_a_repeat_gets_the_same_bytes_though_the_job_moved_on(api: Api) -> None:
    first = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)
    await api.drain(first.json())
    await api.client.delete(f"/v1/jobs/{first.json()['job_id']}")

    again = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.content.endswith(b"}\n")
    assert again.headers["Content-Type"] == first.headers["Content-Type"]
    assert again.headers["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first.headers


@pytest.mark.guarantee("G14")
async def test_fifty_at_once_make_one_job(api: Api) -> None:
    answers: list[httpx.Response] = []

    async def submit() -> None:
        answers.append(await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED))

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(submit)

    made = [answer for answer in answers if answer.status_code == 201]
    refused = [answer for answer in answers if answer.status_code != 201]
    assert len(answers) == 50
    assert len({answer.content for answer in made}) == 1
    for answer in refused:
        problem_of(answer, status=409, code="idempotency_key_conflict")
    assert await count_jobs(api) == 1


async def test_another_body_under_the_same_key_is_refused(api: Api) -> None:
    await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)

    response = await api.client.post("/v1/jobs", json={**DOCUMENT, "name": "x"}, headers=KEYED)

    problem_of(response, status=409, code="idempotency_key_conflict")
    assert await count_jobs(api) == 1


async def test_a_key_is_its_callers_and_its_paths_own(api: Api) -> None:
    job = (await api.client.post("/v1/jobs", json={"status": "open"}, headers=KEYED)).json()

    foreign = await api.foreign.post("/v1/jobs", json={"status": "open"}, headers=KEYED)
    added = await api.client.post(f"/v1/jobs/{job['job_id']}/tasks", json=DOCUMENT, headers=KEYED)

    assert (foreign.status_code, added.status_code) == (201, 200)
    assert foreign.json()["job_id"] != job["job_id"]


async def test_a_refused_request_leaves_its_key_free(api: Api) -> None:
    refused = await api.client.post("/v1/jobs", json={"tasks": []}, headers=KEYED)

    corrected = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)

    problem_of(refused, status=400, code="invalid_argument")
    assert corrected.status_code == 201


async def test_adding_twice_under_a_key_adds_once(api: Api) -> None:
    job = await api.submit(0, status="open")
    path = f"/v1/jobs/{job['job_id']}/tasks"

    first = await api.client.post(path, json=DOCUMENT, headers=KEYED)
    again = await api.client.post(path, json=DOCUMENT, headers=KEYED)
    unkeyed = await api.client.post(path, json=DOCUMENT)

    assert again.content == first.content
    assert again.headers["Idempotency-Replayed"] == "true"
    assert unkeyed.json()["latest_run"]["stats"]["total"] == 2


async def test_a_rerun_under_a_key_happens_once_and_its_filter_is_part_of_it(api: Api) -> None:
    job = await api.submit(2)
    await api.drain(job, failing=1)
    path = f"/v1/jobs/{job['job_id']}/rerun"

    first = await api.client.post(path, params={"status": "failed"}, headers=KEYED)
    again = await api.client.post(path, params={"status": "failed"}, headers=KEYED)
    other = await api.client.post(path, headers=KEYED)

    assert first.status_code == 201
    assert again.content == first.content
    problem_of(other, status=409, code="run_not_terminal")
    runs = (await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).json()["runs"]
    assert len(runs) == 2


async def test_a_key_that_is_none_is_refused(api: Api) -> None:
    for key in (b"", b"x" * 129, "é".encode() * 129, b"\xe9" * 129):
        response = await api.client.post(
            "/v1/jobs", json=DOCUMENT, headers=[(b"Idempotency-Key", key)]
        )

        problem_of(response, status=400, code="invalid_argument")
    assert await count_jobs(api) == 0


@pytest.mark.parametrize(
    "key",
    [
        b"~" * 128,
        b"order 123",
        b" ",
        b"tab\there",
        b"caf\xe9",
        "caf\u00e9 \u65e5".encode(),
        b'"a", b',
    ]
    + ["é".encode() * 128, b"\xe9" * 128],
)
async def test_any_text_is_a_key(api: Api, key: bytes) -> None:
    headers = [(b"Idempotency-Key", key)]

    first = await api.client.post("/v1/jobs", json=DOCUMENT, headers=headers)
    again = await api.client.post("/v1/jobs", json=DOCUMENT, headers=headers)

    assert (first.status_code, again.content) == (201, first.content)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert await count_jobs(api) == 1


async def test_a_key_is_forgotten_after_a_day(api: Api) -> None:
    first = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)
    api.clock.shift(86_399)
    same = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)
    api.clock.shift(2)

    fresh = await api.client.post("/v1/jobs", json=DOCUMENT, headers=KEYED)

    assert same.content == first.content
    assert fresh.json()["job_id"] != first.json()["job_id"]


@pytest.mark.guarantee("G14")
async def test_a_request_that_died_after_its_claim_is_taken_over_with_its_id(api: Api) -> None:
    body = b'{"tasks": [{"url": "https://a.test/"}]}'
    promised = await claim_for_submit(api, body)
    headers = {**KEYED, "Content-Type": "application/json"}

    busy = await api.client.post("/v1/jobs", content=body, headers=headers)
    api.clock.shift(61)
    taken = await api.client.post("/v1/jobs", content=body, headers=headers)

    problem_of(busy, status=409, code="idempotency_key_conflict")
    assert taken.json()["job_id"] == promised
    assert await count_jobs(api) == 1


@pytest.mark.guarantee("G14")
@pytest.mark.parametrize(("is_deleted", "accepted"), [(False, 1), (True, 0)])
async def test_a_request_that_died_after_its_write_is_answered_from_what_is_there(
    api: Api, is_deleted: bool, accepted: int
) -> None:
    """As in a store that writes the answer apart from the job."""
    body = b'{"tasks": [{"url": "https://a.test/"}]}'
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"
    if is_deleted:
        await api.client.delete(f"{path}/runs/{job['latest_run']['run_id']}")
    await claim_for_submit(api, body, created=job["job_id"])
    api.clock.shift(61)

    headers = {**KEYED, "Content-Type": "application/json"}
    answer = await api.client.post("/v1/jobs", content=body, headers=headers)

    assert answer.status_code == 201
    assert (answer.json()["job_id"], answer.json()["accepted_tasks"]) == (job["job_id"], accepted)
    assert await count_jobs(api) == 1


async def claim_for_submit(api: Api, body: bytes, *, created: str = "") -> str:
    """Claim the key of a submit as a server does that is killed right after; the promised id."""
    caller = api.service.identify(KEY).caller_id
    scope = hashlib.sha256("\n".join((caller, "POST", "/v1/jobs?", "order-1")).encode())
    now = api.clock.now()
    claim = await api.binding.idempotency.claim_idempotency_key(
        scope.hexdigest(),
        fingerprint=hashlib.sha256(body).digest(),
        created_id=created or api.clock.new_id(),
        now=now,
        lapses_at=now + 60_000,
        expires_at=now + 86_400_000,
    )
    assert isinstance(claim, ClaimedKey)
    return claim.created_id
