"""The requests of tests of large submits, and their checks of staged files afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec

from conveyor.clock import SystemClock
from conveyor.domain.model import Run, Task
from conveyor.ports.queues import CONTROL_QUEUE
from conveyor.records.blob_keys import staged_prefix
from conveyor.service.submit import READ_HERE
from tests.disk import files_below
from tests.unit.http_api import Api

DEADLINE = 60.0


def tasks_of(count: int, *, padding: int = 0) -> list[dict[str, Any]]:
    return [{"url": f"https://site.test/{number}{'x' * padding}"} for number in range(count)]


def large_body(count: int, **fields: Any) -> bytes:
    """A document that is too large for the loop, though its tasks may be few."""
    body = json.dumps({"tasks": tasks_of(count), "odd": "x" * READ_HERE, **fields}).encode()
    assert len(body) > READ_HERE
    return body


async def post(api: Api, body: bytes, **headers: str) -> httpx.Response:
    return await api.client.post(
        "/v1/jobs", content=body, headers={"Content-Type": "application/json", **headers}
    )


def staged_files(api: Api) -> list[Path]:
    """Return every staged or half-written file."""
    return [path for path in files_below(api.directory / "blobs") if "results" not in path.parts]


def staged_rows(api: Api, job: dict[str, Any]) -> list[tuple[str, str]]:
    """The ids and URLs that lie staged for a job's run, in order."""
    prefix = staged_prefix(job["job_id"], job["latest_run"]["run_id"])
    rows: list[tuple[str, str]] = []
    for path in sorted((api.directory / "blobs" / prefix).iterdir()):
        assert int(path.name) == len(rows)
        for line in path.read_bytes().splitlines():
            rows += [(task_id, spec["url"]) for task_id, spec in msgspec.json.decode(line)]
    return rows


async def rows_of(api: Api, job: dict[str, Any]) -> list[Task]:
    """Every row of a job's first run, in order."""
    run_id, rows = job["latest_run"]["run_id"], []
    found = await api.binding.jobs.find_job(job["job_id"])
    assert found is not None
    for shard in range(found.task_shard_count):
        page = await api.binding.tasks.page_tasks(
            run_id, shard=shard, statuses=None, after=None, limit=100_000
        )
        rows += page.tasks
    return sorted(rows, key=lambda row: row.index)


async def run_of(api: Api, job: dict[str, Any]) -> Run:
    run = await api.run_of(job["job_id"])
    assert run is not None
    return run


async def control_messages(api: Api) -> list[Any]:
    deliveries = await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=60)
    return [delivery.message for delivery in deliveries]


async def nothing_is_left(api: Api) -> None:
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}
    assert staged_files(api) == []
    assert await control_messages(api) == []


def children() -> list[int]:
    """The child processes of this one that check a list."""
    listed = " ".join(_text(path) for path in Path("/proc/self/task").glob("*/children"))
    return [pid for pid in map(int, listed.split()) if _checks_a_list(pid)]


def _checks_a_list(pid: int) -> bool:
    return "conveyor.intake" in _text(Path(f"/proc/{pid}/cmdline"))


def _text(path: Path) -> str:
    """Return a file of /proc; empty if its process has gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def eventually(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    with anyio.fail_after(DEADLINE):
        while not condition():
            await clock.sleep(0.005)
