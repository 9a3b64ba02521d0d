"""Fires of scheduled jobs: which of those that are due make a run of the job's template, and which
pass without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from msgspec import structs
from ulid import ULID

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, Job, Run, RunStats, RunStatus
from conveyor.domain.schedule import (
    ZONES_VERSION,
    Fire,
    Schedule,
    is_computable,
    next_fire,
    next_fires,
    zone_of,
)
from conveyor.domain.scheduling import (
    FireRecord,
    FireStatus,
    Overlap,
    Scheduling,
    SkipReason,
)
from conveyor.domain.text_rules import rfc3339

LONGEST_PAUSE = 60_000
"""Milliseconds at most between two looks at a fire that waits for the end of a run."""
NOTEWORTHY = frozenset({FireStatus.MISSED, SkipReason.QUOTA_EXCEEDED, SkipReason.KEY_UNREADABLE})
"""Outcomes that somebody should know of: the caller asked for none of them."""
WAITED_SHARE = 10
"""A fire that waits is looked at again when it has waited a tenth longer."""


def run_from_template(job: Job, *, run_id: str, trigger: str, now: int) -> tuple[Job, Run]:
    """Make a run of a scheduled job whose rows are ingested from the template; return the next
    version of the job, and the run. `trigger` is scheduled or manual."""
    assert job.scheduling is not None
    template = job.scheduling.template
    run = Run(
        run_id=run_id,
        job_id=job.job_id,
        run_sequence=job.run_count + 1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        trigger=trigger,
        last_batch_received=True,
        next_index=template.rows,
        stats=RunStats(total=template.rows),
        ingest=Ingest(
            status=IngestStatus.PENDING,
            end=template.rows,
            chunks=template.chunks,
            template=True,
            list_id=template.list_id,
        ),
    )
    after = structs.replace(
        job,
        updated_at=max(job.updated_at, now),
        latest_run_id=run_id,
        run_count=run.run_sequence,
        version=job.version + 1,
    )
    return after, run


# -- the next fire --


def with_next_fire(scheduling: Scheduling, *, after: int) -> Scheduling:
    """Compute the next fire by the present zone rules: the first one later than `after`, and than
    the latest fire that was decided."""
    floor = max(after, scheduling.last_at)
    fire = next_fire(scheduling.schedule, after=floor, anchor=scheduling.anchor)
    return _moved(scheduling, fire)


def with_first_fire(scheduling: Scheduling) -> Scheduling:
    """Compute the first fire of a schedule that begins at its anchor.

    Raises ConveyorError(invalid_argument) for a single time that has passed, or that is not later
    than the latest fire that was decided: a clock may have been set back since.
    """
    begun = with_next_fire(scheduling, after=scheduling.anchor)
    if begun.next_at is None and begun.schedule.at is not None:
        problem = "has passed"
        if next_fire(begun.schedule, after=begun.anchor, anchor=begun.anchor) is not None:
            latest = rfc3339(scheduling.last_at)
            problem = f"must be later than the latest fire that was decided, {latest}"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"schedule.at: {problem}")
    return begun


def with_schedule(scheduling: Scheduling, schedule: Schedule, *, now: int) -> Scheduling:
    """Set another schedule from `now` on. The same one changes nothing, not even the anchor of a
    rate, nor does another zone beside a rate. A fire that waits already is kept.

    Raises ConveyorError as `with_first_fire` does, for another schedule.
    """
    if schedule == scheduling.schedule:
        return scheduling
    changed = structs.replace(scheduling, schedule=schedule)
    if schedule.rate is not None and schedule.rate == scheduling.schedule.rate:
        return changed
    return with_first_fire(structs.replace(changed, anchor=now, last_nominal=""))


def with_present_zones(scheduling: Scheduling) -> Scheduling:
    """Compute the stored next fire anew if it was computed by other zone rules.

    A fire is identified by its nominal time: neither does one fire again whose instant the new
    rules move, nor is one left out. Raises KeyError for a zone that the present rules do not have.
    """
    if scheduling.zones_version == ZONES_VERSION:
        return scheduling
    if scheduling.next_at is None or scheduling.schedule.rate is not None:
        return structs.replace(scheduling, zones_version=ZONES_VERSION)
    if scheduling.last_nominal:
        after = _instant_of(scheduling.last_nominal, scheduling.schedule)
    else:
        after = _instant_of(scheduling.next_nominal, scheduling.schedule) - 1
    fires = next_fires(scheduling.schedule, after=after, anchor=scheduling.anchor)
    fire = next((fire for fire in fires if fire.nominal != scheduling.last_nominal), None)
    return _moved(scheduling, fire)


def with_known_zones(scheduling: Scheduling) -> Scheduling:
    """Compute the stored next fire anew as `with_present_zones` does; leave it as it is where the
    present rules do not have the zone."""
    return with_present_zones(scheduling) if is_computable(scheduling.schedule) else scheduling


def _instant_of(nominal: str, schedule: Schedule) -> int:
    local = datetime.fromisoformat(nominal)
    if local.tzinfo is None:
        local = local.replace(tzinfo=zone_of(schedule.timezone or "UTC"))
    return round(local.astimezone(UTC).timestamp() * 1_000)


def _moved(scheduling: Scheduling, fire: Fire | None) -> Scheduling:
    """Put the next fire in its place; a look that was set for a fire that waits comes no later."""
    next_at = None if fire is None else fire.instant
    look_at = scheduling.look_at if scheduling.waiting else None
    if look_at is not None and next_at is not None:
        look_at = min(look_at, next_at)
    return structs.replace(
        scheduling,
        next_at=next_at,
        next_nominal="" if fire is None else fire.nominal,
        look_at=look_at,
        zones_version=ZONES_VERSION,
    )


# -- the fires that are due --


@dataclass(frozen=True, slots=True)
class FireSpan:
    """So many fires in a row, the first and the last of them."""

    count: int
    first: Fire
    last: Fire


@dataclass(frozen=True, slots=True)
class DueFires:
    """The newest of the fires that are due, and the earlier ones, if there are any."""

    newest: Fire
    earlier: FireSpan | None = None

    @property
    def all(self) -> FireSpan:
        """All of them."""
        if self.earlier is None:
            return FireSpan(1, self.newest, self.newest)
        return FireSpan(self.earlier.count + 1, self.earlier.first, self.newest)


def due_fires(scheduling: Scheduling, *, now: int) -> DueFires | None:
    """Return the fires from the stored next one up to `now`; None if it is later."""
    if scheduling.next_at is None or scheduling.next_at > now:
        return None
    first = newest = Fire(scheduling.next_at, scheduling.next_nominal)
    before, count = first, 1
    rate = scheduling.schedule.rate
    if rate is not None:
        # They may be too many to go through.
        count += (now - first.instant) // rate.interval
        if count > 1:
            start = first.instant + (count - 3) * rate.interval
            ends = next_fires(scheduling.schedule, after=start, anchor=scheduling.anchor)
            before, newest = next(ends), next(ends)
    else:
        for fire in next_fires(scheduling.schedule, after=first.instant, anchor=scheduling.anchor):
            if fire.instant > now:
                break
            before, newest, count = newest, fire, count + 1
    return DueFires(newest, FireSpan(count - 1, first, before) if count > 1 else None)


# -- the decision --


class FireLook(msgspec.Struct, frozen=True, kw_only=True):
    """The knowledge of a worker that looks at a scheduled job.

    `is_live` says whether its latest run is live, `newest` is the newest row of its record.
    `run_id` and `fire_id` are fresh ids. A fire may be `catch_up` late, and looks are `interval`
    apart, in milliseconds.
    """

    now: int
    is_live: bool
    newest: FireRecord | None
    run_id: str
    fire_id: str
    catch_up: int
    interval: int


class FireDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The next version of a job, the run that it starts and the fire of that run, if any, and the
    rows for its record. `outcomes` counts the fires by outcome: the reason of those skipped. `lost`
    are those among them that somebody should know of."""

    after: Job
    run: Run | None
    started: Fire | None
    fires: tuple[FireRecord, ...]
    outcomes: dict[str, int]

    @property
    def lost(self) -> dict[str, int]:
        """Return the noteworthy outcomes."""
        return {word: count for word, count in self.outcomes.items() if word in NOTEWORTHY}


