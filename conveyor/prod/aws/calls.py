"""The seam: what an adapter may ask of AWS, and how a refusal reads.

An adapter names a service, an operation and parameters in the service's own shapes. Whatever stands
behind the seam signs, sends, tries again and counts; a leaner transport can take its place without
touching an adapter, and a test can stand before it and lose answers.

Where AWS is, and how hard it is asked.

Batches of which a service does a part and leaves the rest: that is asked for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """One region, and endpoints that are not the region's own ("" means it is).

    `attempts`: tries of one call, the first included. `threads`: calls at a time of one service.
    Times in seconds.
    """

    region: str = "us-east-1"
    dynamodb_endpoint: str = ""
    sqs_endpoint: str = ""
    s3_endpoint: str = ""
    stepfunctions_endpoint: str = ""
    kms_endpoint: str = ""
    attempts: int = 8
    threads: int = 16
    receive_threads: int = 32
    connect_timeout: float = 3.0
    read_timeout: float = 20.0
    retry_base: float = 0.05
    retry_cap: float = 5.0

    def endpoint(self, service: str) -> str | None:
        """The endpoint of a service, None for the region's own."""
        return {
            "dynamodb": self.dynamodb_endpoint,
            "sqs": self.sqs_endpoint,
            "s3": self.s3_endpoint,
            "stepfunctions": self.stepfunctions_endpoint,
            "kms": self.kms_endpoint,
        }.get(service) or None


ROUNDS = 12
"""Calls at most for one batch."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two calls at most: any time up to the doubled one."""

Entry = TypeVar("Entry")


async def retry_unprocessed(
    call: Callable[[list[Entry]], Awaitable[list[Entry]]],
    entries: list[Entry],
    clock: Clock,
    *,
    complaint: str,
) -> None:
    """Call with some entries, then with those that `call` returns as left undone, until none is.

    Raises ConveyorError(unavailable), in the words of the complaint, where some still are after the
    last round.
    """
    left = await call(entries)
    for number in range(1, ROUNDS):
        if not left:
            return
        await clock.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1)) * clock.random())
        left = await call(left)
    if left:
        raise ConveyorError(ErrorCode.UNAVAILABLE, complaint, retry_after=5)


Parameters = Mapping[str, Any]
Answer = dict[str, Any]
REFUSED_FOR = 5
"""Seconds after which a caller may come again, where nobody dealt with a refusal."""


class AwsRefused(ConveyorError):
    """A service said no, and would say no again.

    Adapters deal with the refusals that they know. To all others one that nobody dealt with says
    that the service is unavailable. Its text, for a log, has what the service said; its `detail`,
    which a caller may see, the word alone.

    `word` is the service's own, such as `ConditionalCheckFailedException`. `asked` names service
    and operation. `item` is the row that a condition met, where the call asked for it. `reasons`
    are the words of a cancelled transaction's parts, in order, "None" for those that were well;
    `items` their rows.
    """

    def __init__(
        self,
        word: str,
        message: str,
        *,
        asked: tuple[str, str] = ("aws", "a call"),
        item: Answer | None = None,
        reasons: tuple[str, ...] = (),
        items: tuple[Answer | None, ...] = (),
    ) -> None:
        service, operation = asked
        super().__init__(
            ErrorCode.UNAVAILABLE,
            f"{service} refuses {operation}: {word}",
            retry_after=REFUSED_FOR,
        )
        self.args = (f"{word}: {message}",)
        self.asked = asked
        self.word = word
        self.message = message
        self.item = item
        self.reasons = reasons
        self.items = items

    @property
    def is_condition(self) -> bool:
        """Whether a condition was not met, alone or as a part of a transaction."""
        return (
            self.word == "ConditionalCheckFailedException"
            or "ConditionalCheckFailed" in self.reasons
        )


AWAY_AFTER = 3
"""Tries in a row without an answer, after which a service counts as away."""
AWAY_FOR = 30.0
"""Seconds after the last of them for which it does, where it is not asked again."""


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
    _silent: dict[str, tuple[int, float]] = field(default_factory=dict)
    _useless: dict[str, float] = field(default_factory=dict)

    def answered(self, service: str) -> None:
        """A service gave an answer, be it a refusal."""
        self._silent.pop(service, None)
        self._useless.pop(service, None)

    def unanswered(self, service: str, now: float) -> None:
        """A service gave none to a try, or said that it is out of order; `now` is monotonic."""
        tries, _ = self._silent.get(service, (0, now))
        self._silent[service] = tries + 1, now

    def unusable(self, service: str, now: float) -> None:
        """What a service said leaves nothing that it could be asked: it counts as away at once, and
        this process as of no use."""
        self._silent[service] = AWAY_AFTER, now
        self._useless[service] = now

    def usable(self, now: float) -> bool:
        """Whether all is there that this process works with, and its credentials are accepted."""
        return all(now - last > AWAY_FOR for last in self._useless.values())

    def away(self, now: float) -> tuple[str, ...]:
        """The services that do not answer at present."""
        return tuple(
            service
            for service, (tries, last) in sorted(self._silent.items())
            if tries >= AWAY_AFTER and now - last <= AWAY_FOR
        )


class ShortLived(Exception):
    """Credentials end before a link would that is signed by them."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the credentials do not last for {seconds} s more")


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
        """A link that makes one call of S3 for whoever holds it, for so long.

        It may have to fetch credentials, and takes a thread's time then. Raises ShortLived where
        those that sign it end before; ConveyorError(unavailable) where there are none.
        """
        ...
