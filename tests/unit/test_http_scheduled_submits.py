"""Submits of scheduled jobs over the API, and the limit on their number."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch.models import SubmitJobResponse

from conveyor.domain.api_keys import key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.inputs import InputType, JobInput
from conveyor.records.blob_keys import input_key
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.large_api import control_messages, large_body, post, staged_files, tasks_of
from tests.unit.scheduled_api import (
    CALENDAR,
    KEYED,
    MINUTE,
    ONCE,
    PAST,
    RATE,
    instant,
    shown,
    stored,
    submit,
    template_rows,
)


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.mark.parametrize("schedule", [RATE, CALENDAR, ONCE], ids=["rate", "calendar", "at"])
async def test_a_scheduled_job_is_made_without_a_run(api: Api, schedule: dict[str, Any]) -> None:
    tasks = tasks_of(3)
    document = {"type": "scheduled", "schedule": schedule, "tasks": tasks}

    response = await api.client.post("/v1/jobs", json=document)

    assert response.status_code == 201
    made = SubmitJobResponse.model_validate_json(response.content, strict=True)
    assert (made.accepted_tasks, made.latest_run, made.status.value) == (3, None, "closed")
    job = await shown(api, made.job_id)
    assert (job["type"], job["schedule_state"]) == ("scheduled", "active")
    assert "latest_run" not in job
    assert await template_rows(api, made.job_id) == [task["url"] for task in tasks]
    assert await control_messages(api) == []
    _, plan = await stored(api, made.job_id)
    assert plan.template.rows == 3
    assert plan.anchor == api.clock.now()
    assert plan.key_hash == key_hash(KEY)


async def test_the_answers_show_the_schedule_and_the_next_run(api: Api) -> None:
    rate = await shown(api, await submit(api, {**RATE, "timezone": "nowhere", "overlap": "wait"}))
    calendar = await shown(api, await submit(api, CALENDAR))
    once = await shown(api, await submit(api, ONCE))

    now = api.clock.now()
    assert rate["schedule"] == {**RATE, "timezone": "nowhere", "overlap": "wait"}
    assert instant(rate["next_scheduled_run"]) == now + 15 * MINUTE
    assert calendar["schedule"] == {
        "calendar": {"times_of_day": ["09:00", "18:00"], "cadence": {"daily": {}}},
        "timezone": "Europe/Berlin",
        "overlap": "skip",
    }
    assert calendar["next_scheduled_run"] == "2026-01-01T08:00:00.000Z"
    assert once["schedule"] == {**ONCE, "overlap": "skip"}
    assert once["next_scheduled_run"] == "2026-03-01T08:00:00.000Z"


@pytest.mark.parametrize(
    "cadence", [{"weekly": {"days": ["mon", "fri"]}}, {"monthly": {"days": [1, 31]}}]
)
async def test_each_cadence_comes_back_as_it_was_sent(api: Api, cadence: dict[str, Any]) -> None:
    schedule = {"calendar": {"times_of_day": ["09:00"], "cadence": cadence}, "timezone": "UTC"}

    job = await shown(api, await submit(api, schedule))

    assert job["schedule"] == {**schedule, "overlap": "skip"}


@pytest.mark.slow
async def test_a_large_list_is_a_template_too(api: Api) -> None:
    body = large_body(12_000, type="scheduled", schedule=RATE)

    response = await post(api, body)

    assert response.status_code == 201
    made = response.json()
    assert made["accepted_tasks"] == 12_000
    assert "latest_run" not in made
    assert await template_rows(api, made["job_id"]) == [t["url"] for t in tasks_of(12_000)]


async def test_a_large_document_with_few_tasks_is_a_template_too(api: Api) -> None:
    response = await post(api, large_body(2, type="scheduled", schedule=RATE))

    assert response.status_code == 201
    assert await template_rows(api, response.json()["job_id"]) == [t["url"] for t in tasks_of(2)]


async def test_the_tasks_may_lie_in_a_file(api: Api) -> None:
    now = api.clock.now()
    slot = JobInput(
        input_id=api.clock.new_id(),
        caller=api.service.identify(KEY).caller_id,
        type=InputType.URLS,
        content_type="text/plain",
        created_at=now,
        upload_until=now + 1_000,
        expires_at=now + MINUTE,
    )
    await api.binding.inputs.create_input(slot)
    content = b"https://site.test/a\nhttps://site.test/b\n"
    size = await api.binding.blobs.put(input_key(slot.input_id), content)
    assert await api.binding.inputs.input_uploaded(slot.input_id, size=size)
    document = {"type": "scheduled", "schedule": RATE, "file_input_id": slot.input_id}

    response = await api.client.post("/v1/jobs", json=document)

    assert (response.status_code, response.json()["accepted_tasks"]) == (201, 2)
    rows = await template_rows(api, response.json()["job_id"])
    assert rows == ["https://site.test/a", "https://site.test/b"]


NO_SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({}, "schedule: needs exactly one"),
    ({**RATE, **ONCE}, "schedule: needs exactly one"),
    (PAST, "schedule.at: has passed"),
    ({"at": "2027-03-01T09:00Z", "timezone": "UTC"}, "schedule.at: must be"),
    ({"at": "2027-03-01T09:00+01:00", "timezone": "UTC"}, "schedule.at: must be"),
    ({"at": "2027-02-30T09:00", "timezone": "UTC"}, "schedule.at: is no date"),
    ({"at": "2027-03-01T09:00"}, "schedule.timezone: "),
    ({"at": "2027-03-01T09:00", "timezone": "../etc"}, "schedule.timezone: "),
    ({"at": "2027-03-01T09:00", "timezone": "localtime"}, "schedule.timezone: "),
    ({"at": "2027-03-01T09:00", "timezone": "Europe/Berln"}, "schedule.timezone: "),
    ({"rate": {"every": 0, "unit": "day"}}, "schedule.rate.every: "),
    ({"rate": {"every": 367, "unit": "day"}}, "schedule.rate.every: "),
    ({"rate": {"every": 1, "unit": "week"}}, "schedule.rate.unit: "),
    ({**RATE, "overlap": "both"}, "schedule.overlap: "),
    *[
        ({"calendar": calendar, "timezone": "UTC"}, f"schedule.calendar.{field}")
        for calendar, field in [
            ({"times_of_day": [], "cadence": {"daily": {}}}, "times_of_day: "),
            ({"times_of_day": ["09:30"], "cadence": {"daily": {}}}, "times_of_day[0]: "),
            ({"times_of_day": ["09:00"], "cadence": {}}, "cadence: "),
            (
                {"times_of_day": ["09:00"], "cadence": {"daily": {}, "weekly": {"days": ["mon"]}}},
                "cadence: ",
            ),
            ({"times_of_day": ["09:00"], "cadence": {"weekly": {"days": []}}}, "cadence.weekly."),
            ({"times_of_day": ["09:00"], "cadence": {"monthly": {"days": [32]}}}, "cadence.month"),
        ]
    ],
]
"""Documents that are no schedule, and how the refusal begins."""


@pytest.mark.parametrize(("schedule", "detail"), NO_SCHEDULES, ids=repr)
async def test_what_is_no_schedule_makes_no_job_and_changes_none(
    api: Api, schedule: dict[str, Any], detail: str
) -> None:
    job_id = await submit(api, RATE)
    before = await shown(api, job_id)
    document = {"type": "scheduled", "schedule": schedule, "tasks": tasks_of(2)}

    made = await api.client.post("/v1/jobs", json=document)
    changed = await api.client.put(f"/v1/jobs/{job_id}/schedule", json=schedule)

    for response in (made, changed):
        problem = problem_of(response, status=400, code="invalid_argument")
        assert problem["detail"].startswith(detail)
    assert await shown(api, job_id) == before
    assert len((await api.client.get("/v1/jobs")).json()["jobs"]) == 1
    assert len(staged_files(api)) == 1


async def test_the_nearest_zone_is_named(api: Api) -> None:
    schedule = {**ONCE, "timezone": "Europe/Berln"}
    document = {"type": "scheduled", "schedule": schedule, "tasks": tasks_of(2)}

    response = await api.client.post("/v1/jobs", json=document)

    assert "Europe/Berlin" in problem_of(response, status=400, code="invalid_argument")["detail"]


@pytest.mark.parametrize(
    "fields",
    [{"schedule": PAST}, {"tasks": [{"url": "gopher://x/"}]}, {"schedule": None}],
    ids=repr,
)
async def test_a_large_document_that_is_refused_leaves_nothing(
    api: Api, fields: dict[str, Any]
) -> None:
    body = json.loads(large_body(2, type="scheduled", schedule=RATE)) | fields

    problem_of(await post(api, json.dumps(body).encode()), status=400, code="invalid_argument")

    assert staged_files(api) == []
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}


async def test_what_does_not_go_with_a_schedule(api: Api) -> None:
    document = {"type": "scheduled", "schedule": RATE, "tasks": tasks_of(1)}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"status": "open"}, "status"),
        ({"callback": {"task_token": "t"}}, "callback"),
    ]
    for fields, name in refused:
        response = await api.client.post("/v1/jobs", json={**document, **fields})
        problem = problem_of(response, status=400, code="invalid_argument")
        assert problem["detail"].startswith(f"{name}: ")
    assert staged_files(api) == []


async def test_a_submit_that_is_sent_again_makes_one_job(api: Api) -> None:
    document = {"type": "scheduled", "schedule": RATE, "tasks": tasks_of(2)}

    first = await api.client.post("/v1/jobs", json=document, headers=KEYED)
    again = await api.client.post("/v1/jobs", json=document, headers=KEYED)

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["Idempotency-Replayed"] == "true"
    assert len(staged_files(api)) == 1


async def test_a_submit_taken_over_after_a_lost_answer_keeps_the_first_list(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request wrote the job and lost its answer; the second one finds the job."""
    create = api.binding.jobs.create_job
    document = {"type": "scheduled", "schedule": RATE, "tasks": tasks_of(2)}

    async def write_and_lose(*args: Any, once: Any, **more: Any) -> None:
        await create(*args, once=None, **more)
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the answer was lost")

    async def lose_release(*_args: Any, **_more: Any) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "gone")

    with monkeypatch.context() as patched:
        patched.setattr(api.binding.jobs, "create_job", write_and_lose)
        patched.setattr(api.binding.idempotency, "release_idempotency_key", lose_release)
        lost = await api.client.post("/v1/jobs", json=document, headers=KEYED)
    await api.clock.advance(120)
    again = await api.client.post("/v1/jobs", json=document, headers=KEYED)

    problem_of(lost, status=503, code="unavailable")
    assert again.status_code == 201
    [job] = (await api.client.get("/v1/jobs")).json()["jobs"]
    assert again.json() == {"job_id": job["job_id"], "status": "closed", "accepted_tasks": 2}
    assert await template_rows(api, job["job_id"]) == [task["url"] for task in tasks_of(2)]
    assert len(staged_files(api)) == 1


