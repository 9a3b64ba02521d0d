"""Large submits by the public client, and what stops them half-way: stop, pause, delete, a failed
account. The client's waiter returns, the total is that of the rows, and nothing staged is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from zenrows.batch import ZenRowsBatchClient
from zenrows.batch._resources import JobRef
from zenrows.batch.models import IngestStatus, Run, RunStatus

from tests.acceptance.support_bindings import DEVELOPMENT, FLEET, Serving, bodies, rows_written
from tests.acceptance.support_boot import boot
from tests.acceptance.support_client import LARGE_FROM, added, open_client, pages, urls
from tests.acceptance.support_wire import Wire, eventually

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Sizes:
    """The number of tasks that counts as many, and the number whose writing takes long enough to be
    cut short."""

    some: int
    many: int


ROUNDS = 5
"""Runs that are stopped at most, until one was while its rows were being written."""
SIZES = {DEVELOPMENT: Sizes(1_000, 30_000), FLEET: Sizes(LARGE_FROM, 1_500)}


@pytest.fixture(scope="module")
def sizes(binding: str) -> Sizes:
    """Return the sizes for a binding."""
    return SIZES[binding]


@pytest.fixture(scope="module")
def server(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A server for which a thousand tasks are many, or a fleet for which fewer are."""
    if binding == FLEET:
        yield request.getfixturevalue("shared_fleet")
        return
    with boot(
        tmp_path_factory.mktemp("large"),
        *("--gateway", "fake"),
        async_threshold=SIZES[DEVELOPMENT].some,
        visibility_timeout=2,
        heartbeat=0.5,
        shutdown_grace=0.1,
    ) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[ZenRowsBatchClient]:
    """The public client."""
    with open_client(server) as opened:
        yield opened


def staged(server: Serving, job: JobRef) -> list[str]:
    """Return the staged chunks of a job."""
    return [key for key in bodies(server, job.job_id) if key.startswith("staged/")]


def until_nothing_is_staged(server: Serving, job: JobRef) -> None:
    """It goes after the rows are said to be written."""
    eventually(lambda: staged(server, job) == [] or None, "nothing is staged")


def test_a_large_submit_is_accepted_written_and_read(
    server: Serving, client: ZenRowsBatchClient, sizes: Sizes
) -> None:
    count = sizes.some * 3 // 2
    listed = pages(count)
    job = client.submit_regular(listed)
    assert job.submit_response is not None
    run = job.submit_response.latest_run
    assert run is not None
    assert (run.stats.total, run.ingest_status) == (count, IngestStatus.PENDING)
    job.wait_for_ingest(timeout=60, poll_interval=0.05)
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.status, ended.stats.successful) == (RunStatus.COMPLETED, count)
    assert urls(job.run.results()) == listed
    until_nothing_is_staged(server, job)


def ingested(client: ZenRowsBatchClient, job: JobRef) -> Run:
    """The run of a job, once the client's waiter has returned."""
    data = job.wait_for_ingest(timeout=60, poll_interval=0.05).data
    assert data.latest_run is not None
    return data.latest_run


@pytest.mark.guarantee("G9")
def test_stop(server: Serving, client: ZenRowsBatchClient, sizes: Sizes) -> None:
    # A machine that is busy may write all rows before it is stopped.
    for _ in range(ROUNDS):
        job = client.submit_regular(pages(sizes.many, delay=0.5))
        assert job.run.stop().status is RunStatus.STOPPED
        run = ingested(client, job)
        assert run.stats.total == rows_written(server, run.run_id) <= sizes.many
        until_nothing_is_staged(server, job)
        if run.stats.total < sizes.many:
            return
    raise AssertionError("no ingestion was cut short")


def test_pause(server: Serving, client: ZenRowsBatchClient, sizes: Sizes) -> None:
    job = client.submit_regular(pages(sizes.many, delay=0.5))
    job.run.pause()
    run = ingested(client, job)
    assert run.stats.total == rows_written(server, run.run_id) == sizes.many
    until_nothing_is_staged(server, job)
    job.run.stop()


def test_delete(server: Serving, client: ZenRowsBatchClient, sizes: Sizes) -> None:
    job = client.submit_regular(pages(sizes.many, delay=0.5))
    run = client.get_job(job.job_id).data.latest_run
    assert run is not None
    job.delete()
    run_id = run.run_id
    eventually(
        lambda: (rows_written(server, run_id) == 0 and not staged(server, job)) or None,
        "everything is gone",
    )


def test_account_failure(server: Serving, client: ZenRowsBatchClient, sizes: Sizes) -> None:
    refused = pages(1, "refused", account="insufficient_credits")
    job = client.submit_regular([*refused, *pages(sizes.many, delay=0.5)])
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert ended.status is RunStatus.FAILED
    run = ingested(client, job)
    assert run.stats.total == rows_written(server, run.run_id) <= sizes.many + 1
    until_nothing_is_staged(server, job)


def test_an_open_job_takes_more_once_it_is_written(
    client: ZenRowsBatchClient, sizes: Sizes
) -> None:
    count = sizes.some + 20
    job = client.submit_open(pages(count))
    job.wait_for_ingest(timeout=60, poll_interval=0.05)
    job.add_tasks(added(pages(3, "more"), last_batch=True))
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.status, ended.stats.total) == (RunStatus.COMPLETED, count + 3)


def test_a_large_rerun_of_what_failed(client: ZenRowsBatchClient, sizes: Sizes) -> None:
    good, bad = sizes.some, sizes.some // 5
    listed = [*pages(good), *pages(bad, "missing", status=404)]
    job = client.submit_regular(listed)
    job.run.wait(timeout=60, poll_interval=0.05)
    run = job.rerun(status="failed").data
    assert run.ingest_status is not None
    assert run.stats.total == good + bad
    ended = job.run.wait(timeout=60, poll_interval=0.05)
    assert (ended.stats.successful, ended.stats.failed) == (good, bad)
    rows = list(job.run.results())
    assert urls(rows) == listed
    assert sum(row.source_run_id is not None for row in rows) == good


def test_an_open_job_without_tasks_that_come_later(server: Serving) -> None:
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
