"""The refusals of AWS that are retried and those that are final, in the words of each service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.boto import BotoCarrier
from conveyor.prod.aws.calls import THROTTLED_PARTS, AwsOptions, AwsRefused, CallStats
from conveyor.prod.aws.client import PASSING, PASSING_REASONS, PATIENCE, THROTTLES, AwsClient
from conveyor.prod.aws.opening import open_aws
from tests.conformance.aws_answers import told, told_of_rows
from tests.conformance.emulators import aws_options, use_test_keys

pytestmark = pytest.mark.extended

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamodb": ("query", {"TableName": "one"}),
    "kms": ("decrypt", {"CiphertextBlob": b""}),
    "s3": ("list_objects_v2", {"Bucket": "one"}),
    "sqs": ("list_queues", {}),
    "stepfunctions": ("send_task_heartbeat", {"taskToken": "one"}),
}
ATTEMPTS = 3

# Every one is a status that says nothing by itself, but for those that S3 gives no other.
PASSING_CODES = [
    ("dynamodb", 400, "ProvisionedThroughputExceededException"),
    ("dynamodb", 400, "RequestLimitExceeded"),
    ("dynamodb", 400, "ThrottlingException"),
    ("dynamodb", 400, "ThrottlingError"),
    ("dynamodb", 400, "TransactionConflictException"),
    ("dynamodb", 400, "TransactionInProgressException"),
    ("dynamodb", 400, "InternalServerError"),
    ("kms", 400, "ThrottlingException"),
    ("kms", 400, "KMS.ThrottlingException"),
    ("s3", 503, "SlowDown"),
    ("s3", 400, "RequestTimeout"),
    ("s3", 400, "InternalError"),
    ("s3", 400, "ServiceUnavailable"),
    ("sqs", 403, "RequestThrottled"),
    ("sqs", 400, "RequestThrottledException"),
    ("sqs", 400, "Throttling"),
    ("sqs", 400, "ThrottledException"),
    ("sqs", 400, "InternalFailure"),
    ("stepfunctions", 400, "TooManyRequestsException"),
]
FINAL_CODES = [
    ("dynamodb", 400, "ConditionalCheckFailedException"),
    ("dynamodb", 400, "ItemCollectionSizeLimitExceededException"),
    ("dynamodb", 400, "ResourceNotFoundException"),
    ("dynamodb", 400, "ValidationException"),
    ("kms", 400, "DisabledException"),
    ("s3", 403, "AccessDenied"),
    ("s3", 404, "NoSuchBucket"),
    ("s3", 412, "PreconditionFailed"),
    ("sqs", 400, "AWS.SimpleQueueService.NonExistentQueue"),
    ("sqs", 400, "OverLimit"),
    ("stepfunctions", 400, "TaskTimedOut"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The server below is one of asyncio."""
    return "asyncio"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by a service; `more` is the rest of its document."""

    service: str
    status: int
    code: str
    more: Mapping[str, Any]

    def body(self) -> bytes:
        """The document, in the service's own form."""
        if self.service == "s3":
            return f"<Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        return json.dumps({"__type": f"com.amazonaws#{self.code}", **self.more}).encode()


