"""An idempotency key when work fails, is cut short, or is overtaken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, JobStatus, Run, RunStatus
from conveyor.ports.records import StoredResponse
from conveyor.service.idempotency import IdempotencyClaim, IdempotentRequests, KeyedRequest
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import KEY, Api, open_api

REQUEST = KeyedRequest("scope", b"fingerprint")
ANSWER = StoredResponse(201, b"made")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def once(api: Api) -> IdempotentRequests:
    return IdempotentRequests(api.binding.idempotency, api.clock, claim=60, ttl=86_400)


class Maker:
    """Work that creates a job, counting how often it is asked to."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.tickets: list[IdempotencyClaim] = []

    async def __call__(self, ticket: IdempotencyClaim) -> StoredResponse:
        self.tickets.append(ticket)
        run_id = self._api.clock.new_id()
        job = Job(
            job_id=ticket.created_id,
            caller=self._api.service.identify(KEY).caller_id,
            status=JobStatus.OPEN,
            created_at=0,
            updated_at=0,
            latest_run_id=run_id,
            run_count=1,
        )
        run = Run(
            run_id=run_id,
            job_id=ticket.created_id,
            run_sequence=1,
            status=RunStatus.PENDING,
            created_at=0,
            updated_at=0,
        )
        await self._api.binding.jobs.create_job(job, run, [], answer=ANSWER, once=ticket.once)
        return ANSWER


class HeldMaker(Maker):
    """Work that has begun once it has `entered`, and goes on once it may `leave`."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.entered = anyio.Event()
        self.leave = anyio.Event()

    async def __call__(self, ticket: IdempotencyClaim) -> StoredResponse:
        self.entered.set()
        await self.leave.wait()
        return await super().__call__(ticket)


async def test_work_without_a_key_is_done_each_time(api: Api, once: IdempotentRequests) -> None:
    make = Maker(api)

    given = [await once.answer(None, make) for _ in range(2)]

    assert [one.replayed for one in given] == [False, False]
    assert len({ticket.created_id for ticket in make.tickets}) == 2
    assert {ticket.once for ticket in make.tickets} == {None}


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("unforeseen"),
        ConveyorError(ErrorCode.UNAVAILABLE, "busy"),
        ConveyorError(ErrorCode.CONFLICT, "no"),
    ],
)
async def test_a_failure_frees_the_key(
    api: Api, once: IdempotentRequests, failure: Exception
) -> None:
    async def fail(_ticket: IdempotencyClaim) -> StoredResponse:
        raise failure

    make = Maker(api)

    with pytest.raises(type(failure)):
        await once.answer(REQUEST, fail)

    given = await once.answer(REQUEST, make)
    assert not given.replayed
    assert not make.tickets[0].taken_over


async def test_a_cancelled_request_finishes_its_work(api: Api, once: IdempotentRequests) -> None:
    make = Maker(api)
    begun = anyio.Event()

    async def slow(ticket: IdempotencyClaim) -> StoredResponse:
        begun.set()
        await anyio.lowlevel.checkpoint()
        return await make(ticket)

    async with anyio.create_task_group() as group:
        group.start_soon(once.answer, REQUEST, slow)
        await begun.wait()
        group.cancel_scope.cancel()

    given = await once.answer(REQUEST, make)
    assert given.replayed
    assert len(make.tickets) == 1


async def test_a_slow_request_that_was_overtaken_gives_the_answer_of_the_other(
    api: Api, once: IdempotentRequests
) -> None:
    make = Maker(api)

    async def slow(ticket: IdempotencyClaim) -> StoredResponse:
        api.clock.shift(61)
        given = await once.answer(REQUEST, make)
        assert not given.replayed
        return await make(ticket)

    given = await once.answer(REQUEST, slow)

    assert given.replayed
    assert given.answer == ANSWER
    first, second = make.tickets
    assert first.taken_over
    assert first.created_id == second.created_id
    caller = api.service.identify(KEY).caller_id
    views = await api.binding.jobs.list_jobs(caller, status=None, before=None, limit=10)
    assert [view.job.job_id for view in views] == [first.created_id]


@pytest.mark.slow
async def test_a_slow_request_that_fails_leaves_the_claim_of_who_overtook_it(
    api: Api, once: IdempotentRequests
) -> None:
    make = HeldMaker(api)

    async def slow(_ticket: IdempotencyClaim) -> StoredResponse:
        api.clock.shift(61)
        group.start_soon(once.answer, REQUEST, make)
        await make.entered.wait()
        raise RuntimeError("too late")

    async with anyio.create_task_group() as group:
        with pytest.raises(RuntimeError):
            await once.answer(REQUEST, slow)
        with pytest.raises(ConveyorError) as refused:
            await once.answer(REQUEST, make)
        assert refused.value.code is ErrorCode.IDEMPOTENCY_KEY_CONFLICT
        make.leave.set()

    assert len(make.tickets) == 1


async def test_a_slow_request_does_not_free_the_claim_of_who_overtook_it_by_another_clock(
    api: Api, once: IdempotentRequests
) -> None:
    ahead = FakeClock(start=api.clock.now() + 30_000, seed=1)
    other = IdempotentRequests(api.binding.idempotency, ahead, claim=60, ttl=86_400)
    make = HeldMaker(api)

    async def slow(_ticket: IdempotencyClaim) -> StoredResponse:
        for clock in (api.clock, ahead):
            clock.shift(40)
        group.start_soon(other.answer, REQUEST, make)
        await make.entered.wait()
        raise ConveyorError(ErrorCode.UNAVAILABLE, "away")

    async with anyio.create_task_group() as group:
        with pytest.raises(ConveyorError, match="away"):
            await once.answer(REQUEST, slow)
        make.leave.set()
    given = await once.answer(REQUEST, make)

    assert given.replayed
    assert len(make.tickets) == 1


@pytest.mark.guarantee("G14")
async def test_what_a_lost_answer_made_is_found_again(api: Api, once: IdempotentRequests) -> None:
    make = Maker(api)

    async def without_storing(ticket: IdempotencyClaim) -> StoredResponse:
        api.clock.shift(61)
        await make(IdempotencyClaim(ticket.created_id))
        raise RuntimeError("killed before the answer was stored")

    async def found(ticket: IdempotencyClaim) -> StoredResponse:
        return StoredResponse(201, ticket.created_id.encode())

    with pytest.raises(RuntimeError):
        await once.answer(REQUEST, without_storing, found=found)

    given = await once.answer(REQUEST, make, found=found)

    assert given.answer.body == make.tickets[0].created_id.encode()
    assert len({ticket.created_id for ticket in make.tickets}) == 1
