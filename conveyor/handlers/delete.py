"""Scrubbing a deleted run: its rows in bounded steps, its bodies by prefix, its tombstone at
last."""

from __future__ import annotations

from conveyor.ports.binding import Binding
from conveyor.ports.blobs import LIFECYCLE_DAYS, run_prefix
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery
from conveyor.ports.work import ACKNOWLEDGE, Outcome, Throttled

ROWS_A_STEP = 1_000


class DeleteHandler:
    """The handler of delete messages.

    A second pass, one visibility timeout after the first, takes what a worker that was killed
    between body and settlement has left. Doing any of it twice is harmless.
    """

    def __init__(self, binding: Binding, *, visibility: float) -> None:
        self._binding = binding
        self._visibility = visibility

    async def handle(self, delivery: Delivery, _throttled: Throttled) -> Outcome:
        """Remove everything of one run."""
        message = delivery.message
        assert isinstance(message, DeleteMessage)
        await self._binding.queues.drop_run(message.run_id)
        while await self._binding.tasks.scrub_tasks(message.run_id, ROWS_A_STEP) > 0:
            pass
        for days in LIFECYCLE_DAYS:
            prefix = run_prefix(message.job_id, message.run_id, days)
            await self._binding.blobs.delete_prefix(prefix)
        if not message.final:
            again = DeleteMessage(message.job_id, message.run_id, final=True)
            await self._binding.queues.send(CONTROL_QUEUE, again, delay=self._visibility)
            return ACKNOWLEDGE
        await self._binding.runs.purge_run(message.run_id)
        await self._binding.jobs.purge_job(message.job_id)
        return ACKNOWLEDGE

    async def renew(self) -> None:
        """Nothing is held beside the message itself."""
