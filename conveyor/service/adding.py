"""Adding tasks to open jobs."""

from __future__ import annotations

from conveyor.domain import ids, strict_json
from conveyor.domain.submission import Limits, parse_add
from conveyor.ports.records import Answer, Appended
from conveyor.service.announcing import Announcer
from conveyor.service.context import Context
from conveyor.service.once import Given, KeyedRequest, OnceOnly, Ticket
from conveyor.service.wire import add_tasks_body, encode


class Additions:
    """Takes the documents that bring further tasks."""

    def __init__(
        self, context: Context, *, announcer: Announcer, once: OnceOnly, limits: Limits
    ) -> None:
        self._context = context
        self._announcer = announcer
        self._once = once
        self._limits = limits

    async def add_tasks(
        self, caller_id: str, job_id: str, body: bytes, *, keyed: KeyedRequest | None
    ) -> Given:
        """Add tasks to an open job, all of them or none.

        Raises ConveyorError: invalid_argument; not_found; job_not_open; last_batch_received;
        run_not_terminal; quota_exceeded; idempotency_key_conflict.
        """

        async def work(ticket: Ticket) -> Answer:
            return await self._append(caller_id, job_id, body, ticket)

        return await self._once.answer(keyed, work)

    async def _append(self, caller_id: str, job_id: str, body: bytes, ticket: Ticket) -> Answer:
        view = await self._context.live_job(caller_id, job_id)
        request = parse_add(strict_json.decode(body), self._limits, view.job.params)
        added: list[tuple[str, int]] = []

        def render(appended: Appended) -> Answer:
            made = add_tasks_body(appended)
            added[:] = [(made.latest_run.run_id, appended.first_index)]
            return Answer(200, encode(made))

        answer = await self._context.binding.jobs.append_tasks(
            caller_id,
            job_id,
            request.specs,
            last_batch=request.last_batch,
            max_tasks=self._limits.max_open_job_tasks,
            now=self._context.clock.now(),
            answer=render,
            once=ticket.once,
        )
        for run_id, first in added:
            indexes = range(first, first + len(request.specs))
            references = [(index, ids.task_id(run_id, index)) for index in indexes]
            await self._announcer.tasks_added(job_id, run_id, references)
        return answer
