"""Calls to AWS over Conveyor's own HTTP client: cancellation, connections, cuts, regions."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws import calls, http
from conveyor.prod.aws.calls import AnswerBody, BodyGivenBack, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.places import CallPlace, CallPlaces
from conveyor.prod.s3.blobs import RESUMPTIONS, S3Blobs, open_body
from conveyor.records.blob_keys import is_written_once, result_key
from tests.patient import SECONDS
from tests.unit.aws_stub import (
    Cut,
    Seen,
    Stub,
    calling,
    eventually,
    give_keys,
    nothing,
    own,
    said,
    serving,
    summed,
)

GET = ("dynamodb", "get_item", {"TableName": "t", "Key": {}})
RECEIVE = ("sqs", "receive_message", {"QueueUrl": "https://queues/1/q"})
READ = ("s3", "get_object", {"Bucket": "bucket", "Key": "k"})
ULID = "01J00000000000000000000000"
PUT = ("s3", "put_object", {"Bucket": "bucket", "Key": "k", "Body": b"body"})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    give_keys(monkeypatch)


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with serving(Stub()) as there:
        yield there


class Held:
    """Answers that come when a test lets them."""

    def __init__(self) -> None:
        self.arrived = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        self.answered = 0

    async def __call__(self, seen: Seen) -> bytes:
        self.arrived.release()
        await self.release.wait()
        self.answered += 1
        return await nothing(seen)


async def arrival(held: Held, count: int = 1) -> None:
    """Wait for so many requests."""
    with anyio.fail_after(SECONDS):
        for _ in range(count):
            await held.arrived.acquire()


async def closed(aws: AwsClient, *, but: int = 0) -> None:
    """Wait until so many connections are open."""
    await eventually(lambda: own(aws).open_connections == but)


async def size_of(body: AnswerBody) -> int:
    """Read a body."""
    size = 0
    while piece := await body.read(65_536):
        size += len(piece)
    return size


# -- cancellation --


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["http", "boto"])
@pytest.mark.parametrize("asked", [GET, RECEIVE], ids=["write", "receive"])
async def test_a_call_in_flight_is_over_before_its_caller_is_cancelled(
    stub: Stub, carrier: str, asked: tuple[str, str, dict[str, object]]
) -> None:
    stub.answer = held = Held()
    async with calling(stub.url, carrier=carrier, services=[asked[0]]) as aws:
        answered_then = []
        got = []

        async def claim(scope: anyio.CancelScope) -> None:
            with scope:
                try:
                    got.append(await aws.call(*asked))
                    await anyio.lowlevel.checkpoint()
                finally:
                    answered_then.append(held.answered)

        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(claim, scope)
            await arrival(held)
            scope.cancel()
            for _ in range(9):
                await asyncio.sleep(0)
            assert not answered_then
            held.release.set()
        assert scope.cancelled_caught
        assert answered_then == [1]
        # It learns what it did, and is cancelled where it waits next.
        assert [answer["ResponseMetadata"]["HTTPStatusCode"] for answer in got] == [200]


async def test_so_it_is_if_its_task_is_cancelled_again_and_again(stub: Stub) -> None:
    stub.answer = held = Held()
    async with calling(stub.url, services=["dynamodb"]) as aws:
        task = asyncio.create_task(aws.call(*GET))
        await arrival(held)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        held.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.answered == 1
        held.release.set()
        await aws.call(*GET)
    assert stub.connections == 1


async def test_a_body_that_comes_for_nobody_is_closed(stub: Stub) -> None:
    held = Held()

    async def give(seen: Seen) -> bytes:
        await held(seen)
        return said(b"x" * 1_000_000, b'ETag: "1"')

    stub.answer = give
    async with calling(stub.url, services=["s3"]) as aws:
        task = asyncio.create_task(aws.call(*READ))
        await arrival(held)
        task.cancel()
        held.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed(aws)


@pytest.mark.parametrize("key", [result_key(ULID, ULID, "0000001ABC", 1, 30), "exports/k"])
async def test_the_put_of_a_body_alone_is_left_by_a_caller_that_is_cancelled(
    stub: Stub, key: str
) -> None:
    """An export may be written again under its key: what was begun for it runs to its end."""
    stub.answer = held = Held()
    async with calling(stub.url, services=["s3"]) as aws:
        blobs = S3Blobs(aws, bucket="bucket", clock=SystemClock())
        task = asyncio.create_task(blobs.put(key, b"body"))
        await arrival(held)
        task.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        assert task.done() is is_written_once(key)
        held.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed(aws, but=0 if is_written_once(key) else 1)
        await aws.call(*READ)


async def test_a_place_is_looked_for_once(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    find = CallPlaces.find

    def look(places: CallPlaces, service: str, parameters: Parameters) -> CallPlace | None:
        looked.append(service)
        return find(places, service, parameters)

    monkeypatch.setattr(CallPlaces, "find", look)
    async with calling(stub.url, services=["dynamodb"]) as aws:
        await asyncio.gather(*(aws.call(*GET) for _ in range(9)))
    assert looked == ["dynamodb"]


async def test_a_call_that_waits_for_its_turn_is_cancelled_at_once(stub: Stub) -> None:
    stub.answer = held = Held()
    async with calling(stub.url, services=["dynamodb"], threads=1) as aws:
        first = asyncio.create_task(aws.call(*GET))
        await arrival(held)
        second = asyncio.create_task(aws.call(*GET))
        for _ in range(9):
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.release.set()
        await first
        await aws.call(*GET)
    assert len(stub.seen) == 2


async def test_a_caller_that_is_cancelled_already_sends_nothing(stub: Stub) -> None:
    async with calling(stub.url, services=["dynamodb"]) as aws:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await aws.call(*GET)
    assert scope.cancelled_caught
    assert not stub.seen


# -- connections --


async def test_calls_at_a_time_are_bounded_and_receives_apart(stub: Stub) -> None:
    stub.answer = held = Held()
    async with (
        calling(stub.url, services=["sqs"], threads=3, receive_threads=2) as aws,
        anyio.create_task_group() as group,
    ):
        for _ in range(9):
            group.start_soon(aws.call, *RECEIVE)
        await arrival(held, 2)
        deletion = ("sqs", "delete_message", {"QueueUrl": "q", "ReceiptHandle": "r"})
        for _ in range(9):
            group.start_soon(aws.call, *deletion)
        await arrival(held, 3)
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(stub.seen) == 5
        held.release.set()
    assert len(stub.seen) == 18
    assert stub.most == 5


async def test_a_request_that_a_kept_connection_does_not_answer_goes_over_a_fresh_one(
    stub: Stub,
) -> None:
    answers = [said(b"{}"), b"", said(b"{}")]

    async def close_the_kept(_seen: Seen) -> bytes:
        return answers.pop(0)

    stub.answer = close_the_kept
    async with calling(stub.url, services=["dynamodb"]) as aws:
        await aws.call(*GET)
        await aws.call(*GET)
    assert stub.connections == 2
    assert aws.stats.calls == {("dynamodb", "get_item", "ok"): 2}


async def test_a_fresh_connection_that_answers_nothing_is_a_try_that_failed(stub: Stub) -> None:
    async def close(_seen: Seen) -> bytes:
        return b""

    stub.answer = close
    async with calling(stub.url, services=["dynamodb"]) as aws:
        with pytest.raises(ConveyorError, match="does not answer get_item: ConnectionClosedError"):
            await aws.call(*GET)
    assert len(stub.seen) == 1


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(GET, summed(b'{"Item":{"a":{"S":"x"}}}')), (PUT, said(b"", b'ETag: "1"'))],
    ids=["row", "body"],
)
async def test_an_answer_cut_at_any_byte_is_none(
    stub: Stub, asked: tuple[str, str, dict[str, object]], answer: bytes
) -> None:
    cuts = list(range(len(answer)))

    async def cut(_seen: Seen) -> bytes:
        # What is cut is the end of its connection, too.
        return Cut(answer[: cuts.pop(0)]) if cuts else answer

    stub.answer = cut
    async with calling(stub.url, services=[asked[0]], attempts=len(cuts) + 1) as aws:
        await aws.call(*asked)
    assert aws.stats.calls == {(*asked[:2], "failed"): len(answer), (*asked[:2], "ok"): 1}


@pytest.mark.parametrize("cut_at", [0, 1, 70_000, 299_999])
async def test_a_body_cut_off_breaks_off(stub: Stub, cut_at: int) -> None:
    whole = said(b"x" * 300_000, b'ETag: "1"')
    head = len(whole) - 300_000

    async def cut(_seen: Seen) -> bytes:
        return Cut(whole[: head + cut_at])

    stub.answer = cut
    async with calling(stub.url, services=["s3"]) as aws:
        body = (await aws.call(*READ))["Body"]
        with pytest.raises(ConveyorError, match="s3 get_object broke off: ConnectionClosedError"):
            await size_of(body)
        await closed(aws)


async def test_bodies_that_nobody_reads_keep_no_other_call_waiting(stub: Stub) -> None:
    async def give(seen: Seen) -> bytes:
        return said(b"x" * 1_000_000, b'ETag: "1"') if seen.method == "GET" else await nothing(seen)

    stub.answer = give
    async with calling(stub.url, services=["s3"], threads=2) as aws:
        bodies = [(await aws.call(*READ))["Body"] for _ in range(9)]
        await aws.call(*PUT)
        assert own(aws).open_connections == 10
        for body in bodies:
            body.close()
        await closed(aws, but=1)


def large(_seen: Seen) -> bytes:
    return said(b"x" * 1_000_000, b'ETag: "1"')


async def test_a_body_that_nobody_asks_for_gives_its_connection_back(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODIES_OPEN", 2)
    monkeypatch.setattr(http, "BODY_KEPT", 0.02)

    async def give(seen: Seen) -> bytes:
        return large(seen)

    stub.answer = give
    async with calling(stub.url, services=["s3"], threads=2) as aws:
        forgotten = [(await aws.call(*READ))["Body"] for _ in range(2)]
        monkeypatch.setattr(http, "BODY_KEPT", SECONDS)
        assert await size_of((await aws.call(*READ))["Body"]) == 1_000_000
        await closed(aws, but=1)
        for body in forgotten:
            with pytest.raises(BodyGivenBack):
                await size_of(body)


async def test_a_reader_that_is_closed_gives_its_connection_back(stub: Stub) -> None:
    async def give(seen: Seen) -> bytes:
        return large(seen)

    stub.answer = give
    async with calling(stub.url, services=["s3"]) as aws:
        reader = await open_body(aws, READ[2])
        assert reader is not None
        assert own(aws).open_connections == 1
        await reader.aclose()
        await closed(aws)


async def test_a_reader_may_be_slow_again_and_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_KEPT", 0.02)
    whole = bytes(range(256)) * 16_384

    async def give(seen: Seen) -> bytes:
        start = int(seen.fields.get("range", "bytes=0-")[6:].partition("-")[0])
        return said(whole[start:], b'ETag: "1"', status=206 if start else 200)

    stub.answer = give
    async with calling(stub.url, services=["s3"]) as aws:
        pieces = await S3Blobs(aws, bucket="bucket", clock=SystemClock()).open("k")
        assert pieces is not None
        read = []
        for _ in range(2 * RESUMPTIONS):
            await closed(aws)
            read += [await anext(pieces), await anext(pieces)]
        read += [piece async for piece in pieces]
        assert b"".join(read) == whole
    assert len(stub.seen) > 1 + RESUMPTIONS


async def test_a_store_that_ignores_a_range_is_not_believed(stub: Stub) -> None:
    """A proxy before a store may: the reader would give out the beginning once more."""
    whole = bytes(range(256)) * 4_096

    async def give(seen: Seen) -> bytes:
        answer = said(whole, b'ETag: "1"')
        return answer if "range" in seen.fields else Cut(answer[:700_000])

    stub.answer = give
    async with calling(stub.url, services=["s3"]) as aws:
        pieces = await S3Blobs(aws, bucket="bucket", clock=SystemClock()).open("k")
        assert pieces is not None
        read: list[bytes] = []

        async def read_on() -> None:
            while True:
                read.append(await anext(pieces))

        with pytest.raises(ConveyorError, match="another part"):
            await read_on()
        assert 0 < len(b"".join(read)) <= 700_000
        assert whole.startswith(b"".join(read))
        await closed(aws)


@pytest.mark.slow
async def test_a_call_without_a_turn_says_nothing_about_its_service(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODIES_OPEN", 1)
    monkeypatch.setattr(calls, "AWAY_AFTER", 1)

    async def give(seen: Seen) -> bytes:
        return large(seen)

    stub.answer = give
    async with calling(
        stub.url, services=["s3"], threads=1, read_timeout=1.0, connect_timeout=0.5
    ) as aws:
        body = (await aws.call(*READ))["Body"]
        with pytest.raises(ConveyorError, match="all connections for get_object are in use"):
            await aws.call(*READ)
        assert aws.stats.away(SystemClock().monotonic()) == ()
        body.close()
        assert await size_of((await aws.call(*READ))["Body"]) == 1_000_000
    assert len(stub.seen) == 2


@pytest.mark.slow
async def test_a_service_that_hangs_is_not_waited_for_longer_than_allowed(stub: Stub) -> None:
    stub.answer = Held()
    async with calling(
        stub.url, services=["dynamodb"], read_timeout=0.1, connect_timeout=0.5
    ) as aws:
        with pytest.raises(ConveyorError, match="ReadTimeoutError"):
            await aws.call(*GET)
        assert own(aws).open_connections == 0


@pytest.mark.slow
async def test_a_piece_that_does_not_come_in_time_breaks_the_body_off(stub: Stub) -> None:
    async def stall(_seen: Seen) -> bytes:
        return said(b"x" * 10, b'ETag: "1"')[:-5]

    stub.answer = stall
    async with calling(stub.url, services=["s3"], read_timeout=1.0) as aws:
        body = (await aws.call(*READ))["Body"]
        assert await body.read(5) == b"x" * 5
        with pytest.raises(ConveyorError, match="broke off: ReadTimeoutError"):
            await body.read(10)


async def test_nobody_at_an_endpoint_is_told_as_boto3_tells_it() -> None:
    told = []
    for carrier in ("http", "boto"):
        async with calling("http://127.0.0.1:1", services=["dynamodb"], carrier=carrier) as aws:
            with pytest.raises(ConveyorError) as caught:
                await aws.call(*GET)
            told.append(caught.value.detail)
    assert told == ["dynamodb does not answer get_item: EndpointConnectionError"] * 2


@pytest.mark.slow
async def test_a_large_body_is_sent_whole(stub: Stub) -> None:
    body = bytes(range(256)) * 32_768
    async with calling(stub.url, services=["s3"]) as aws:
        await aws.call("s3", "put_object", {**PUT[2], "Body": body})
    assert stub.seen[0].body == body


@pytest.mark.slow
async def test_nothing_is_left_when_calls_are_closed(stub: Stub) -> None:
    async with calling(stub.url, services=["dynamodb", "s3"]) as aws:
        await asyncio.gather(*(aws.call(*asked) for asked in (GET, PUT) for _ in range(5)))
    assert own(aws).open_connections == 0
    del aws
    gc.collect()
    await eventually(lambda: not stub.open)


async def test_closing_ends_a_call_and_its_further_tries(stub: Stub) -> None:
    stub.answer = held = Held()
    async with calling(stub.url, services=["dynamodb"], attempts=8) as aws:
        call = asyncio.create_task(aws.call(*GET))
        await arrival(held)
        await aws.aclose()
        held.release.set()
        with pytest.raises(ConveyorError):
            await call
        assert own(aws).open_connections == 0
    assert len(stub.seen) == 1
    assert aws.stats.away(SystemClock().monotonic()) == ()


async def test_closing_ends_a_call_that_waits_for_its_turn(stub: Stub) -> None:
    stub.answer = held = Held()
    async with calling(stub.url, services=["dynamodb"], threads=1) as aws:
        held_up = [asyncio.create_task(aws.call(*GET)) for _ in range(2)]
        await arrival(held)
        await aws.aclose()
        ends = await asyncio.gather(*held_up, return_exceptions=True)
        assert [type(end) for end in ends] == [ConveyorError, ConveyorError]
        assert own(aws).open_connections == 0
    assert len(stub.seen) == 1


@pytest.mark.parametrize("carrier", ["http", "boto"])
async def test_a_call_after_the_end_is_refused(stub: Stub, carrier: str) -> None:
    async with calling(stub.url, services=["dynamodb"], carrier=carrier) as aws:
        await aws.aclose()
        with pytest.raises(ConveyorError, match="closed"):
            await aws.call(*GET)
    assert not stub.seen


# -- the table --


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        said(b"", status=301),
        said(b"", b"Location: http://127.0.0.1:1/", status=307),
        said(b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>", status=400),
    ],
    ids=["moved", "redirected", "signed for another region"],
)
async def test_calls_about_a_bucket_of_another_region_go_through_boto3(
    stub: Stub, answer: bytes
) -> None:
    async def move(seen: Seen) -> bytes:
        is_boto = "Boto" in seen.fields["user-agent"]
        return await nothing(seen) if is_boto or seen.target.startswith("/other") else answer

    stub.answer = move
    async with calling(stub.url, services=["s3"]) as aws:
        for bucket in ("bucket", "bucket", "other"):
            await aws.call("s3", "put_object", {**PUT[2], "Bucket": bucket})
    boto = ["Boto" in seen.fields["user-agent"] for seen in stub.seen]
    assert boto == [False, True, True, False]
    assert aws.stats.calls == {("s3", "put_object", "ok"): 3}


async def test_the_carrier_can_be_boto3_for_all(stub: Stub) -> None:
    async with calling(stub.url, services=["dynamodb"], carrier="boto") as aws:
        await aws.call(*GET)
    assert "Boto" in stub.seen[0].fields["user-agent"]
