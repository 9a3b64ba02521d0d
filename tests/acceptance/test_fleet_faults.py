"""A fleet whose parts fail: processes killed and stopped, messages and a queue lost, Redis away and
back empty. Every task ends once, the counters are exact, and no cap is passed.

The gateway sees the calls of a dead or stopped process to their end, and counts them. So calls take
less time here than a permit's lease: what is still in flight still has its permit.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import (
    CAP,
    LEASE,
    QUICK,
    assert_exact,
    calls_of,
    insisting,
    pages,
    permits_of,
    until_called,
    waiting_for,
)
from tests.acceptance.support_wire import Wire
from tests.conformance.emulators import REGION
from tests.conformance.redis_process import RedisProcess

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

OLD_QUEUE = 62.0
"""Seconds from which a queue that is missing is not one that is yet to come."""


class Early(NamedTuple):
    """A job whose tasks so far have ended, and when it was there."""

    job_id: str
    urls: list[str]
    there_at: float


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """The ledger's own, that may be killed."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def running(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """One fleet for all: each test leaves it whole."""
    directory: Path = tmp_path_factory.mktemp("fleet")
    with fleet(directory, apis=2, workers=3, redis_url=redis.url, **QUICK) as started:
        yield started


@pytest.fixture(scope="module")
def wire(running: RoleFleet) -> Iterator[Wire]:
    """Requests to whichever api has its turn."""
    with Wire(running.api) as wire:
        yield wire


@pytest.fixture(scope="module", autouse=True)
def early(wire: Wire) -> Early:
    """An open job of as early as can be: its queue counts as old sooner than that of any other."""
    urls = pages("early", 2)
    job_id = wire.submit(urls, status="open", max_inflight=CAP)["job_id"]
    there_at = time.monotonic()
    waiting_for(lambda: wire.latest_run(job_id)["stats"]["completed"] == 2 or None, "it is idle")
    return Early(job_id, urls, there_at)


