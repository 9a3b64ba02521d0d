"""Requests whose answer never came: cut off by a kill, or failed; and their retries."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from conveyor.dev.sqlite.jobs import SqliteJobs
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, NewTask, Run
from conveyor.ports.binding import Binding, Jobs
from conveyor.ports.records import IdempotencyScope, StoredResponse
from conveyor.testing.process import ServerProcess
from tests.acceptance.support_data import (
    rows_of,
    server,
)
from tests.acceptance.support_inside import inside
from tests.acceptance.support_wire import Wire, eventually, target, together

pytestmark = pytest.mark.server


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


@pytest.mark.guarantee("G14")
@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=(pytest.mark.full, pytest.mark.timeout(600)), id="full")]
)
def test_a_submit_cut_off_by_a_kill_is_found_by_its_retry(tmp_path: Path, kills: int) -> None:
    """Every third kill comes as soon as the database has grown by the job, before the answer."""
    draw = random.Random(kills)
    answered: dict[int, bytes] = {}
    for number in range(kills + 1):
        with (
            server(tmp_path, "--gateway", "fake", idempotency_claim=1.0) as process,
            Wire(process.info.api) as wire,
        ):
            if number > 0:
                assert_made_once(wire, tmp_path, number - 1, answered)
            if number < kills:
                after = 5 if number % 3 == 0 else draw.random() * 0.4
                answer = submit_and_kill(wire, process, number, after=after)
                if answer is not None:
                    answered[number] = answer


def submit_and_kill(
    wire: Wire, process: ServerProcess, number: int, *, after: float
) -> bytes | None:
    """Kill the server while it works on a submit, once the job is written or `after` seconds; the
    answer, if it came all the same."""
    log = Path(process.info.data_dir, "conveyor.db-wal")
    grown = log.stat().st_size + 500_000
    moment = time.monotonic() + after

    def act(thread: int) -> bytes | None:
        if thread == 0:
            while time.monotonic() < moment and log.stat().st_size < grown:
                time.sleep(0.0005)
            process.kill()
            return None
        try:
            return post_big(wire, number).content
        except httpx.TransportError:
            return None

    return together(2, act)[1]


def post_big(wire: Wire, number: int) -> httpx.Response:
    """The submit of job `number`, the same each time."""
    tasks = [{"url": target(f"big/{number}/{one}")} for one in range(5_000)]
    body = {"tasks": tasks, "external_id": f"big-{number}"}
    return wire.send("POST", "/jobs", body=body, key=f"big-{number}")


def assert_made_once(wire: Wire, data_dir: Path, number: int, answered: dict[int, bytes]) -> None:
    """A retry gives the job that the first request made, if it made one, and there is one only."""
    sql = "SELECT job_id FROM jobs WHERE external_id = ?"
    made = rows_of(data_dir, sql, f"big-{number}")

    def retry() -> httpx.Response | None:
        response = post_big(wire, number)
        if response.status_code == 409:
            return None
        assert response.status_code == 201, response.text
        return response

    response = eventually(retry, "the retry is answered")
    job_id = response.json()["job_id"]
    assert rows_of(data_dir, sql, f"big-{number}") == [(job_id,)]
    assert made in ([], [(job_id,)])
    assert response.content == answered.get(number, response.content)
    assert post_big(wire, number).content == response.content
    assert wire.latest_run(job_id)["stats"]["total"] == 5_000
    assert len(wire.rows(job_id)) == 5_000


class FailingJobs(SqliteJobs):
    """A store whose disk fails under the next submit, before or after it was written."""

    def __init__(self, jobs: SqliteJobs, *, written: bool) -> None:
        super().__init__(jobs._database)
        self._written = written
        self._failures = 1

    async def create_job(
        self,
        job: Job,
        run: Run | None,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        failing, self._failures = self._failures > 0, 0
        if self._written or not failing:
            await super().create_job(job, run, tasks, answer=answer, once=once)
        if failing:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is full")


@pytest.mark.parametrize("written", [False, True])
async def test_a_request_that_failed_with_5xx_is_free_again(tmp_path: Path, written: bool) -> None:
    def failing(ports: Binding) -> Binding:
        assert isinstance(ports.jobs, SqliteJobs)
        jobs: Jobs = FailingJobs(ports.jobs, written=written)
        return replace(ports, jobs=jobs)

    async with inside(tmp_path, failing, discovery_interval=0.2) as booted:
        body = {"tasks": [{"url": target("free")}]}

        async def submit() -> httpx.Response:
            return await booted.client.post("/jobs", json=body, headers={"Idempotency-Key": "k"})

        refused = await submit()
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        answers = [await submit() for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[0].content == answers[1].content
        job_id = answers[0].json()["job_id"]
        assert rows_of(tmp_path, "SELECT job_id FROM jobs") == [(job_id,)]
        await booted.ended(job_id)
        assert booted.gateway.hits.total == 1
