"""Callbacks to a real state machine that waits with a task token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.outbox import Callbacks, TokenExpired
from conveyor.prod.admin.checks import Finding, callbacks_problem, run_check
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.stepfunctions import StepFunctionsCallbacks
from tests.conformance.state_machines import SFN, Machine, state_machine

TOKEN = "a-token-that-no-error-names"


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    async with state_machine() as machine:
        yield machine


async def test_a_success_is_the_output_of_the_state(machine: Machine) -> None:
    callbacks: Callbacks = StepFunctionsCallbacks(machine.aws)
    execution, token = await machine.wait()
    await callbacks.send_heartbeat(token)
    assert await machine.status(execution) == "RUNNING"
    await callbacks.send_success(token, output='{"run_id":"R","stats":{"total":3}}')
    found = await machine.end(execution)

    assert found["status"] == "SUCCEEDED"
    assert json.loads(found["output"]) == {"run_id": "R", "stats": {"total": 3}}
    for again in all_kinds(callbacks, token):
        with pytest.raises(TokenExpired):
            await again()


async def test_a_failure_fails_the_state_with_error_and_cause(machine: Machine) -> None:
    callbacks = StepFunctionsCallbacks(machine.aws)
    execution, token = await machine.wait()
    await callbacks.send_failure(token, error="Conveyor.RunStopped", cause='{"run_id":"R"}')
    found = await machine.end(execution)

    assert found["status"] == "FAILED"
    history = await machine.aws.call(SFN, "get_execution_history", {"executionArn": execution})
    [failed] = [
        event["executionFailedEventDetails"]
        for event in history["events"]
        if event["type"] == "ExecutionFailed"
    ]
    assert failed == {"error": "Conveyor.RunStopped", "cause": '{"run_id":"R"}'}


async def test_nobody_waits_with_a_token_that_is_none(machine: Machine) -> None:
    for call in all_kinds(StepFunctionsCallbacks(machine.aws), TOKEN):
        with pytest.raises(TokenExpired):
            await call()


class Refuses:
    """Refuses everything with one code, and repeats the token, as AWS may. The emulator knows but
    one of the codes."""

    def __init__(self, code: str) -> None:
        self._code = code

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        raise AwsRefused(self._code, f"{operation}: {parameters['taskToken']}")

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        raise AssertionError(operation)


@pytest.mark.parametrize("code", ["TaskTimedOut", "TaskDoesNotExist", "InvalidToken"])
async def test_a_token_that_has_had_its_day_is_nobodys(code: str) -> None:
    for call in all_kinds(StepFunctionsCallbacks(Refuses(code)), TOKEN):
        with pytest.raises(TokenExpired):
            await call()


@pytest.mark.parametrize("code", ["AccessDeniedException", "InvalidOutput"])
async def test_any_other_refusal_is_unavailable_and_keeps_the_token(code: str) -> None:
    for call in all_kinds(StepFunctionsCallbacks(Refuses(code)), TOKEN):
        with pytest.raises(ConveyorError, match=code) as refused:
            await call()
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert TOKEN not in str(refused.value)
        assert refused.value.__context__ is None


async def test_a_check_tells_whether_callbacks_are_permitted() -> None:
    async def check(code: str) -> Finding:
        return await run_check("callbacks", lambda: callbacks_problem(Refuses(code), SystemClock()))

    assert (await check("InvalidToken")).problem is None
    denied = await check("AccessDeniedException")
    assert "not permitted: send_task_heartbeat" in str(denied)


def all_kinds(callbacks: Callbacks, token: str) -> list[Callable[[], Awaitable[None]]]:
    """Make each kind of callback."""
    return [
        lambda: callbacks.send_heartbeat(token),
        lambda: callbacks.send_success(token, output="{}"),
        lambda: callbacks.send_failure(token, error="E", cause="C"),
    ]
