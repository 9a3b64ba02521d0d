"""Makes a new run from the latest one, in full or in part; or the first one of a scheduled job."""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import structs

from conveyor.domain.api_keys import NONCE_LENGTH
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.fires import run_from_template
from conveyor.domain.model import Job, TaskStatus
from conveyor.ports.records import Rerun, RerunRequest, StoredResponse
from conveyor.ports.schedules import ScheduleChange
from conveyor.ports.tracing import TRACEPARENT
from conveyor.service.callers import Caller
from conveyor.service.context import Context
from conveyor.service.failures import known_groups, parse_groups
from conveyor.service.idempotency import IdempotencyClaim, IdempotentRequests, KeyedRequest, Reply
from conveyor.service.notifier import WorkNotifier
from conveyor.service.responses import encode, first_rerun_body, made_run, rerun_body
from conveyor.service.waiting import Waits

CLAIM_WAIT = 5.0
"""Seconds that a small rerun waits for calls in flight of the run it replays. For a large one, the
copying waits."""

LATER = 202
"""The status of a rerun whose rows are written after the answer."""

FIRES_TRIED = 8
"""Times that the first run of a scheduled job is tried while others change the job in between."""

_PAUSES = Backoff(0.05, 0.5)
_DAY = 86_400_000


class TaskChoice(msgspec.Struct, frozen=True):
    """The tasks of a run to start afresh: those in `statuses`, of None all; with `groups`, those of
    these failure groups alone."""

    statuses: frozenset[TaskStatus] | None = None
    groups: frozenset[str] | None = None


class Reruns:
    """Reruns, full and partial."""

    def __init__(self, context: Context, notifier: WorkNotifier, once: IdempotentRequests) -> None:
        self._context = context
        self._notifier = notifier
        self._once = once

    async def rerun(
        self,
        caller: Caller,
        job_id: str,
        *,
        choice: TaskChoice,
        keyed: KeyedRequest | None,
    ) -> Reply:
        """Make the new run of the tasks of a choice. Answers 202 if its rows come later. A
        scheduled job that has no run gets one from its template.

        Raises ConveyorError as `RunWriter.rerun` does, and idempotency_key_conflict.
        """

        async def work(claim: IdempotencyClaim) -> StoredResponse:
            return await self._make(caller, job_id, choice, claim)

        return await self._once.answer(keyed, work)

    async def _make(
        self,
        caller: Caller,
        job_id: str,
        choice: TaskChoice,
        claim: IdempotencyClaim,
    ) -> StoredResponse:
        if choice.statuses is None:
            fired = await self._fire(caller, job_id, claim)
            if isinstance(fired, StoredResponse):
                return fired
            job = fired
        else:
            view = await self._context.live_job(caller.caller_id, job_id)
            job = view.job
            if choice.groups is not None and view.latest_run is not None:
                await known_groups(self._context.tasks, view.latest_run.run_id, choice.groups)
        patience = _SourceWait(self._context)
        while True:
            try:
                answer = await self._replay(caller.caller_id, job_id, choice, claim)
                break
            except CallInFlight as held:
                await patience.wait_for(held.run_id, held.task_id)
        if answer.status == LATER:
            await self._notifier.ingest_due(job_id, claim.created_id)
        else:
            await self._notifier.run_made(job, claim.created_id)
        return answer

    async def _fire(
        self, caller: Caller, job_id: str, claim: IdempotencyClaim
    ) -> StoredResponse | Job:
        """Make a run from the template of a scheduled job, and seal the caller's key anew; return
        the job if there is a run to replay."""
        context = self._context
        for attempt in range(1, FIRES_TRIED + 1):
            view = await context.live_job(caller.caller_id, job_id)
            if view.job.scheduling is None or view.latest_run is not None:
                return view.job
            after, run = run_from_template(
                view.job,
                run_id=claim.created_id,
                trigger="manual",
                now=context.clock.now(),
            )
            sealed_key = context.keyring.sealer.seal(
                caller.api_key, caller=caller.caller_id, nonce=context.clock.token(NONCE_LENGTH)
            )
            after = structs.replace(after, sealed_key=sealed_key)
            made = first_rerun_body(after, run, waits=await context.waits.look())
            answer = StoredResponse(LATER, encode(made))
            change = ScheduleChange(
                before=view.job, after=after, run=run, answer=answer, once=claim.once
            )
            if await self._context.schedules.change_schedule(change):
                await self._notifier.ingest_due(job_id, run.run_id, template=True)
                return answer
            await self._context.clock.sleep(_PAUSES.delay(attempt))
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, "others keep changing this job; try again", retry_after=1
        )

    async def _replay(
        self,
        caller_id: str,
        job_id: str,
        choice: TaskChoice,
        claim: IdempotencyClaim,
    ) -> StoredResponse:
        now = self._context.clock.now()
        return await self._context.runs.rerun(
            RerunRequest(
                caller=caller_id,
                job_id=job_id,
                run_id=claim.created_id,
                statuses=choice.statuses,
                groups=choice.groups,
                window_start=now - self._context.options.partial_rerun_window_days * _DAY,
                large_from=self._context.options.async_threshold,
                now=now,
                traceparent=TRACEPARENT.get(),
            ),
            answer=partial(_answer, await self._context.waits.look()),
            once=claim.once,
        )


class _SourceWait:
    """Waits, for one rerun, for calls that it would miss or copy twice.

    A wait polls one row, less and less often. The store is asked again only when that claim has
    ended, and scans its rows anew: each wait is longer than the one before, so there are at most a
    dozen scans.
    """

    def __init__(self, context: Context) -> None:
        self._clock = context.clock
        self._tasks = context.tasks
        self._deadline = context.clock.monotonic() + CLAIM_WAIT
        self._looks = 0

    async def wait_for(self, run_id: str, task_id: str) -> None:
        """Wait until the claim of a task has ended.

        Raises ConveyorError(run_not_terminal) if all waits together take too long.
        """
        is_held = True
        while is_held:
            left = self._deadline - self._clock.monotonic()
            if left <= 0:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_TERMINAL, "calls in flight of the stopped run have not ended"
                )
            self._looks += 1
            await self._clock.sleep(min(_PAUSES.delay(self._looks), left))
            task = await self._tasks.get_task(run_id, task_id)
            is_held = (
                task is not None
                and task.status is TaskStatus.PROCESSING
                and task.claimed_until > self._clock.now()
            )


def parse_choice(status: str | None, group: str | None) -> TaskChoice:
    """Parse a comma list of task states, and one of failure groups. Raises
    ConveyorError(invalid_argument)."""
    statuses = _parse_statuses(status)
    return TaskChoice(statuses, parse_groups(group, statuses))


def _parse_statuses(text: str | None) -> frozenset[TaskStatus] | None:
    if text is None:
        return None
    try:
        return frozenset(TaskStatus(word.strip()) for word in text.split(","))
    except ValueError:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT,
            f"status: must be a comma list of {', '.join(status.value for status in TaskStatus)}",
        ) from None


def _answer(waits: Waits, rerun: Rerun) -> StoredResponse:
    later = made_run(rerun.view).ingest is not None
    return StoredResponse(LATER if later else 201, encode(rerun_body(rerun, waits=waits)))