def decide_fires(job: Job, look: FireLook, *, refused: SkipReason | None = None) -> FireDecision:
    """Decide about the fires of a job that are due. `refused` is why no run may start now."""
    assert job.scheduling is not None
    notes = _Notes(look)
    scheduling = with_present_zones(job.scheduling)
    due = due_fires(scheduling, now=look.now)
    fire, scheduling = _waiting(scheduling, due, look, notes)
    if due is not None:
        fire = _newest(scheduling, due, look, notes)
        scheduling = with_next_fire(_passed(scheduling, due), after=due.newest.instant)
    start = None
    if fire is not None and look.is_live and scheduling.overlap is Overlap.WAIT:
        scheduling = _wait(scheduling, fire, notes)
    elif fire is not None and (look.is_live or refused is not None):
        reason = SkipReason.RUN_LIVE if look.is_live else refused
        assert reason is not None
        notes.skip(reason, FireSpan(1, fire, fire))
    elif fire is not None:
        start = fire
        notes.start(fire)
    scheduling = _look_again(scheduling, look)
    after, run = structs.replace(job, version=job.version + 1), None
    if start is not None:
        after, run = run_from_template(job, run_id=look.run_id, trigger="scheduled", now=look.now)
    return FireDecision(
        after=structs.replace(after, scheduling=scheduling),
        run=run,
        started=start,
        fires=tuple(notes.rows),
        outcomes=notes.outcomes,
    )


