"""Faults of AWS, scripted or random: lost answers, throttled calls, batches done in part.

A scripted rule applies to calls of one operation and says what happens to the next ones. It acts as
the transport itself would: after a lost answer the same call is made again. With random faults, any
call may be hit.
"""

from __future__ import annotations

import random  # noqa: TID251  (seeded: the troubles of a test)
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, Parameters

Action = Callable[[], Awaitable[None]]
Match = Callable[[Parameters], bool]

ATTEMPTS = 8
"""The transport's default number of attempts for a call."""
THROTTLED = "ThrottlingError"


class _Kind(Enum):
    LOSE = auto()
    VANISH = auto()
    THROTTLE = auto()
    FAIL = auto()
    SPLIT = auto()
    BEFORE = auto()
    AFTER = auto()


@dataclass(slots=True, eq=False)
class _Rule:
    """The fault of `times` calls, after the first `skip`."""

    kind: _Kind
    operation: tuple[str, str]
    matches: Match
    skip: int
    times: int
    error: Exception | None = None
    action: Action | None = None


def _match_all(parameters: Parameters) -> bool:
    return True


class FaultyAws:
    """An `Aws` in front of another one; without rules it only passes calls on.

    Services and operations have the transport's names. `where` narrows a rule to calls with
    matching parameters; `nth` is the first matching call that it applies to, from 1, and `times`
    the number of calls. Rules apply in the order in which they were made, one to a call. `calls`
    are the requested operations, in order, each once; `fired` counts the uses of rules, so that a
    test can tell that its fault happened.
    """

    def __init__(self, aws: Aws) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fired = 0
        self._aws = aws
        self._rules: list[_Rule] = []

    def lose_answer(
        self,
        service: str,
        operation: str,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Carry the call out, lose its answer, and make the same call again."""
        self._rules.append(_Rule(_Kind.LOSE, (service, operation), where, nth - 1, times))

    def vanish(
        self,
        service: str,
        operation: str,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Carry the call out without ever answering: unavailable, as after the last attempt."""
        self._rules.append(_Rule(_Kind.VANISH, (service, operation), where, nth - 1, times))

    def throttle(
        self,
        service: str,
        operation: str,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Refuse `times` attempts in a row.

        The call is unavailable if no attempt is left, else carried out by the next one.
        """
        self._rules.append(_Rule(_Kind.THROTTLE, (service, operation), where, nth - 1, times))

    def fail(
        self,
        service: str,
        operation: str,
        error: Exception,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Raise `error` instead of carrying the call out."""
        self._rules.append(
            _Rule(_Kind.FAIL, (service, operation), where, nth - 1, times, error=error)
        )

    def split(
        self,
        service: str,
        operation: str,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Leave the second half of a DynamoDB batch undone: UnprocessedItems, UnprocessedKeys, or
        throttled statements.

        A batch of one is left undone as a whole.
        """
        self._rules.append(_Rule(_Kind.SPLIT, (service, operation), where, nth - 1, times))

    def before(
        self,
        service: str,
        operation: str,
        action: Action,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Run an action before the call; calls made by the action are passed on like any others."""
        self._rules.append(
            _Rule(_Kind.BEFORE, (service, operation), where, nth - 1, times, action=action)
        )

    def after(
        self,
        service: str,
        operation: str,
        action: Action,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _match_all,
    ) -> None:
        """Run an action between the call and its answer."""
        self._rules.append(
            _Rule(_Kind.AFTER, (service, operation), where, nth - 1, times, action=action)
        )

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, under the first rule that applies to it."""
        self.calls.append((service, operation))
        rule = self._rule(service, operation, parameters)
        if rule is None:
            return await self._aws.call(service, operation, parameters)
        return await self._apply(rule, service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Return a link, unchanged."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    def _rule(self, service: str, operation: str, parameters: Parameters) -> _Rule | None:
        """Return the rule that applies to the call; all other matching rules count it."""
        found: _Rule | None = None
        for rule in self._rules:
            if rule.operation != (service, operation) or not rule.matches(parameters):
                continue
            if rule.skip:
                rule.skip -= 1
            elif rule.times and found is None:
                found = rule
        if found is not None:
            self.fired += 1
            # A throttle counts the attempts of one call.
            found.times -= 0 if found.kind is _Kind.THROTTLE else 1
        return found

    async def _apply(
        self, rule: _Rule, service: str, operation: str, parameters: Parameters
    ) -> Answer:
        async def carry_out() -> Answer:
            return await self._aws.call(service, operation, parameters)

        match rule.kind:
            case _Kind.LOSE:
                await _unanswered(carry_out)
                return await carry_out()
            case _Kind.VANISH:
                await _unanswered(carry_out)
                raise _unavailable(service, operation)
            case _Kind.THROTTLE:
                throttled = min(rule.times, ATTEMPTS)
                rule.times -= throttled
                if throttled == ATTEMPTS:
                    raise _unavailable(service, operation)
                return await carry_out()
            case _Kind.FAIL:
                assert rule.error is not None
                raise rule.error
            case _Kind.SPLIT:
                return await self._do_half(service, operation, parameters)
            case _Kind.BEFORE:
                assert rule.action is not None
                await rule.action()
                return await carry_out()
            case _Kind.AFTER:
                assert rule.action is not None
                answer = await carry_out()
                await rule.action()
                return answer

    async def _do_half(self, service: str, operation: str, parameters: Parameters) -> Answer:
        match operation:
            case "batch_execute_statement":
                done, left = _split_in_half(parameters["Statements"])
                answer = await self._batch(service, operation, {"Statements": done}, bool(done))
                undone = [{"Error": {"Code": THROTTLED, "Message": "slow down"}} for _ in left]
                return {**answer, "Responses": [*answer.get("Responses", []), *undone]}
            case "batch_write_item":
                [(table, requests)] = parameters["RequestItems"].items()
                done, left = _split_in_half(requests)
                asked = {**parameters, "RequestItems": {table: done}}
                answer = await self._batch(service, operation, asked, bool(done))
                return {**answer, "UnprocessedItems": {table: left}}
            case "batch_get_item":
                [(table, request)] = parameters["RequestItems"].items()
                done, left = _split_in_half(request["Keys"])
                asked = {**parameters, "RequestItems": {table: {**request, "Keys": done}}}
                answer = await self._batch(service, operation, asked, bool(done))
                undone_keys = {table: {**request, "Keys": left}}
                return {"Responses": {}, **answer, "UnprocessedKeys": undone_keys}
        raise ValueError(f"{operation} is no batch")

    async def _batch(
        self, service: str, operation: str, parameters: Mapping[str, Any], has_work: bool
    ) -> Answer:
        return await self._aws.call(service, operation, parameters) if has_work else {}


def _split_in_half(parts: list[Any]) -> tuple[list[Any], list[Any]]:
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]


async def _unanswered(carry_out: Callable[[], Awaitable[Answer]]) -> None:
    """Carry out and drop the answer; a refusal is an answer too, and lost like any other."""
    try:
        await carry_out()
    except AwsRefused:
        return


def _unavailable(service: str, operation: str) -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE, f"{service} does not answer {operation}", retry_after=5
    )


CALM = 10
"""Fault-free calls at the start of a process: it could not start otherwise."""
DELAY = 3
"""Seconds by which late messages are delayed."""
_LONGEST_DELAY = 900
RARE = 20
"""The factor by which calls made once for many tasks are hit more often than others."""
CONFLICT_SECONDS = 0.5
_BATCHES = frozenset({"batch_execute_statement", "batch_write_item", "batch_get_item"})
_SENDS = frozenset({"send_message", "send_message_batch"})
_FOR_MANY = _BATCHES | _SENDS | {"delete_message_batch"}


class AwsTrouble(msgspec.Struct, frozen=True):
    """The fault of one call.

    `lost`: its answer was lost and the call made again; `vanished`: its answer was lost and the
    call given up; `refused`: throttled or in conflict to the last attempt; `throttled`: made again;
    `split`: a batch was done in part; `late` or `dropped`: the messages sent. `concerns` is the
    number of messages, rows or other things in the call.
    """

    kind: str
    service: str
    operation: str
    concerns: int


class TroubledAws:
    """An `Aws` in front of another one. Each call is hit with the probability `rate` (RARE times
    that for rare operations) by a fault that it can have; `on_fault` is called before the fault
    happens."""

    def __init__(
        self,
        aws: Aws,
        clock: Clock,
        *,
        seed: str,
        rate: float,
        on_fault: Callable[[AwsTrouble], None],
    ) -> None:
        self._aws = aws
        self._clock = clock
        self._random = random.Random(seed)
        self._rate = rate
        self._on_fault = on_fault
        self._calm = CALM

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, perhaps with a fault."""
        self._calm -= 1
        rate = self._rate * (RARE if operation in _FOR_MANY else 1)
        if self._calm >= 0 or self._random.random() >= rate:
            return await self._aws.call(service, operation, parameters)
        kind = self._random.choice(_kinds(service, operation))
        self._on_fault(AwsTrouble(kind, service, operation, _count_items(parameters)))
        return await self._call_with_fault(kind, service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Return a link, unchanged."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    async def _call_with_fault(
        self, kind: str, service: str, operation: str, parameters: Parameters
    ) -> Answer:
        faulty = FaultyAws(self._aws)
        match kind:
            case "lost":
                faulty.lose_answer(service, operation)
            case "vanished":
                faulty.vanish(service, operation)
            case "split":
                faulty.split(service, operation)
            case "refused":
                raise ConveyorError(
                    ErrorCode.UNAVAILABLE, f"{service} does not answer {operation}", retry_after=1
                )
            case "throttled":
                await self._clock.sleep(CONFLICT_SECONDS * self._random.random())
            case "late":
                parameters = _delay_messages(parameters)
            case "dropped":
                entries = parameters.get("Entries", ())
                sent = [{"Id": entry["Id"], "MessageId": entry["Id"]} for entry in entries]
                return {"MessageId": "dropped", "Successful": sent}
        return await faulty.call(service, operation, parameters)


def _kinds(service: str, operation: str) -> list[str]:
    kinds = ["refused", "throttled"]
    if operation != "get_object":  # nobody would close the stream of a lost answer
        kinds += ["lost", "vanished"]
    if service == "dynamodb" and operation in _BATCHES:
        kinds += ["split", "split"]
    if operation in _SENDS:
        kinds += ["late", "dropped"] * 2
    return kinds


def _count_items(parameters: Parameters) -> int:
    parts: list[Any] = parameters.get("Entries") or parameters.get("Statements") or []
    return len(parts) or int(parameters.get("MaxNumberOfMessages", 1))


def _delay_messages(parameters: Parameters) -> Parameters:
    if "Entries" not in parameters:
        return _delay_message(parameters)
    return {**parameters, "Entries": [_delay_message(entry) for entry in parameters["Entries"]]}


def _delay_message(message: Parameters) -> Answer:
    seconds = message.get("DelaySeconds", 0) + DELAY
    return {**message, "DelaySeconds": min(_LONGEST_DELAY, seconds)}
