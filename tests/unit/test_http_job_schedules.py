"""The schedule of a job over the API: changed, paused, and shown with its fires."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tzdata
from msgspec import structs
from zenrows.batch.models import Job as ClientJob

from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.scheduling import (
    FireRecord,
    FireStatus,
    Overlap,
    SkipReason,
)
from conveyor.ports.schedules import ScheduleChange
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.scheduled_api import (
    CALENDAR,
    DAY,
    HOUR,
    MINUTE,
    ONCE,
    RATE,
    instant,
    look,
    shown,
    stored,
    submit,
)


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


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


async def test_what_was_due_before_a_change_is_not_lost_with_the_old_schedule(api: Api) -> None:
    """No worker looked for 40 minutes: the fire at 15 is missed, and the one at 30 made up for."""
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"
    await api.clock.advance(40 * MINUTE / 1_000)

    changed = await api.client.put(f"{path}/schedule", json={"rate": {"every": 1, "unit": "hour"}})
    at = api.clock.now()
    await look(api, after=MINUTE)

    assert "latest_run" not in changed.json()
    [run] = (await api.client.get(f"{path}/runs")).json()["runs"]
    assert run["trigger"] == "scheduled"
    fires = (await api.client.get(f"{path}/schedule/fires")).json()["fires"]
    assert [(fire["status"], fire["count"]) for fire in fires] == [("started", 1), ("missed", 1)]
    assert instant(fires[0]["at"]) == at - 10 * MINUTE
    assert instant((await shown(api, job_id))["next_scheduled_run"]) == at + HOUR


async def test_what_was_due_while_paused_stays_skipped_when_the_schedule_changes(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}/schedule"
    await api.client.post(f"{path}/state", json={"schedule_state": "paused"})
    await api.clock.advance(40 * MINUTE / 1_000)

    changed = (await api.client.put(path, json={"rate": {"every": 1, "unit": "hour"}})).json()

    assert changed["schedule_state"] == "paused"
    [fire] = (await api.client.get(f"{path}/fires")).json()["fires"]
    assert (fire["status"], fire["reason"], fire["count"]) == ("skipped", "paused", 2)


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


async def test_a_zone_that_the_rules_have_no_longer_is_told_and_replaced(
    api: Api, unforeseen: list[logging.LogRecord]
) -> None:
    job_id = await submit(api, CALENDAR)
    job, plan = await stored(api, job_id)
    assert plan.next_at is not None
    zone = structs.replace(plan.schedule, timezone="Mars/Phobos")
    gone = structs.replace(plan, schedule=zone, zones_version="2001a")
    after = structs.replace(job, scheduling=gone, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(ScheduleChange(before=job, after=after))
    path = f"/v1/jobs/{job_id}/schedule"

    [listed] = (await api.client.get("/v1/jobs")).json()["jobs"]
    told = (await api.client.get(path)).json()
    paused = await api.client.post(f"{path}/state", json={"schedule_state": "paused"})
    resumed = await api.client.post(f"{path}/state", json={"schedule_state": "active"})
    assert listed == await shown(api, job_id) | {"updated_at": listed["updated_at"]}
    assert instant(listed["next_scheduled_run"]) == plan.next_at
    assert told["next_scheduled_run"] == listed["next_scheduled_run"]
    assert (told["fires"], told["zones_version"]) == ([], "2001a")
    assert told["note"].startswith(f"Mars/Phobos: the zone rules {tzdata.IANA_VERSION} do not have")
    assert (paused.status_code, paused.json()["schedule_state"]) == (200, "paused")
    assert (resumed.status_code, resumed.json()["schedule_state"]) == (200, "active")

    await look(api, after=DAY)
    assert all("KeyError('Mars/Phobos')" in one.getMessage() for one in unforeseen)
    unforeseen.clear()
    manual = await api.client.post(f"/v1/jobs/{job_id}/rerun")
    await api.client.post(f"/v1/jobs/{job_id}/stop")
    changed = (await api.client.put(path, json=CALENDAR)).json()
    await look(api, after=MINUTE)
    assert manual.status_code == 202
    assert changed["schedule"]["timezone"] == "Europe/Berlin"
    assert "note" not in (await api.client.get(path)).json()
    [fire] = (await api.client.get(f"{path}/fires")).json()["fires"]
    assert (fire["status"], instant(fire["at"])) == ("started", plan.next_at)


async def test_what_a_change_finds_missed_is_logged_for_the_alarm(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}/schedule"
    await api.clock.advance(50 * MINUTE / 1_000)
    await api.client.put(path, json={"rate": {"every": 1, "unit": "hour"}})
    await api.client.post(f"{path}/state", json={"schedule_state": "paused"})
    await api.client.post(f"{path}/state", json={"schedule_state": "active"})

    lost = [one.__dict__ for one in caplog.records if one.getMessage() == "fires made no run"]
    assert [(one["job_id"], one["reason"], one["count"]) for one in lost] == [(job_id, "missed", 2)]


async def test_each_change_and_the_first_manual_run_seal_the_key_anew(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"
    sealer = KeySealer([*api.binding.sealing_secrets, api.binding.root_secret])
    paused, active = ({"schedule_state": word} for word in ("paused", "active"))
    seen = {(await stored(api, job_id))[0].sealed_key}
    for number, (method, route, body) in enumerate(
        [
            ("PUT", "/schedule", CALENDAR),
            ("POST", "/schedule/state", paused),
            ("POST", "/schedule/state", active),
            ("POST", "/rerun", None),
        ],
        start=2,
    ):
        await api.client.request(method, path + route, json=body)
        job, _ = await stored(api, job_id)
        seen.add(job.sealed_key)
        assert len(seen) == number
        assert sealer.unseal(job) == KEY
    await api.client.put(f"{path}/schedule", json=CALENDAR)
    assert (await stored(api, job_id))[0] == job


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [("PUT", "", RATE), ("POST", "/state", {"schedule_state": "active"})],
)
async def test_a_key_that_no_secret_opens_is_mended_even_by_what_changes_nothing_else(
    api: Api, method: str, route: str, body: dict[str, Any]
) -> None:
    job_id = await submit(api, RATE)
    job, _ = await stored(api, job_id)
    nonce = api.clock.token(NONCE_LENGTH)
    lost = KeySealer([b"a secret that is gone"]).seal(KEY, caller=job.caller, nonce=nonce)
    after = structs.replace(job, sealed_key=lost, version=job.version + 1)
    assert await api.binding.schedules.change_schedule(ScheduleChange(before=job, after=after))
    path = f"/v1/jobs/{job_id}/schedule"
    await look(api, after=15 * MINUTE)

    await api.client.request(method, path + route, json=body)
    await look(api, after=15 * MINUTE)

    fires = (await api.client.get(f"{path}/fires")).json()["fires"]
    told = [(fire["status"], fire.get("reason")) for fire in fires]
    assert told == [("started", None), ("skipped", "key_unreadable")]


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
