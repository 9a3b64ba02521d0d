"""Scheduled jobs of an API in one process, and what its tests look at."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from zenrows.batch.models import Job as ClientJob

from conveyor.domain.api_keys import KeySealer
from conveyor.domain.model import Job
from conveyor.domain.scheduling import (
    Scheduling,
)
from conveyor.handlers.fire import SchedulerOptions
from conveyor.records.blob_keys import template_list_prefix
from tests.unit.http_api import Api
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


async def look(api: Api, *, after: int) -> None:
    """Let a worker look for schedules that are due, so many milliseconds later."""
    await api.clock.advance(after / 1_000)
    secrets = [*api.binding.sealing_secrets, api.binding.root_secret]
    options = SchedulerOptions(interval=5.0, catch_up=DAY / 1_000, max_active_jobs=0)
    await scheduler(api.binding, api.clock, sealer=KeySealer(secrets), options=options).fire()
