"""Creating jobs."""

from __future__ import annotations

from conveyor.domain import ids, strict_json
from conveyor.domain.model import Job, JobStatus, NewTask, Run, RunStats
from conveyor.domain.sealing import NONCE_LENGTH
from conveyor.domain.states import live_run_status
from conveyor.domain.submission import JobRequest, Limits, parse_job
from conveyor.ports.records import Answer
from conveyor.service.announcing import Announcer
from conveyor.service.callers import Caller
from conveyor.service.context import Context
from conveyor.service.once import Given, KeyedRequest, OnceOnly, Ticket
from conveyor.service.quota import ActiveJobQuota
from conveyor.service.unbuilt import refuse_large, refuse_unbuilt
from conveyor.service.wire import encode, submit_body


class Submissions:
    """Takes the documents that describe new jobs."""

    def __init__(
        self, context: Context, *, announcer: Announcer, once: OnceOnly, limits: Limits
    ) -> None:
        self._context = context
        self._announcer = announcer
        self._once = once
        self._limits = limits
        self._quota = ActiveJobQuota(context.binding.jobs, limit=context.options.max_active_jobs)

    async def submit(self, caller: Caller, body: bytes, *, keyed: KeyedRequest | None) -> Given:
        """Create a job from a JSON document, all of it or nothing.

        Raises ConveyorError: invalid_argument, with every bad task listed; quota_exceeded;
        not_implemented; idempotency_key_conflict.
        """

        async def work(ticket: Ticket) -> Answer:
            return await self._create(caller, self._parse(body), ticket)

        async def found(ticket: Ticket) -> Answer:
            return await self._created_before(caller.caller_id, ticket.created_id)

        return await self._once.answer(keyed, work, found=found)

    def _parse(self, body: bytes) -> JobRequest:
        document = strict_json.decode(body)
        options = self._context.options
        refuse_large(
            document,
            async_threshold=options.async_threshold,
            max_inline_tasks=options.max_inline_tasks,
        )
        request = parse_job(document, self._limits)
        refuse_unbuilt(request)
        return request

    async def _create(self, caller: Caller, request: JobRequest, ticket: Ticket) -> Answer:
        job, run = self._new_job(caller, request, ticket.created_id)
        tasks = [
            NewTask(index, ids.task_id(run.run_id, index), spec)
            for index, spec in enumerate(request.specs)
        ]
        answer = Answer(201, encode(submit_body(job, run, accepted=len(tasks))))
        async with self._quota.room_for_one(caller.caller_id):
            await self._context.binding.jobs.create_job(
                job, run, tasks, answer=answer, once=ticket.once
            )
        references = [(task.index, task.task_id) for task in tasks]
        await self._announcer.tasks_added(job.job_id, run.run_id, references)
        return answer

    def _new_job(self, caller: Caller, request: JobRequest, job_id: str) -> tuple[Job, Run]:
        clock = self._context.clock
        now = clock.now()
        stats = RunStats(total=len(request.specs))
        run = Run(
            run_id=clock.new_id(),
            job_id=job_id,
            run_sequence=1,
            status=live_run_status(stats, job_closed=not request.open),
            created_at=now,
            updated_at=now,
            last_batch_received=not request.open,
            next_index=stats.total,
            stats=stats,
        )
        job = Job(
            job_id=job_id,
            caller=caller.caller_id,
            status=JobStatus.OPEN if request.open else JobStatus.CLOSED,
            created_at=now,
            updated_at=now,
            name=request.name,
            external_id=request.external_id,
            metadata=request.metadata,
            params=request.params,
            format=request.format,
            max_inflight=request.max_inflight,
            priority=request.priority,
            max_attempts=request.max_attempts,
            result_ttl_days=request.result_ttl_days,
            sealed_key=self._context.keyring.sealer.seal(
                caller.api_key, caller=caller.caller_id, nonce=clock.token(NONCE_LENGTH)
            ),
            latest_run_id=run.run_id,
            run_count=1,
        )
        return job, run

    async def _created_before(self, caller_id: str, job_id: str) -> Answer:
        """The job that the request whose claim was taken over made after all."""
        view = await self._context.live_job(caller_id, job_id)
        run = view.latest_run
        accepted = run.stats.total if run is not None else 0
        return Answer(201, encode(submit_body(view.job, run, accepted=accepted)))
