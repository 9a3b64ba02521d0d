"""The memory of bodies that come in pieces: bounded for a whole process, and never a standstill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from itertools import repeat

import anyio
import pytest

from conveyor.prod.aws.calls import Answer, Parameters
from conveyor.prod.s3 import blobs as s3_blobs
from conveyor.prod.s3.blobs import S3Blobs
from conveyor.testing.clock import FakeClock

PART = 64 * 1024
PIECE = b"x" * (PART // 8)
LIMIT = 3 * PART


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that cost no time to copy."""
    monkeypatch.setattr(s3_blobs, "PART", PART)


class SlowS3:
    """S3 that takes a second for each call; `held` bytes have come, and are not with it yet."""

    def __init__(self, clock: FakeClock) -> None:
        self.held = self.most = self.put = 0
        self._clock = clock

    async def body(self, pieces: int, *, pause: float = 0.0) -> AsyncIterator[bytes]:
        for piece in repeat(PIECE, pieces):
            await self._clock.sleep(pause)
            self.held += len(piece)
            self.most = max(self.most, self.held)
            yield piece

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        await self._clock.sleep(1.0)
        taken = len(parameters.get("Body", b""))
        self.held -= taken
        self.put += taken
        return {"UploadId": "one", "ETag": "tag"}

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        raise AssertionError("no link is needed")


@pytest.mark.parametrize("pieces", [1, 8, 9, 30])
async def test_bodies_of_many_slots_take_bounded_memory_and_all_arrive(pieces: int) -> None:
    clock = FakeClock()
    s3 = SlowS3(clock)
    blobs = S3Blobs(s3, bucket="bodies", clock=clock, head_memory=LIMIT)
    sizes: list[int] = []

    async def put(number: int) -> None:
        sizes.append(await blobs.put(f"results/30/{number}", s3.body(pieces)))

    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(put, number)
        await clock.advance(600.0)

    assert sizes == [pieces * len(PIECE)] * 40
    assert s3.put == sum(sizes)
    # Beside the heads: each body's next piece, the oldest one's head, and parts on their way, of
    # which an upload has filled the next one before its turn comes.
    uploads = LIMIT // PART + 1
    beside = 40 * len(PIECE) + PART + len(PIECE) + (4 + uploads) * PART
    assert s3.most <= min(LIMIT + beside, 40 * pieces * len(PIECE))
    if pieces > 1:
        assert s3.most < 40 * 8 * len(PIECE)


async def test_small_bodies_pass_those_that_come_slowly() -> None:
    """A slow body holds the bytes that have come, and no more."""
    clock = FakeClock()
    s3 = SlowS3(clock)
    blobs = S3Blobs(s3, bucket="bodies", clock=clock, head_memory=LIMIT)
    done: list[str] = []

    async def put(key: str, pieces: int, pause: float) -> None:
        await blobs.put(key, s3.body(pieces, pause=pause))
        done.append(key)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(partial(put, f"slow/{number}", 4, 100.0))
        for number in range(20):
            group.start_soon(partial(put, f"quick/{number}", 1, 0.0))
        await clock.advance(100.0)
        assert sorted(done) == sorted(f"quick/{number}" for number in range(20))
        await clock.advance(10_000.0)

    assert len(done) == 40


async def test_a_body_that_is_cut_off_gives_its_memory_back() -> None:
    clock = FakeClock()
    s3 = SlowS3(clock)
    blobs = S3Blobs(s3, bucket="bodies", clock=clock, head_memory=PART)
    async with anyio.create_task_group() as group:
        for number in range(5):
            body = s3.body(7, pause=0.1)
            group.start_soon(blobs.put, f"cut/{number}", body)
        await clock.advance(0.65)
        group.cancel_scope.cancel()

    sizes: list[int] = []

    async def put(number: int) -> None:
        sizes.append(await blobs.put(f"whole/{number}", s3.body(8)))

    async with anyio.create_task_group() as group:
        for number in range(2):
            group.start_soon(put, number)
        await clock.advance(5.0)

    assert sizes == [PART, PART]
