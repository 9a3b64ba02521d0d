"""Scheduled jobs of a development binding in virtual time, and schedulers that fire them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from conveyor.dev.binding import open_binding
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.fires import with_next_fire
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Job,
    JobStatus,
    Run,
    StoredBody,
    Task,
    TaskSpec,
)
from conveyor.domain.schedule import Calendar, Rate, Schedule
from conveyor.domain.scheduling import FireRecord, Scheduling, Template
from conveyor.domain.task_rules import Succeeded
from conveyor.handlers.fire import Scheduler, SchedulerOptions
from conveyor.intake.frames import Chunk
from conveyor.intake.rows import RowWriter
from conveyor.ports.binding import Binding
from conveyor.ports.handler import Handler
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery, Message, TemplateMessage
from conveyor.ports.records import StoredResponse
from conveyor.ports.schedules import ScheduleChange
from conveyor.ports.tasks import Claimed
from conveyor.records.blob_keys import TEMPLATES, result_key, template_key
from conveyor.testing.clock import FakeClock
from tests.unit.wired_handlers import delete_handler, ingest_handler, scheduler

CALLER = "caller"
API_KEY = "key-of-alice"
SECRET = b"the first root secret of the tests"
HOUR = 3_600.0
DAY = 24 * HOUR
INTERVAL = 5.0
CATCH_UP = 7 * DAY
VISIBILITY = 60.0
HOURLY = Schedule(rate=Rate(1, "hour"))
DAILY = Schedule(calendar=Calendar((9,)), timezone="Europe/Berlin")


@dataclass
class Schedules:
    """A development binding in virtual time, and what its schedulers have counted."""

    binding: Binding
    clock: FakeClock
    schedulers: list[Scheduler] = field(default_factory=list)
    max_active_jobs: int = 0

    @property
    def outcomes(self) -> dict[str, int]:
        """The counts of all schedulers."""
        counted: dict[str, int] = {}
        for one in self.schedulers:
            for outcome, count in one.outcomes.items():
                counted[outcome] = counted.get(outcome, 0) + count
        return counted

    def scheduler(
        self, *secrets: bytes, binding: Binding | None = None, interval: float = INTERVAL
    ) -> Scheduler:
        """One more scheduler."""
        made = scheduler(
            binding or self.binding,
            self.clock,
            sealer=KeySealer(secrets or (SECRET,)),
            options=SchedulerOptions(
                interval=interval, catch_up=CATCH_UP, max_active_jobs=self.max_active_jobs
            ),
        )
        self.schedulers.append(made)
        return made

    async def look(self, after: float = 0.0) -> None:
        """Let one more scheduler look, so many seconds later."""
        await self.clock.advance(after)
        await self.scheduler().fire()

    def draft(self, schedule: Schedule = HOURLY, *, rows: int = 3, **fields: Any) -> Job:
        """A scheduled job, neither staged nor written."""
        now = self.clock.now()
        template = Template(rows=rows, units=rows, chunks=(), list_id=self.clock.new_id())
        names = Scheduling.__struct_fields__
        of_schedule = {name: value for name, value in fields.items() if name in names}
        of_job = {name: value for name, value in fields.items() if name not in names}
        scheduling = with_next_fire(
            Scheduling(schedule=schedule, template=template, anchor=now, **of_schedule), after=now
        )
        job = Job(
            job_id=self.clock.new_id(),
            caller=CALLER,
            status=JobStatus.CLOSED,
            created_at=now,
            updated_at=now,
            scheduling=scheduling,
        )
        sealed = self.sealed(CALLER)
        return structs.replace(job, **({"sealed_key": sealed} | of_job))

    def sealed(self, caller: str, *secrets: bytes) -> bytes:
        """A caller's key, sealed."""
        nonce = self.clock.token(NONCE_LENGTH)
        return KeySealer(secrets or (SECRET,)).seal(API_KEY, caller=caller, nonce=nonce)

    async def add(self, schedule: Schedule = HOURLY, *, rows: int = 3, **fields: Any) -> Job:
        """Stage a template and write its job."""
        return await self.write(await self.stage(self.draft(schedule, rows=rows, **fields)))

    async def stage(self, job: Job) -> Job:
        """Stage the template of a job as a submit does; its rows have ids of no run."""
        assert job.scheduling is not None
        template = job.scheduling.template
        chunks: list[Chunk] = []
        writer = RowWriter(template.list_id, chunks.append)
        for first in range(0, template.rows, 250):
            writer.add([spec(index) for index in range(first, min(first + 250, template.rows))])
        writer.finish()
        for chunk in chunks:
            key = template_key(job.job_id, template.list_id, chunk.first_index)
            await self.binding.blobs.put(key, chunk.content)
        template = structs.replace(template, chunks=tuple(one.first_index for one in chunks))
        return structs.replace(job, scheduling=structs.replace(job.scheduling, template=template))

    async def write(self, job: Job) -> Job:
        """Write a scheduled job."""
        answer = StoredResponse(201, b"{}")
        await self.binding.jobs.create_job(job, None, [], answer=answer, once=None)
        return job

    async def job(self, job_id: str) -> Job:
        """A job as it stands."""
        job = await self.binding.jobs.find_job(job_id)
        assert job is not None
        return job

    async def scheduling(self, job: Job) -> Scheduling:
        """The scheduling of a job as it stands."""
        found = (await self.job(job.job_id)).scheduling
        assert found is not None
        return found

    async def change(self, job: Job, **fields: Any) -> None:
        """Change the scheduling of a job, as the API does."""
        before = await self.job(job.job_id)
        assert before.scheduling is not None
        scheduling = structs.replace(before.scheduling, **fields)
        after = structs.replace(before, scheduling=scheduling, version=before.version + 1)
        assert await self.binding.schedules.change_schedule(
            ScheduleChange(before=before, after=after)
        )

    async def runs(self, job: Job) -> list[Run]:
        """The runs of a job, oldest first."""
        found = await self.binding.runs.list_runs(job.caller, job.job_id, before=None, limit=1_000)
        return found[::-1]

    async def rows(self, run_id: str) -> list[Task]:
        """The rows of a run in order."""
        page = await self.binding.tasks.page_tasks(
            run_id, shard=0, statuses=None, after=None, limit=100_000
        )
        return page.tasks

    async def fires(self, job: Job) -> list[FireRecord]:
        """The record of a job, oldest first."""
        return (await self.binding.schedules.list_fires(job.job_id, before=None, limit=1_000))[::-1]

    async def record(self, job: Job) -> list[tuple[str, str | None, int]]:
        """The same in short: status, reason, count."""
        return [(one.status.value, one.reason, one.count) for one in await self.fires(job)]

    async def stop(self, job: Job) -> None:
        """End the live run of a job."""
        await self.binding.runs.stop_run(job.caller, job.job_id, now=self.clock.now())

    async def work(self) -> int:
        """Handle the control messages that wait; return their number."""
        handled = 0
        while found := await self.binding.queues.receive(
            CONTROL_QUEUE, limit=10, visibility=VISIBILITY
        ):
            for delivery in found:
                await self._handle(delivery)
                handled += 1
        return handled

    async def _handle(self, delivery: Delivery) -> None:
        ingest = ingest_handler(self.binding, self.clock)
        delete = delete_handler(self.binding, self.clock, visibility=VISIBILITY)
        handlers: dict[type[Message], Handler] = {TemplateMessage: ingest, DeleteMessage: delete}
        outcome = await handlers[type(delivery.message)].handle(delivery, lambda: None)
        assert outcome.hide_for is None
        await self.binding.queues.delete(delivery.queue, [delivery.receipt])

    async def drain(self, run: Run) -> None:
        """End every task of a run as successful."""
        for task in await self.rows(run.run_id):
            await self.succeed(run, task)

    async def succeed(self, run: Run, task: Task) -> None:
        """Let a task bring back a body."""
        now = self.clock.now()
        claim = await self.binding.tasks.claim_task(
            run.run_id,
            task.task_id,
            worker="worker",
            now=now,
            claimed_until=now + 60_000,
            max_interruptions=10,
        )
        assert isinstance(claim, Claimed), claim
        number = claim.task.claim_number
        key = result_key(run.job_id, run.run_id, task.task_id, number, 30)
        await self.binding.blobs.put(key, b"body")
        event = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=now, ended_at=now)
        ending = Succeeded(event, StoredBody(key, 4, "text/plain", Format.HTML))
        settled = await self.binding.tasks.settle_task(
            run.run_id, task.task_id, number, ending, now=now
        )
        assert settled.applied

    async def templates(self) -> list[str]:
        """The keys of all chunks of templates."""
        return await self.binding.blobs.list_keys(TEMPLATES, after="", limit=1_000)


def spec(index: int) -> TaskSpec:
    """One task of a template."""
    return TaskSpec(f"https://site.test/{index}", external_id=f"task {index} ü")


@asynccontextmanager
async def open_schedules(
    directory: Path, *, clock: FakeClock | None = None
) -> AsyncIterator[Schedules]:
    """An empty development binding under virtual time, or what an earlier one left."""
    clock = clock or FakeClock()
    opened = await open_binding(directory, clock)
    yield Schedules(opened.ports, clock)
    await opened.ports.aclose()