def with_state(job: Job, look: FireLook, *, paused: bool) -> FireDecision:
    """Pause or resume the schedule of a job. Resuming fires nothing: what was due before is noted
    as skipped. Where the present rules do not have the zone, nothing is decided."""
    assert job.scheduling is not None
    present = with_known_zones(job.scheduling)
    is_due = bool(present.waiting) or (present.next_at is not None and present.next_at <= look.now)
    if not paused and present.paused and is_due and is_computable(present.schedule):
        decided = decide_fires(job, look)
    else:
        after = structs.replace(job, version=job.version + 1, scheduling=present)
        decided = FireDecision(after=after, run=None, started=None, fires=(), outcomes={})
    assert decided.after.scheduling is not None
    changed = structs.replace(
        decided.after,
        updated_at=max(job.updated_at, look.now),
        scheduling=structs.replace(decided.after.scheduling, paused=paused),
    )
    return structs.replace(decided, after=changed)


def with_new_schedule(
    job: Job, look: FireLook, schedule: Schedule, *, overlap: Overlap
) -> FireDecision:
    """Replace the schedule of a job. What was due before is not lost with the old one: the newest
    fire waits for the next look of a worker, which starts or skips it, and earlier ones are noted.

    Raises ConveyorError as `with_schedule` does.
    """
    assert job.scheduling is not None
    notes = _Notes(look)
    present = with_known_zones(job.scheduling)
    changed = with_schedule(present, schedule, now=look.now)
    due = _due_before_change(present, now=look.now)
    if changed.next_at != present.next_at and due is not None:
        _, kept = _waiting(present, due, look, notes)
        newest = _newest(kept, due, look, notes)
        if newest is not None:
            kept = _wait(kept, newest, notes)
        changed = with_schedule(_passed(kept, due), schedule, now=look.now)
    after = structs.replace(
        job,
        version=job.version + 1,
        updated_at=max(job.updated_at, look.now),
        scheduling=structs.replace(changed, overlap=overlap),
    )
    return FireDecision(
        after=after, run=None, started=None, fires=tuple(notes.rows), outcomes=notes.outcomes
    )


def _due_before_change(scheduling: Scheduling, *, now: int) -> DueFires | None:
    """Return the fires that are due; of a zone that the present rules do not have the stored one
    alone, since those after it cannot be computed."""
    if is_computable(scheduling.schedule):
        return due_fires(scheduling, now=now)
    if scheduling.next_at is None or scheduling.next_at > now:
        return None
    return DueFires(Fire(scheduling.next_at, scheduling.next_nominal))


def _passed(scheduling: Scheduling, due: DueFires) -> Scheduling:
    """Remember the newest fire as the latest that was decided."""
    return structs.replace(scheduling, last_nominal=due.newest.nominal, last_at=due.newest.instant)


def _waiting(
    scheduling: Scheduling, due: DueFires | None, look: FireLook, notes: _Notes
) -> tuple[Fire | None, Scheduling]:
    """Decide about a fire that waits: return it if its time has come, and the scheduling after
    that. Newer ones that are due come before it, once no run is live.

    It is too late if nobody looked at the job when the look was due: a wait for a run may be long.
    """
    if not scheduling.waiting:
        return None, scheduling
    fire = Fire(scheduling.waiting_at, scheduling.waiting)
    span = FireSpan(1, fire, fire)
    look_due = scheduling.waiting_at if scheduling.look_at is None else scheduling.look_at
    cleared = structs.replace(scheduling, waiting="", waiting_at=0)
    if scheduling.paused:
        notes.skip(SkipReason.PAUSED, span)
    elif look.now - look_due > look.catch_up:
        notes.miss(span, SkipReason.TOO_LATE)
    elif look.is_live and scheduling.overlap is Overlap.WAIT:
        return None, scheduling
    elif look.is_live:
        notes.skip(SkipReason.RUN_LIVE, span)
    elif due is not None:
        notes.miss(span)
    else:
        return fire, cleared
    return None, cleared


