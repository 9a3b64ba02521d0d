"""Schedulers at work over every store: one run for each fire, and its rows from the template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from conveyor.dev.files import FileBlobs
from conveyor.dev.queues import LocalSignals
from conveyor.domain import ids
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.model import Job, RunStatus
from conveyor.domain.scheduling import Template
from conveyor.handlers.fire import Scheduler, SchedulerOptions, SchedulerPorts
from conveyor.handlers.ingest import IngestHandler
from conveyor.intake.frames import Chunk
from conveyor.intake.rows import RowWriter
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, Message, TemplateMessage
from conveyor.records.blob_keys import template_key
from conveyor.records.task_sending import TaskSender
from conveyor.service.context import NO_LIMITS
from tests.conformance.bindings import BindingKind
from tests.conformance.scheduled_jobs import HOUR, schedule_job
from tests.conformance.world import CALLER, World, spec

SEALER = KeySealer([b"the root secret"])


class Sent:
    """The queues port, as far as these handlers know it: keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.references: list[tuple[int, str]] = []

    async def send(self, queue: str, message: Message) -> None:
        """Keep a control message."""
        assert queue == CONTROL_QUEUE
        self.messages.append(message)

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """There is nothing to open."""

    async def send_tasks(
        self,
        _job_id: str,
        _run_id: str,
        tasks: Sequence[tuple[int, str]],
        _hosts: Sequence[str] = (),
        _lanes: Sequence[str] = (),
    ) -> None:
        """Keep references."""
        self.references += tasks


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[FileBlobs]:
    opened = FileBlobs(tmp_path / "blobs")
    yield opened
    await opened.aclose()


def _scheduler(world: World, sent: Sent) -> Scheduler:
    ports = SchedulerPorts(
        schedules=world.store.schedules,
        jobs=world.store.jobs,
        runs=world.store.runs,
        queues=cast(Any, sent),
        signals=LocalSignals(),
        sealer=SEALER,
    )
    options = SchedulerOptions(interval=5.0, catch_up=3_600.0, max_active_jobs=0)
    return Scheduler(ports, world.clock, options=options)


async def _job(world: World, **fields: Any) -> Job:
    nonce = world.clock.token(NONCE_LENGTH)
    sealed_key = SEALER.seal("key", caller=CALLER, nonce=nonce)
    return await schedule_job(
        world,
        anchor=world.now - HOUR,
        next_at=world.now,
        of_job={"sealed_key": sealed_key},
        **fields,
    )


@pytest.mark.guarantee("G21")
async def test_four_schedulers_make_one_run_for_each_fire(
    binding_kind: BindingKind, world: World
) -> None:
    count = round(60 * binding_kind.effort)
    jobs = [await _job(world) for _ in range(count)]
    sent = Sent()
    schedulers = [_scheduler(world, sent) for _ in range(4)]

    async with anyio.create_task_group() as group:
        for one in schedulers:
            group.start_soon(one.fire)

    assert sum(one.outcomes.get("started", 0) for one in schedulers) == count
    runs = [await world.run(job.job_id) for job in jobs]
    assert {run.run_sequence for run in runs} == {1}
    assert sorted(map(str, sent.messages)) == sorted(
        str(TemplateMessage(run.job_id, run.run_id)) for run in runs
    )
    await world.clock.advance(60)
    for one in schedulers:
        await one.fire()
    assert sum(one.outcomes.get("started", 0) for one in schedulers) == count
    for job in jobs[::10]:
        [row] = await world.store.schedules.list_fires(job.job_id, before=None, limit=10)
        assert row.run_id == (await world.run(job.job_id)).run_id


async def test_the_rows_of_a_run_are_those_of_the_template(world: World, blobs: FileBlobs) -> None:
    """Of each run anew, with ids of its own."""
    chunks: list[Chunk] = []
    list_id = world.clock.new_id()
    writer = RowWriter(list_id, chunks.append)
    writer.add([spec(index) for index in range(130)])
    writer.finish()
    template = Template(rows=130, units=130, chunks=(0,), list_id=list_id)
    job = await _job(world, template=template)
    [chunk] = chunks
    await blobs.put(template_key(job.job_id, list_id, 0), chunk.content)

    for number in (1, 2):
        sent = Sent()
        await _scheduler(world, sent).fire()
        [message] = sent.messages
        handler = IngestHandler(
            world.clock,
            ingestion=world.store.ingestion,
            blobs=blobs,
            queues=cast(Any, sent),
            signals=LocalSignals(),
            sender=TaskSender(
                cast(Any, sent), world.store.runs, world.store.tasks, NO_LIMITS, world.clock
            ),
        )
        delivery = Delivery(CONTROL_QUEUE, message, "receipt", 1)
        assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE

        run = await world.run(job.job_id)
        assert (run.run_sequence, run.status) == (number, RunStatus.RUNNING)
        rows = await world.rows(run.run_id)
        assert [row.spec for row in rows] == [spec(index) for index in range(130)]
        assert [row.task_id for row in rows] == ids.task_ids(run.run_id, 0, 130)
        assert sent.references == [(row.index, row.task_id) for row in rows]
        await world.store.runs.stop_run(CALLER, job.job_id, now=world.now)
        await world.clock.advance(HOUR / 1_000)
