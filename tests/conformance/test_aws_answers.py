"""The AWS transport with answers that are incomplete, are not the service's, or do not come at
all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import AWAY_AFTER, AWAY_FOR, AwsRefused
from conveyor.prod.aws.client import AwsClient
from tests.conformance.aws_answers import ATTEMPTS, REQUEST_ID, answering, bare, told, told_of_rows

pytestmark = pytest.mark.extended

WHOLE = told_of_rows(b'{"Items":[]}')
CUT_OFF = b"HTTP/1.1 200 OK\r\nServer: one\r\nConten"
REFUSAL = told_of_rows(b'{"__type":"ResourceNotFoundException"}', status=400)
BROKEN = told(b"{}", status=500)

ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "item": ("dynamodb", "get_item", {"TableName": "one", "Key": {}}),
    "rows": ("dynamodb", "query", {"TableName": "one"}),
    "plaintext": ("kms", "decrypt", {"CiphertextBlob": b""}),
    "messages": ("sqs", "receive_message", {"QueueUrl": "http://sqs/one"}),
    "deleted": ("sqs", "delete_queue", {"QueueUrl": "http://sqs/one"}),
    "heartbeat": ("stepfunctions", "send_task_heartbeat", {"taskToken": "one"}),
    "keys": ("s3", "list_objects_v2", {"Bucket": "one"}),
    "body": ("s3", "get_object", {"Bucket": "one", "Key": "k"}),
    "size": ("s3", "head_object", {"Bucket": "one", "Key": "k"}),
    "written": ("s3", "put_object", {"Bucket": "one", "Key": "k", "Body": b""}),
    "removed": ("s3", "delete_object", {"Bucket": "one", "Key": "k"}),
}
ROWS = ["dynamodb"]
DOCUMENTS = ("item", "rows", "plaintext", "messages")
PAGE = b"<html><body>Sign in</body></html>"
DAMAGED = [b"", b"<garbage>", PAGE, b"[]", b"null", b'"x"', b'{"Item":{"k":', b"{}}"]
TAG = b'ETag: "one"'
LISTED = b"<ListBucketResult><Name>one</Name></ListBucketResult>"
GOOD = {
    "item": told_of_rows(b"{}"),
    "rows": WHOLE,
    "plaintext": told(b'{"KeyId":"one"}'),
    "messages": told(b"{}"),
    "deleted": told(b""),
    "heartbeat": told(b""),
    "keys": told(LISTED),
    "body": told(b"one", TAG),
    "size": told(b"", TAG),
    "written": told(b"", TAG),
    "removed": told(b"", status=204),
}
FOREIGN = [
    # Whatever is said by somebody who numbers no requests.
    *((what, bare(body)) for what in ASKED for body in (b"", b"<garbage>", b"{}", PAGE)),
    *((what, bare(PAGE, status=status)) for what in ASKED for status in (302, 403, 404)),
    *((what, bare(b"", status=404)) for what in ASKED),
    # Damaged on the way, or put in the place of what the service said.
    *((what, told(body)) for what in ("plaintext", "messages") for body in DAMAGED),
    *((what, told_of_rows(body, wrote=b"{}")) for what in ("item", "rows") for body in DAMAGED),
    *((what, told_of_rows(body)) for what in ("item", "rows") for body in DAMAGED[:6]),
    *((what, told(body)) for what in ("deleted", "heartbeat") for body in (b"[]", b"<garbage>")),
    *((what, told(b"", status=status)) for what in DOCUMENTS for status in (204, 302, 304, 400)),
    *((what, told(b"[]", status=400)) for what in DOCUMENTS),
    ("rows", told_of_rows(b'{"Items":7}')),
    ("rows", told_of_rows(b'{"Items":["x"]}')),
    ("messages", told(b'{"Messages":{"Body":"x"}}')),
    ("plaintext", told(b'{"Plaintext":"x"}')),
    ("item", told_of_rows(b"{}", wrote=b'{"Item":{}}')),
    ("item", told_of_rows(b'{"__type":"X"}', wrote=b"{}", status=400)),
    ("keys", told(b"")),
    ("keys", told(LISTED[:-1])),
    ("keys", told(PAGE)),
    ("keys", told(b"<Error><Code>InternalError</Code></Error>")),
    ("keys", told(PAGE, status=404)),
    ("body", told(PAGE, status=404)),
    ("body", told(b"", status=404)),
    ("body", told(b"one")),
    ("size", told(b"")),
    ("size", b"HTTP/1.1 200 OK\r\n%s\r\n%s\r\n\r\n" % (REQUEST_ID, TAG)),
    ("written", told(b"")),
    ("body", told(b"<Error>", status=404).replace(b"Length: 7", b"Length: 9")),
]


@pytest.fixture
def anyio_backend() -> str:
    """The server of answers is one of asyncio."""
    return "asyncio"


def ask(aws: AwsClient, what: str) -> Awaitable[dict[str, Any]]:
    return aws.call(*ASKED[what])


async def test_an_answer_cut_off_within_its_headers_is_asked_for_again() -> None:
    async with answering(CUT_OFF, WHOLE, services=ROWS) as aws:
        assert (await ask(aws, "rows"))["Items"] == []
    assert aws.stats.calls["dynamodb", "query", "failed"] == 1


async def test_an_answer_of_s3_with_no_body_may_tell_no_length() -> None:
    answer = b"HTTP/1.1 200 OK\r\nx-amz-request-id: 1\r\n\r\n"
    async with answering(answer, services=["s3"]) as aws:
        await aws.call("s3", "head_bucket", {"Bucket": "one"})
    assert aws.stats.calls["s3", "head_bucket", "ok"] == 1


async def test_what_is_no_answer_of_the_service_is_asked_for_again() -> None:
    answers = [one for what, bad in FOREIGN for one in (bad, GOOD[what])]
    services = sorted({service for service, _, _ in ASKED.values()})
    async with answering(*answers, services=services) as aws:
        for what, bad in FOREIGN:
            service, operation, _ = ASKED[what]
            failed = aws.stats.calls[service, operation, "failed"]
            answer = await ask(aws, what)
            assert answer["ResponseMetadata"]["HTTPStatusCode"] < 300
            if "Body" in answer:
                answer["Body"].close()
            assert aws.stats.calls[service, operation, "failed"] == failed + 1, (what, bad)
    assert sum(aws.stats.retries.values()) == len(FOREIGN)


@pytest.mark.parametrize("what", ASKED)
async def test_a_service_that_somebody_else_speaks_for_is_unavailable_and_away(what: str) -> None:
    service, operation, _ = ASKED[what]
    async with answering(*[bare(b"<garbage>")] * ATTEMPTS, services=[service]) as aws:
        with pytest.raises(ConveyorError, match=f"{service} does not answer {operation}") as caught:
            await ask(aws, what)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert not isinstance(caught.value, AwsRefused)
        assert aws.stats.away(SystemClock().monotonic()) == (service,)


@pytest.mark.parametrize(
    ("what", "answer", "word"),
    [
        ("rows", REFUSAL, "ResourceNotFoundException"),
        ("item", told(b'{"__type":"X"}', status=400), "X"),
        ("messages", told(b'{"__type":"a#Gone"}', status=400), "Gone"),
        ("size", told(b"", status=404), "404"),
        ("body", told(b"<Error><Code>NoSuchKey</Code></Error>", status=404), "NoSuchKey"),
        ("written", told(b"<Error><Code>Other</Code></Error>", status=412), "Other"),
    ],
)
async def test_a_refusal_of_the_service_is_one(what: str, answer: bytes, word: str) -> None:
    async with answering(answer, services=[ASKED[what][0]]) as aws:
        with pytest.raises(AwsRefused) as caught:
            await ask(aws, what)
    assert caught.value.word == word


@pytest.mark.parametrize("answer", [CUT_OFF, BROKEN])
async def test_a_service_that_does_not_answer_is_away_until_it_does(answer: bytes) -> None:
    now: Callable[[], float] = SystemClock().monotonic
    async with answering(*[answer] * AWAY_AFTER, REFUSAL, services=ROWS) as aws:
        with pytest.raises(ConveyorError) as caught:
            await ask(aws, "rows")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert aws.stats.away(now()) == ("dynamodb",)
        assert aws.stats.away(now() + AWAY_FOR + 1) == ()
        with pytest.raises(AwsRefused):
            await ask(aws, "rows")
        assert aws.stats.away(now()) == ()


async def test_a_service_that_failed_now_and_then_is_not_away() -> None:
    async with answering(CUT_OFF, BROKEN, WHOLE, CUT_OFF, WHOLE, services=ROWS) as aws:
        await ask(aws, "rows")
        await ask(aws, "rows")
        assert aws.stats.away(SystemClock().monotonic()) == ()
