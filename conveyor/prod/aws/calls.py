"""The seam: what an adapter may ask of AWS, and how a refusal reads.

An adapter names a service, an operation and parameters in the service's own shapes. Whatever stands
behind the seam signs, sends, tries again and counts; a leaner transport can take its place without
touching an adapter, and a test can stand before it and lose answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Parameters = Mapping[str, Any]
Answer = dict[str, Any]


class AwsRefused(Exception):
    """A service said no, and would say no again.

    `code` is the service's own word, such as `ConditionalCheckFailedException`. `item` is the row
    that a condition met, where the call asked for it. `reasons` are the codes of a cancelled
    transaction's parts, in order, "None" for those that were well; `items` their rows.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        item: Answer | None = None,
        reasons: tuple[str, ...] = (),
        items: tuple[Answer | None, ...] = (),
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.item = item
        self.reasons = reasons
        self.items = items

    @property
    def is_condition(self) -> bool:
        """Whether a condition was not met, alone or as a part of a transaction."""
        return (
            self.code == "ConditionalCheckFailedException"
            or "ConditionalCheckFailed" in self.reasons
        )


@dataclass(slots=True)
class CallStats:
    """What was asked of AWS since the start, for metrics.

    `calls` by (service, operation, outcome), the outcome being `ok`, `refused` or `failed`, one for
    each try; `retries` and `throttles` by (service, operation); `capacity` in units by operation,
    of DynamoDB alone.
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    retries: Counter[tuple[str, str]] = field(default_factory=Counter)
    throttles: Counter[tuple[str, str]] = field(default_factory=Counter)
    capacity: dict[str, float] = field(default_factory=dict)


class AnswerBody(Protocol):
    """A body that comes as a stream, in an answer under `Body`."""

    async def read(self, most: int) -> bytes:
        """The next bytes, at most so many; none at the end.

        Raises ConveyorError(unavailable) where the connection breaks off before that.
        """
        ...

    def close(self) -> None:
        """Let go of the connection; for a body that is not read to its end."""
        ...


class Aws(Protocol):
    """Where calls go."""

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, again where trying again can help; its answer as the service gave it.

        `service` and `operation` as boto3's clients name them: ("dynamodb", "update_item"). A call
        may be carried out although no answer came, and then be made again: what is not idempotent
        by nature has to carry a token or a condition of its own. A streamed body is an AnswerBody.
        Raises AwsRefused; ConveyorError(unavailable) where the service stays away.
        """
        ...

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """A link that makes one call of S3 for whoever holds it, for so long."""
        ...
