"""A real state machine whose one state waits with a task token."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from tests.conformance.emulators import address, aws_options, on_aws

SFN, SQS = "stepfunctions", "sqs"
ROLE = "arn:aws:iam::000000000000:role/conveyor-test"
PATIENCE = 60.0
"""Seconds until a state machine has to have moved."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A state machine whose only state sends its task token to a queue, and waits."""

    aws: AwsClient
    arn: str
    queue: str

    async def wait(self) -> tuple[str, str]:
        """Let one execution come to wait; its name and its token."""
        begun = await self.aws.call(SFN, "start_execution", {"stateMachineArn": self.arn})
        with anyio.fail_after(PATIENCE):
            while True:
                asked = {"QueueUrl": self.queue, "WaitTimeSeconds": 1}
                received = await self.aws.call(SQS, "receive_message", asked)
                for message in received.get("Messages", []):
                    return begun["executionArn"], json.loads(message["Body"])["token"]

    async def status(self, execution: str) -> str:
        """Return the status of an execution."""
        found = await self.aws.call(SFN, "describe_execution", {"executionArn": execution})
        return str(found["status"])

    async def end(self, execution: str) -> dict[str, Any]:
        """Return the result of an execution."""
        with anyio.fail_after(PATIENCE):
            while True:
                asked = {"executionArn": execution}
                found = await self.aws.call(SFN, "describe_execution", asked)
                if found["status"] != "RUNNING":
                    return found
                await anyio.sleep(0.02)


@asynccontextmanager
async def state_machine() -> AsyncIterator[Machine]:
    """Make a state machine for a while; skip the test if that is impossible."""
    if on_aws():
        pytest.skip("a state machine on AWS needs a role that the tests do not make")
    endpoint = address("CONVEYOR_TEST_STEPFUNCTIONS")
    # This emulator's state machines send to its own queues, not to those of the SQS emulator.
    options = aws_options(stepfunctions_endpoint=endpoint, sqs_endpoint=endpoint)
    aws = await open_aws(options, SystemClock(), SFN, SQS)
    name = f"conveyor-test-{secrets.token_hex(6)}"
    queue = (await aws.call(SQS, "create_queue", {"QueueName": name}))["QueueUrl"]
    waits = {
        "Type": "Task",
        "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
        "Parameters": {"QueueUrl": queue, "MessageBody": {"token.$": "$$.Task.Token"}},
        "TimeoutSeconds": 60,
        "End": True,
    }
    definition = json.dumps({"StartAt": "Wait", "States": {"Wait": waits}})
    made = await aws.call(
        SFN, "create_state_machine", {"name": name, "definition": definition, "roleArn": ROLE}
    )
    yield Machine(aws, made["stateMachineArn"], queue)
    await aws.call(SFN, "delete_state_machine", {"stateMachineArn": made["stateMachineArn"]})
    await aws.call(SQS, "delete_queue", {"QueueUrl": queue})
    await aws.aclose()
