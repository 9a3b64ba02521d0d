"""The public client makes scheduled jobs, changes their schedules, and fires one by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from zenrows.batch import At, Calendar, Rate, ZenRowsBatchClient
from zenrows.batch._schedule import Daily, Monthly, Schedule, Weekly
from zenrows.batch._typed_dicts import JobScheduleDict
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import JobSchedule, JobStatus, JobType, RunTrigger, ScheduleState

from tests.acceptance.support_client import (
    added,
    finish,
    pages,
    refused,
    urls,
)

ONCE = At(datetime(2_099, 9, 1, 9, 0), timezone="Europe/Berlin")
RATE = Rate(every=15, unit="minute")
CALENDARS = [
    Calendar(["09:00", "18:00"], cadence, timezone="Europe/Berlin")
    for cadence in (Daily(), Weekly(["mon", "fri"]), Monthly([1, 15]))
]


def is_told(told: JobSchedule | None, schedule: Schedule) -> bool:
    """Tell whether an answer has the schedule that was sent."""
    return told == JobSchedule.model_validate(schedule.to_dict())


@pytest.mark.parametrize("schedule", [ONCE, RATE, *CALENDARS], ids=repr)
def test_a_scheduled_job_has_its_schedule_and_no_run(
    client: ZenRowsBatchClient, schedule: Schedule
) -> None:
    job = client.submit_scheduled(schedule, pages(3, "planned"), name="planned")
    found = client.job(job.job_id).load().data

    assert (found.type, found.status) == (JobType.SCHEDULED, JobStatus.CLOSED)
    assert (found.schedule_state, found.latest_run) == (ScheduleState.ACTIVE, None)
    assert is_told(found.schedule, schedule)
    assert found.next_scheduled_run is not None
    assert found.next_scheduled_run > datetime.now(UTC) - timedelta(days=1)
    assert list(job.runs()) == []
    job.delete()


def test_a_schedule_is_changed_paused_and_resumed(client: ZenRowsBatchClient) -> None:
    job = client.submit_scheduled(RATE, pages(1, "changed"))
    before = job.load().data.next_scheduled_run
    others: list[Schedule] = [*CALENDARS, ONCE, RATE]
    for schedule in others:
        assert is_told(job.schedule.update(schedule).data.schedule, schedule)
    raw = JobScheduleDict(rate={"every": 1, "unit": "day"})
    daily = job.schedule.update(raw).data.next_scheduled_run
    assert before is not None
    assert daily is not None
    assert daily > before
    paused = job.schedule.pause().data
    assert (paused.schedule_state, paused.next_scheduled_run) == (ScheduleState.PAUSED, daily)
    assert job.schedule.pause().data == paused
    assert job.schedule.resume().data.schedule_state is ScheduleState.ACTIVE
    assert job.load().data.latest_run is None
    job.delete()


def test_the_first_run_is_fired_by_hand(client: ZenRowsBatchClient) -> None:
    job = client.submit_scheduled(RATE, pages(5, "by-hand"))
    for act in (job.run.stop, job.run.pause, job.retry_failed):
        refused(Code.NO_PRIOR_RUN, 409, act)

    first = job.rerun(wait_for_ingest=True)
    finish(job)
    second = job.rerun()
    finish(job)

    runs = [run.data for run in job.runs()]
    assert [run.run_id for run in runs] == [second.run_id, first.run_id]
    assert {run.trigger for run in runs} == {RunTrigger.MANUAL}
    assert {run.stats.successful for run in runs} == {5}
    assert urls(job.run.results()) == urls(first.results()) == pages(5, "by-hand")
    job.delete()


def test_what_a_scheduled_job_refuses(client: ZenRowsBatchClient) -> None:
    job = client.submit_scheduled(RATE, pages(1, "refused"))
    regular = client.submit_regular(pages(1, "regular"))

    refused(Code.JOB_NOT_OPEN, 409, job.close)
    refused(Code.JOB_NOT_OPEN, 409, lambda: job.add_tasks(added(pages(1))))
    refused(Code.CONFLICT, 409, regular.schedule.pause)
    refused(Code.CONFLICT, 409, lambda: regular.schedule.update(RATE))
    past = At("2001-09-01T09:00:00", timezone="Europe/Berlin")
    for act in (
        lambda: client.submit_scheduled(past, pages(1)),
        lambda: job.schedule.update(past),
    ):
        refused(Code.INVALID_ARGUMENT, 400, act)
    job.delete()
    refused(Code.NOT_FOUND, 404, job.schedule.pause)


def test_scheduled_jobs_are_listed_by_themselves(client: ZenRowsBatchClient) -> None:
    job = client.submit_scheduled(RATE, pages(1, "listed"))
    regular = client.submit_regular(pages(1, "regular"))

    scheduled = {one.job_id for one in client.iter_jobs(job_type="scheduled")}
    others = {one.job_id for one in client.iter_jobs(job_type="regular")}

    assert job.job_id in scheduled - others
    assert regular.job_id in others - scheduled
    job.delete()
