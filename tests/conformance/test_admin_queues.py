"""The queues of an environment: made from nothing, set right, removed with those of its runs."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.prod.admin.checks import MADE, queues_problem
from conveyor.prod.admin.resources import QueuesResource
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.sqs.registry import RETENTION
from conveyor.prod.sqs.registry import prefix as prefix_of
from tests.conformance.emulators import address, aws_options

pytestmark = pytest.mark.extended

CLOCK = SystemClock()
MAX_RECEIVES = 50


@pytest.fixture
async def aws() -> AsyncIterator[AwsClient]:
    opened = await open_aws(aws_options(sqs_endpoint=address("CONVEYOR_TEST_SQS")), CLOCK, "sqs")
    yield opened
    await opened.aclose()


@pytest.fixture
async def prefix(aws: AwsClient) -> AsyncIterator[str]:
    """Return the prefix of the queue names of one test; remove its queues afterwards."""
    environment = f"admin-{secrets.token_hex(6)}"
    yield prefix_of(environment)
    await queues(aws, prefix_of(environment)).remove()


def queues(aws: AwsClient, prefix: str) -> QueuesResource:
    environment = prefix.removeprefix("conveyor-").removesuffix("-")
    return QueuesResource(aws, CLOCK, environment=environment, max_receives=MAX_RECEIVES)


async def url(aws: AwsClient, name: str) -> dict[str, str]:
    answer = await aws.call("sqs", "get_queue_url", {"QueueName": name})
    return {"QueueUrl": answer["QueueUrl"]}


async def attributes(aws: AwsClient, name: str) -> dict[str, Any]:
    where = await url(aws, name)
    answer = await aws.call("sqs", "get_queue_attributes", {**where, "AttributeNames": ["All"]})
    found: dict[str, Any] = answer["Attributes"]
    return found


async def names(aws: AwsClient, prefix: str) -> set[str]:
    answer = await aws.call("sqs", "list_queues", {"QueueNamePrefix": prefix})
    return {found.rpartition("/")[2].removeprefix(prefix) for found in answer.get("QueueUrls", [])}


async def test_queues_are_made_once_and_then_found_right(aws: AwsClient, prefix: str) -> None:
    resource = queues(aws, prefix)
    assert "dead-letter does not exist" in str(await resource.problem())
    assert await resource.ensure() == MADE
    assert await resource.problem() is None
    assert await resource.ensure() == ""
    assert await names(aws, prefix) == {"control", "dead-letter"}


async def test_what_is_received_too_often_goes_to_the_dead_letters(
    aws: AwsClient, prefix: str
) -> None:
    await queues(aws, prefix).ensure()
    control = await attributes(aws, f"{prefix}control")
    dead = await attributes(aws, f"{prefix}dead-letter")
    policy = json.loads(control["RedrivePolicy"])

    assert policy["deadLetterTargetArn"] == dead["QueueArn"]
    assert int(policy["maxReceiveCount"]) == MAX_RECEIVES
    assert {control["MessageRetentionPeriod"], dead["MessageRetentionPeriod"]} == {str(RETENTION)}
    assert "RedrivePolicy" not in dead


async def test_a_queue_that_somebody_changed_is_told_and_mended(
    aws: AwsClient, prefix: str
) -> None:
    resource = queues(aws, prefix)
    await resource.ensure()
    changed = {"MessageRetentionPeriod": "3600"}
    where = await url(aws, f"{prefix}control")
    await aws.call("sqs", "set_queue_attributes", {**where, "Attributes": changed})

    assert "control has a wrong MessageRetentionPeriod" in str(await resource.problem())
    assert await resource.ensure() == f"set MessageRetentionPeriod of {prefix}control"
    assert await resource.problem() is None


async def test_everything_of_the_environment_is_removed_and_nothing_else(
    aws: AwsClient, prefix: str
) -> None:
    resource = queues(aws, prefix)
    await resource.ensure()
    # An environment may be named as another one begins.
    foreign = {"other-control", "other-dead-letter", f"other-run-{CLOCK.new_id()}-1"}
    run_id = CLOCK.new_id()
    own = {f"run-{run_id}-1", f"run-{run_id}-h62-1", f"run-{CLOCK.new_id()}-12"}
    for name in own | foreign:
        await aws.call("sqs", "create_queue", {"QueueName": prefix + name})

    assert await resource.remove() is True
    assert await names(aws, prefix) == foreign
    assert await resource.remove() is False
    for name in foreign:
        await aws.call("sqs", "delete_queue", await url(aws, prefix + name))


async def test_every_call_of_a_role_is_tried_and_nothing_is_left(
    aws: AwsClient, prefix: str
) -> None:
    assert await queues_problem(aws, "admin-check", CLOCK) is None
    tried = {operation for _, operation, outcome in aws.stats.calls if outcome == "ok"}

    assert await names(aws, prefix_of("admin-check")) == set()
    assert tried >= {
        "create_queue",
        "send_message_batch",
        "receive_message",
        "change_message_visibility_batch",
        "delete_message_batch",
        "delete_queue",
    }