class Services:
    """All services behind the transport; they refuse some calls and answer the others with nothing.

    One for all tests: a client takes a second to make.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._refusal = Refusal("", 0, "", {})
        self._times = 0

    def refuse(self, refusal: Refusal, *, times: int) -> None:
        """From now on; `asked` counts from here."""
        self.asked, self._refusal, self._times = 0, refusal, times

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one call."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        self.asked += 1
        is_refused = self.asked <= self._times
        body = self._refusal.body() if is_refused else self._nothing()
        status = self._refusal.status if is_refused else 200
        by_table = self._refusal.service == "dynamodb"
        writer.write((told_of_rows if by_table else told)(body, status=status))
        writer.close()

    def _nothing(self) -> bytes:
        return b"<ListBucketResult/>" if self._refusal.service == "s3" else b"{}"


@pytest.fixture(scope="module")
async def opened() -> AsyncIterator[tuple[AwsClient, Services]]:
    use_test_keys()
    there = Services()
    async with await asyncio.start_server(there.serve, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = aws_options(
            dynamodb_endpoint=endpoint,
            kms_endpoint=endpoint,
            s3_endpoint=endpoint,
            sqs_endpoint=endpoint,
            stepfunctions_endpoint=endpoint,
            attempts=ATTEMPTS,
            retry_base=0.0,
        )
        aws = await open_aws(options, SystemClock(), *ASKED)
        yield aws, there
        await aws.aclose()


@pytest.fixture
def aws(opened: tuple[AwsClient, Services]) -> AwsClient:
    opened[0].stats = CallStats()
    return opened[0]


@pytest.fixture
def there(opened: tuple[AwsClient, Services]) -> Services:
    return opened[1]


async def ask(aws: AwsClient, service: str) -> None:
    operation, parameters = ASKED[service]
    await aws.call(service, operation, parameters)


def test_every_code_that_passes_has_its_case() -> None:
    assert {code for _, _, code in PASSING_CODES} == PASSING
    assert THROTTLES <= PASSING


@pytest.mark.parametrize(("service", "status", "code"), PASSING_CODES)
async def test_a_refusal_that_passes_is_asked_again(
    aws: AwsClient, there: Services, service: str, status: int, code: str
) -> None:
    there.refuse(Refusal(service, status, code, {}), times=ATTEMPTS - 1)
    await ask(aws, service)
    called = (service, ASKED[service][0])
    assert there.asked == ATTEMPTS
    assert aws.stats.calls == {(*called, "failed"): ATTEMPTS - 1, (*called, "ok"): 1}
    assert aws.stats.retries == {called: ATTEMPTS - 1}
    assert aws.stats.throttles[called] == (ATTEMPTS - 1 if code in THROTTLES else 0)


@pytest.mark.parametrize(("service", "status", "code"), FINAL_CODES)
async def test_any_other_refusal_is_final(
    aws: AwsClient, there: Services, service: str, status: int, code: str
) -> None:
    there.refuse(Refusal(service, status, code, {}), times=1)
    with pytest.raises(AwsRefused) as caught:
        await ask(aws, service)
    assert caught.value.word == code
    assert there.asked == 1
    assert aws.stats.calls == {(service, ASKED[service][0], "refused"): 1}


@pytest.mark.parametrize("service", ASKED)
async def test_a_service_that_is_out_of_order_is_asked_again_whatever_it_says(
    aws: AwsClient, there: Services, service: str
) -> None:
    there.refuse(Refusal(service, 500, "Unheard", {}), times=1)
    await ask(aws, service)
    assert there.asked == 2
    assert not aws.stats.throttles


async def test_a_refusal_that_does_not_pass_in_time_is_told_as_unavailable(
    aws: AwsClient, there: Services
) -> None:
    there.refuse(Refusal("s3", 503, "SlowDown", {}), times=ATTEMPTS)
    with pytest.raises(ConveyorError) as caught:
        await ask(aws, "s3")
    assert (there.asked, caught.value.code) == (ATTEMPTS, ErrorCode.UNAVAILABLE)
    assert "SlowDown" in caught.value.detail


@pytest.mark.parametrize(
    ("reasons", "passes"),
    [
        *((("None", reason), True) for reason in sorted(PASSING_REASONS - {"None"})),
        (("TransactionConflict", "ThrottlingError"), True),
        (("ConditionalCheckFailed", "None"), False),
        # What a condition says is final: the conflict beside it changes nothing.
        (("TransactionConflict", "ConditionalCheckFailed"), False),
        (("ValidationError", "None"), False),
        (("ItemCollectionSizeLimitExceeded",), False),
    ],
)
async def test_a_cancelled_transaction_is_made_again_if_every_reason_passes(
    aws: AwsClient, there: Services, reasons: tuple[str, ...], passes: bool
) -> None:
    more = {"CancellationReasons": [{"Code": reason} for reason in reasons]}
    code = "TransactionCanceledException"
    there.refuse(Refusal("dynamodb", 400, code, more), times=1)
    call = aws.call(
        "dynamodb", "transact_write_items", {"TransactItems": [], "ClientRequestToken": "one"}
    )
    if passes:
        await call
    else:
        with pytest.raises(AwsRefused) as caught:
            await call
        assert caught.value.reasons == reasons
    assert there.asked == 1 + passes
    throttled = passes and bool(THROTTLED_PARTS & set(reasons))
    assert aws.stats.throttles["dynamodb", "transact_write_items"] == throttled


class JumpingClock(SystemClock):
    """Sleeps end at once, and move its time on."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds


async def test_a_call_is_given_up_while_its_caller_still_waits() -> None:
    use_test_keys()
    clock = JumpingClock()
    options = aws_options(sqs_endpoint="http://127.0.0.1:1", attempts=1_000)
    aws = await open_aws(options, clock, "sqs")
    with pytest.raises(ConveyorError) as caught:
        await ask(aws, "sqs")
    await aws.aclose()

    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert PATIENCE <= clock.slept <= PATIENCE + options.retry_cap
    assert 4 < aws.stats.calls["sqs", "list_queues", "failed"] < 1_000


class Hanging:
    """A client of SQS whose calls are never answered: each lasts for its read timeout."""

    def __init__(self, clock: JumpingClock, options: AwsOptions) -> None:
        self._clock = clock
        self._options = options

    def list_queues(self) -> None:
        self._clock.slept += self._options.read_timeout
        raise ReadTimeoutError(endpoint_url="")


async def test_where_a_service_hangs_a_call_is_made_twice() -> None:
    clock, options = JumpingClock(), aws_options()
    aws = AwsClient(BotoCarrier({"sqs": Hanging(clock, options)}, options), options, clock)
    with pytest.raises(ConveyorError) as caught:
        await ask(aws, "sqs")

    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert aws.stats.calls == {("sqs", "list_queues", "failed"): 2}
    assert clock.slept < 60.0  # a load balancer's patience
