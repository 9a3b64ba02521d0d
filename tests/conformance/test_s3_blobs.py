"""The additions of S3 to the blobs port: parts, lost answers, broken connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import BodyRefused
from conveyor.prod.aws import calls
from conveyor.prod.aws.calls import Answer, AnswerBody, Aws, AwsRefused, CallStats, Parameters
from conveyor.prod.aws.refusals import DeployedAws
from conveyor.prod.s3 import blobs as adapter
from conveyor.prod.s3.blobs import (
    PART,
    PARTS_AT_A_TIME,
    PIECE,
    RESUMPTIONS,
    SAME_SIZE,
    S3Blobs,
    part_size,
)
from conveyor.records.blob_keys import run_prefix
from conveyor.records.packed_bodies import pack_key, place_body
from tests.conformance.s3_bucket import empty_bucket, unfinished_uploads

PREFIX = run_prefix("JOB", "RUN", 30)
KEY = f"{PREFIX}BODY"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Broken:
    """A body whose connection breaks off after so many bytes."""

    def __init__(self, body: AnswerBody, after: int) -> None:
        self._body = body
        self._left = after

    async def read(self, most: int) -> bytes:
        if self._left <= 0:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "broke off")
        piece = await self._body.read(min(most, self._left))
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        self._body.close()


class Seam:
    """Passes calls on and counts them.

    `twice` names an operation that is made again after it was done, as after a lost answer;
    `breaks_after` is where each body breaks off; `answered` may change an answer.
    """

    def __init__(self, aws: Aws) -> None:
        self.calls: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.twice = ""
        self.breaks_after: int | None = None
        self.answered: Callable[[str, Answer], Answer] = lambda _, answer: answer
        self._aws = aws

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        self.calls[operation] += 1
        self.at_once[operation] += 1
        self.most_at_once |= self.at_once
        try:
            answer = await self._aws.call(service, operation, parameters)
            if operation == self.twice:
                answer = await self._aws.call(service, operation, parameters)
        finally:
            self.at_once[operation] -= 1
        if self.breaks_after is not None and "Body" in answer:
            answer["Body"] = Broken(answer["Body"], self.breaks_after)
        return self.answered(operation, answer)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)


class Bench:
    def __init__(self, aws: Aws, bucket: str) -> None:
        self.seam = Seam(aws)
        self.bucket = bucket
        self.blobs = S3Blobs(self.seam, bucket=bucket, clock=SystemClock())

    async def read(self, key: str) -> bytes | None:
        content = await self.blobs.open(key)
        return None if content is None else b"".join([piece async for piece in content])

    async def unfinished(self) -> list[str]:
        return await unfinished_uploads(self.seam, self.bucket)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with empty_bucket() as (aws, bucket):
        yield Bench(aws, bucket)


def _body(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def _pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def test_a_small_body_is_one_call(bench: Bench) -> None:
    await bench.blobs.put(KEY, _pieces(_body(PART), 1_000_003))
    assert bench.seam.calls == {"put_object": 1}
    assert await bench.read(KEY) == _body(PART)


@pytest.mark.parametrize("form", ["whole", "in pieces"])
async def test_a_large_body_goes_in_parts(bench: Bench, form: str) -> None:
    body = _body(2 * PART + 100)
    content = body if form == "whole" else _pieces(body, 1_000_003)
    assert await bench.blobs.put(KEY, content) == len(body)
    assert bench.seam.calls == {
        "create_multipart_upload": 1,
        "upload_part": 3,
        "complete_multipart_upload": 1,
    }
    assert await bench.read(KEY) == body


async def test_parts_of_all_bodies_together_are_few_at_a_time(bench: Bench) -> None:
    body = _body(3 * PART)
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(bench.blobs.put, f"{PREFIX}N{number}", body)
    assert bench.seam.calls["upload_part"] == 9
    assert 1 < bench.seam.most_at_once["upload_part"] <= PARTS_AT_A_TIME


async def test_a_put_that_was_cut_short_gives_back_its_turns(bench: Bench) -> None:
    for _ in range(PARTS_AT_A_TIME + 1):
        with anyio.move_on_after(0.05):
            await bench.blobs.put(KEY, _body(4 * PART))
    assert await bench.unfinished() == []
    with anyio.fail_after(60):
        assert await bench.blobs.put(KEY, _body(2 * PART)) == 2 * PART


def test_parts_grow_so_that_ten_thousand_of_them_are_enough() -> None:
    assert part_size(1) == part_size(SAME_SIZE) == PART
    assert part_size(SAME_SIZE + 1) == 2 * PART
    assert sum(map(part_size, range(1, 10_001))) > 107_374_182_400


@pytest.mark.parametrize(
    "operation", ["put_object", "upload_part", "complete_multipart_upload", "delete_objects"]
)
async def test_a_call_whose_answer_was_lost_is_made_again(bench: Bench, operation: str) -> None:
    bench.seam.twice = operation
    body = _body(100 if operation == "put_object" else PART + 100)
    assert await bench.blobs.put(KEY, body) == len(body)
    assert await bench.read(KEY) == body
    assert await bench.unfinished() == []
    assert await bench.blobs.delete_prefix(PREFIX) == 1
    assert await bench.read(KEY) is None


@pytest.mark.parametrize("size", [PART + 1, PART + 2])
async def test_an_upload_that_is_gone_since_it_was_completed_is_a_success(
    bench: Bench, size: int
) -> None:
    await bench.blobs.put(KEY, b"o" * (PART + 1))

    def gone(operation: str, answer: Answer) -> Answer:
        if operation == "complete_multipart_upload":
            raise AwsRefused("NoSuchUpload", "the answer was lost and the call made again")
        return answer

    bench.seam.answered = gone
    assert await bench.blobs.put(KEY, b"n" * size) == size
    assert await bench.read(KEY) == b"n" * size


async def test_an_upload_that_is_gone_and_was_never_completed_is_a_failure(bench: Bench) -> None:
    await bench.blobs.put(KEY, _body(PART + 1))

    async def content() -> AsyncIterator[bytes]:
        yield _body(PART + 100)
        for upload in (await bench.seam.call("s3", "list_multipart_uploads", _named(bench)))[
            "Uploads"
        ]:
            gone = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            await bench.seam.call("s3", "abort_multipart_upload", {**_named(bench), **gone})

    with pytest.raises(Exception, match="NoSuchUpload"):
        await bench.blobs.put(KEY, content())
    assert await bench.read(KEY) == _body(PART + 1)


def _named(bench: Bench) -> dict[str, str]:
    return {"Bucket": bench.bucket}


async def test_reading_goes_on_where_the_connection_broke_off(bench: Bench) -> None:
    body = _body(3 * PIECE)
    await bench.blobs.put(KEY, body)
    bench.seam.breaks_after = PIECE + 10
    assert await bench.read(KEY) == body
    assert bench.seam.calls["get_object"] == 3


async def _packed(bench: Bench, bodies: list[bytes]) -> list[str]:
    """Store a pack of bodies; return the key of each."""
    pack, offset, keys = pack_key(f"{PREFIX}0/BODY"), 0, []
    for body in bodies:
        keys.append(place_body(pack, offset, body).key)
        offset += len(body)
    await bench.blobs.put(pack, b"".join(bodies))
    return keys


async def test_neighbours_are_one_call_for_the_bytes_from_the_first_to_the_last(
    bench: Bench,
) -> None:
    bodies = [_body(size) for size in range(1, 40)]
    keys = await _packed(bench, bodies)
    lengths = []

    def answered(_operation: str, answer: Answer) -> Answer:
        lengths.append(answer["ContentLength"])
        return answer

    bench.seam.answered = answered
    assert await bench.blobs.read_neighbours(keys[3:9:2]) == bodies[3:9:2]
    assert lengths == [sum(map(len, bodies[3:8]))]


async def test_reading_of_a_packed_body_goes_on_where_the_connection_broke_off(
    bench: Bench,
) -> None:
    bodies = [_body(1_000), _body(2_000), _body(3_000)]
    keys = await _packed(bench, bodies)
    bench.seam.breaks_after = 700
    assert await bench.read(keys[1]) == bodies[1]
    assert bench.seam.calls["get_object"] == 3


async def test_reading_that_breaks_off_again_and_again_fails(bench: Bench) -> None:
    await bench.blobs.put(KEY, _body(PIECE))
    bench.seam.breaks_after = 10
    with pytest.raises(ConveyorError) as caught:
        await bench.read(KEY)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert bench.seam.calls["get_object"] == 1 + RESUMPTIONS


@pytest.mark.parametrize("end", ["replaced", "removed"])
async def test_two_bodies_are_never_mixed(bench: Bench, end: str) -> None:
    await bench.blobs.put(KEY, b"o" * 2 * PIECE)
    bench.seam.breaks_after = PIECE
    content = await bench.blobs.open(KEY)
    assert content is not None
    assert await anext(content) == b"o" * PIECE
    if end == "replaced":
        await bench.blobs.put(KEY, b"n" * 2 * PIECE)
    else:
        await bench.blobs.delete(KEY)
    with pytest.raises(ConveyorError, match="was replaced"):
        await anext(content)


async def test_a_prefix_of_many_pages_is_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "MOST_DELETE", 7)
    for number in range(20):
        await bench.blobs.put(f"{PREFIX}N{number}", b"x")
    await bench.blobs.put("results/30/JOB/RUNNER/1", b"x")
    assert await bench.blobs.delete_prefix(PREFIX, limit=8) == 8
    assert await bench.blobs.delete_prefix(PREFIX) == 12
    assert bench.seam.calls["delete_objects"] == 2 + 2
    assert await bench.blobs.size("results/30/JOB/RUNNER/1") == 1


@pytest.mark.parametrize("size", [1, PART + 1], ids=["one call", "parts"])
@pytest.mark.parametrize(
    ("word", "of_the_body"),
    [
        ("EntityTooLarge", True),
        ("BadDigest", True),
        ("AccessDenied", False),
        ("ExpiredToken", False),
        ("NoSuchBucket", False),
        ("RequestTimeTooSkewed", False),
        ("KMS.DisabledException", False),
        ("ThatNobodyKnows", False),
    ],
)
async def test_only_what_s3_says_of_a_body_itself_is_a_refusal_of_the_body(
    bench: Bench, word: str, of_the_body: bool, size: int
) -> None:
    def refused(operation: str, answer: Answer) -> Answer:
        if operation in ("put_object", "upload_part"):
            raise AwsRefused(word, "no")
        return answer

    bench.seam.answered = refused
    deployed = DeployedAws(
        bench.seam, CallStats(), SystemClock(), resources={"s3": "bucket bodies"}
    )
    blobs = S3Blobs(deployed, bucket=bench.bucket, clock=SystemClock())
    with pytest.raises(ConveyorError) as caught:
        await blobs.put(KEY, b"x" * size)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert isinstance(caught.value, BodyRefused) is of_the_body


async def test_keys_that_would_not_go_are_tried_again(bench: Bench) -> None:
    refused = [{"Key": f"{PREFIX}N1", "Code": "InternalError"}]

    def once(operation: str, answer: Answer) -> Answer:
        if operation == "delete_objects" and refused:
            return {"Errors": [refused.pop()]}
        return answer

    bench.seam.answered = once
    for number in range(3):
        await bench.blobs.put(f"{PREFIX}N{number}", b"x")
    assert await bench.blobs.delete_prefix(PREFIX) == 3
    assert bench.seam.calls["delete_objects"] == 2


async def test_keys_that_never_go_are_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "ROUNDS", 2)
    code = "InternalError"

    def never(operation: str, answer: Answer) -> Answer:
        if operation == "delete_objects":
            return {"Errors": [{"Key": KEY, "Code": code}]}
        return answer

    bench.seam.answered = never
    await bench.blobs.put(KEY, b"x")
    with pytest.raises(ConveyorError) as caught:
        await bench.blobs.delete_prefix(PREFIX)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    code = "AccessDenied"
    await bench.blobs.put(KEY, b"x")
    with pytest.raises(Exception, match="denies the deletion"):
        await bench.blobs.delete_prefix(PREFIX)
    assert bench.seam.calls["delete_objects"] == 3
