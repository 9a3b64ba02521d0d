"""The ingest handler over the development binding: cut off, repeated, frozen, and given up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import anyio
import msgspec
import pytest

from conveyor.dev.binding import DevBinding, open_binding
from conveyor.domain import ids
from conveyor.domain.errors import not_found
from conveyor.domain.model import (
    RunFailure,
    RunStatus,
)
from conveyor.handlers import ingest
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    Delivery,
    IngestMessage,
    Message,
    QueueMissing,
    Queues,
    TaskMessage,
    run_queue,
)
from conveyor.ports.records import RerunRequest, StoredResponse
from conveyor.testing.clock import FakeClock
from tests.unit.ingest_world import CALLER, LINE, Ingestion, large_run
from tests.unit.wired_handlers import ingest_handler


@pytest.fixture
def anyio_backend() -> str:
    """The development binding belongs to asyncio."""
    return "asyncio"


@pytest.fixture
async def dev(tmp_path: Path) -> AsyncIterator[DevBinding]:
    """An empty development binding under virtual time."""
    opened = await open_binding(tmp_path, FakeClock())
    yield opened
    await opened.ports.aclose()


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Ingestion]:
    """A run of 30 tasks, staged in four chunks."""
    async with large_run(tmp_path) as ingestion:
        yield ingestion


async def test_every_row_is_written_and_announced(large: Ingestion) -> None:
    assert await large.handle() == ACKNOWLEDGE
    run = await large.run()
    assert (run.ingesting, run.stats.total, run.status) == (False, 30, RunStatus.RUNNING)
    assert await large.indexes() == list(range(30))
    assert await large.staged() == 0
    received: list[str] = []
    queue = run_queue(large.run_id)
    while found := await large.binding.queues.receive(queue, limit=10, visibility=60):
        received += [one.message.task_id for one in found if isinstance(one.message, TaskMessage)]
    assert received == [ids.task_id(large.run_id, index) for index in range(30)]


@pytest.mark.guarantee("G2")
async def test_three_at_once_and_one_later_change_nothing(large: Ingestion) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(large.handle)
    assert await large.handle() == ACKNOWLEDGE
    run = await large.run()
    assert (run.ingesting, run.stats.total) == (False, 30)
    assert await large.indexes() == list(range(30))


@pytest.mark.parametrize("at", range(0, 31, 4))
async def test_it_goes_on_where_another_was_cut_off(large: Ingestion, at: int) -> None:
    for start in range(0, at, LINE):
        end = min(start + LINE, 30)
        rows = StagedRows(start, end - start, large.line(start, end))
        assert await large.binding.ingestion.write_rows(large.run_id, rows, now=0)
    assert await large.handle() == ACKNOWLEDGE
    assert await large.indexes() == list(range(30))
    assert (await large.run()).stats.total == 30


class Recorder:
    """The queues port, which also notes the references that are sent."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.indexes: list[int] = []
        self.sent: list[tuple[Message, float]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._queues, name)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Send, and note what goes to the control lane."""
        assert queue == CONTROL_QUEUE
        self.sent.append((message, delay))
        await self._queues.send(queue, message, delay=delay)

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        """Send, and note."""
        self.indexes += [index for index, _ in tasks]
        await self._queues.send_tasks(job_id, run_id, tasks, hosts, lanes)


async def test_references_of_the_last_stretch_before_a_cut_are_sent_again(
    large: Ingestion,
) -> None:
    """Rows and checkpoint were written, and the worker was killed before it could send."""
    rows = StagedRows(0, LINE, large.line(0, LINE))
    assert await large.binding.ingestion.write_rows(large.run_id, rows, now=0)
    recorder = Recorder(large.binding.queues)
    large.binding = replace(large.binding, queues=cast(Queues, recorder))
    assert await large.handle() == ACKNOWLEDGE
    assert recorder.indexes == list(range(30))


async def rerun(large: Ingestion) -> str:
    """Plan a large rerun of the run; its id."""
    again = large.clock.new_id()
    await large.binding.runs.rerun(
        RerunRequest(
            caller=CALLER,
            job_id=large.job_id,
            run_id=again,
            statuses=None,
            window_start=0,
            large_from=1,
            now=0,
        ),
        answer=lambda _made: StoredResponse(202, b"{}"),
        once=None,
    )
    return again


async def test_copied_rows_are_announced_and_again_after_a_cut(large: Ingestion) -> None:
    await large.handle()
    await large.stop()
    again = await rerun(large)
    await large.binding.ingestion.copy_rows(again, first_index=0, end_index=7, now=0)
    recorder = Recorder(large.binding.queues)
    large.binding = replace(large.binding, queues=cast(Queues, recorder))
    message = IngestMessage(large.job_id, again)
    handler = ingest_handler(large.binding, large.clock)
    delivery = Delivery(CONTROL_QUEUE, message, "receipt", 1)
    assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE
    assert recorder.indexes == list(range(30))


async def test_a_copy_that_is_held_sends_no_reference_twice(
    large: Ingestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands back, again and again, behind what it has copied, and then goes on."""
    monkeypatch.setattr(ingest, "STRETCH", 10)
    await large.handle()
    now = large.clock.now()
    task_id = ids.task_id(large.run_id, 25)
    await large.binding.tasks.claim_task(
        large.run_id, task_id, worker="w", now=now, claimed_until=now + 60_000, max_interruptions=9
    )
    await large.stop()
    again = await rerun(large)
    recorder = Recorder(large.binding.queues)
    large.binding = replace(large.binding, queues=cast(Queues, recorder))
    handler = ingest_handler(large.binding, large.clock)
    delivery = Delivery(CONTROL_QUEUE, IngestMessage(large.job_id, again), "receipt", 1)
    for _ in range(3):
        assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE
        assert recorder.indexes == list(range(20))
    assert recorder.sent == [(delivery.message, ingest.HELD_PAUSE)] * 3
    await large.clock.advance(60)
    assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE
    # The stretch before the checkpoint once more: whoever copied it may have been killed then.
    assert recorder.indexes == [*range(20), *range(10, 30)]
    assert len(recorder.sent) == 3


