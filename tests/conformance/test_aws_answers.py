"""The seam and answers that do not come whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.boto import BotoAws, open_aws
from conveyor.prod.aws.calls import AWAY_AFTER, AWAY_FOR, AwsRefused
from conveyor.prod.aws.options import AwsOptions
from tests.conformance.emulators import use_test_keys

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"Items":[]}'
CUT_OFF = b"HTTP/1.1 200 OK\r\nServer: one\r\nConten"
REFUSED = b'{"__type":"ResourceNotFoundException"}'
REFUSAL = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSED), REFUSED)
BROKEN = b"HTTP/1.1 500 Broken\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def anyio_backend() -> str:
    """The server below is one of asyncio."""
    return "asyncio"


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[BotoAws]:
    """The seam over a server that gives these answers, one a connection."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        writer.write(left.pop(0))
        writer.close()

    use_test_keys()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        endpoint = f"http://127.0.0.1:{port}"
        options = AwsOptions(
            dynamodb_endpoint=endpoint, s3_endpoint=endpoint, attempts=3, retry_base=0.001
        )
        aws = await open_aws(options, SystemClock(), "dynamodb", "s3")
        try:
            yield aws
        finally:
            await aws.aclose()


def query(aws: BotoAws) -> Awaitable[dict[str, object]]:
    return aws.call("dynamodb", "query", {"TableName": "one"})


async def test_an_answer_cut_off_within_its_headers_is_asked_for_again() -> None:
    async with answering(CUT_OFF, WHOLE) as aws:
        assert (await query(aws))["Items"] == []
    assert aws.stats.calls["dynamodb", "query", "failed"] == 1


async def test_an_answer_of_s3_with_no_body_may_tell_no_length() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nServer: AmazonS3\r\n\r\n") as aws:
        await aws.call("s3", "head_bucket", {"Bucket": "one"})
    assert aws.stats.calls["s3", "head_bucket", "ok"] == 1


@pytest.mark.parametrize("answer", [CUT_OFF, BROKEN])
async def test_a_service_that_does_not_answer_is_away_until_it_does(answer: bytes) -> None:
    now: Callable[[], float] = SystemClock().monotonic
    async with answering(*[answer] * AWAY_AFTER, REFUSAL) as aws:
        with pytest.raises(ConveyorError) as caught:
            await query(aws)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert aws.stats.away(now()) == ("dynamodb",)
        assert aws.stats.away(now() + AWAY_FOR + 1) == ()
        with pytest.raises(AwsRefused):
            await query(aws)
        assert aws.stats.away(now()) == ()


async def test_a_service_that_failed_now_and_then_is_not_away() -> None:
    async with answering(CUT_OFF, BROKEN, WHOLE, CUT_OFF, WHOLE) as aws:
        await query(aws)
        await query(aws)
        assert aws.stats.away(SystemClock().monotonic()) == ()
