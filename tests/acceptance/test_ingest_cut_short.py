"""Large submits by the public client, and what stops them half-way: stop, pause, delete, a failed
account. The client's waiter returns, the total is that of the rows, and nothing staged is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zenrows.batch import ZenRowsBatchClient
from zenrows.batch._resources import JobRef
from zenrows.batch.models import IngestStatus, Run, RunStatus

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_client import added, open_client, pages, urls
from tests.acceptance.support_data import rows_of
from tests.acceptance.support_wire import Wire, eventually

pytestmark = pytest.mark.server

LARGE = 30_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    """A server over the fake gateway for which a thousand tasks are many."""
    with boot(
        tmp_path_factory.mktemp("large"),
        *("--gateway", "fake"),
        async_threshold=1_000,
        visibility_timeout=2,
        heartbeat=0.5,
        shutdown_grace=0.1,
    ) as running:
        yield running


@pytest.fixture
def client(server: Booted) -> Iterator[ZenRowsBatchClient]:
    """The public client."""
    with open_client(server) as opened:
        yield opened


def staged(server: Booted) -> list[Path]:
    """What is staged."""
    root = server.data_dir / "blobs" / "staged"
    return [path for path in root.rglob("*") if path.is_file()]


def rows_written(server: Booted, run_id: str) -> int:
    """How many rows a run has, by the database itself."""
    sql = (
        "SELECT count(*) FROM tasks JOIN runs ON task_key >> 35 >= run_no "
        "AND task_key >> 35 < run_no + shard_count WHERE run_id = ?"
    )
    found: int = rows_of(server.data_dir, sql, run_id)[0][0]
    return found


def test_a_large_submit_is_accepted_written_and_read(
    server: Booted, client: ZenRowsBatchClient
) -> None:
    listed = pages(1_500)
    job = client.submit_regular(listed)
    assert job.submit_response is not None
    run = job.submit_response.latest_run
    assert run is not None
    assert (run.stats.total, run.ingest_status) == (1_500, IngestStatus.PENDING)
    job.wait_for_ingest(timeout=60, poll_interval=0.05)
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.status, ended.stats.successful) == (RunStatus.COMPLETED, 1_500)
    assert urls(job.run.results()) == listed
    assert staged(server) == []


def ingested(client: ZenRowsBatchClient, job: JobRef) -> Run:
    """The run of a job, once the client's waiter has returned."""
    data = job.wait_for_ingest(timeout=60, poll_interval=0.05).data
    assert data.latest_run is not None
    return data.latest_run


def test_stop(server: Booted, client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(LARGE, delay=0.5))
    assert job.run.stop().status is RunStatus.STOPPED
    run = ingested(client, job)
    assert run.stats.total == rows_written(server, run.run_id) < LARGE
    assert staged(server) == []


def test_pause(server: Booted, client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(LARGE, delay=0.5))
    job.run.pause()
    run = ingested(client, job)
    assert run.stats.total == rows_written(server, run.run_id) == LARGE
    assert staged(server) == []
    job.run.stop()


def test_delete(server: Booted, client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(LARGE, delay=0.5))
    run = client.get_job(job.job_id).data.latest_run
    assert run is not None
    job.delete()
    run_id = run.run_id
    eventually(
        lambda: (rows_written(server, run_id) == 0 and not staged(server)) or None,
        "everything is gone",
    )


def test_account_failure(server: Booted, client: ZenRowsBatchClient) -> None:
    refused = pages(1, "refused", account="insufficient_credits")
    job = client.submit_regular([*refused, *pages(LARGE, delay=0.5)])
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert ended.status is RunStatus.FAILED
    run = ingested(client, job)
    assert run.stats.total == rows_written(server, run.run_id) <= LARGE + 1
    assert staged(server) == []


def test_an_open_job_takes_more_once_it_is_written(client: ZenRowsBatchClient) -> None:
    job = client.submit_open(pages(1_200))
    job.wait_for_ingest(timeout=60, poll_interval=0.05)
    job.add_tasks(added(pages(3, "more"), last_batch=True))
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.status, ended.stats.total) == (RunStatus.COMPLETED, 1_203)


def test_a_large_rerun_of_what_failed(client: ZenRowsBatchClient) -> None:
    listed = [*pages(1_000), *pages(200, "missing", status=404)]
    job = client.submit_regular(listed)
    job.run.wait(timeout=60, poll_interval=0.05)
    run = job.rerun(status="failed").data
    assert run.ingest_status is not None
    assert run.stats.total == 1_200
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.stats.successful, ended.stats.failed) == (1_000, 200)
    rows = list(job.run.results())
    assert urls(rows) == listed
    assert sum(row.source_run_id is not None for row in rows) == 1_000


def test_an_open_job_without_tasks_that_come_later(server: Booted) -> None:
    with Wire(server.api) as wire:
        made = wire.ask("POST", "/jobs", body={"status": "open", "async": True})
        job_id = made["job_id"]
        eventually(
            lambda: wire.latest_run(job_id)["ingest_status"] == "done" or None, "nothing is written"
        )
        assert wire.latest_run(job_id)["status"] == "pending"
        wire.ask("POST", f"/jobs/{job_id}/tasks", body={"tasks": [{"url": "http://fake.test/1"}]})
        wire.ask("POST", f"/jobs/{job_id}/close")
        assert wire.ended(job_id)["stats"]["successful"] == 1
