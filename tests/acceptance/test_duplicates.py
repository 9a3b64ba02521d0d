"""Every message delivered again, while it is in work and after it is done, changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conveyor.ports.binding import Binding
from conveyor.ports.queues import DeleteMessage, TaskMessage
from conveyor.testing.faults import DuplicatingQueues
from tests.acceptance.support_data import row_counts, rows_of
from tests.acceptance.support_inside import inside
from tests.acceptance.support_wire import target
from tests.disk import body_files

VISIBILITY = 2
MIXTURE: tuple[tuple[dict[str, float], int], ...] = (
    ({}, 1),
    ({"delay": 0.05}, 1),
    ({"flaky": 1}, 2),
    ({"status": 404}, 1),
    ({"status": 500}, 2),
)
"""Answers that URLs ask of the gateway, and the calls that each takes."""
TASKS = 200
SETTINGS: dict[str, Any] = {
    "visibility_timeout": VISIBILITY,
    "heartbeat": 0.2,
    "discovery_interval": 0.2,
    "retry_base": 0.01,
    "workers": 20,
}


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


@pytest.mark.guarantee("G3")
async def test_every_message_delivered_again_changes_no_counter(tmp_path: Path) -> None:
    made: list[DuplicatingQueues] = []

    def doubling(ports: Binding) -> Binding:
        made.append(DuplicatingQueues(ports.queues))
        return replace(ports, queues=made[0])

    calls: dict[str, int] = {}
    for number in range(TASKS):
        behaviour, times = MIXTURE[number % len(MIXTURE)]
        calls[target(f"double/{number}", **behaviour)] = times
    # One call goes on until the copies that came during a call are due again.
    calls[target("last", delay=2 * VISIBILITY)] = 1
    async with inside(tmp_path, doubling, crews=2, **SETTINGS) as server:
        [queues] = made
        job = await server.ask(
            "POST",
            "/jobs",
            json={"tasks": [{"url": url} for url in calls], "max_attempts": 2},
        )
        job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
        stats = (await server.ended(job_id))["stats"]

        assert (stats["total"], stats["successful"], stats["failed"]) == (201, 121, 80)
        assert stats["failure_reasons"] == {"bad_target": 40, "gateway_error": 40}
        assert server.gateway.hits.counts == calls
        rows = await server.rows(job_id)
        assert [row["url"] for row in rows] == list(calls)
        for row in rows:
            path = f"/jobs/{job_id}/tasks/{row['task_id']}/history"
            events = (await server.ask("GET", path))["events"]
            assert [event["kind"] for event in events] == ["attempt"] * calls[row["url"]]
        messages = [TaskMessage(job_id, run_id, row["task_id"]) for row in rows[:-1]]
        assert min(queues.deliveries[message] for message in messages) >= 3
        assert rows_of(tmp_path, "SELECT sum(interruptions) FROM tasks") == [(0,)]
        assert len(body_files(tmp_path)) == stats["successful"]

        await server.ask("DELETE", f"/jobs/{job_id}")

        async def is_gone() -> bool:
            return not any(row_counts(tmp_path).values()) and not body_files(tmp_path)

        await server.until(is_gone, "nothing of the job is left")
        passes = [DeleteMessage(job_id, run_id, final=done) for done in (False, True)]
        assert min(queues.deliveries[message] for message in passes) >= 2
        assert server.gateway.hits.counts == calls
