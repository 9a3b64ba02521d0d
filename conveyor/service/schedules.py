"""Show when schedules fire and what became of fires; change the schedules of jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import UNSET, structs

from conveyor.domain import strict_json
from conveyor.domain.api_keys import NONCE_LENGTH, UnsealError
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import (
    FireDecision,
    FireLook,
    with_known_zones,
    with_new_schedule,
    with_state,
)
from conveyor.domain.model import Job, JobView
from conveyor.domain.schedule import (
    ZONES_VERSION,
    Fire,
    Schedule,
    is_computable,
    local_time,
    parse_schedule,
    upcoming,
)
from conveyor.domain.scheduling import FireRecord, Overlap, Scheduling, parse_overlap
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.schedules import ScheduleChange
from conveyor.service.callers import Caller
from conveyor.service.context import Context
from conveyor.service.responses import PAUSED, STATES, job_body, next_run, schedule_body, state_word
from conveyor.service.results import Cursors
from conveyor.service.schemas import (
    FireBody,
    FireRecordBody,
    FiresPage,
    JobBody,
    JobScheduleBody,
    SchedulePreviewBody,
    present,
)

UNKNOWN_ZONE = (
    f"the zone rules {ZONES_VERSION} do not have this zone, and nothing fires: set another one"
)
"""Said of a schedule whose next fires cannot be computed."""
PREVIEWED = 10
"""Fires that a preview shows."""
CHANGES_TRIED = 8
"""Times that a change is tried while others change the job in between."""
_PAUSES = Backoff(0.02, 0.5)
_log = logging.getLogger("conveyor.service")


class JobSchedules:
    """Shows and changes the schedules of jobs, and shows the fires of one that is not saved."""

    def __init__(self, context: Context, cursors: Cursors) -> None:
        self._context = context
        self._clock = context.clock
        self._cursors = cursors

    def preview(self, body: bytes) -> SchedulePreviewBody:
        """Show the next fires of the schedule in a JSON document, as if it were saved now.

        Raises ConveyorError(invalid_argument), naming the field; also for a single time that has
        passed.
        """
        document = strict_json.decode(body)
        schedule = parse_schedule(document)
        parse_overlap(document, usual=Overlap.SKIP)
        now = self._clock.now()
        fires = upcoming(schedule, after=now, anchor=now, count=PREVIEWED)
        if schedule.at is not None and not fires:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "schedule.at: has passed")
        return SchedulePreviewBody(
            zones_version=ZONES_VERSION, fires=[_shown(fire, schedule) for fire in fires]
        )

    async def require(self, caller_id: str, job_id: str) -> None:
        """Raise ConveyorError unless the caller has this job (not_found), and it is scheduled
        (conflict)."""
        await self._scheduled(caller_id, job_id)

    async def show(self, caller_id: str, job_id: str) -> JobScheduleBody:
        """Show the schedule of a job with its next fires; a note in their place where the present
        rules do not have its zone. Raises ConveyorError: not_found; conflict on a regular job."""
        _, plan = await self._scheduled(caller_id, job_id)
        plan = with_known_zones(plan)
        is_known = is_computable(plan.schedule)
        fires: list[Fire] = []
        if plan.next_at is not None and is_known:
            fires = upcoming(
                plan.schedule, after=plan.next_at - 1, anchor=plan.anchor, count=PREVIEWED
            )
        return JobScheduleBody(
            job_id=job_id,
            schedule=schedule_body(plan),
            schedule_state=state_word(plan),
            next_scheduled_run=next_run(plan),
            waiting=present(plan.waiting or None),
            zones_version=plan.zones_version,
            fires=[_shown(fire, plan.schedule) for fire in fires],
            note=UNSET if is_known else f"{plan.schedule.timezone}: {UNKNOWN_ZONE}",
        )

    async def list_fires(
        self, caller_id: str, job_id: str, *, cursor: str | None, limit: int
    ) -> FiresPage:
        """Return a page of what became of a job's fires, newest first.

        Raises ConveyorError: not_found; conflict on a regular job; invalid_argument for a bad
        cursor.
        """
        await self._scheduled(caller_id, job_id)
        scope = f"fires:{job_id}"
        before = self._cursors.decode(cursor, scope=scope) if cursor is not None else None
        fires = await self._context.schedules.list_fires(job_id, before=before, limit=limit + 1)
        following = None
        if len(fires) > limit:
            following = self._cursors.encode(fires[limit - 1].fire_id, scope=scope)
        return FiresPage([_record(fire) for fire in fires[:limit]], present(following))

    async def replace(self, caller: Caller, job_id: str, body: bytes) -> JobBody:
        """Replace the schedule of a job by the one in a JSON document. A live run goes on.

        Raises ConveyorError: not_found; conflict on a regular job; invalid_argument, naming the
        field; unavailable.
        """
        document = strict_json.decode(body)
        schedule = parse_schedule(document)

        def change(job: Job, plan: Scheduling, look: FireLook) -> FireDecision:
            overlap = parse_overlap(document, usual=plan.overlap)
            return with_new_schedule(job, look, schedule, overlap=overlap)

        return await self._change(caller, job_id, change)

    async def set_state(self, caller: Caller, job_id: str, body: bytes) -> JobBody:
        """Pause or resume the schedule of a job, as a JSON document says. Resuming fires nothing:
        what was due before is noted as skipped.

        Raises as `replace` does.
        """
        is_paused = _parse_state(strict_json.decode(body)) == PAUSED

        def change(job: Job, _plan: Scheduling, look: FireLook) -> FireDecision:
            return with_state(job, look, paused=is_paused)

        return await self._change(caller, job_id, change)

    async def _look(self, view: JobView) -> FireLook:
        newest = await self._context.schedules.list_fires(view.job.job_id, before=None, limit=1)
        run = view.latest_run
        return FireLook(
            now=self._clock.now(),
            is_live=run is not None and run.status in LIVE_RUN_STATES,
            newest=next(iter(newest), None),
            run_id=self._clock.new_id(),
            fire_id=self._clock.new_id(),
            catch_up=round(self._context.options.schedule_catch_up * 1_000),
            interval=0,
        )

    async def _change(
        self,
        caller: Caller,
        job_id: str,
        change: Callable[[Job, Scheduling, FireLook], FireDecision],
    ) -> JobBody:
        """Change a job as it is read, anew whenever another write comes first, and seal the
        caller's key anew. What changes nothing is not written, unless no secret opens the key."""
        for attempt in range(1, CHANGES_TRIED + 1):
            view, plan = await self._scheduled(caller.caller_id, job_id)
            decided = change(view.job, plan, await self._look(view))
            if decided.after.scheduling == plan and self._opens(view.job):
                return job_body(view, waits=await self._context.waits.look())
            sealed_key = self._context.keyring.sealer.seal(
                caller.api_key, caller=caller.caller_id, nonce=self._clock.token(NONCE_LENGTH)
            )
            after = structs.replace(decided.after, sealed_key=sealed_key)
            made = ScheduleChange(before=view.job, after=after, fires=decided.fires)
            if await self._context.schedules.change_schedule(made):
                for reason, count in decided.lost.items():
                    fields = {"job_id": job_id, "reason": str(reason), "count": count}
                    _log.warning("fires made no run", extra=fields)
                shown = JobView(after, view.latest_run)
                return job_body(shown, waits=await self._context.waits.look())
            await self._clock.sleep(_PAUSES.full_jitter(attempt, self._clock.random()))
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, "others keep changing this job; try again", retry_after=1
        )

    def _opens(self, job: Job) -> bool:
        try:
            self._context.keyring.sealer.unseal(job)
        except UnsealError:
            return False
        return True

    async def _scheduled(self, caller_id: str, job_id: str) -> tuple[JobView, Scheduling]:
        view = await self._context.live_job(caller_id, job_id)
        if view.job.scheduling is None:
            raise ConveyorError(ErrorCode.CONFLICT, "a regular job has no schedule")
        return view, view.job.scheduling


def _parse_state(document: object) -> str:
    word = document.get("schedule_state") if isinstance(document, dict) else None
    if word not in STATES:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"schedule_state: must be {' or '.join(STATES)}"
        )
    return str(word)


def _shown(fire: Fire, schedule: Schedule) -> FireBody:
    zone = None if schedule.rate is not None else schedule.timezone
    return FireBody(
        at=rfc3339(fire.instant),
        local_time=local_time(fire.instant, zone),
        note=present(fire.note or None),
    )


def _record(fire: FireRecord) -> FireRecordBody:
    return FireRecordBody(
        fire_id=fire.fire_id,
        status=fire.status.value,
        reason=UNSET if fire.reason is None else fire.reason.value,
        count=fire.count,
        at=rfc3339(fire.instant),
        local_time=fire.nominal,
        last_at=rfc3339(fire.last_instant),
        last_local_time=fire.last_nominal,
        run_id=present(fire.run_id),
        updated_at=rfc3339(fire.noted_at),
    )
