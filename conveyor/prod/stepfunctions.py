"""The callbacks port over Step Functions."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.outbox import TokenExpired
from conveyor.prod.aws.calls import Aws, AwsRefused

SERVICE = "stepfunctions"
NOBODY_WAITS = frozenset({"TaskTimedOut", "TaskDoesNotExist", "InvalidToken"})
"""Refusals of a token that will never be valid (again)."""


class StepFunctionsCallbacks:
    """The callbacks port. Its errors quote only the code of a refusal: the message may hold the
    token."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def send_heartbeat(self, task_token: str) -> None:
        await self._send("send_task_heartbeat", task_token)

    async def send_success(self, task_token: str, *, output: str) -> None:
        await self._send("send_task_success", task_token, output=output)

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        await self._send("send_task_failure", task_token, error=error, cause=cause)

    async def _send(self, operation: str, task_token: str, **parameters: str) -> None:
        try:
            await self._aws.call(SERVICE, operation, {"taskToken": task_token, **parameters})
        except AwsRefused as refused:
            code = refused.word
        else:
            return
        # Raised out here, so that the refusal does not become its context.
        if code in NOBODY_WAITS:
            raise TokenExpired
        raise ConveyorError(ErrorCode.UNAVAILABLE, f"{SERVICE} refuses {operation}: {code}")