def _newest(scheduling: Scheduling, due: DueFires, look: FireLook, notes: _Notes) -> Fire | None:
    """Note the fires that pass because nobody looked, or because the schedule is paused; return the
    one that is left to decide about."""
    if scheduling.paused:
        notes.skip(SkipReason.PAUSED, due.all)
        return None
    if look.now - due.newest.instant > look.catch_up:
        notes.miss(due.all, SkipReason.TOO_LATE)
        return None
    if due.earlier is not None:
        notes.miss(due.earlier)
    return due.newest


def _wait(scheduling: Scheduling, fire: Fire, notes: _Notes) -> Scheduling:
    """Let a fire wait, unless another one does. A look at it is due since its time."""
    if scheduling.waiting:
        notes.skip(SkipReason.RUN_LIVE, FireSpan(1, fire, fire))
        return scheduling
    return structs.replace(
        scheduling, waiting=fire.nominal, waiting_at=fire.instant, look_at=fire.instant
    )


def _look_again(scheduling: Scheduling, look: FireLook) -> Scheduling:
    """Set the next look if a fire waits: the longer it waits, the later, and not after the next
    fire. Without one, it comes at the next fire."""
    if not scheduling.waiting:
        return structs.replace(scheduling, look_at=None)
    pause = min((look.now - scheduling.waiting_at) // WAITED_SHARE, LONGEST_PAUSE)
    look_at = look.now + max(pause, look.interval)
    if scheduling.next_at is not None:
        look_at = min(look_at, scheduling.next_at)
    return structs.replace(scheduling, look_at=look_at)


class _Notes:
    """The rows that a decision writes. The first one may continue the newest that is there."""

    def __init__(self, look: FireLook) -> None:
        self._look = look
        self._last_id = "" if look.newest is None else look.newest.fire_id
        self.rows: list[FireRecord] = []
        self.outcomes: dict[str, int] = {}

    def start(self, fire: Fire) -> None:
        """Note the fire of the run."""
        row = self._row(FireStatus.STARTED, FireSpan(1, fire, fire))
        self.rows.append(structs.replace(row, run_id=self._look.run_id))
        self._count(FireStatus.STARTED, 1)

    def miss(self, span: FireSpan, reason: SkipReason | None = None) -> None:
        """Note fires that passed while nobody looked."""
        self.rows.append(structs.replace(self._row(FireStatus.MISSED, span), reason=reason))
        self._count(FireStatus.MISSED, span.count)

    def skip(self, reason: SkipReason, span: FireSpan) -> None:
        """Note fires that make no run, in the row of those before if they have the same reason."""
        self._count(reason, span.count)
        before = self.rows[-1] if self.rows else self._look.newest
        if before is None or before.status is not FireStatus.SKIPPED or before.reason != reason:
            self.rows.append(structs.replace(self._row(FireStatus.SKIPPED, span), reason=reason))
            return
        longer = structs.replace(
            before,
            count=before.count + span.count,
            last_nominal=span.last.nominal,
            last_instant=span.last.instant,
            noted_at=self._look.now,
        )
        self.rows[-1:] = [longer]

    def _row(self, status: FireStatus, span: FireSpan) -> FireRecord:
        self._last_id = _later_id(self._look.fire_id, self._last_id)
        return FireRecord(
            fire_id=self._last_id,
            status=status,
            nominal=span.first.nominal,
            instant=span.first.instant,
            last_nominal=span.last.nominal,
            last_instant=span.last.instant,
            noted_at=self._look.now,
            count=span.count,
        )

    def _count(self, outcome: str, count: int) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count


def _later_id(fresh: str, earlier: str) -> str:
    """Return a fresh ULID, or the one after `earlier` where a clock was set back."""
    if fresh > earlier:
        return fresh
    return str(ULID.from_bytes((int(ULID.from_str(earlier)) + 1).to_bytes(16)))
