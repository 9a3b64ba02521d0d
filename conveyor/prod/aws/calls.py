"""The interface between the adapters and AWS: options, calls, refusals, and call statistics.

An adapter names a service, an operation and parameters in the service's own shapes. The
implementation signs, sends, retries and counts. A leaner transport can replace it without a change
to any adapter, and tests can wrap it to lose answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.histogram import STORE, Histogram
from conveyor.ports.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """One region, and endpoints other than the region's own ("" for the region's own).

    `carrier`: "http", or "boto" for all calls through boto3. `attempts`: tries of one call,
    including the first. `threads`: concurrent calls of one service. Times are in seconds.
    """

    region: str = "us-east-1"
    dynamodb_endpoint: str = ""
    sqs_endpoint: str = ""
    s3_endpoint: str = ""
    stepfunctions_endpoint: str = ""
    kms_endpoint: str = ""
    carrier: str = "http"
    attempts: int = 8
    threads: int = 16
    receive_threads: int = 32
    connect_timeout: float = 3.0
    read_timeout: float = 20.0
    retry_base: float = 0.05
    retry_cap: float = 5.0

    def endpoint(self, service: str) -> str | None:
        """Return the endpoint of a service, None for the region's own."""
        return {
            "dynamodb": self.dynamodb_endpoint,
            "sqs": self.sqs_endpoint,
            "s3": self.s3_endpoint,
            "stepfunctions": self.stepfunctions_endpoint,
            "kms": self.kms_endpoint,
        }.get(service) or None


ROUNDS = 12
"""Most calls for one batch."""
PAUSES = Backoff(0.1, 5.0)
"""Most seconds between two calls for one batch; each pause is any time up to that."""

Entry = TypeVar("Entry")


async def retry_unprocessed(
    call: Callable[[list[Entry]], Awaitable[list[Entry]]],
    entries: list[Entry],
    clock: Clock,
    *,
    complaint: str,
) -> None:
    """Call with a batch of entries, then with those that `call` returns as unprocessed.

    Raises ConveyorError(unavailable) with `complaint` as text if some are left after all rounds.
    """
    left = await call(entries)
    for number in range(1, ROUNDS):
        if not left:
            return
        await clock.sleep(PAUSES.full_jitter(number, clock.random()))
        left = await call(left)
    if left:
        raise ConveyorError(ErrorCode.UNAVAILABLE, complaint, retry_after=5)


Parameters = Mapping[str, Any]
Answer = dict[str, Any]
MAY_BE_LEFT = ContextVar("conveyor.prod.aws.may_be_left", default=False)
"""Set around a call that is to be left at once if its caller is cancelled, if the carrier can: it
may arrive after all that follows, and changes nothing then. All others run to their end."""
REFUSED_FOR = 5
"""Seconds after which a caller may retry, if no adapter handled the refusal."""


