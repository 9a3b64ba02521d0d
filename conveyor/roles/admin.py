"""The actions of `conveyor admin`: each prints its results and returns the exit code."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from conveyor.bootstrap.production import (
    look_at_run,
    open_administration,
    open_dead_letters,
    open_records,
)
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
    from conveyor.prod.admin.dead_letters import Letter
    from conveyor.prod.admin.run_look import RunLook
    from conveyor.prod.dynamodb.store import DynamoStore

Say = Callable[[str], None]
FINE, WRONG = 0, 1
MINUTE, HOUR, DAY = 60, 3_600, 86_400


async def init(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """Create missing resources."""
    async with await open_administration(settings, SystemClock()) as administration:
        async for change in administration.init():
            say(_json(change) if as_json else str(change))
    return FINE


async def check(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """Check every resource; return WRONG if one is missing or at fault."""
    code = FINE
    async with await open_administration(settings, SystemClock()) as administration:
        async for finding in administration.check():
            say(_json(finding) if as_json else str(finding))
            code = code if finding.problem is None else WRONG
    return code


async def destroy(
    settings: Settings, say: Say, *, even_if_alive: bool = False, as_json: bool = False
) -> int:
    """Remove every resource. Raises ConveyorError if a worker is alive, unless that is ignored."""
    async with await open_administration(settings, SystemClock()) as administration:
        if not even_if_alive:
            await administration.check_no_worker(_aside(say, as_json))
        async for change in administration.destroy():
            say(_json(change) if as_json else str(change))
    return FINE


async def move_ledger(settings: Settings, kind: str, say: Say, *, as_json: bool = False) -> int:
    """Move the fleet's permits to another ledger. Raises ConveyorError if a worker is alive."""
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.move_ledger(kind, _aside(say, as_json))
    if as_json:
        say(_json({"ledger": kind, "changed": changed}))
    else:
        say(f"permits are kept in {kind}" if changed else f"permits were kept in {kind} already")
    return FINE


