"""The seam to AWS, misbehaving by chance: any call may be the one that something happens to."""

from __future__ import annotations

import random  # noqa: TID251  (seeded: the troubles of a test)
from collections.abc import Callable
from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.testing.faulty_aws import FaultyAws

CALM = 10
"""Calls at the start of a process that nothing happens to: it would not come to be."""
DELAY = 3
"""Seconds by which messages are late."""
_LONGEST_DELAY = 900
RARE = 20
"""Times that calls which are made once for many tasks are in trouble as often as others."""
CONFLICT_SECONDS = 0.5
_BATCHES = frozenset({"batch_execute_statement", "batch_write_item", "batch_get_item"})
_SENDS = frozenset({"send_message", "send_message_batch"})
_FOR_MANY = _BATCHES | _SENDS | {"delete_message_batch"}


class Trouble(msgspec.Struct, frozen=True):
    """What has happened to one call: `lost`, the answer, and the call made again; `vanished`, the
    answer, and the call given up; `refused` to the last try, for throttling or a conflict;
    `throttled`, and made again; `split`, a batch done in part; `late` or `dropped`, the messages
    sent. `concerns` is how many messages, rows or other things the call was about."""

    kind: str
    service: str
    operation: str
    concerns: int


class TroubledAws:
    """An `Aws` before another one. Each call has trouble with the probability `rate` (RARE times
    that where few are made), of a kind that it can have; `tell` hears of it before it happens."""

    def __init__(
        self,
        aws: Aws,
        clock: Clock,
        *,
        seed: str,
        rate: float,
        tell: Callable[[Trouble], None],
    ) -> None:
        self._aws = aws
        self._clock = clock
        self._random = random.Random(seed)
        self._rate = rate
        self._tell = tell
        self._calm = CALM

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, if nothing comes in between."""
        self._calm -= 1
        rate = self._rate * (RARE if operation in _FOR_MANY else 1)
        if self._calm >= 0 or self._random.random() >= rate:
            return await self._aws.call(service, operation, parameters)
        kind = self._random.choice(_kinds(service, operation))
        self._tell(Trouble(kind, service, operation, _concerns(parameters)))
        return await self._troubled(kind, service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """A link, as it is."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    async def _troubled(
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
                parameters = _late(parameters)
            case "dropped":
                entries = parameters.get("Entries", ())
                sent = [{"Id": entry["Id"], "MessageId": entry["Id"]} for entry in entries]
                return {"MessageId": "dropped", "Successful": sent}
        return await faulty.call(service, operation, parameters)


def _kinds(service: str, operation: str) -> list[str]:
    kinds = ["refused", "throttled"]
    if operation != "get_object":  # the stream of a lost answer would be nobody's to close
        kinds += ["lost", "vanished"]
    if service == "dynamodb" and operation in _BATCHES:
        kinds += ["split", "split"]
    if operation in _SENDS:
        kinds += ["late", "dropped"] * 2
    return kinds


def _concerns(parameters: Parameters) -> int:
    parts: list[Any] = parameters.get("Entries") or parameters.get("Statements") or []
    return len(parts) or int(parameters.get("MaxNumberOfMessages", 1))


def _late(parameters: Parameters) -> Parameters:
    if "Entries" not in parameters:
        return _later(parameters)
    return {**parameters, "Entries": [_later(entry) for entry in parameters["Entries"]]}


def _later(message: Parameters) -> Answer:
    seconds = message.get("DelaySeconds", 0) + DELAY
    return {**message, "DelaySeconds": min(_LONGEST_DELAY, seconds)}