class AwsRefused(ConveyorError):
    """A service refused a call, and would refuse it again.

    Adapters handle the refusals that they know. One that no adapter handles means to all others
    that the service is unavailable. Its text, for logs, quotes the service's message; its `detail`,
    which callers may see, only the error code.

    `word` is the service's error code, such as `ConditionalCheckFailedException`, `status` the
    answer's. `asked` names service and operation. `item` is the row that failed the condition, if
    the call asked for it. `reasons` are the error codes of the parts of a cancelled transaction, in
    order, "None" for parts that were fine; `items` are their rows.
    """

    def __init__(
        self,
        word: str,
        message: str,
        *,
        asked: tuple[str, str] = ("aws", "a call"),
        status: int = 400,
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
        self.status = status
        self.word = word
        self.message = message
        self.item = item
        self.reasons = reasons
        self.items = items

    @property
    def is_condition(self) -> bool:
        """True if a condition failed, of the call itself or of a part of its transaction."""
        return (
            self.word == "ConditionalCheckFailedException"
            or "ConditionalCheckFailed" in self.reasons
        )


AWAY_AFTER = 3
"""Tries in a row without an answer after which a service counts as away."""
AWAY_FOR = 30.0
"""Seconds after the last try for which it still counts as away, unless it answers meanwhile."""


THROTTLED_PARTS = frozenset(
    {
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "RequestThrottled",
        "SlowDown",
        "ThrottlingError",
        "ThrottlingException",
    }
)
"""Codes by which a service says of one part of a call that it has too much to do."""
_UNDONE_STATEMENTS = THROTTLED_PARTS | {"InternalServerError", "TransactionConflict"}
"""Errors of single statements after which the statement was not carried out; others answer it."""
_UNPROCESSED = "ProvisionedThroughputExceeded"


def undone_parts(answer: Answer) -> list[str]:
    """Return a code for each part that a service left undone of a call which it answered: items,
    keys and statements of DynamoDB, entries of SQS, objects of S3."""
    codes = [_UNPROCESSED for left in answer.get("UnprocessedItems", {}).values() for _ in left]
    for left in answer.get("UnprocessedKeys", {}).values():
        codes += [_UNPROCESSED for _ in left["Keys"]]
    if isinstance(responses := answer.get("Responses"), list):
        errors = [str(one.get("Error", {}).get("Code")) for one in responses]
        codes += [code for code in errors if code in _UNDONE_STATEMENTS]
    failed = [*answer.get("Failed", ()), *answer.get("Errors", ())]
    return codes + [str(one.get("Code")) for one in failed]


@dataclass(slots=True)
class CallStats:
    """Counts of the calls to AWS since the start, for metrics and readiness.

    `calls` counts tries by (service, operation, outcome), with the outcome `ok`, `refused` or
    `failed`; `retries` and `throttles` are by (service, operation), as are `undone`, the parts that
    answered calls left undone. `capacity` holds the units that DynamoDB consumed, by operation,
    `took` the seconds of tries by (service, operation).
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    retries: Counter[tuple[str, str]] = field(default_factory=Counter)
    throttles: Counter[tuple[str, str]] = field(default_factory=Counter)
    undone: Counter[tuple[str, str]] = field(default_factory=Counter)
    capacity: dict[str, float] = field(default_factory=dict)
    took: Histogram = field(default_factory=partial(Histogram, STORE))
    _silent: dict[str, tuple[int, float]] = field(default_factory=dict)
    _useless: dict[str, float] = field(default_factory=dict)

    def count_parts(self, service: str, operation: str, answer: Answer) -> None:
        """Count the parts of an answered call that were left undone, or throttled."""
        codes = undone_parts(answer)
        if codes:
            self.undone[service, operation] += len(codes)
            throttled = sum(code in THROTTLED_PARTS for code in codes)
            self.throttles[service, operation] += throttled

    def answered(self, service: str) -> None:
        """Record an attempt that a service answered, if only to refuse it."""
        self._silent.pop(service, None)
        self._useless.pop(service, None)

    def unanswered(self, service: str, now: float) -> None:
        """Record an attempt that got no answer or a 5xx; `now` is monotonic."""
        tries, _ = self._silent.get(service, (0, now))
        self._silent[service] = tries + 1, now

    def unusable(self, service: str, now: float) -> None:
        """Record a refusal after which all calls of a service will fail: count the service as away
        at once, and this process as not usable."""
        self._silent[service] = AWAY_AFTER, now
        self._useless[service] = now

    def usable(self, now: float) -> bool:
        """Return True if all resources of this process exist, and AWS accepts its credentials."""
        return all(now - last > AWAY_FOR for last in self._useless.values())

    def away(self, now: float) -> tuple[str, ...]:
        """Return the services that do not answer at present."""
        return tuple(
            service
            for service, (tries, last) in sorted(self._silent.items())
            if tries >= AWAY_AFTER and now - last <= AWAY_FOR
        )


class ShortLived(Exception):
    """The credentials expire before a link that they would sign."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the credentials expire within {seconds} s")


class BodyGivenBack(ConveyorError):
    """A streamed body was not asked for in a while, and so gave its connection back."""

    def __init__(self) -> None:
        text = "s3 get_object: nobody asked for the body in a while"
        super().__init__(ErrorCode.UNAVAILABLE, text, retry_after=REFUSED_FOR)


class AnswerBody(Protocol):
    """The streamed body of an answer, under `Body`."""

    async def read(self, most: int) -> bytes:
        """Return the next bytes, at most `most`; b"" at the end.

        Raises ConveyorError(unavailable) if the connection breaks before the end; BodyGivenBack if
        this process gave it back.
        """
        ...

    def close(self) -> None:
        """Release the connection; for a body that is not read to its end."""
        ...


class Aws(Protocol):
    """Makes calls to AWS."""

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make one call, retry it if that can help, and return the answer as the service gave it.

        `service` and `operation` are named as in boto3's clients: ("dynamodb", "update_item"). A
        service may carry out a call whose answer is lost, and then gets it again: a call that is
        not idempotent by nature has to carry a token or a condition. A streamed body is an
        AnswerBody. Raises AwsRefused; ConveyorError(unavailable) if the service does not answer.
        """
        ...

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Return a link with which its holder can make one call of S3, valid for `seconds`.

        May block to fetch credentials, so call it in a thread. Raises ShortLived if the credentials
        expire before the link; ConveyorError(unavailable) if there are none.
        """
        ...