async def rebind(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """Set the fleet's bucket and secret to those of the settings.

    Raises ConveyorError if a worker is alive.
    """
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.rebind(_aside(say, as_json))
    if as_json:
        with_secret = bool(settings.secret)
        say(_json({"bucket": settings.bucket, "with_secret": with_secret, "changed": changed}))
        return FINE
    what = "its bucket and secret" if settings.secret else "its bucket"
    say(f"the fleet {'now uses' if changed else 'already used'} {what} of these settings")
    return FINE


async def pause(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """Order that nothing new starts in the fleet."""
    async with await open_administration(settings, SystemClock()) as administration:
        since = await administration.pause()
    if as_json:
        say(_json(_fleet_pause(since, paused=True, changed=since is None)))
    elif since is not None:
        say(f"the fleet was paused already, since {rfc3339(since)}")
    else:
        say("the fleet is paused: within 10 s its workers start nothing new; calls under way end")
        say("conveyor admin resume --fleet lets work go on")
    return FINE


async def resume(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """Let work go on in the fleet."""
    async with await open_administration(settings, SystemClock()) as administration:
        since = await administration.resume()
    if as_json:
        say(_json(_fleet_pause(since, paused=False, changed=since is not None)))
    elif since is None:
        say("the fleet was not paused")
    else:
        say(f"the fleet goes on within 10 s; it was paused since {rfc3339(since)}")
    return FINE


def _fleet_pause(since: int | None, *, paused: bool, changed: bool) -> dict[str, object]:
    was = None if since is None else rfc3339(since)
    return {"paused": paused, "changed": changed, "was_paused_since": was}


def _aside(say: Say, as_json: bool) -> Say:
    """Return what says lines for people, which are no part of an output in JSON."""
    return partial(print, file=sys.stderr, flush=True) if as_json else say


async def show_run(settings: Settings, say: Say, run_id: str, *, as_json: bool) -> int:
    """Show what keeps a run from being faster. Raises ConveyorError(not_found)."""
    look = await look_at_run(settings, run_id, SystemClock())
    if as_json:
        say(_json(_readable(msgspec.to_builtins(look))))
        return FINE
    for line in _run_lines(look):
        say(line)
    return FINE


def _run_lines(look: RunLook) -> Iterator[str]:
    """Yield the lines about a run."""
    left = look.total - look.successful - look.failed
    state = f"{look.status}, paused" if look.is_paused else look.status
    yield f"run {look.run_id} of job {look.job_id}: {state}"
    yield f"tasks     {look.successful:,} successful, {look.failed:,} failed, {left:,} left"
    wait = look.waiting
    if wait is not None:
        others = f" (also: {', '.join(wait.others)})" if wait.others else ""
        yield f"waits     {wait.reason} since {rfc3339(wait.since)}: {wait.detail}{others}"
    holding = sum(holder.count > 0 for holder in look.holders)
    wanting = sum(holder.wants for holder in look.holders)
    yield (
        f"permits   {look.permits:,} of {look.cap:,} in use by {holding:,} holders,"
        f" {wanting:,} of whom want more"
    )
    ceiling = "no worker serves it" if look.ceiling is None else f"{look.ceiling:,} of {look.cap:,}"
    yield f"ceiling   {ceiling} after refusals for load"
    yield f"queue     about {look.queue_depth:,} messages"
    ago = max(0, look.looked_at - look.counted_at) / 1_000
    yield f"counters  changed {rfc3339(look.counted_at)}, {ago:,.1f} s ago"
    yield f"workers   {len(look.workers):,} have it in hand, {look.workers_alive:,} are alive"
    if look.workers:
        yield f"{'WORKER':<26}  PERMITS  CALLS  IN HAND  PUT OFF  CEILING  SLOTS        WAITS FOR"
    for one in look.workers:
        slots = f"{one.slots_in_use} of {one.slots}"
        waits_for = "silent" if one.is_silent else one.waits_for or "nothing"
        yield (
            f"{one.worker_id:<26}  {one.permits:>7}  {one.calls:>5}  {one.in_hand:>7}"
            f"  {one.put_off:>7}  {one.ceiling:>7}  {slots:<11}  {waits_for}"
        )


_INSTANTS = frozenset({"counted_at", "created_at", "looked_at", "said_at", "since", "until"})


def _readable(value: Any) -> Any:
    """Write the instants of a document as RFC 3339."""
    if isinstance(value, list):
        return [_readable(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: rfc3339(one) if name in _INSTANTS and one is not None else _readable(one)
        for name, one in value.items()
    }


def _json(shown: object) -> str:
    return msgspec.json.encode(shown).decode()


async def list_letters(settings: Settings, say: Say, *, limit: int, as_json: bool = False) -> int:
    """List dead letters, about oldest first, as the queue returns them."""
    async with open_dead_letters(settings, SystemClock()) as letters:
        found = await letters.peek(limit=limit)
    if as_json:
        for letter in found:
            say(_json(_letter(letter)))
        return FINE
    if found:
        say(f"{'ID':<36}   AGE  LEFT  WHAT, AND WHY")
    for letter in found:
        reason = letter.reason or "received too often, no reason given"
        times = f"{_age(letter.age):>4}  {_age(letter.left):>4}"
        say(f"{letter.letter_id:<36}  {times}  {letter.about}: {reason}")
    if not found:
        say("no dead letters")
    return FINE


def _letter(letter: Letter) -> dict[str, object]:
    return {
        "letter_id": letter.letter_id,
        "age_seconds": round(letter.age),
        "left_seconds": round(letter.left),
        "about": letter.about,
        "reason": letter.reason or None,
    }


async def redrive_letters(
    settings: Settings, say: Say, chosen: frozenset[str] | None, *, as_json: bool = False
) -> int:
    """Send dead letters back; return WRONG if one is missing or cannot be sent."""
    async with open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.redrive(chosen)
    return _report(say, done, chosen, verb="sent back", as_json=as_json)


async def drop_letters(
    settings: Settings, say: Say, chosen: frozenset[str] | None, *, as_json: bool = False
) -> int:
    """Delete dead letters; return WRONG if a named one is missing."""
    async with open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.drop(chosen)
    return _report(say, done, chosen, verb="removed", as_json=as_json)


SCHEDULES_PAGE = 100
SCHEDULES_HEADER = f"{'JOB':<26}  STATE   NEXT FIRE, UTC    KEY"
CHANGES_TRIED = 8
"""Times that schedules are read again while others change them."""


async def list_schedules(settings: Settings, say: Say, *, as_json: bool = False) -> int:
    """List the scheduled jobs of all callers with the hashes of their keys."""
    keys = open_api_keys(settings.api_keys) if settings.api_keys else None
    number = 0
    async with open_records(settings, SystemClock()) as store:
        async for job in _scheduled(store):
            number += 1
            if as_json:
                say(_json(_scheduled_job(job, keys)))
                continue
            if number == 1:
                say(SCHEDULES_HEADER)
            say(_schedule_line(job, keys))
    if not number and not as_json:
        say("no scheduled jobs")
    return FINE


async def set_schedules(
    settings: Settings, say: Say, key_hash: str, *, paused: bool, as_json: bool = False
) -> int:
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
    state = "paused" if paused else "active"
    for job_id in sorted(known):
        is_new = job_id in changed
        if as_json:
            say(_json({"job_id": job_id, "state": state, "changed": is_new}))
        else:
            say(f"{job_id} {verb if is_new else f'was {verb} already'}")
    if not known:
        _aside(say, as_json)("no schedule belongs to that key")
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


def _scheduled_job(job: Job, keys: ApiKeys | None) -> dict[str, object]:
    next_at = None if job.scheduling is None else job.scheduling.next_at
    return {
        "job_id": job.job_id,
        "state": "paused" if _is_paused(job) else "active",
        "next_scheduled_run": None if next_at is None else rfc3339(next_at),
        "key_hash": _key_hash(job),
        "key_known": None if keys is None else keys.knows_hash(_key_hash(job)),
    }


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
    say: Say,
    done: dict[str, str | None],
    chosen: frozenset[str] | None,
    *,
    verb: str,
    as_json: bool,
) -> int:
    missing = "does not exist, or is hidden by another command: try again in half a minute"
    lost = dict.fromkeys((chosen or frozenset()) - done.keys(), missing)
    for letter_id, problem in sorted({**done, **lost}.items()):
        if as_json:
            outcome = {"outcome": verb if problem is None else None, "problem": problem}
            say(_json({"letter_id": letter_id, **outcome}))
        else:
            stays = problem if letter_id in lost else f"stays: {problem}"
            say(f"{letter_id} {verb if problem is None else stays}")
    if not done and not lost and not as_json:
        say("no dead letters")
    return WRONG if lost or any(done.values()) else FINE


def _age(seconds: float) -> str:
    whole = int(seconds)
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
