"""Why a run waits, where workers and what they share go away under it, read from a real fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import redis

from conveyor.domain.run_waits import RunWaitReason
from conveyor.ports.queues import run_queue
from conveyor.prod.redis.permits import ledger_key
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import QUICK, pages, until_called, waiting_for
from tests.acceptance.support_waits import told
from tests.acceptance.support_wire import Wire
from tests.conformance.emulators import REGION

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

R = RunWaitReason
SLOTS = 50


@pytest.fixture(scope="module", params=["redis", "dynamodb"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoleFleet]:
    """A fleet of one api and two workers; reports are in Redis, or where there is none in rows."""
    settings: dict[str, Any] = {**QUICK, "visibility_timeout": 20}
    directory = tmp_path_factory.mktemp("fleet")
    if request.param == "redis":
        with fleet(directory, apis=1, workers=2, **settings) as started:
            yield started
        return
    from dataclasses import replace

    with fleet(
        directory, apis=1, workers=2, over=replace(services(), redis=""), **settings
    ) as started:
        yield started


def test_a_queue_that_is_missing(running: RoleFleet) -> None:
    """Delete the queue of a run."""
    with Wire(running.api) as wire:
        urls = pages("lost", 60, delay=0.5)
        run = wire.submit(urls, max_inflight=1)["latest_run"]
        until_called(running, urls, 1)
        sqs = boto3.client("sqs", region_name=REGION, endpoint_url=services().sqs)
        (queue,) = [
            url
            for url in sqs.list_queues()["QueueUrls"]
            if run_queue(run["run_id"]).rpartition("/")[2] in url or run["run_id"] in url
        ]
        sqs.delete_queue(QueueUrl=queue)
        told(wire, running.api, run["job_id"], R.QUEUE_LOST)
        wire.ask("POST", f"/jobs/{run['job_id']}/stop")


def test_a_ledger_that_was_begun_anew(running: RoleFleet) -> None:
    url = services().redis
    if running.environment.get("CONVEYOR_LEDGER") == "dynamodb":
        pytest.skip("a ledger in DynamoDB loses nothing, so it never begins anew")
    with Wire(running.api) as wire, redis.Redis.from_url(url) as server:
        server.delete(ledger_key(running.environment["CONVEYOR_ENVIRONMENT"]))
        job = wire.submit(pages("late", 3, delay=0.1))["job_id"]
        waiting = told(wire, running.api, job, R.PERMITS_CLOSED)["waiting"]
        assert waiting["until"] > waiting["since"]
        assert wire.ended(job)["stats"]["successful"] == 3


def test_workers_that_die_one_after_the_other(running: RoleFleet) -> None:
    """The claims of the first are told until they lapse; without the second there is no worker."""
    first, second = [process for process in running.processes if process.role == "worker"]
    with Wire(running.api) as wire:
        urls = pages("held", 300, delay=5)
        job = wire.submit(urls, max_inflight=2 * SLOTS)["job_id"]
        until_called(running, urls, SLOTS + 10)
        told(wire, running.api, job, R.MAX_INFLIGHT)
        first.kill()

        def silent() -> Any:
            waiting = wire.latest_run(job).get("waiting", {})
            return waiting if waiting.get("reason") == R.CLAIMS_HELD else None

        held = waiting_for(silent, "the claims of the dead worker are told")
        assert held["until"] > held["since"]
        assert held["detail"].endswith("are under claims of a worker that is silent")
        second.kill()

        def alone() -> Any:
            waiting = wire.latest_run(job).get("waiting", {})
            return waiting if waiting.get("reason") == R.NO_WORKER else None

        assert waiting_for(alone, "no worker is told")["detail"] == (
            "no worker has said a word for 3 heartbeats of 1 s"
        )
        wire.ask("POST", f"/jobs/{job}/pause")
        paused = wire.latest_run(job)["waiting"]
        assert (paused["reason"], paused["others"][0]) == (R.PAUSED, R.NO_WORKER)
        wire.ask("POST", f"/jobs/{job}/resume")
        for worker in (first, second):
            worker.start()
        for worker in (first, second):
            worker.ready()
        nothing_holds_or_capped(wire, job)
        second.end()
        assert first.alive
        wire.ask("POST", f"/jobs/{job}/stop")


def nothing_holds_or_capped(wire: Wire, job: str) -> None:
    """Wait until the run works again, as fast as it may."""

    def look() -> bool | None:
        waiting = wire.latest_run(job).get("waiting", {})
        return True if waiting.get("reason") in (None, R.MAX_INFLIGHT, R.SLOTS) else None

    waiting_for(look, "the run works again")
