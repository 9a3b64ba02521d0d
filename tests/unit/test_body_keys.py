"""The keys of bodies: spread within a run, and those of earlier versions still readable."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.domain.ids import task_ids
from conveyor.domain.model import Format, StoredBody
from conveyor.domain.task_rules import Succeeded
from conveyor.records.blob_keys import SPREAD, checked_key, result_key, run_prefix
from tests.disk import body_files
from tests.unit.http_api import PAGE, PAGE_TYPE, Api, open_api

TASKS = 10_000
BUSY = 1_000
"""Keys that are written at about the same time."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


def test_keys_of_consecutive_tasks_are_spread_evenly_over_prefixes_of_their_run() -> None:
    prefix = run_prefix("JOB", "RUN", 30)
    keys = [result_key("JOB", "RUN", task, 1, 30) for task in task_ids("RUN", 0, TASKS)]
    assert all(checked_key(key).startswith(prefix) for key in keys)
    assert len(set(keys)) == TASKS
    for start in range(0, TASKS, BUSY):
        digits = Counter(key[len(prefix)] for key in keys[start : start + BUSY])
        assert len(digits) == SPREAD
        assert max(digits.values()) < 2 * BUSY / SPREAD


async def test_a_body_under_an_earlier_key_is_read_and_deleted_with_its_run(api: Api) -> None:
    job = await api.submit(1)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    [task] = await api.tasks_of(run_id)
    claimed = await api.claim(run_id, task.task_id)
    earlier = f"{run_prefix(job_id, run_id, 30)}{task.task_id[:5]}/{task.task_id}.1"
    await api.binding.blobs.put(earlier, PAGE)
    stored = StoredBody(earlier, len(PAGE), PAGE_TYPE, Format.HTML)
    await api.settle(claimed, Succeeded(api.event(claimed), stored))

    answer = await api.client.get(f"/v1/jobs/{job_id}/tasks/{task.task_id}/content")
    assert answer.content == PAGE
    assert body_files(api.directory)
    assert await api.binding.blobs.delete_prefix(run_prefix(job_id, run_id, 30)) == 1
    assert not body_files(api.directory)
