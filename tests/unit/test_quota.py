"""The limit on unfinished jobs of a caller: its cost, and the callers it holds up."""

from __future__ import annotations

from collections import Counter
from typing import cast

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, JobStatus, JobView, Run, RunStatus
from conveyor.ports.binding import Jobs
from conveyor.records.quotas import COUNTED_PER_JOB, LEAST_COUNTED, PAGE, ActiveJobQuota


class History:
    """Jobs of callers, each by the status of its latest run, newest first; counts what is read."""

    def __init__(self, **statuses: list[RunStatus]) -> None:
        self._views = {
            caller: [
                _view(caller, len(of_one) - place, status) for place, status in enumerate(of_one)
            ]
            for caller, of_one in statuses.items()
        }
        self.pages: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    async def list_jobs(
        self, caller: str, *, status: JobStatus | None, before: str | None, limit: int
    ) -> list[JobView]:
        """Answer as the port does."""
        assert status is None
        await anyio.lowlevel.checkpoint()
        views = self._views.get(caller, [])
        found = [view for view in views if before is None or view.job.job_id < before][:limit]
        self.pages[caller] += 1
        self.rows[caller] += len(found)
        return found


def _view(caller: str, number: int, status: RunStatus) -> JobView:
    job_id = f"{number:026}"
    job = Job(
        job_id=job_id,
        caller=caller,
        status=JobStatus.CLOSED,
        created_at=0,
        updated_at=0,
        latest_run_id=job_id,
    )
    run = Run(
        run_id=job_id, job_id=job_id, run_sequence=1, status=status, created_at=0, updated_at=0
    )
    return JobView(job, run)


def _quota(history: History, limit: int) -> ActiveJobQuota:
    return ActiveJobQuota(cast(Jobs, history), limit=limit)


DONE, LIVE = RunStatus.COMPLETED, RunStatus.RUNNING


async def test_a_long_history_is_read_up_to_its_bound() -> None:
    history = History(old=[DONE] * 10_000)
    async with _quota(history, 5).room_for_one("old"):
        pass
    assert history.rows["old"] == LEAST_COUNTED
    assert history.pages["old"] == LEAST_COUNTED // PAGE


@pytest.mark.slow
async def test_a_larger_limit_is_counted_among_more_jobs() -> None:
    history = History(old=[DONE] * 10_000)
    async with _quota(history, 205).room_for_one("old"):
        pass
    assert history.rows["old"] == 205 * COUNTED_PER_JOB


async def test_counting_ends_where_the_limit_is_met() -> None:
    history = History(busy=[DONE] * 150 + [LIVE] * 3 + [DONE] * 5_000)
    with pytest.raises(ConveyorError) as refused:
        async with _quota(history, 3).room_for_one("busy"):
            pass
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    assert history.pages["busy"] == 2


async def test_jobs_beyond_the_bound_are_not_counted() -> None:
    at_the_end = History(busy=[DONE] * (LEAST_COUNTED - 1) + [LIVE])
    beyond = History(busy=[DONE] * LEAST_COUNTED + [LIVE])
    with pytest.raises(ConveyorError):
        async with _quota(at_the_end, 1).room_for_one("busy"):
            pass
    async with _quota(beyond, 1).room_for_one("busy"):
        pass


async def test_one_callers_submit_waits_for_no_other_caller() -> None:
    history = History(one=[DONE], other=[DONE])
    quota = _quota(history, 1)
    made: list[str] = []

    async def submit(caller: str) -> None:
        async with quota.room_for_one(caller):
            made.append(caller)

    async with anyio.create_task_group() as group, quota.room_for_one("one"):
        group.start_soon(submit, "one")
        group.start_soon(submit, "other")
        await anyio.wait_all_tasks_blocked()
        assert made == ["other"]
    assert made == ["other", "one"]
