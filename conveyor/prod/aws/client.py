"""Calls to AWS: tries over a carrier, until one is answered or patience ends.

Retries are made here, on the injected clock, and counted.
"""

from __future__ import annotations

from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import (
    THROTTLED_PARTS,
    Answer,
    AwsOptions,
    AwsRefused,
    CallStats,
    Parameters,
)
from conveyor.prod.aws.carriers import NO_CREDENTIALS, Carrier, Unanswered, describe_silence

THROTTLES = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
        "TooManyRequestsException",
        "ThrottledException",
    }
)
PASSING = THROTTLES | {
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "RequestTimeout",
    "ServiceUnavailable",
    "TransactionConflictException",
    "TransactionInProgressException",
    "KMS.ThrottlingException",
}
"""Refusals that pass by themselves: the call is retried."""
PASSING_REASONS = frozenset(
    {"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded", "None"}
)
PATIENCE = 25.0
"""Seconds from the first attempt after which a call is not retried. If a service hangs, that allows
two attempts of the read timeout: a caller of the API gets its error before a load balancer, which
waits for a minute, answers instead."""
_COUNTS_CAPACITY = frozenset(
    {
        "get_item",
        "put_item",
        "update_item",
        "delete_item",
        "query",
        "scan",
        "batch_get_item",
        "batch_write_item",
        "batch_execute_statement",
        "execute_statement",
        "transact_write_items",
        "transact_get_items",
    }
)


class AwsClient:
    """An `Aws` over a carrier. `opening.open_aws` makes it."""

    def __init__(self, carrier: Carrier, options: AwsOptions, clock: Clock) -> None:
        self.stats = CallStats()
        self.carrier = carrier
        self._options = options
        self._clock = clock
        self._is_closed = False

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if service == "dynamodb" and operation in _COUNTS_CAPACITY:
            parameters = {"ReturnConsumedCapacity": "TOTAL", **parameters}
        patience_ends = self._clock.monotonic() + PATIENCE
        for attempt in range(1, self._options.attempts + 1):
            self._check_open()
            began = self._clock.monotonic()
            try:
                answer = await self.carrier.once(service, operation, parameters)
            except AwsRefused as refused:
                self._note_refusal(refused)
                reason = refused.word
            except Unanswered as error:
                if error.is_silence and not self._is_closed:
                    self.stats.unanswered(service, self._clock.monotonic())
                reason = error.reason
            else:
                self.stats.answered(service)
                self.stats.calls[service, operation, "ok"] += 1
                self._count_capacity(operation, answer)
                return answer
            finally:
                self.stats.took.observe(self._clock.monotonic() - began, service, operation)
            self.stats.calls[service, operation, "failed"] += 1
            is_last = attempt == self._options.attempts or reason in NO_CREDENTIALS
            if is_last or self._is_closed or self._clock.monotonic() >= patience_ends:
                break
            self.stats.retries[service, operation] += 1
            await self._clock.sleep(self._pause(attempt))
        text = describe_silence(service, operation, reason)
        raise ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self.carrier.presign(operation, parameters, seconds=seconds)

    async def aclose(self) -> None:
        """Close all connections, and make no further try of any call. No call may follow."""
        self._is_closed = True
        await self.carrier.aclose()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the calls to AWS are closed")

    def _note_refusal(self, refused: AwsRefused) -> None:
        """Count a refusal; raise it unless the same call may succeed a moment later."""
        asked = refused.asked
        is_broken = refused.status >= 500 and refused.word not in THROTTLES
        if is_broken:
            self.stats.unanswered(asked[0], self._clock.monotonic())
        else:
            self.stats.answered(asked[0])
        if refused.word == "TransactionCanceledException":
            passes = set(refused.reasons) <= PASSING_REASONS
        else:
            passes = is_broken or refused.word in PASSING
        if not passes:
            self.stats.calls[(*asked, "refused")] += 1
            raise refused from None
        if refused.word in THROTTLES or THROTTLED_PARTS & set(refused.reasons):
            self.stats.throttles[asked] += 1

    def _pause(self, attempt: int) -> float:
        options = self._options
        backoff = Backoff(2.0 * options.retry_base, options.retry_cap)
        return backoff.full_jitter(attempt, self._clock.random())

    def _count_capacity(self, operation: str, answer: Answer) -> None:
        consumed = answer.get("ConsumedCapacity")
        if not consumed:
            return
        parts = consumed if isinstance(consumed, list) else [consumed]
        units = sum(float(part.get("CapacityUnits", 0.0)) for part in parts)
        self.stats.capacity[operation] = self.stats.capacity.get(operation, 0.0) + units
