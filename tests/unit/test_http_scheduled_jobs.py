"""Scheduled jobs over the API: submit, the routes of their schedules, and the other operations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tzdata
from msgspec import structs
from zenrows.batch.models import Job as ClientJob
from zenrows.batch.models import RerunJobResponse, SubmitJobResponse

from conveyor.domain.api_keys import KeySealer, key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import run_from_template
from conveyor.domain.model import Job
from conveyor.domain.scheduling import (
    FireRecord,
    FireStatus,
    Overlap,
    Scheduling,
    SkipReason,
)
from conveyor.handlers.fire import SchedulerOptions
from conveyor.ports.inputs import InputType, JobInput
from conveyor.ports.queues import DeleteMessage, IngestMessage
from conveyor.ports.schedules import ScheduleChange
from conveyor.records.blob_keys import input_key, template_list_prefix
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.large_api import control_messages, large_body, post, staged_files, tasks_of
from tests.unit.wired_handlers import scheduler

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
RATE = {"rate": {"every": 15, "unit": "minute"}}
CALENDAR = {
    "calendar": {"times_of_day": ["18:00", "09:00", "09:00"], "cadence": {"daily": {}}},
    "timezone": "Europe/Berlin",
}
ONCE = {"at": "2026-03-01T09:00", "timezone": "Europe/Berlin"}
PAST = {"at": "2025-03-01T09:00", "timezone": "Europe/Berlin"}
KEYED = {"Idempotency-Key": "order-1"}


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def submit(api: Api, schedule: dict[str, Any], urls: int = 3, **fields: Any) -> str:
    """Create a scheduled job; its id."""
    made = await api.submit(urls, type="scheduled", schedule=schedule, **fields)
    job_id: str = made["job_id"]
    return job_id


async def shown(api: Api, job_id: str) -> dict[str, Any]:
    response = await api.client.get(f"/v1/jobs/{job_id}")
    ClientJob.model_validate_json(response.content, strict=True)
    body: dict[str, Any] = response.json()
    return body


async def stored(api: Api, job_id: str) -> tuple[Job, Scheduling]:
    job = await api.binding.jobs.find_job(job_id)
    assert job is not None
    assert job.scheduling is not None
    return job, job.scheduling


async def template_rows(api: Api, job_id: str) -> list[str]:
    """The URLs of a job's template, in order."""
    _, plan = await stored(api, job_id)
    folder = api.directory / "blobs" / template_list_prefix(job_id, plan.template.list_id)
    urls: list[str] = []
    chunks = sorted(folder.iterdir())
    assert tuple(int(path.name) for path in chunks) == plan.template.chunks
    for path in chunks:
        for line in path.read_bytes().splitlines():
            urls += [spec["url"] for _, spec in msgspec.json.decode(line)]
    return urls


