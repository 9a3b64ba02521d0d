"""Settle the events of webhooks: make one delivery of the end of a run."""

from __future__ import annotations

from collections.abc import Callable

from conveyor.domain.deliveries import EventDelivery, event_id
from conveyor.domain.model import Job, JobStatus, Run, RunStatus
from conveyor.domain.run_events import build_webhook_event, event_type
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.clock import Clock
from conveyor.ports.deliveries import DeliveryQueue
from conveyor.ports.outbox import Outbox, OutboxEntry
from conveyor.ports.records import JobLookup


class EventSettler:
    """Deals with entries of webhooks.

    `interval` is the number of seconds between two looks at a run that goes on, in case its end was
    not noted; `origin` is the public origin of the API, empty where it is not known.

    The delivery is written before the entry is dropped, under an id that follows from the run and
    its end: a crash in between loses no event, and makes no second one. `made` is called after one
    was written.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        outbox: Outbox,
        deliveries: DeliveryQueue,
        jobs: JobLookup,
        interval: float,
        origin: str,
        made: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._outbox = outbox
        self._deliveries = deliveries
        self._jobs = jobs
        self._interval = interval
        self._origin = origin
        self._made = made

    async def tell(self, entry: OutboxEntry) -> None:
        """Put the entry of a live run off; else make the delivery, if it is owed, and drop the
        entry."""
        run = entry.run
        if entry.ended_as is None and run is not None and run.status in LIVE_RUN_STATES:
            due_at = self._clock.now() + round(self._interval * 1_000)
            await self._outbox.reschedule_entry(entry, due_at=due_at, attempts=0)
            return
        if run is not None and run.status is not RunStatus.DELETED:
            await self._settle(entry, run)
        await self._outbox.drop_entry(entry)

    async def _settle(self, entry: OutboxEntry, run: Run) -> None:
        ended_as = entry.ended_as or run.status
        kind = event_type(ended_as)
        job = await self._jobs.find_job(entry.job_id)
        if job is None or not _wants(job, kind, entry):
            return
        ended_at = entry.ended_at or run.updated_at
        delivery_id = event_id(run.run_id, kind, ended_at=ended_at)
        now = self._clock.now()
        # Where the id exists, an earlier try got as far as this: its bytes stand.
        await self._deliveries.create_delivery(
            EventDelivery(
                delivery_id=delivery_id,
                caller=job.caller,
                job_id=job.job_id,
                run_id=run.run_id,
                event_type=kind,
                webhook_number=entry.webhook_number,
                body=build_webhook_event(
                    run,
                    ended_as,
                    job,
                    event_id=delivery_id,
                    ended_at=ended_at,
                    origin=self._origin,
                ),
                created_at=now,
                due_at=now,
                updated_at=now,
            )
        )
        self._made()


def _wants(job: Job, kind: str, entry: OutboxEntry) -> bool:
    """Return whether a job's event of a type is to be sent: not to a webhook that was set after the
    one which the run ended under was removed."""
    if job.status is JobStatus.DELETED or job.webhook is None:
        return False
    return kind in job.webhook.events and entry.webhook_number == job.webhook_number
