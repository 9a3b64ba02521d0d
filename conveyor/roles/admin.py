"""What `conveyor admin` does: each gives the exit code, and says one line for each thing."""

from __future__ import annotations

from collections.abc import Callable

from conveyor.bootstrap.production import open_administration, open_dead_letters
from conveyor.clock import SystemClock
from conveyor.settings import Settings

Say = Callable[[str], None]
FINE, WRONG = 0, 1
MINUTE, HOUR, DAY = 60, 3_600, 86_400


async def init(settings: Settings, say: Say) -> int:
    """Make what is missing."""
    async with await open_administration(settings, SystemClock()) as administration:
        async for line in administration.init():
            say(line)
    return FINE


async def check(settings: Settings, say: Say) -> int:
    """Check everything; WRONG where anything is missing."""
    code = FINE
    async with await open_administration(settings, SystemClock()) as administration:
        async for finding in administration.check():
            say(str(finding))
            code = code if finding.problem is None else WRONG
    return code


async def destroy(settings: Settings, say: Say, *, even_if_alive: bool = False) -> int:
    """Remove everything. Raises ConveyorError where a worker is alive, unless that is no matter."""
    async with await open_administration(settings, SystemClock()) as administration:
        if not even_if_alive:
            await administration.check_no_worker(say)
        async for line in administration.destroy():
            say(line)
    return FINE


async def move_ledger(settings: Settings, kind: str, say: Say) -> int:
    """Let the fleet keep its permits elsewhere. Raises ConveyorError where a worker is alive."""
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.move_ledger(kind, say)
    say(f"permits are kept in {kind}" if changed else f"permits were kept in {kind} already")
    return FINE


async def rebind(settings: Settings, say: Say) -> int:
    """Let bucket and secret of the fleet be those of the settings. Raises ConveyorError where a
    worker is alive."""
    async with await open_administration(settings, SystemClock()) as administration:
        changed = await administration.rebind(say)
    what = "its bucket and secret" if settings.secret else "its bucket"
    say(f"the fleet {'works' if changed else 'worked already'} by these settings for {what}")
    return FINE


async def list_letters(settings: Settings, say: Say, *, limit: int) -> int:
    """List dead letters, oldest first as far as the queue tells."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        found = await letters.look(limit=limit)
    if found:
        say(f"{'ID':<36}   AGE  WHAT, AND WHY")
    for letter in found:
        reason = letter.reason or "received too often, no reason was given"
        say(f"{letter.letter_id:<36}  {_age(letter.age):>4}  {letter.about}: {reason}")
    if not found:
        say("no dead letters")
    return FINE


async def redrive_letters(settings: Settings, say: Say, chosen: frozenset[str] | None) -> int:
    """Send dead letters back; WRONG where one is not there, or cannot be sent."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.redrive(chosen)
    return _told(say, done, chosen, verb="sent back")


async def drop_letters(settings: Settings, say: Say, chosen: frozenset[str] | None) -> int:
    """Remove dead letters; WRONG where one that was named is not there."""
    async with await open_dead_letters(settings, SystemClock()) as letters:
        done = await letters.drop(chosen)
    return _told(say, done, chosen, verb="removed")


def _told(
    say: Say, done: dict[str, str | None], chosen: frozenset[str] | None, *, verb: str
) -> int:
    missing = "is not there, or hidden by another look: try again in half a minute"
    told = {
        letter_id: verb if problem is None else f"stays: {problem}"
        for letter_id, problem in done.items()
    }
    told |= dict.fromkeys((chosen or frozenset()) - done.keys(), missing)
    for letter_id, what in sorted(told.items()):
        say(f"{letter_id} {what}")
    if not told:
        say("no dead letters")
    return FINE if all(what == verb for what in told.values()) else WRONG


def _age(seconds: float) -> str:
    whole = int(seconds)
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
