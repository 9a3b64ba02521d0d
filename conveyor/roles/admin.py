"""The actions of `conveyor admin`: each prints its results and returns the exit code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from conveyor.bootstrap.production import open_administration, open_dead_letters, open_records
from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import FireLook, with_state
from conveyor.domain.model import Job
from conveyor.domain.text_rules import rfc3339
from conveyor.http.auth import ApiKeys, open_api_keys
from conveyor.ports.clock import Clock
from conveyor.ports.schedules import ScheduleChange
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.prod.dynamodb.store import DynamoStore

Say = Callable[[str], None]
FINE, WRONG = 0, 1
MINUTE, HOUR, DAY = 60, 3_600, 86_400


async def init(settings: Settings, say: Say) -> int:
    """Create missing resources."""
    async with await open_administration(settings, SystemClock()) as administration:
        async for line in administration.init():
            say(line)
    return FINE


async def check(settings: Settings, say: Say) -> int:
    """Check every resource; return WRONG if one is missing or at fault."""
    code = FINE
    async with await open_administration(settings, SystemClock()) as administration:
        async for finding in administration.check():
            say(str(finding))
            code = code if finding.problem is None else WRONG
    return code


async def destroy(settings: Settings, say: Say, *, even_if_alive: bool = False) -> int:
    """Remove every resource. Raises ConveyorError if a worker is alive, unless that is ignored."""
    async with await open_administration(settings, SystemClock()) as administration:
        if not even_if_alive:
            await administration.check_no_worker(say)
        async for line in administration.destroy():
            say(line)
    return FINE


async def move_ledger(settings: Settings, kind: str, say: Say) -> int:
    """Move the fleet's permits to another ledger. Raises ConveyorError if a worker is alive."""
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.move_ledger(kind, say)
    say(f"permits are kept in {kind}" if changed else f"permits were kept in {kind} already")
    return FINE


async def rebind(settings: Settings, say: Say) -> int:
    """Set the fleet's bucket and secret to those of the settings.

    Raises ConveyorError if a worker is alive.
    """
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.rebind(say)
    what = "its bucket and secret" if settings.secret else "its bucket"
    say(f"the fleet {'now uses' if changed else 'already used'} {what} of these settings")
    return FINE


async def list_letters(settings: Settings, say: Say, *, limit: int) -> int:
    """List dead letters, about oldest first, as the queue returns them."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        found = await letters.peek(limit=limit)
    if found:
        say(f"{'ID':<36}   AGE  LEFT  WHAT, AND WHY")
    for letter in found:
        reason = letter.reason or "received too often, no reason given"
        times = f"{_age(letter.age):>4}  {_age(letter.left):>4}"
        say(f"{letter.letter_id:<36}  {times}  {letter.about}: {reason}")
    if not found:
        say("no dead letters")
    return FINE


async def redrive_letters(settings: Settings, say: Say, chosen: frozenset[str] | None) -> int:
    """Send dead letters back; return WRONG if one is missing or cannot be sent."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.redrive(chosen)
    return _report(say, done, chosen, verb="sent back")


async def drop_letters(settings: Settings, say: Say, chosen: frozenset[str] | None) -> int:
    """Delete dead letters; return WRONG if a named one is missing."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.drop(chosen)
    return _report(say, done, chosen, verb="removed")


SCHEDULES_PAGE = 100
SCHEDULES_HEADER = f"{'JOB':<26}  STATE   NEXT FIRE, UTC    KEY"
CHANGES_TRIED = 8
"""Times that schedules are read again while others change them."""


async def list_schedules(settings: Settings, say: Say) -> int:
    """List the scheduled jobs of all callers with the hashes of their keys."""
    keys = open_api_keys(settings.api_keys) if settings.api_keys else None
    number = 0
    async with open_records(settings, SystemClock()) as store:
        async for job in _scheduled(store):
            number += 1
            if number == 1:
                say(SCHEDULES_HEADER)
            say(_schedule_line(job, keys))
    if not number:
        say("no scheduled jobs")
    return FINE


async def set_schedules(settings: Settings, say: Say, key_hash: str, *, paused: bool) -> int:
    """Pause or resume every schedule of the key with a hash; return WRONG if it has none.

    Raises ConveyorError(unavailable) for schedules that others keep changing.
    """
    clock, known, changed = SystemClock(), set[str](), set[str]()
    async with open_records(settings, clock) as store:
        for _ in range(CHANGES_TRIED):
            jobs = [job async for job in _scheduled(store) if _key_hash(job) == key_hash]
            known |= {job.job_id for job in jobs}
            left = [job for job in jobs if _is_paused(job) != paused]
            if not left:
                break
            for job in left:
                if await _change(store, job, clock, paused=paused):
                    changed.add(job.job_id)
        else:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "others keep changing schedules; try again")
    verb = "paused" if paused else "resumed"
    for job_id in sorted(known):
        say(f"{job_id} {verb if job_id in changed else f'was {verb} already'}")
    if not known:
        say("no schedule belongs to that key")
    return FINE if known else WRONG


async def _scheduled(store: DynamoStore) -> AsyncIterator[Job]:
    after = ""
    while jobs := await store.schedules.list_schedules(after=after, limit=SCHEDULES_PAGE):
        for job in jobs:
            yield job
        after = jobs[-1].job_id


async def _change(store: DynamoStore, job: Job, clock: Clock, *, paused: bool) -> bool:
    newest = await store.schedules.list_fires(job.job_id, before=None, limit=1)
    look = FireLook(
        now=clock.now(),
        is_live=False,  # a paused schedule skips its fires, whatever its run does
        newest=next(iter(newest), None),
        run_id=clock.new_id(),
        fire_id=clock.new_id(),
        catch_up=0,
        interval=0,
    )
    decided = with_state(job, look, paused=paused)
    change = ScheduleChange(before=job, after=decided.after, fires=decided.fires)
    return await store.schedules.change_schedule(change)


def _key_hash(job: Job) -> str:
    return "" if job.scheduling is None else job.scheduling.key_hash


def _is_paused(job: Job) -> bool:
    return job.scheduling is not None and job.scheduling.paused


def _schedule_line(job: Job, keys: ApiKeys | None) -> str:
    next_at = None if job.scheduling is None else job.scheduling.next_at
    following = "none" if next_at is None else rfc3339(next_at)[:16].replace("T", " ")
    state = "paused" if _is_paused(job) else "active"
    if keys is None:
        found = "not checked"
    else:
        found = "known" if keys.knows_hash(_key_hash(job)) else "not in CONVEYOR_API_KEYS"
    return f"{job.job_id:<26}  {state}  {following:<16}  {found}\n  {_key_hash(job)}"


def _report(
    say: Say, done: dict[str, str | None], chosen: frozenset[str] | None, *, verb: str
) -> int:
    missing = "does not exist, or is hidden by another command: try again in half a minute"
    results = {
        letter_id: verb if problem is None else f"stays: {problem}"
        for letter_id, problem in done.items()
    }
    results |= dict.fromkeys((chosen or frozenset()) - done.keys(), missing)
    for letter_id, what in sorted(results.items()):
        say(f"{letter_id} {what}")
    if not results:
        say("no dead letters")
    return FINE if all(what == verb for what in results.values()) else WRONG


def _age(seconds: float) -> str:
    whole = int(seconds)
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
