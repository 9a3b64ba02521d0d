"""kill -9 of workers of a fleet around the ends of runs: each run that ended has one event, and it
is delivered at least once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import QUICK, ended, waiting_for
from tests.acceptance.support_receiver import SlowReceiver
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import Wire, target
from tests.conformance.emulators import REGION

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

JOBS = 6
"""Jobs submitted before each kill; one of them is stopped by its caller."""
EVENTS = ["run.completed", "run.failed", "run.stopped"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """A fleet whose events may go to this machine."""
    with fleet(
        tmp_path_factory.mktemp("fleet"),
        apis=1,
        workers=3,
        trouble=lambda _role, _number: ["--receivers-here"],
        outbox_interval=0.5,
        **QUICK,
    ) as started:
        yield started


def submit(wire: Wire, receiver: SlowReceiver, name: str) -> list[str]:
    """Submit jobs whose runs end soon, and stop the last one; return their ids."""
    webhook = {"url": receiver.url, "signature": False, "events": EVENTS}
    made: list[str] = []
    for number in range(JOBS):
        urls = [target(f"{name}/{number}/{task}", delay=0.1 * number) for task in range(2)]
        made.append(wire.submit(urls, webhook=webhook)["job_id"])
    wire.ask("POST", f"/jobs/{made[-1]}/stop")
    return made


def under_way(running: RoleFleet) -> int:
    """Count the ends in the table that are not told yet, and the deliveries that are pending."""
    client = boto3.client(
        "dynamodb",
        region_name=REGION,
        endpoint_url=running.environment["CONVEYOR_DYNAMODB_ENDPOINT"] or None,
    )
    pages = client.get_paginator("scan").paginate(
        TableName=f"conveyor-{running.name}",
        ConsistentRead=True,
        FilterExpression="(sk = :webhook AND attribute_exists(ended_at)) "
        "OR (begins_with(pk, :deliveries) AND #status = :pending)",
        ExpressionAttributeNames={"#status": "status"},
        ExpressionAttributeValues={
            ":webhook": {"S": "Webhook"},
            ":deliveries": {"S": "Deliveries#"},
            ":pending": {"S": "pending"},
        },
    )
    return sum(page["Count"] for page in pages)


def only_delivery(wire: Wire, job_id: str) -> Any:
    """The one delivery of a job, once an attempt has succeeded."""

    def look() -> Any:
        deliveries = wire.ask("GET", f"/jobs/{job_id}/webhook/deliveries")["deliveries"]
        assert len(deliveries) <= 1
        return next((one for one in deliveries if one["status"] == "delivered"), None)

    return waiting_for(look, f"the end of job {job_id} is told")


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        (8, 1),
        pytest.param(40, 2, marks=(pytest.mark.full, pytest.mark.timeout(1_200)), id="full"),
    ],
)
def test_each_run_of_a_fleet_has_one_event_whichever_worker_is_killed(
    running: RoleFleet, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    receiver = SlowReceiver(random.Random(seed))
    jobs: list[str] = []
    cut_off = 0
    with receiver, in_background(receiver), Wire(running.api) as wire:
        for number in range(kills):
            jobs += submit(wire, receiver, f"kill-{seed}-{number}")
            time.sleep(draw.random() * 1.5)  # the moment is what the test varies
            victim = draw.choice(running.workers)
            victim.kill()
            cut_off += under_way(running)
            # Not waited for: it may be killed again while it boots.
            victim.start()
        runs = {job_id: ended(wire, job_id) for job_id in jobs}
        told = {job_id: only_delivery(wire, job_id) for job_id in jobs}
        for process in running.workers:
            process.ready()

    assert cut_off > 0  # some of the kills came between an end and its delivery
    assert set(receiver.got) == {one["delivery_id"] for one in told.values()}
    for job_id in jobs:
        run, delivery = runs[job_id], told[job_id]
        bodies = receiver.got[delivery["delivery_id"]]
        assert len(set(bodies)) == 1
        event = json.loads(bodies[0])
        assert event["event_id"] == delivery["delivery_id"]
        assert (event["run_id"], event["event_type"]) == (run["run_id"], f"run.{run['status']}")
        # A request may have been begun, and not have come, when its worker was killed.
        assert 1 <= len(bodies) <= delivery["attempt_count"]