async def test_scheduled_jobs_are_limited_where_that_is_set(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_scheduled_jobs=2) as api:
        document = {"type": "scheduled", "schedule": RATE, "tasks": tasks_of(1)}
        await api.submit(1)
        first = await submit(api, RATE)
        await submit(api, ONCE)

        refused = await api.client.post("/v1/jobs", json=document)
        foreign = await api.foreign.post("/v1/jobs", json=document)
        files = len(staged_files(api))
        await api.client.delete(f"/v1/jobs/{first}")
        allowed = await api.client.post("/v1/jobs", json=document)

        problem_of(refused, status=429, code="quota_exceeded")
        assert refused.json()["detail"] == "at most 2 jobs may have a schedule"
        assert (foreign.status_code, allowed.status_code) == (201, 201)
        assert files == 3


async def test_a_scheduled_job_is_active_only_while_a_run_of_it_lives(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_active_jobs=1) as api:
        document = {"tasks": tasks_of(1)}
        job_id = await submit(api, RATE)
        await submit(api, RATE)

        idle = await api.client.post("/v1/jobs", json=document)
        await api.client.delete(f"/v1/jobs/{idle.json()['job_id']}")
        await api.client.post(f"/v1/jobs/{job_id}/rerun")
        live = await api.client.post("/v1/jobs", json=document)
        another = await submit(api, RATE)
        await api.client.post(f"/v1/jobs/{job_id}/stop")
        ended = await api.client.post("/v1/jobs", json=document)

        assert (idle.status_code, ended.status_code) == (201, 201)
        problem_of(live, status=429, code="quota_exceeded")
        assert live.json()["detail"] == "at most 1 job may be unfinished"
        assert (await shown(api, another))["type"] == "scheduled"
