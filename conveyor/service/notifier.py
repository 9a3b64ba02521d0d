"""Notifies the workers of writes.

The rows are the truth: if a notification fails, its change has been written, discovery or the next
start finds it, and the request has succeeded. So nothing in this module raises.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    ExportMessage,
    Queues,
    Signals,
    ingest_message,
)
from conveyor.ports.tasks import UnfinishedTasks
from conveyor.records.task_sending import TaskSender

SEND_CHUNK = 1_000

_log = logging.getLogger("conveyor.service")


class WorkNotifier:
    """Enqueues references and signals changed runs."""

    def __init__(
        self, queues: Queues, signals: Signals, tasks: UnfinishedTasks, sender: TaskSender
    ) -> None:
        self._queues = queues
        self._signals = signals
        self._tasks = tasks
        self._sender = sender

    async def tasks_added(
        self,
        job: Job,
        run_id: str,
        references: Sequence[tuple[int, str]],
        urls: Iterable[str],
    ) -> None:
        """Enqueue tasks written to a run, each (index, task_id), and its URL."""
        send = self._sender.send(
            job.job_id, run_id, references, politeness=job.politeness, urls=urls
        )
        await self._guard(send, run_id)
        self._signals.run_changed(run_id)

    async def run_made(self, job: Job, run_id: str) -> None:
        """Enqueue the rows of a rerun that was written."""
        await self._guard(self._send_unfinished(job, run_id), run_id)
        self._signals.run_changed(run_id)

    async def ingest_due(self, job_id: str, run_id: str, *, template: bool = False) -> None:
        """Request the rows of a run that was written without them."""
        message = ingest_message(job_id, run_id, template=template)
        await self._guard(self._queues.send(CONTROL_QUEUE, message), run_id)
        self._signals.run_changed(run_id)

    async def export_due(self, job_id: str, run_id: str, export_id: str) -> None:
        """Request the making of an export that was written."""
        message = ExportMessage(job_id, run_id, export_id)
        await self._guard(self._queues.send(CONTROL_QUEUE, message), run_id)
        self._signals.run_changed(run_id)

    async def run_ended(self, run_id: str) -> None:
        """Drop the queue of a run that may no longer be worked."""
        self._signals.run_halted(run_id)
        await self._guard(self._queues.drop_run(run_id), run_id)
        self._signals.run_ended(run_id)

    async def run_deleted(self, job_id: str, run_id: str) -> None:
        """Request the scrubbing of a run that became a tombstone: its rows and bodies."""
        self._signals.run_halted(run_id)
        message = DeleteMessage(job_id, run_id)
        await self._guard(self._queues.drop_run(run_id), run_id)
        await self._guard(self._queues.send(CONTROL_QUEUE, message), run_id)
        self._signals.run_ended(run_id)

    async def job_deleted(self, job_id: str) -> None:
        """Request the removal of what is left of a deleted job without a run."""
        await self._guard(self._queues.send(CONTROL_QUEUE, DeleteMessage(job_id, job_id)), job_id)

    def run_paused(self, run_id: str) -> None:
        """Signal that a run was paused."""
        self._signals.run_halted(run_id)
        self._signals.run_changed(run_id)

    def run_changed(self, run_id: str) -> None:
        """Signal that a run was resumed or closed."""
        self._signals.run_changed(run_id)

    def run_completed(self, run_id: str) -> None:
        """Signal that a run was closed when its tasks had ended."""
        self._signals.run_ended(run_id)

    async def _send_unfinished(self, job: Job, run_id: str) -> None:
        after = -1
        while references := await self._tasks.unfinished_after(run_id, after, SEND_CHUNK):
            await self._sender.send(job.job_id, run_id, references, politeness=job.politeness)
            after = references[-1][0]

    async def _guard(self, action: Awaitable[None], run_id: str) -> None:
        try:
            await action
        except Exception as error:
            code = error.code.value if isinstance(error, ConveyorError) else type(error).__name__
            _log.warning(
                "workers could not be notified of a change",
                extra={"run_id": run_id, "error": code},
            )
