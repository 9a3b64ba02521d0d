"""One run as an administrator looks at it, to find out why it is slow: its permits and their
holders, what the workers say of it, its queue and its counters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import not_found
from conveyor.domain.run_waits import Crew, RunWait, Sight, run_wait
from conveyor.ports.clock import Clock
from conveyor.ports.permits import PermitHolder
from conveyor.ports.queues import run_queues
from conveyor.prod.binding import Fleet


class WorkerLook(msgspec.Struct, frozen=True, kw_only=True):
    """A run as one worker has it. `calls` are under way, `in_hand` the messages that it holds,
    `put_off` the tasks that it left until later. Its gateway lets it make `ceiling` calls of the
    job at a time. `said_at` is in milliseconds since the epoch."""

    worker_id: str
    permits: int
    calls: int
    in_hand: int
    put_off: int
    ceiling: int
    slots: int
    slots_in_use: int
    said_at: int
    is_silent: bool
    waits_for: str | None


class RunLook(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, for an administrator. Instants are in milliseconds since the epoch.

    `permits` of `cap` are in use. `ceiling` is the least that a worker has left after refusals for
    load, None where no worker serves the run. About `queue_depth` messages wait. `counted_at` is
    the last change of the run or of its counters. `workers_alive` counts all of the fleet.
    """

    run_id: str
    job_id: str
    status: str
    is_paused: bool
    created_at: int
    looked_at: int
    total: int
    successful: int
    failed: int
    waiting: RunWait | None
    cap: int
    permits: int
    holders: Sequence[PermitHolder]
    ceiling: int | None
    queue_depth: int
    counted_at: int
    workers_alive: int
    workers: Sequence[WorkerLook]


async def look_at_run(fleet: Fleet, run_id: str, clock: Clock, *, heartbeat: float) -> RunLook:
    """Look at a run. `heartbeat` is that of the workers in seconds, where none was heard. Raises
    ConveyorError(not_found)."""
    run = await fleet.store.runs.find_run(run_id) if ids.is_ulid(run_id) else None
    job = None if run is None else await fleet.store.jobs.find_job(run.job_id)
    if run is None or job is None:
        raise not_found("run")
    reports = await fleet.workers.all()
    holders = await fleet.permits.holders(job.job_id)
    hosts = await fleet.store.runs.hosts_of(run_id)
    depth = sum([await fleet.queues.count(queue) for queue in run_queues(run_id, hosts)])
    now = clock.now()
    crew = Crew(reports, heard_at=now, heartbeat=heartbeat)
    sights = crew.sights(run_id)
    ceilings = [lane.ceiling for worker, lane in sights if lane.limit and not worker.is_silent(now)]
    return RunLook(
        run_id=run_id,
        job_id=job.job_id,
        status=run.status.value,
        is_paused=run.paused,
        created_at=run.created_at,
        looked_at=now,
        total=run.stats.total,
        successful=run.stats.successful,
        failed=run.stats.failed,
        waiting=run_wait(run, crew, now),
        cap=job.max_inflight,
        permits=sum(holder.count for holder in holders),
        holders=holders,
        ceiling=min(ceilings, default=None),
        queue_depth=depth,
        counted_at=run.updated_at,
        workers_alive=sum(not one.is_silent(now) for one in reports),
        workers=[_worker_look(sight, now) for sight in sights],
    )


def _worker_look(sight: Sight, now: int) -> WorkerLook:
    worker, lane = sight
    return WorkerLook(
        worker_id=worker.worker_id,
        permits=lane.permits,
        calls=lane.calling,
        in_hand=lane.in_flight + lane.buffered,
        put_off=lane.put_off,
        ceiling=lane.ceiling,
        slots=worker.slots,
        slots_in_use=worker.in_use,
        said_at=worker.said_at,
        is_silent=worker.is_silent(now),
        waits_for=None if lane.reason is None else lane.reason.value,
    )
