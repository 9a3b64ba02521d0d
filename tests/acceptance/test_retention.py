"""Removal in time: results, rows, exports and uploads; and deletions cut off by a kill."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from conveyor.handlers import delete
from conveyor.ports.binding import Binding, Tasks
from tests.acceptance.support_data import row_counts, rows_left, rows_of, server
from tests.acceptance.support_inside import ORIGIN, Inside, UnhurriedClock, inside
from tests.acceptance.support_wire import Wire, eventually, target
from tests.disk import body_files

pytestmark = pytest.mark.server

HOUR = 3_600.0
DAY = 24 * HOUR
MINUTES = HOUR / 10
"""By which the calendar goes on at each look of a test: a sweep that was under way when it was
turned on by days is followed by the next one an hour later."""
ROUNDS = 5
"""Deletions that are begun at most, until a kill comes in the middle of one."""
SWEEPING: dict[str, Any] = {"sweep_interval": 0.1, "visibility_timeout": 1.0, "heartbeat": 0.3}


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


class Calendar(UnhurriedClock):
    """A clock with a calendar that can be turned on by days."""

    def __init__(self) -> None:
        super().__init__()
        self._turned = 0

    def now(self) -> int:
        """Milliseconds since the epoch, as far as the calendar was turned."""
        return super().now() + self._turned

    def turn(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._turned += round(seconds * 1_000)


def as_they_are(binding: Binding) -> Binding:
    """The ports of the development binding."""
    return binding


async def content(server: Inside, job_id: str, task_id: str) -> int:
    """The status of the answer to a request for a body."""
    return (await server.client.get(f"/jobs/{job_id}/tasks/{task_id}/content")).status_code


async def test_results_expire_then_bodies_go_and_at_last_the_rows_and_the_job(
    tmp_path: Path,
) -> None:
    clock = Calendar()
    async with inside(
        tmp_path, as_they_are, clock=clock, row_retention_days=30, **SWEEPING
    ) as booted:
        tasks = [{"url": target("good")}, {"url": target("bad", status=404)}]
        fields = {"tasks": tasks, "result_ttl_days": 3}
        job_id = (await booted.ask("POST", "/jobs", json=fields))["job_id"]
        await booted.ended(job_id)
        good, bad = await booted.rows(job_id)
        clock.turn(3 * DAY - HOUR)
        assert await content(booted, job_id, good["task_id"]) == 200
        assert len(body_files(tmp_path)) == 1
        clock.turn(2 * HOUR)
        good, bad = await booted.rows(job_id)
        assert (good["status"], bad["status"]) == ("expired", "failed")
        assert "result_url" not in good

        async def bodies_are_gone() -> bool:
            clock.turn(MINUTES)
            return body_files(tmp_path) == []

        await booted.until(bodies_are_gone, "the bodies are removed")
        assert await content(booted, job_id, good["task_id"]) == 410
        assert row_counts(tmp_path)["tasks"] == 2
        clock.turn(30 * DAY)

        async def job_is_gone() -> bool:
            clock.turn(MINUTES)
            return (await booted.client.get(f"/jobs/{job_id}")).status_code == 404

        await booted.until(job_is_gone, "the job goes with its last run")
        assert set(row_counts(tmp_path).values()) == {0}


async def test_an_expired_export_goes_with_its_file(tmp_path: Path) -> None:
    clock = Calendar()
    async with inside(tmp_path, as_they_are, clock=clock, **SWEEPING) as booted:
        submitted = await booted.ask("POST", "/jobs", json={"tasks": [{"url": target("page")}]})
        job_id = submitted["job_id"]
        run = await booted.ended(job_id)
        made = await booted.ask("POST", f"/jobs/{job_id}/runs/{run['run_id']}/exports")
        path = f"/jobs/{job_id}/runs/{run['run_id']}/exports/{made['export_id']}"

        async def is_made() -> bool:
            return bool((await booted.ask("GET", path))["status"] == "completed")

        await booted.until(is_made, "the export is made")
        assert len(body_files(tmp_path)) == 2
        clock.turn(12 * HOUR + 60)
        assert (await booted.client.get(path)).status_code == 404

        async def row_is_gone() -> bool:
            return rows_of(tmp_path, "SELECT count(*) FROM exports") == [(0,)]

        await booted.until(row_is_gone, "the export is removed")
        assert len(body_files(tmp_path)) == 1


async def test_an_expired_upload_goes_with_its_file(tmp_path: Path) -> None:
    clock = Calendar()
    async with inside(tmp_path, as_they_are, clock=clock, **SWEEPING) as booted:
        slot = await booted.ask("POST", "/job_inputs", json={"type": "urls"})
        upload = slot["upload"]
        assert upload["url"].startswith(ORIGIN)
        sent = await booted.client.put(
            upload["url"], content=b"http://a.test/", headers=upload["headers"]
        )
        assert sent.is_success, sent.text
        assert len(body_files(tmp_path)) == 1
        clock.turn(25 * HOUR)

        async def slot_is_gone() -> bool:
            return rows_of(tmp_path, "SELECT count(*) FROM job_inputs") == [(0,)]

        await booted.until(slot_is_gone, "the slot is removed")
        assert body_files(tmp_path) == []


class RowsWithoutEnd:
    """The tasks port over another one, in which no scrub comes to an end before `end`."""

    def __init__(self, tasks: Tasks) -> None:
        self.end = anyio.Event()
        self.scrubbing: set[str] = set()
        self._tasks = tasks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        """Tell of as many rows as were asked for, until `end`."""
        if self.end.is_set():
            return await self._tasks.scrub_tasks(run_id, limit)
        self.scrubbing.add(run_id)
        await anyio.sleep(0.01)
        return limit


async def test_deletions_that_take_long_keep_no_ingestion_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delete, "PAUSE", 0.5)
    rows: list[RowsWithoutEnd] = []

    def without_end(binding: Binding) -> Binding:
        rows.append(RowsWithoutEnd(binding.tasks))
        return dataclasses.replace(binding, tasks=cast(Tasks, rows[0]))

    async with inside(tmp_path, without_end, **SWEEPING) as booted:
        jobs = []
        for number in range(6):
            body: dict[str, Any] = {"tasks": [{"url": target(f"deleted/{number}")}]}
            jobs.append((await booted.ask("POST", "/jobs", json=body))["job_id"])
            await booted.ended(jobs[-1])
        for job_id in jobs:
            await booted.ask("DELETE", f"/jobs/{job_id}")

        async def all_are_under_way() -> bool:
            return len(rows[0].scrubbing) == len(jobs)

        await booted.until(all_are_under_way, "every deletion has begun")
        body = {"tasks": [{"url": target("ingested")}], "async": True}
        ingested = (await booted.ask("POST", "/jobs", json=body))["job_id"]
        assert (await booted.ended(ingested))["stats"]["successful"] == 1
        assert row_counts(tmp_path)["jobs"] == len(jobs) + 1
        rows[0].end.set()

        async def deleted_ones_are_gone() -> bool:
            return row_counts(tmp_path)["jobs"] == 1

        await booted.until(deleted_ones_are_gone, "the deletions end")


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(
    ("batches", "kills"),
    [(1, 1), pytest.param(6, 5, marks=(pytest.mark.full, pytest.mark.timeout(600)), id="full")],
)
def test_a_deletion_cut_off_by_a_kill_leaves_nothing_in_the_end(
    tmp_path: Path, batches: int, kills: int
) -> None:
    settings = {"visibility_timeout": 1, "heartbeat": 0.3}
    flags = ("--gateway", "fake")
    # A machine that is busy may delete everything before the kill.
    for _ in range(ROUNDS):
        begin_deletions(tmp_path, batches, *flags, **settings)
        if rows_left(tmp_path, "SELECT count(*) FROM tasks") > [(0,)]:
            break
    for number in range(kills):
        before = rows_left(tmp_path, "SELECT count(*) FROM tasks")[0][0]
        assert before > 0
        assert rows_left(tmp_path, "SELECT count(*) FROM runs WHERE status = 'deleted'") > [(0,)]
        with server(tmp_path, *flags, **settings):
            if number < kills - 1:
                _wait_for_fewer_tasks(tmp_path, than=before)
            else:
                eventually(lambda: _is_empty(tmp_path) or None, "nothing is left")


def begin_deletions(data_dir: Path, batches: int, *flags: str, **settings: object) -> None:
    """Delete a job that has ended and one with tasks that wait; kill the server when rows go."""
    with server(data_dir, *flags, **settings) as process, Wire(process.info.api) as wire:
        eventually(lambda: _is_empty(data_dir) or None, "nothing is left of an earlier round")
        drained = wire.submit([target(f"body/{number}") for number in range(300)])["job_id"]
        wire.ended(drained)
        waiting = wire.ask("POST", "/jobs", body={"type": "regular", "status": "open"})["job_id"]
        wire.ask("POST", f"/jobs/{waiting}/pause")
        for batch in range(batches):
            tasks = [{"url": target(f"{batch}/{number}")} for number in range(10_000)]
            wire.ask("POST", f"/jobs/{waiting}/tasks", body={"tasks": tasks})
        left = _tasks(data_dir)
        assert left == 300 + batches * 10_000
        for job_id in (waiting, drained):
            wire.ask("DELETE", f"/jobs/{job_id}")
        _wait_for_fewer_tasks(data_dir, than=left)


def _tasks(data_dir: Path) -> int:
    count: int = rows_of(data_dir, "SELECT count(*) FROM tasks")[0][0]
    return count


def _wait_for_fewer_tasks(data_dir: Path, *, than: int) -> None:
    eventually(lambda: _tasks(data_dir) < than or None, "rows go")


def _is_empty(data_dir: Path) -> bool:
    return not any(row_counts(data_dir).values()) and not body_files(data_dir)
