"""Telling the workers what a write has done.

The rows are the truth: whatever fails here has been written already, discovery or the next start
finds it, and the request has succeeded. So nothing in this module raises.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence

from conveyor.domain.errors import ConveyorError
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    ExportMessage,
    IngestMessage,
    Queues,
    Signals,
)
from conveyor.ports.tasks import Tasks

SEND_CHUNK = 1_000

_log = logging.getLogger("conveyor.service")


class WorkNotifier:
    """Enqueues references and hints at changed runs."""

    def __init__(self, queues: Queues, signals: Signals, tasks: Tasks) -> None:
        self._queues = queues
        self._signals = signals
        self._tasks = tasks

    async def tasks_added(
        self, job_id: str, run_id: str, references: Sequence[tuple[int, str]]
    ) -> None:
        """Tasks, (index, task_id) each, were written to a run."""
        await self._guard(self._send(job_id, run_id, references), run_id)
        self._signals.run_changed(run_id)

    async def run_made(self, job_id: str, run_id: str) -> None:
        """A rerun was written, with rows in it that nobody has enqueued yet."""
        await self._guard(self._send_unfinished(job_id, run_id), run_id)
        self._signals.run_changed(run_id)

    async def ingest_due(self, job_id: str, run_id: str) -> None:
        """A run was written whose rows are still to come."""
        await self._guard(self._queues.send(CONTROL_QUEUE, IngestMessage(job_id, run_id)), run_id)
        self._signals.run_changed(run_id)

    async def export_due(self, job_id: str, run_id: str, export_id: str) -> None:
        """An export was written that is still to be made."""
        message = ExportMessage(job_id, run_id, export_id)
        await self._guard(self._queues.send(CONTROL_QUEUE, message), run_id)
        self._signals.run_changed(run_id)

    async def run_ended(self, run_id: str) -> None:
        """A run may no longer be worked: what waits in its queue is void."""
        await self._guard(self._queues.drop_run(run_id), run_id)
        self._signals.run_changed(run_id)

    async def run_deleted(self, job_id: str, run_id: str) -> None:
        """A run has become a tombstone: its rows and bodies are to be scrubbed."""
        message = DeleteMessage(job_id, run_id)
        await self._guard(self._queues.drop_run(run_id), run_id)
        await self._guard(self._queues.send(CONTROL_QUEUE, message), run_id)
        self._signals.run_changed(run_id)

    def run_changed(self, run_id: str) -> None:
        """A run was paused, resumed, closed."""
        self._signals.run_changed(run_id)

    async def _send(self, job_id: str, run_id: str, references: Sequence[tuple[int, str]]) -> None:
        await self._queues.open_run(job_id, run_id)
        if references:
            await self._queues.send_tasks(job_id, run_id, references)

    async def _send_unfinished(self, job_id: str, run_id: str) -> None:
        await self._queues.open_run(job_id, run_id)
        after = -1
        while references := await self._tasks.unfinished_after(run_id, after, SEND_CHUNK):
            await self._queues.send_tasks(job_id, run_id, references)
            after = references[-1][0]

    async def _guard(self, action: Awaitable[None], run_id: str) -> None:
        try:
            await action
        except Exception as error:
            code = error.code.value if isinstance(error, ConveyorError) else type(error).__name__
            _log.warning(
                "a written change could not be announced",
                extra={"run_id": run_id, "error": code},
            )
