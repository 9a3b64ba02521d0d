"""Creates jobs, and adds tasks to open ones."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.domain import ids, strict_json
from conveyor.domain.api_keys import NONCE_LENGTH, key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import with_first_fire
from conveyor.domain.model import Ingest, IngestStatus, Job, JobStatus, Run, RunStats
from conveyor.domain.scheduling import Scheduling, Template
from conveyor.domain.shards import Shards, ShardScheme, layout
from conveyor.domain.states import live_run_status
from conveyor.domain.submission import JobRequest, Limits, parse_add, parse_job
from conveyor.ports.records import Appended, AppendRequest, StoredResponse
from conveyor.ports.tracing import TRACEPARENT
from conveyor.records.quotas import ActiveJobQuota, ScheduledJobQuota
from conveyor.service.callers import Caller
from conveyor.service.context import Context, template_is_fixed
from conveyor.service.idempotency import IdempotencyClaim, IdempotentRequests, KeyedRequest, Reply
from conveyor.service.list_validation import CancelOnDisconnect, never_disconnected
from conveyor.service.notifier import WorkNotifier
from conveyor.service.responses import add_tasks_body, encode, submit_body
from conveyor.service.task_lists import StagedList, TaskList, TaskListLoader
from conveyor.service.webhooks import ReceiverCheck


class Additions:
    """Adds further tasks to open jobs."""

    def __init__(
        self, context: Context, *, notifier: WorkNotifier, once: IdempotentRequests, limits: Limits
    ) -> None:
        self._context = context
        self._notifier = notifier
        self._once = once
        self._limits = limits

    async def add_tasks(
        self, caller_id: str, job_id: str, body: bytes, *, keyed: KeyedRequest | None
    ) -> Reply:
        """Add tasks to an open job, all or nothing.

        Raises ConveyorError: invalid_argument; not_found; job_not_open; last_batch_received;
        run_not_terminal; quota_exceeded; idempotency_key_conflict.
        """

        async def work(claim: IdempotencyClaim) -> StoredResponse:
            return await self._append(caller_id, job_id, body, claim)

        return await self._once.answer(keyed, work)

    async def _append(
        self, caller_id: str, job_id: str, body: bytes, claim: IdempotencyClaim
    ) -> StoredResponse:
        view = await self._context.live_job(caller_id, job_id)
        if view.job.scheduling is not None:
            raise template_is_fixed()
        request = parse_add(strict_json.decode(body), self._limits, view.job.params)
        added: list[tuple[str, int]] = []

        waits = await self._context.waits.look()

        def render(appended: Appended) -> StoredResponse:
            made = add_tasks_body(appended, request.remarks, waits=waits)
            added[:] = [(made.latest_run.run_id, appended.first_index)]
            return StoredResponse(200, encode(made))

        answer = await self._context.jobs.append_tasks(
            AppendRequest(
                caller=caller_id,
                job_id=job_id,
                specs=request.specs,
                last_batch=request.last_batch,
                max_tasks=self._limits.max_open_job_tasks,
                now=self._context.clock.now(),
            ),
            answer=render,
            once=claim.once,
        )
        for run_id, first in added:
            indexes = range(first, first + len(request.specs))
            references = [(index, ids.task_id(run_id, index)) for index in indexes]
            urls = (spec.url for spec in request.specs)
            await self._notifier.tasks_added(view.job, run_id, references, urls)
        return answer


READ_HERE = 262_144
"""Larger documents, in bytes, are checked by a child instead of on this event loop."""


class Submissions:
    """Creates jobs from the documents that describe them."""

    def __init__(
        self,
        context: Context,
        *,
        notifier: WorkNotifier,
        once: IdempotentRequests,
        limits: Limits,
        receivers: ReceiverCheck,
    ) -> None:
        self._context = context
        self._notifier = notifier
        self._once = once
        self._limits = limits
        self._receivers = receivers
        self._lists = TaskListLoader(
            context.inputs,
            context.blobs,
            context.options,
            context.clock,
            work=None if context.moved is None else context.moved.work,
        )
        self._active = ActiveJobQuota(context.jobs, limit=context.options.max_active_jobs)
        self._scheduled = ScheduledJobQuota(context.jobs, limit=context.options.max_scheduled_jobs)

    async def submit(
        self,
        caller: Caller,
        body: Sequence[bytes],
        *,
        keyed: KeyedRequest | None,
        attended: CancelOnDisconnect = never_disconnected,
    ) -> Reply:
        """Create a job from a JSON document in pieces, all or nothing.

        The answer is 201 with every row written, or 202 for a list that is long, or flagged to be
        written later. A scheduled job is made without a run: 201, with its template written. A long
        check of the list runs under `attended`; the rest is never cut short.
        Raises ConveyorError: invalid_argument, with every bad task listed; quota_exceeded;
        callback_url_must_be_https, callback_url_unresolvable, webhook_signing_requires_active_key;
        idempotency_key_conflict; file_input_not_found, file_input_not_uploaded,
        file_input_unsupported_for_job_type; payload_too_large; unavailable.
        """

        async def work(claim: IdempotencyClaim) -> StoredResponse:
            return await self._create(caller, body, claim, attended)

        async def found(claim: IdempotencyClaim) -> StoredResponse:
            return await self._created_before(caller.caller_id, claim.created_id)

        return await self._once.answer(keyed, work, found=found)

    async def _create(
        self,
        caller: Caller,
        body: Sequence[bytes],
        claim: IdempotencyClaim,
        attended: CancelOnDisconnect,
    ) -> StoredResponse:
        to = StagedList(
            self._context.blobs,
            job_id=claim.created_id,
            run_id=self._context.clock.new_id(),
        )
        try:
            request, tasks = await self._checked(caller.caller_id, body, to, attended)
            job, run = self._new_job(caller, request, to, tasks)
        except BaseException:
            await to.discard()
            raise
        status = 202 if run is not None and tasks.staged else 201
        remarks = request.remarks.joined(tasks.remarks)
        waits = await self._context.waits.look()
        made = submit_body(job, run, accepted=tasks.rows, waits=waits, remarks=remarks)
        answer = StoredResponse(status, encode(made))
        quota = self._active if run is not None else self._scheduled
        try:
            async with quota.room_for_one(caller.caller_id):
                await self._context.jobs.create_job(
                    job, run, tasks.tasks, answer=answer, once=claim.once
                )
        except Exception:
            await self._discard_unless_written(to)
            raise
        await self._announce(job, run, tasks)
        return answer

    async def _announce(self, job: Job, run: Run | None, tasks: TaskList) -> None:
        if run is None:
            return
        if tasks.staged:
            await self._notifier.ingest_due(run.job_id, run.run_id)
        else:
            references = [(task.index, task.task_id) for task in tasks.tasks]
            urls = (task.spec.url for task in tasks.tasks)
            await self._notifier.tasks_added(job, run.run_id, references, urls)

    async def _checked(
        self, caller_id: str, body: Sequence[bytes], to: StagedList, attended: CancelOnDisconnect
    ) -> tuple[JobRequest, TaskList]:
        """Check a document; return the request, and its tasks or those of the file that it
        names."""

        async def check(request: JobRequest) -> None:
            if not self._context.options.heeds_robots:
                _refuse_robots(request)
            if request.webhook is not None:
                await self._receivers.check(caller_id, request.webhook, prefix="webhook.")

        size = sum(map(len, body))
        if size > READ_HERE:
            request, tasks = await attended(
                lambda: self._lists.from_document(to, body, self._limits, check)
            )
        else:
            request = parse_job(strict_json.decode(b"".join(body)), self._limits)
            await check(request)
            if request.file_input_id is None:
                return request, await self._lists.from_specs(to, request, size)
        if request.file_input_id is not None:
            tasks = await attended(lambda: self._lists.from_file(to, request, caller_id))
        return request, tasks

    def _new_job(
        self, caller: Caller, request: JobRequest, to: StagedList, tasks: TaskList
    ) -> tuple[Job, Run | None]:
        """Build the job, and its first run unless it is scheduled.

        Raises ConveyorError(invalid_argument) for a single time that has passed.
        """
        clock = self._context.clock
        options = self._context.options
        now = clock.now()
        run = None
        if request.schedule is None:
            run = _first_run(to, tasks, is_open=request.open, now=now)
        shards = layout(
            Shards(options.task_shard_count, ShardScheme(options.shard_scheme)),
            large=tasks.rows >= options.async_threshold,
            is_open=request.open,
            units=tasks.units,
        )
        job = Job(
            job_id=to.job_id,
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
            task_shard_count=shards.count,
            shard_scheme=shards.scheme.value,
            sealed_key=self._context.keyring.sealer.seal(
                caller.api_key, caller=caller.caller_id, nonce=clock.token(NONCE_LENGTH)
            ),
            latest_run_id=None if run is None else run.run_id,
            run_count=0 if run is None else 1,
            callback=request.callback,
            webhook=request.webhook,
            scheduling=_scheduling(caller, request, to, tasks, now),
            politeness=request.politeness,
        )
        return job, run

    async def _discard_unless_written(self, to: StagedList) -> None:
        """Discard what was staged, unless the failed write happened after all and needs it."""
        job = await self._context.jobs.find_job(to.job_id) if to.chunks else None
        if job is None or not _needs(job, to):
            await to.discard()

    async def _created_before(self, caller_id: str, job_id: str) -> StoredResponse:
        """Build the answer for the job made by the request whose claim was taken over."""
        view = await self._context.live_job(caller_id, job_id)
        waits = await self._context.waits.look()
        if view.job.scheduling is not None:
            accepted = view.job.scheduling.template.rows
            made = submit_body(view.job, None, accepted=accepted, waits=waits)
            return StoredResponse(201, encode(made))
        run = view.latest_run
        accepted = run.stats.total if run is not None else 0
        status = 202 if run is not None and run.ingest is not None else 201
        made = submit_body(view.job, run, accepted=accepted, waits=waits)
        return StoredResponse(status, encode(made))


def _refuse_robots(request: JobRequest) -> None:
    if request.politeness is not None and request.politeness.robots:
        problem = (
            "politeness.robots: needs the gateway direct, and the extra robots where the server "
            "runs: pip install 'conveyor-batch[robots]', and a restart"
        )
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem)


def _needs(job: Job, to: StagedList) -> bool:
    """Return whether a job that was written has the rows of this list to come."""
    if job.scheduling is not None:
        return job.scheduling.template.list_id == to.run_id
    return job.latest_run_id == to.run_id


def _scheduling(
    caller: Caller, request: JobRequest, to: StagedList, tasks: TaskList, now: int
) -> Scheduling | None:
    if request.schedule is None:
        return None
    template = Template(
        rows=tasks.rows, units=tasks.units, chunks=tuple(to.chunks), list_id=to.run_id
    )
    return with_first_fire(
        Scheduling(
            schedule=request.schedule,
            template=template,
            anchor=now,
            overlap=request.overlap,
            key_hash=key_hash(caller.api_key),
        )
    )


def _first_run(to: StagedList, tasks: TaskList, *, is_open: bool, now: int) -> Run:
    stats = RunStats(total=tasks.rows)
    ingest = None
    if tasks.chunks is not None:
        ingest = Ingest(status=IngestStatus.PENDING, end=tasks.rows, chunks=tasks.chunks)
    return Run(
        run_id=to.run_id,
        job_id=to.job_id,
        run_sequence=1,
        status=live_run_status(stats, job_closed=not is_open, ingesting=ingest is not None),
        created_at=now,
        updated_at=now,
        last_batch_received=not is_open,
        next_index=tasks.rows,
        stats=stats,
        ingest=ingest,
        traceparent=TRACEPARENT.get(),
    )
