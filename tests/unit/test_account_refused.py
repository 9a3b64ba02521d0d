"""A gateway that refuses the account ends the run, and leaves the task as if it was never tried."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest

from conveyor.domain.model import Problem, RunFailure, RunStatus, TaskFailure, TaskStatus
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.ports.handler import Outcome
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


class Refusing:
    """A gateway that refuses the account, with this detail."""

    def __init__(self, detail: str) -> None:
        self._detail = detail

    def scrape(self, request: ScrapeRequest) -> NoReturn:
        reason = RunFailure.API_KEY_CAP_REACHED
        problem = Problem(code=reason.value, title="Refused", status=402, detail=self._detail)
        raise ScrapeFailed(problem, failure=TaskFailure.OTHER, retryable=False, account=reason)

    async def aclose(self) -> None:
        pass


async def refused(api: Api, *, detail: str) -> tuple[dict[str, str], Outcome]:
    """Work the only task of a job whose account the gateway refuses; return the job's ids."""
    job = await api.submit(1)
    ids = {"job": job["job_id"], "run": job["latest_run"]["run_id"]}
    [task] = await api.tasks_of(ids["run"])
    handler = task_handler(
        api.binding,
        Refusing(detail),
        api.clock,
        retry_policy=RetryPolicy(api.clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=Telemetry(),
        max_interruptions=4,
    )
    message = TaskMessage(ids["job"], ids["run"], task.task_id)
    return ids, await handler.handle(Delivery("queue", message, "receipt", 1), lambda: None)


async def test_the_claim_is_undone_and_a_rerun_right_after_is_made(api: Api) -> None:
    ids, outcome = await refused(api, detail="Full.")
    [task] = await api.tasks_of(ids["run"])
    run = await api.run_of(ids["job"])

    assert outcome.drop_queue is not None
    assert run is not None
    assert run.status is RunStatus.FAILED
    assert (task.status, task.attempts, task.interruptions) == (TaskStatus.PENDING, 0, 0)
    again = await api.client.post(f"/v1/jobs/{ids['job']}/rerun")
    assert again.status_code == 201
    assert not api.clock.pending


@pytest.mark.parametrize(("length", "kept"), [(10, 10), (500, 500), (5_000, 500)])
async def test_the_detail_is_bounded(api: Api, length: int, kept: int) -> None:
    ids, _ = await refused(api, detail="x" * length)
    run = await api.run_of(ids["job"])

    assert run is not None
    assert run.failure_reason is RunFailure.API_KEY_CAP_REACHED
    assert run.failure_detail == "x" * kept
