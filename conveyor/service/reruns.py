"""Making a new run of the latest one, in full or in part."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobView, RunStatus, TaskStatus
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

_CLAIM_POLL = 0.05
_CLAIM_PAGE = 1_000
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
        deadline = clock.monotonic() + CLAIM_WAIT
        shards = range(shards_of(view.job).count)
        while any([await self._has_live_claim(run.run_id, shard) for shard in shards]):
            if clock.monotonic() >= deadline:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_TERMINAL, "calls in flight of the stopped run have not ended"
                )
            await clock.sleep(_CLAIM_POLL)

    async def _has_live_claim(self, run_id: str, shard: int) -> bool:
        after: int | None = None
        while True:
            page = await self._context.binding.tasks.page_tasks(
                run_id,
                shard=shard,
                statuses=frozenset({TaskStatus.PROCESSING}),
                after=after,
                limit=_CLAIM_PAGE,
            )
            now = self._context.clock.now()
            if any(task.claimed_until > now for task in page.tasks):
                return True
            if page.next_index is None:
                return False
            after = page.next_index


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