def instant(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


# -- submit --


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


# -- limits --


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
        assert (await shown(api, another))["type"] == "scheduled"


# -- PUT schedule --


async def test_the_same_schedule_changes_no_anchor_and_another_one_does(api: Api) -> None:
    job_id = await submit(api, {**RATE, "overlap": "wait"})
    path = f"/v1/jobs/{job_id}/schedule"
    begun = (await stored(api, job_id))[1]
    await api.clock.advance(400)

    same = await api.client.put(path, json=RATE)
    zoned = await api.client.put(path, json={**RATE, "timezone": "Europe/Berlin"})
    assert (await stored(api, job_id))[1].anchor == begun.anchor
    other = await api.client.put(path, json={"rate": {"every": 1, "unit": "hour"}})

    now = api.clock.now()
    assert [one.status_code for one in (same, zoned, other)] == [200, 200, 200]
    assert instant(same.json()["next_scheduled_run"]) == begun.anchor + 15 * MINUTE
    assert zoned.json()["schedule"]["timezone"] == "Europe/Berlin"
    assert instant(zoned.json()["next_scheduled_run"]) == begun.anchor + 15 * MINUTE
    assert instant(other.json()["next_scheduled_run"]) == now + HOUR
    assert other.json()["schedule"]["overlap"] == "wait"
    assert other.json() == await shown(api, job_id)
    ClientJob.model_validate_json(other.content, strict=True)
    skips = await api.client.put(path, json={**other.json()["schedule"], "overlap": "skip"})
    assert skips.json()["schedule"]["overlap"] == "skip"
    assert (await stored(api, job_id))[1].anchor == now


async def test_a_time_that_has_passed_may_be_sent_again_but_not_anew(api: Api) -> None:
    job_id = await submit(api, ONCE)
    job, plan = await stored(api, job_id)
    spent = structs.replace(plan, next_at=None, next_nominal="")
    after = structs.replace(job, scheduling=spent, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(ScheduleChange(before=job, after=after))
    await api.clock.advance(100 * DAY / 1_000)
    path = f"/v1/jobs/{job_id}/schedule"

    same = await api.client.put(path, json=ONCE)
    other = await api.client.put(path, json={**ONCE, "at": "2026-03-02T09:00"})
    later = await api.client.put(path, json={**ONCE, "at": "2026-12-02T09:00"})

    assert same.status_code == 200
    assert "next_scheduled_run" not in same.json()
    problem_of(other, status=400, code="invalid_argument")
    assert later.json()["next_scheduled_run"] == "2026-12-02T08:00:00.000Z"


async def test_a_live_run_goes_on_when_the_schedule_changes(api: Api) -> None:
    job_id = await submit(api, RATE)
    run = (await api.client.post(f"/v1/jobs/{job_id}/rerun")).json()["latest_run"]

    changed = (await api.client.put(f"/v1/jobs/{job_id}/schedule", json=CALENDAR)).json()

    assert changed["latest_run"]["run_id"] == run["run_id"]
    assert changed["latest_run"]["status"] == "running"
    assert (await shown(api, job_id))["latest_run"]["status"] == "running"


async def test_only_later_fires_follow_another_schedule(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"
    await api.client.post(f"{path}/rerun")
    await look(api, after=20 * MINUTE)
    await api.client.put(f"{path}/schedule", json={"rate": {"every": 1, "unit": "hour"}})
    await api.client.post(f"{path}/stop")

    await look(api, after=50 * MINUTE)
    before = (await api.client.get(f"{path}/runs")).json()["runs"]
    await look(api, after=10 * MINUTE)
    runs = (await api.client.get(f"{path}/runs")).json()["runs"]

    assert [run["trigger"] for run in before] == ["manual"]
    assert [run["trigger"] for run in runs] == ["scheduled", "manual"]
    fires = (await api.client.get(f"{path}/schedule/fires")).json()["fires"]
    told = [(fire["status"], fire.get("reason"), fire.get("run_id")) for fire in fires]
    assert told == [("started", None, runs[0]["run_id"]), ("skipped", "run_live", None)]
    at = instant((await shown(api, job_id))["next_scheduled_run"])
    assert at == api.clock.now() + HOUR


async def look(api: Api, *, after: int) -> None:
    """Let a worker look for schedules that are due, so many milliseconds later."""
    await api.clock.advance(after / 1_000)
    secrets = [*api.binding.sealing_secrets, api.binding.root_secret]
    options = SchedulerOptions(interval=5.0, catch_up=DAY / 1_000, max_active_jobs=0)
    await scheduler(api.binding, api.clock, sealer=KeySealer(secrets), options=options).fire()


async def test_a_change_that_meets_another_write_is_made_all_the_same(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(api, RATE)
    change = api.binding.schedules.change_schedule
    sleep = api.clock.sleep
    tries: list[int] = []

    async def meet(made: ScheduleChange) -> bool:
        tries.append(made.before.version)
        if len(tries) == 1:
            job, plan = await stored(api, job_id)
            other = structs.replace(plan, overlap=Overlap.WAIT)
            after = structs.replace(job, scheduling=other, version=job.version + 1)
            assert await change(ScheduleChange(before=job, after=after))
        return await change(made)

    async def at_once(_seconds: float) -> None:
        await sleep(0)

    monkeypatch.setattr(api.binding.schedules, "change_schedule", meet)
    monkeypatch.setattr(api.clock, "sleep", at_once)
    answer = (await api.client.put(f"/v1/jobs/{job_id}/schedule", json=CALENDAR)).json()

    assert tries == [1, 2]
    assert answer["schedule"]["overlap"] == "wait"
    assert "calendar" in answer["schedule"]


async def test_a_next_fire_of_older_zone_rules_is_computed_anew(api: Api) -> None:
    job_id = await submit(api, CALENDAR)
    job, plan = await stored(api, job_id)
    assert plan.next_at is not None
    old = structs.replace(plan, zones_version="2001a", next_at=plan.next_at - HOUR)
    after = structs.replace(job, scheduling=old, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(ScheduleChange(before=job, after=after))

    assert instant((await shown(api, job_id))["next_scheduled_run"]) == plan.next_at
    schedule = (await api.client.get(f"/v1/jobs/{job_id}/schedule")).json()
    assert schedule["zones_version"] == tzdata.IANA_VERSION
    assert instant(schedule["fires"][0]["at"]) == plan.next_at
    await api.client.put(f"/v1/jobs/{job_id}/schedule", json=CALENDAR)
    assert (await stored(api, job_id))[1] == plan


# -- state --


async def test_a_schedule_is_paused_and_resumed(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}/schedule/state"

    paused = await api.client.post(path, json={"schedule_state": "paused"})
    repeated = await api.client.post(path, json={"schedule_state": "paused"})
    resumed = await api.client.post(path, json={"schedule_state": "active"})

    assert (paused.status_code, resumed.status_code) == (200, 200)
    assert paused.json()["schedule_state"] == "paused"
    assert paused.json()["next_scheduled_run"] == resumed.json()["next_scheduled_run"]
    assert repeated.content == paused.content
    assert resumed.json()["schedule_state"] == "active"
    ClientJob.model_validate_json(paused.content, strict=True)
    assert "latest_run" not in await shown(api, job_id)


async def test_what_was_due_while_paused_does_not_fire_on_resuming(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}/schedule"
    await api.client.post(f"{path}/state", json={"schedule_state": "paused"})
    await api.clock.advance(40 * MINUTE / 1_000)

    resumed = (await api.client.post(f"{path}/state", json={"schedule_state": "active"})).json()

    _, plan = await stored(api, job_id)
    assert instant(resumed["next_scheduled_run"]) == plan.anchor + 45 * MINUTE
    assert "latest_run" not in resumed
    [fire] = (await api.client.get(f"{path}/fires")).json()["fires"]
    assert (fire["status"], fire["reason"], fire["count"]) == ("skipped", "paused", 2)
    assert instant(fire["at"]) == plan.anchor + 15 * MINUTE
    assert instant(fire["last_at"]) == plan.anchor + 30 * MINUTE


@pytest.mark.parametrize(
    "body", [{}, {"schedule_state": None}, {"schedule_state": "off"}, {"schedule_state": []}, [], 5]
)
async def test_what_is_no_state(api: Api, body: object) -> None:
    job_id = await submit(api, RATE)

    response = await api.client.post(f"/v1/jobs/{job_id}/schedule/state", json=body)

    problem = problem_of(response, status=400, code="invalid_argument")
    assert problem["detail"] == "schedule_state: must be active or paused"


# -- what is seen --


async def test_the_next_fires_are_shown_with_what_the_clock_does(api: Api) -> None:
    at_two = {**CALENDAR, "calendar": {"times_of_day": ["02:00"], "cadence": {"daily": {}}}}
    begin = datetime(2_026, 3, 20, tzinfo=UTC).timestamp() - api.clock.now() / 1_000
    await api.clock.advance(begin)
    job_id = await submit(api, at_two)

    response = await api.client.get(f"/v1/jobs/{job_id}/schedule")

    told = response.json()
    assert (told["job_id"], told["schedule_state"]) == (job_id, "active")
    assert told["next_scheduled_run"] == told["fires"][0]["at"]
    assert len(told["fires"]) == 10
    assert [fire for fire in told["fires"] if "note" in fire] == [
        {
            "at": "2026-03-29T01:00:00.000Z",
            "local_time": "2026-03-29T03:00:00+02:00",
            "note": "02:00 does not exist on this day: it fires at 03:00",
        }
    ]
    assert told["zones_version"] == tzdata.IANA_VERSION


async def test_a_schedule_that_is_over_shows_no_fire(api: Api) -> None:
    job_id = await submit(api, ONCE)
    job, plan = await stored(api, job_id)
    spent = structs.replace(plan, next_at=None, next_nominal="", waiting=plan.next_nominal)
    after = structs.replace(job, scheduling=spent, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(ScheduleChange(before=job, after=after))

    told = (await api.client.get(f"/v1/jobs/{job_id}/schedule")).json()

    assert told["fires"] == []
    assert told["waiting"] == "2026-03-01T09:00:00"
    assert "next_scheduled_run" not in told


async def test_fires_are_listed_newest_first_in_pages(api: Api) -> None:
    job_id = await submit(api, RATE)
    job, plan = await stored(api, job_id)
    ids = [api.clock.new_id() for _ in range(3)]
    now = api.clock.now()
    row = FireRecord(
        fire_id=ids[0],
        status=FireStatus.SKIPPED,
        nominal="2026-01-01T00:15:00+00:00",
        instant=now,
        last_nominal="2026-01-01T00:30:00+00:00",
        last_instant=now + 15 * MINUTE,
        noted_at=now + HOUR,
        count=2,
        reason=SkipReason.RUN_LIVE,
    )
    run_id = api.clock.new_id()
    started = structs.replace(row, status=FireStatus.STARTED, count=1, reason=None, run_id=run_id)
    rows = (row, *[structs.replace(started, fire_id=one) for one in ids[1:]])
    after = structs.replace(job, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(
        ScheduleChange(before=job, after=after, fires=rows)
    )
    path = f"/v1/jobs/{job_id}/schedule/fires"

    first = (await api.client.get(path, params={"limit": 2})).json()
    second = (
        await api.client.get(path, params={"limit": 2, "cursor": first["next_cursor"]})
    ).json()

    assert [fire["fire_id"] for fire in first["fires"]] == ids[:0:-1]
    assert first["fires"][0]["run_id"] == run_id
    assert second == {
        "fires": [
            {
                "fire_id": ids[0],
                "status": "skipped",
                "reason": "run_live",
                "count": 2,
                "at": "2026-01-01T00:00:00.000Z",
                "local_time": "2026-01-01T00:15:00+00:00",
                "last_at": "2026-01-01T00:15:00.000Z",
                "last_local_time": "2026-01-01T00:30:00+00:00",
                "updated_at": "2026-01-01T01:00:00.000Z",
            }
        ]
    }
    for params in ({"cursor": "x"}, {"limit": "0"}, {"limit": "101"}):
        problem_of(await api.client.get(path, params=params), status=400, code="invalid_argument")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("PUT", ""), ("POST", "/state"), ("GET", "/fires")],
)
async def test_a_regular_job_has_no_schedule(api: Api, method: str, path: str) -> None:
    job = await api.submit(1)
    for body in ({**RATE, "schedule_state": "paused"}, {}):
        response = await api.client.request(
            method,
            f"/v1/jobs/{job['job_id']}/schedule{path}",
            json=None if method == "GET" else body,
        )
        problem_of(response, status=409, code="conflict")


async def test_jobs_are_listed_by_type(api: Api) -> None:
    regular = [(await api.submit(1))["job_id"] for _ in range(2)]
    scheduled = [await submit(api, RATE) for _ in range(3)]

    async def listed(**params: Any) -> list[str]:
        page = (await api.client.get("/v1/jobs", params=params)).json()
        return [job["job_id"] for job in page["jobs"]]

    assert await listed(type="scheduled") == scheduled[::-1]
    assert await listed(type="regular") == regular[::-1]
    assert await listed() == [*scheduled[::-1], *regular[::-1]]
    page = (await api.client.get("/v1/jobs", params={"type": "scheduled", "limit": 2})).json()
    assert await listed(type="scheduled", cursor=page["next_cursor"]) == scheduled[:1]


# -- other operations --


async def test_the_tasks_of_a_scheduled_job_never_change(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"

    for response in (
        await api.client.post(f"{path}/tasks", json={"tasks": tasks_of(1)}),
        await api.client.post(f"{path}/close"),
    ):
        problem_of(response, status=409, code="job_not_open")


async def test_nothing_is_found_before_the_first_run(api: Api) -> None:
    path = f"/v1/jobs/{await submit(api, RATE)}"

    problem_of(await api.client.get(f"{path}/results"), status=404, code="not_found")
    assert (await api.client.get(f"{path}/runs")).json() == {"runs": []}
    for operation in ("stop", "cancel", "pause", "resume", "rerun?status=failed"):
        response = await api.client.post(f"{path}/{operation}")
        problem_of(response, status=409, code="no_prior_run")


async def test_a_rerun_without_a_run_makes_the_first_one(api: Api) -> None:
    job_id = await submit(api, RATE)

    response = await api.client.post(f"/v1/jobs/{job_id}/rerun", headers=KEYED)
    again = await api.client.post(f"/v1/jobs/{job_id}/rerun", headers=KEYED)

    assert response.status_code == 202
    made = RerunJobResponse.model_validate_json(response.content, strict=True)
    assert (made.rerun_of, made.retried_tasks, made.inherited_tasks) == (None, 3, 0)
    run = response.json()["latest_run"]
    assert (run["trigger"], run["ingest_status"], run["run_sequence"]) == ("manual", "pending", 1)
    assert run["stats"]["total"] == 3
    assert again.content == response.content
    assert again.headers["Idempotency-Replayed"] == "true"
    assert await control_messages(api) == [IngestMessage(job_id, run["run_id"])]
    second = await api.client.post(f"/v1/jobs/{job_id}/rerun")
    problem_of(second, status=409, code="run_not_terminal")
    _, plan = await stored(api, job_id)
    assert plan.next_at == plan.anchor + 15 * MINUTE


async def test_a_rerun_that_meets_a_fire_replays_no_second_list(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(api, RATE)
    change = api.binding.schedules.change_schedule
    sleep = api.clock.sleep
    fired: list[str] = []

    async def meet(made: ScheduleChange) -> bool:
        if not fired:
            fired.append(api.clock.new_id())
            job, _ = await stored(api, job_id)
            after, run = run_from_template(
                job, run_id=fired[0], trigger="scheduled", now=api.clock.now()
            )
            assert await change(ScheduleChange(before=job, after=after, run=run))
        return await change(made)

    async def at_once(_seconds: float) -> None:
        await sleep(0)

    monkeypatch.setattr(api.binding.schedules, "change_schedule", meet)
    monkeypatch.setattr(api.clock, "sleep", at_once)
    response = await api.client.post(f"/v1/jobs/{job_id}/rerun")

    problem_of(response, status=409, code="run_not_terminal")
    [run] = (await api.client.get(f"/v1/jobs/{job_id}/runs")).json()["runs"]
    assert (run["run_id"], run["trigger"]) == (fired[0], "scheduled")


async def test_a_rerun_after_all_runs_were_deleted_takes_the_template(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"
    first = (await api.client.post(f"{path}/rerun")).json()["latest_run"]
    await api.client.post(f"{path}/stop")
    assert (await api.client.delete(f"{path}/runs/{first['run_id']}")).status_code == 202

    response = await api.client.post(f"{path}/rerun")

    assert response.status_code == 202
    run = response.json()["latest_run"]
    assert (run["run_sequence"], run["stats"]["total"]) == (2, 3)
    assert "rerun_of" not in response.json()


async def test_a_deleted_job_has_no_schedule(api: Api) -> None:
    job_id = await submit(api, RATE)
    await api.client.post(f"/v1/jobs/{job_id}/rerun")
    assert (await api.client.delete(f"/v1/jobs/{job_id}")).status_code == 202

    assert (await shown(api, job_id))["status"] == "deleted"
    for method, path in [("GET", ""), ("PUT", ""), ("POST", "/state"), ("GET", "/fires")]:
        response = await api.client.request(method, f"/v1/jobs/{job_id}/schedule{path}", json=RATE)
        problem_of(response, status=404, code="not_found")
    problem_of(await api.client.post(f"/v1/jobs/{job_id}/close"), status=404, code="not_found")


async def test_a_job_can_be_deleted_before_its_first_run(api: Api) -> None:
    job_id = await submit(api, RATE)

    assert (await api.client.delete(f"/v1/jobs/{job_id}")).status_code == 202

    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}
    assert (await shown(api, job_id))["status"] == "deleted"
    assert await control_messages(api) == [DeleteMessage(job_id, job_id)]
