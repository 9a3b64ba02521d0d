"""The seam to AWS, misbehaving as AWS may: answers lost, calls throttled, batches done in part.

Each rule is for calls of one operation and says what becomes of the next ones. What a rule is used
up for is as the seam itself would do it: a lost answer means that the very call is made again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, Parameters

Action = Callable[[], Awaitable[None]]
Match = Callable[[Parameters], bool]

ATTEMPTS = 8
"""Tries that the seam makes of a call, by default."""
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
    """What becomes of `times` calls, after `skip` that are left alone."""

    kind: _Kind
    operation: tuple[str, str]
    matches: Match
    skip: int
    times: int
    error: Exception | None = None
    action: Action | None = None


def _any(parameters: Parameters) -> bool:
    return True


class FaultyAws:
    """An `Aws` before another one. Without rules it only passes calls on.

    Services and operations are named as the seam names them. `where` narrows a rule down to calls
    whose parameters it says yes to; `nth` is the first such call that it is for, from 1, and
    `times` how many it is for. Rules apply in the order in which they were made, one to a call.
    `calls` are the operations that were asked for, in order, each once; `fired` counts the rules'
    uses, so that a test can tell that its fault happened.
    """

    def __init__(self, aws: Aws) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fired = 0
        self._aws = aws
        self._rules: list[_Rule] = []

    def lose_answer(
        self, service: str, operation: str, *, nth: int = 1, times: int = 1, where: Match = _any
    ) -> None:
        """The call is carried out, its answer lost, and the very call made again."""
        self._add(_Kind.LOSE, service, operation, nth, times, where)

    def vanish(
        self, service: str, operation: str, *, nth: int = 1, times: int = 1, where: Match = _any
    ) -> None:
        """The call is carried out, and no answer ever comes: unavailable, as after the last try."""
        self._add(_Kind.VANISH, service, operation, nth, times, where)

    def throttle(
        self, service: str, operation: str, *, nth: int = 1, times: int = 1, where: Match = _any
    ) -> None:
        """Tries are refused, `times` of them in a row; the call is unavailable where no try is left
        to it, else carried out by the next one."""
        self._add(_Kind.THROTTLE, service, operation, nth, times, where)

    def fail(
        self,
        service: str,
        operation: str,
        error: Exception,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _any,
    ) -> None:
        """The call is not carried out, and raises."""
        self._add(_Kind.FAIL, service, operation, nth, times, where, error=error)

    def split(
        self, service: str, operation: str, *, nth: int = 1, times: int = 1, where: Match = _any
    ) -> None:
        """A batch of DynamoDB is carried out but for its second half, which is left undone:
        UnprocessedItems, UnprocessedKeys, or statements that were throttled. A batch of one is left
        undone as a whole."""
        self._add(_Kind.SPLIT, service, operation, nth, times, where)

    def before(
        self,
        service: str,
        operation: str,
        action: Action,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _any,
    ) -> None:
        """Something happens first; calls of the action's own are passed on like any others."""
        self._add(_Kind.BEFORE, service, operation, nth, times, where, action=action)

    def after(
        self,
        service: str,
        operation: str,
        action: Action,
        *,
        nth: int = 1,
        times: int = 1,
        where: Match = _any,
    ) -> None:
        """Something happens between the call and its answer."""
        self._add(_Kind.AFTER, service, operation, nth, times, where, action=action)

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, as the first rule that is for it says."""
        self.calls.append((service, operation))
        rule = self._rule(service, operation, parameters)
        if rule is None:
            return await self._aws.call(service, operation, parameters)
        return await self._apply(rule, service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """A link, as it is."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    def _add(
        self,
        kind: _Kind,
        service: str,
        operation: str,
        nth: int,
        times: int,
        where: Match,
        *,
        error: Exception | None = None,
        action: Action | None = None,
    ) -> None:
        rule = _Rule(kind, (service, operation), where, nth - 1, times, error, action)
        self._rules.append(rule)

    def _rule(self, service: str, operation: str, parameters: Parameters) -> _Rule | None:
        """The rule that is for a call; all others that might have been count it."""
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
            # A throttle counts the tries of one call.
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
                raise _away(service, operation)
            case _Kind.THROTTLE:
                throttled = min(rule.times, ATTEMPTS)
                rule.times -= throttled
                if throttled == ATTEMPTS:
                    raise _away(service, operation)
                return await carry_out()
            case _Kind.FAIL:
                assert rule.error is not None
                raise rule.error
            case _Kind.SPLIT:
                return await self._half(service, operation, parameters)
            case _Kind.BEFORE:
                assert rule.action is not None
                await rule.action()
                return await carry_out()
            case _Kind.AFTER:
                assert rule.action is not None
                answer = await carry_out()
                await rule.action()
                return answer

    async def _half(self, service: str, operation: str, parameters: Parameters) -> Answer:
        match operation:
            case "batch_execute_statement":
                done, left = _halves(parameters["Statements"])
                answer = await self._batch(service, operation, {"Statements": done}, bool(done))
                undone = [{"Error": {"Code": THROTTLED, "Message": "slow down"}} for _ in left]
                return {**answer, "Responses": [*answer.get("Responses", []), *undone]}
            case "batch_write_item":
                [(table, requests)] = parameters["RequestItems"].items()
                done, left = _halves(requests)
                asked = {**parameters, "RequestItems": {table: done}}
                answer = await self._batch(service, operation, asked, bool(done))
                return {**answer, "UnprocessedItems": {table: left}}
            case "batch_get_item":
                [(table, request)] = parameters["RequestItems"].items()
                done, left = _halves(request["Keys"])
                asked = {**parameters, "RequestItems": {table: {**request, "Keys": done}}}
                answer = await self._batch(service, operation, asked, bool(done))
                undone_keys = {table: {**request, "Keys": left}}
                return {"Responses": {}, **answer, "UnprocessedKeys": undone_keys}
        raise ValueError(f"{operation} is no batch")

    async def _batch(
        self, service: str, operation: str, parameters: Mapping[str, Any], has_work: bool
    ) -> Answer:
        return await self._aws.call(service, operation, parameters) if has_work else {}


def _halves(parts: list[Any]) -> tuple[list[Any], list[Any]]:
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]


async def _unanswered(carry_out: Callable[[], Awaitable[Answer]]) -> None:
    """A refusal is an answer too, and lost like any other."""
    try:
        await carry_out()
    except AwsRefused:
        return


def _away(service: str, operation: str) -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE, f"{service} does not answer {operation}", retry_after=5
    )
