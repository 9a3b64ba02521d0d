"""Making a new run of the latest one, in full or in part."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobView, RunStatus, Task, TaskStatus
from conveyor.domain.shards import shards_of
from conveyor.ports.records import Answer, Rerun
from conveyor.service.announcing import Announcer
from conveyor.service.context import Context
from conveyor.service.once import Given, KeyedRequest, OnceOnly, Ticket
from conveyor.service.wire import encode, made_run, rerun_body

CLAIM_WAIT = 5.0
"""Seconds that a rerun waits for the calls in flight of the run it replays."""

LATER = 202
"""The status of a rerun whose rows are written after the answer."""

LONGEST_CALL = 3_600_000
"""Milliseconds after the end of a run in which a call of it may still be under way: minutes, in
truth. The store, which decides, knows an older run at once."""

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.5
_CLAIM_PAGE = 10
_DAY = 86_400_000


class Reruns:
    """Reruns, full and partial."""

    def __init__(self, context: Context, announcer: Announcer, once: OnceOnly) -> None:
        self._context = context
        self._announcer = announcer
        self._once = once

    async def rerun(
        self,
        caller_id: str,
        job_id: str,
        *,
        statuses: frozenset[TaskStatus] | None,
        keyed: KeyedRequest | None,
    ) -> Given:
        """Make the new run; None as statuses replays everything. 202 where its rows come later.

        Raises ConveyorError as `Runs.rerun` does, idempotency_key_conflict besides.
        """

        async def work(ticket: Ticket) -> Answer:
            return await self._make(caller_id, job_id, statuses, ticket)

        return await self._once.answer(keyed, work)

    async def _make(
        self,
        caller_id: str,
        job_id: str,
        statuses: frozenset[TaskStatus] | None,
        ticket: Ticket,
    ) -> Answer:
        view = await self._context.live_job(caller_id, job_id)
        await self._wait_for_claims(view)
        now = self._context.clock.now()
        answer = await self._context.binding.runs.rerun(
            caller_id,
            job_id,
            ticket.created_id,
            statuses=statuses,
            window_start=now - self._context.options.partial_rerun_window_days * _DAY,
            large_from=self._context.options.async_threshold,
            now=now,
            answer=_answer,
            once=ticket.once,
        )
        if answer.status == LATER:
            await self._announcer.ingest_due(job_id, ticket.created_id)
        else:
            await self._announcer.run_made(job_id, ticket.created_id)
        return answer

    async def _wait_for_claims(self, view: JobView) -> None:
        """Calls in flight of a run cut short still settle, and would be missed or copied twice."""
        run = view.latest_run
        if run is None or run.status not in (RunStatus.STOPPED, RunStatus.FAILED):
            return
        clock = self._context.clock
        all_ended = run.stats.completed >= run.stats.total
        if all_ended or clock.now() - run.updated_at > LONGEST_CALL:
            return
        deadline = clock.monotonic() + CLAIM_WAIT
        for shard in range(shards_of(view.job).count):
            await self._wait_for_shard(run.run_id, shard, deadline)

    async def _wait_for_shard(self, run_id: str, shard: int, deadline: float) -> None:
        """Go through the claims of a shard. No row of a run that has ended comes to be claimed, so
        each stretch of rows is read about once, however long the wait."""
        after: int | None = None
        while True:
            page = await self._context.binding.tasks.page_tasks(
                run_id,
                shard=shard,
                statuses=frozenset({TaskStatus.PROCESSING}),
                after=after,
                limit=_CLAIM_PAGE,
            )
            claimed = next(filter(self._is_live, page.tasks), None)
            if claimed is not None:
                # What follows it is read anew: others have ended with it.
                await self._wait_for(claimed, deadline)
                after = claimed.index
            elif page.next_index is None:
                return
            else:
                after = page.next_index

    async def _wait_for(self, claimed: Task, deadline: float) -> None:
        """Look at one row, ever less often, until its claim has ended."""
        clock = self._context.clock
        pause = _FIRST_PAUSE
        task: Task | None = claimed
        while task is not None and self._is_live(task):
            left = deadline - clock.monotonic()
            if left <= 0:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_TERMINAL, "calls in flight of the stopped run have not ended"
                )
            await clock.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
            task = await self._context.binding.tasks.get_task(claimed.run_id, claimed.task_id)

    def _is_live(self, task: Task) -> bool:
        now = self._context.clock.now()
        return task.status is TaskStatus.PROCESSING and task.claimed_until > now


def parse_statuses(text: str | None) -> frozenset[TaskStatus] | None:
    """The task states named in a comma list. Raises ConveyorError(invalid_argument)."""
    if text is None:
        return None
    try:
        return frozenset(TaskStatus(word.strip()) for word in text.split(","))
    except ValueError:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT,
            f"status: must be a comma list of {', '.join(status.value for status in TaskStatus)}",
        ) from None


def _answer(rerun: Rerun) -> Answer:
    later = made_run(rerun.view).ingest is not None
    return Answer(LATER if later else 201, encode(rerun_body(rerun)))
