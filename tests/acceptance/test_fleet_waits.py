"""Waits of runs whose workers, or what these share, go away: read from a real fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import boto3
import httpx
import pytest
import redis

from conveyor.domain.run_waits import RunWaitReason
from conveyor.prod.redis.permits import ledger_key
from conveyor.prod.sqs.registry import run_queue_name
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import QUICK, pages, until_called, waiting_for
from tests.acceptance.support_waits import told
from tests.acceptance.support_wire import Wire
from tests.conformance.emulators import REGION, unavailable
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

R = RunWaitReason
SLOTS = 50
CLAIM = 45
"""Seconds for which claims outlive their worker, and what tells of them can be read: on a machine
that others use, a look takes seconds, and in some of them the other worker seems silent as well."""
LONG = 3_000
"""Pages that two workers do not get through while a test waits as long as it may."""


@pytest.fixture(
    scope="module",
    params=["redis", pytest.param("dynamodb", marks=pytest.mark.full)],
    ids=["redis", "no redis"],
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoleFleet]:
    """A fleet of two workers. Where there is no Redis, their reports are rows."""
    there = services() if request.param == "redis" else replace(services(), redis="")
    # Claims outlive by far the silence after which their worker counts as gone.
    settings: dict[str, Any] = {**QUICK, "visibility_timeout": CLAIM}
    directory = tmp_path_factory.mktemp("fleet")
    with fleet(directory, apis=1, workers=2, over=there, **settings) as started:
        yield started


def waits(wire: Wire, job: str, *reasons: RunWaitReason | None) -> Any:
    """Wait until the run waits for one of the reasons; what it says of that. If it never does, the
    failure tells what was read instead."""
    seen: list[tuple[Any, ...]] = []

    def look() -> Any:
        run = wire.latest_run(job)
        waiting = run.get("waiting", {})
        word = (run["status"], waiting.get("reason"), waiting.get("others"))
        if word not in seen[-1:]:
            seen.append(word)
        return (waiting,) if waiting.get("reason") in reasons else None

    try:
        return waiting_for(look, f"the run waits because of {reasons}")[0]
    except AssertionError as error:
        error.add_note(f"it was {seen}")
        raise


@contextmanager
def no_queue_made(prefix: str) -> Iterator[None]:
    """Keep queues whose names begin so from being made: else a lost one is there again within a
    second, and what is read meanwhile is a matter of luck."""
    where = services().sqs
    if not where:
        unavailable("AWS itself keeps no queue from being made")
    with httpx.Client(base_url=where, timeout=SECONDS, trust_env=False) as emulator:
        emulator.post(f"/_names/block/{prefix}").raise_for_status()
        try:
            yield
        finally:
            emulator.post(f"/_names/free/{prefix}").raise_for_status()


def test_a_queue_that_is_missing(running: RoleFleet) -> None:
    with Wire(running.api) as wire:
        urls = pages("lost", 600, delay=0.5)
        run = wire.submit(urls, max_inflight=1)["latest_run"]
        until_called(running, urls, 1)
        prefix = run_queue_name(running.name, run["run_id"], 1)[:-1]
        sqs = boto3.client("sqs", region_name=REGION, endpoint_url=services().sqs)
        with no_queue_made(prefix):
            for url in sqs.list_queues(QueueNamePrefix=prefix)["QueueUrls"]:
                sqs.delete_queue(QueueUrl=url)
            waits(wire, run["job_id"], R.QUEUE_LOST)
            told(wire, running.api, run["job_id"], R.QUEUE_LOST)
            assert not sqs.list_queues(QueueNamePrefix=prefix).get("QueueUrls")
        wire.ask("POST", f"/jobs/{run['job_id']}/stop")


def test_a_ledger_that_was_begun_anew(running: RoleFleet) -> None:
    if not running.environment.get("CONVEYOR_REDIS_URL"):
        pytest.skip("a ledger in DynamoDB loses nothing, so it never begins anew")
    with Wire(running.api) as wire, redis.Redis.from_url(services().redis) as server:
        server.delete(ledger_key(running.name))
        job = wire.submit(pages("late", 3, delay=0.1))["job_id"]
        waiting = told(wire, running.api, job, R.PERMITS_CLOSED)["waiting"]
        assert waiting["until"] > waiting["since"]
        assert wire.ended(job)["stats"]["successful"] == 3


def test_workers_that_die_one_after_the_other(running: RoleFleet) -> None:
    first, second = running.workers
    with Wire(running.api) as wire:
        urls = pages("held", LONG, delay=8)
        job = wire.submit(urls, max_inflight=SLOTS + 10)["job_id"]
        until_called(running, urls, SLOTS + 5)
        told(wire, running.api, job, R.MAX_INFLIGHT)

        first.kill()
        held = waits(wire, job, R.CLAIMS_HELD)
        assert held["detail"].endswith("under claims of a worker that is silent")
        assert held["until"] > held["since"]

        second.kill()
        alone = waits(wire, job, R.NO_WORKER)
        assert alone["detail"] == "no worker has said a word for 3 heartbeats of 1 s"
        paused = wire.ask("POST", f"/jobs/{job}/pause")["waiting"]
        assert (paused["reason"], paused["others"][0]) == (R.PAUSED, R.NO_WORKER)
        wire.ask("POST", f"/jobs/{job}/resume")

        for worker in (first, second):
            running.restart(worker)
        waits(wire, job, None, R.MAX_INFLIGHT, R.SLOTS)
        # One that ends in order takes its word back, so that the other is not missed for it.
        assert first.end() == 0
        waits(wire, job, None, R.MAX_INFLIGHT, R.SLOTS)
        wire.ask("POST", f"/jobs/{job}/stop")
        running.restart(first)