async def test_a_run_to_copy_from_that_is_gone_fails_the_rerun(large: Ingestion) -> None:
    source = large.binding.ingestion

    class Gone:
        """The port over a store that has lost the source."""

        def __getattr__(self, name: str) -> object:
            return getattr(source, name)

        async def ingesting(self, run_id: str) -> object:
            """A rerun that ingests."""
            state = await source.ingesting(run_id)
            return None if state is None else msgspec.structs.replace(state, rerun_of="SOURCE")

        async def copy_rows(self, run_id: str, **_more: int) -> None:
            """Raises what the port says."""
            raise not_found("run")

    handler = ingest_handler(large.binding, large.clock)
    handler._ingestion = Gone()  # type: ignore[assignment]
    assert await handler.handle(large.delivery, lambda: None) == ACKNOWLEDGE
    run = await large.run()
    assert (run.status, run.failure_detail) == (RunStatus.FAILED, "the run to copy from is gone")


async def test_a_late_second_ingester_does_no_harm_to_a_live_run(large: Ingestion) -> None:
    """It learned of the run before the first one finished, and finds the staged list gone."""
    ingestion = large.binding.ingestion
    before = await ingestion.ingesting(large.run_id)
    await large.handle()

    class Late:
        """The port, whose first answer is out of date."""

        answers = [before]

        def __getattr__(self, name: str) -> object:
            return getattr(ingestion, name)

        async def ingesting(self, run_id: str) -> object:
            """Answer once with the earlier state."""
            return self.answers.pop() if self.answers else await ingestion.ingesting(run_id)

    handler = ingest_handler(large.binding, large.clock)
    handler._ingestion = Late()  # type: ignore[assignment]
    assert await handler.handle(large.delivery, lambda: None) == ACKNOWLEDGE
    assert (await large.run()).status is RunStatus.RUNNING
    queue = run_queue(large.run_id)
    assert len(await large.binding.queues.receive(queue, limit=10, visibility=60)) == 10
    assert await large.binding.queues.receive(DEAD_LETTER_QUEUE, limit=10, visibility=60) == []