@pytest.mark.parametrize(
    ("tasks", "kills", "seed"),
    [
        (150, 5, 1),
        pytest.param(1_000, 30, 2, marks=(pytest.mark.full, pytest.mark.timeout(900)), id="full"),
    ],
)
def test_a_run_survives_kills_of_any_process(
    running: RoleFleet, wire: Wire, tasks: int, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    urls = pages(f"kill-{seed}", tasks)
    batches = [urls[start : start + tasks // 5] for start in range(0, tasks, tasks // 5)]
    job_id = wire.submit(batches[0], status="open", max_inflight=CAP)["job_id"]

    def add_the_others() -> None:
        """Each with a key, and again until it is answered."""
        for number, batch in enumerate(batches[1:], start=1):
            last = number == len(batches) - 1
            body = {"tasks": [{"url": url} for url in batch], "last_batch": last}
            until_called(running, urls, tasks * number // 10)
            key = f"{job_id}-{number}"
            insisting(partial(wire.send, "POST", f"/jobs/{job_id}/tasks", body=body, key=key))

    workers_killed = 0
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add_the_others)
        for number, moment in enumerate(sorted(draw.sample(range(CAP, tasks - CAP), kills))):
            until_called(running, urls, moment)
            is_api = number % 3 == 1
            victim = draw.choice(running.apis if is_api else running.workers)
            victim.kill()
            if is_api:
                running.restart(victim)
            else:
                # Not waited for: it may be killed again while it boots.
                victim.start()
                workers_killed += 1
        adding.result()

    assert_exact(wire, running, job_id, urls, faults=workers_killed)
    for process in running.workers:
        process.ready()


@pytest.mark.guarantee("G14")
@pytest.mark.parametrize(
    "kills", [2, pytest.param(20, marks=(pytest.mark.full, pytest.mark.timeout(900)), id="full")]
)
def test_a_submit_whose_api_is_killed_is_found_by_its_retry_at_another(
    running: RoleFleet, wire: Wire, kills: int
) -> None:
    """Each kill comes some time after the request was sent, and most before its answer."""
    draw = random.Random(kills)
    cut_off = 0
    for number in range(10 * kills):
        if number >= kills and cut_off > 0:
            break
        urls = pages(f"cut/{kills}/{number}", 200, delay=0)
        body = {"tasks": [{"url": url} for url in urls], "external_id": f"cut-{kills}-{number}"}
        victim, other = draw.sample(running.apis, 2)
        with Wire(victim.info.api) as first, Wire(other.info.api) as second:
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(first.send, "POST", "/jobs", body=body, key=f"cut-{number}")
                time.sleep(draw.random() * 0.3)  # the moment is what the test varies
                victim.kill()
            cut_off += answer.exception() is not None
            retry = partial(second.send, "POST", "/jobs", body=body, key=f"cut-{number}")
            made = insisting(retry)
            assert retry().json() == made
            assert answer.exception() is not None or answer.result().json() == made
            running.restart(victim)
        listed = [job for job in jobs(wire) if job.get("external_id") == body["external_id"]]
        assert [job["job_id"] for job in listed] == [made["job_id"]]
        assert_exact(wire, running, made["job_id"], urls, faults=0)
    assert cut_off > 0


def jobs(wire: Wire) -> list[Any]:
    """Every job of the caller."""
    found, cursor = [], None
    while True:
        page = wire.ask("GET", "/jobs", limit=100, cursor=cursor)
        found += page["jobs"]
        cursor = page.get("next_cursor")
        if cursor is None:
            return found


def test_a_worker_that_is_stopped_beyond_its_lease_does_no_harm(
    running: RoleFleet, wire: Wire
) -> None:
    urls = pages("stop", 100, delay=1.0)
    job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
    until_called(running, urls, CAP + 1)
    stopped = max(running.workers, key=permits_of)
    stopped.signal(signal.SIGSTOP)
    try:
        time.sleep(LEASE + 1)  # for longer than it has told anybody that it lives
        waiting_for(lambda: max(calls_of(running, urls).values()) > 1 or None, "others take over")
        assert wire.latest_run(job_id)["status"] == "running"
    finally:
        stopped.signal(signal.SIGCONT)
    assert assert_exact(wire, running, job_id, urls, faults=1) > 0


def queue_of(running: RoleFleet, run_id: str) -> tuple[Any, str]:
    """A client of SQS, and the URL of the one queue that a run has."""
    client = boto3.client(
        "sqs",
        region_name=REGION,
        endpoint_url=running.environment["CONVEYOR_SQS_ENDPOINT"] or None,
    )
    name = f"conveyor-{running.name}-run-{run_id}-"
    [found] = client.list_queues(QueueNamePrefix=name)["QueueUrls"]
    return client, found


def test_messages_lost_outright_are_sent_again(running: RoleFleet, wire: Wire) -> None:
    urls = pages("lost", 60)
    run = wire.submit(urls, max_inflight=2)
    job_id, run_id = run["job_id"], run["latest_run"]["run_id"]
    until_called(running, urls, 4)
    client, queue = queue_of(running, run_id)
    lost = 0
    while batch := client.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages"):
        entries = [
            {"Id": str(number), "ReceiptHandle": one["ReceiptHandle"]}
            for number, one in enumerate(batch)
        ]
        client.delete_message_batch(QueueUrl=queue, Entries=entries)
        lost += len(batch)
    assert lost >= len(urls) // 3
    assert_exact(wire, running, job_id, urls, faults=0)


@pytest.mark.parametrize(
    "away",
    [
        2.0,
        pytest.param(60.0, marks=(pytest.mark.full, pytest.mark.timeout(300)), id="full"),
    ],
)
def test_a_redis_that_comes_back_empty(
    running: RoleFleet, wire: Wire, redis: RedisProcess, away: float
) -> None:
    urls = pages(f"redis-{away:g}", 120)
    job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
    until_called(running, urls, 2 * CAP)
    redis.kill()
    try:
        before = sum(calls_of(running, urls).values())
        gone_at = time.monotonic()
        # Calls that began before are not all: permits in hand are worked on with.
        until_called(running, urls, before + CAP + 1)
        time.sleep(max(0.0, away - (time.monotonic() - gone_at)))
    finally:
        redis.start()
    # Where its answer comes too late for a lease, a worker ends its calls and gives them back.
    assert_exact(wire, running, job_id, urls, faults=1)


def test_a_queue_that_is_deleted_under_a_live_run_is_made_again(
    running: RoleFleet, wire: Wire, early: Early
) -> None:
    run_id = wire.latest_run(early.job_id)["run_id"]
    time.sleep(max(0.0, early.there_at + OLD_QUEUE - time.monotonic()))
    urls = pages("queue", 60)
    body = {"tasks": [{"url": url} for url in urls], "last_batch": True}
    wire.ask("POST", f"/jobs/{early.job_id}/tasks", body=body)
    until_called(running, urls, 2 * CAP)
    client, queue = queue_of(running, run_id)
    client.delete_queue(QueueUrl=queue)
    assert_exact(wire, running, early.job_id, early.urls + urls, faults=0)