async def test_an_open_job_without_tasks_is_done_at_once(dev: DevBinding) -> None:
    empty = Ingestion(dev, FakeClock(), 0)
    await empty.stage()
    assert await empty.handle() == ACKNOWLEDGE
    assert not (await empty.run()).ingesting


async def test_a_stopped_run_keeps_the_rows_it_has(large: Ingestion) -> None:
    rows = StagedRows(0, LINE, large.line(0, LINE))
    await large.binding.ingestion.write_rows(large.run_id, rows, now=0)
    await large.stop()
    assert await large.handle() == ACKNOWLEDGE
    with pytest.raises(QueueMissing):
        await large.binding.queues.receive(run_queue(large.run_id), limit=1, visibility=60)
    run = await large.run()
    assert (run.status, run.ingesting, run.stats.total) == (RunStatus.STOPPED, False, LINE)
    assert await large.staged() == 0


async def test_a_failed_account_ends_it_likewise(large: Ingestion) -> None:
    await large.binding.runs.fail_run(
        large.run_id, reason=RunFailure.INSUFFICIENT_CREDITS, detail="no credits", now=0
    )
    assert await large.handle() == ACKNOWLEDGE
    run = await large.run()
    assert (run.status, run.ingesting, run.stats.total) == (RunStatus.FAILED, False, 0)
    assert run.failure_reason is RunFailure.INSUFFICIENT_CREDITS
    assert await large.staged() == 0


async def test_of_a_deleted_run_only_the_staged_list_is_removed(large: Ingestion) -> None:
    await large.binding.jobs.delete_job(CALLER, large.job_id, now=0)
    assert await large.handle() == ACKNOWLEDGE
    assert await large.indexes() == []
    assert await large.staged() == 0


async def test_one_frozen_in_the_middle_wakes_up_to_nothing(large: Ingestion) -> None:
    """The first is stopped between two stretches; the second finishes, and the tasks settle."""
    ingestion = large.binding.ingestion
    frozen, thawed = anyio.Event(), anyio.Event()

    class Slow:
        """The port, which freezes its caller before the third stretch."""

        calls = 0

        def __getattr__(self, name: str) -> object:
            return getattr(ingestion, name)

        async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
            """Write, once thawed."""
            self.calls += 1
            if self.calls == 3:
                frozen.set()
                await thawed.wait()
            return await ingestion.write_rows(run_id, rows, now=now)

    first = ingest_handler(large.binding, large.clock)
    first._ingestion = Slow()  # type: ignore[assignment]
    async with anyio.create_task_group() as group:
        group.start_soon(first.handle, large.delivery, lambda: None)
        await frozen.wait()
        assert await large.handle() == ACKNOWLEDGE
        await _settle_all(large)
        thawed.set()
    run = await large.run()
    assert (run.status, run.stats.successful, run.stats.total) == (RunStatus.COMPLETED, 30, 30)
    assert await large.indexes() == []


async def _settle_all(large: Ingestion) -> None:
    from conveyor.domain.model import Event, EventKind, Format, StoredBody
    from conveyor.domain.task_rules import Succeeded
    from conveyor.ports.tasks import Claimed

    tasks = large.binding.tasks
    for index, task_id in await tasks.unfinished_after(large.run_id, -1, 100):
        claim = await tasks.claim_task(
            large.run_id,
            task_id,
            worker="worker",
            now=0,
            claimed_until=60_000,
            max_interruptions=3,
        )
        assert isinstance(claim, Claimed)
        event = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=0, ended_at=0)
        body = StoredBody(f"body/{index}", 1, "text/html", Format.HTML)
        await tasks.settle_task(
            large.run_id, task_id, claim.task.claim_number, Succeeded(event, body), now=0
        )
