"""The actions of `conveyor admin`: each prints its results and returns the exit code."""

from __future__ import annotations

from collections.abc import Callable

from conveyor.bootstrap.production import open_administration, open_dead_letters
from conveyor.clock import SystemClock
from conveyor.settings import Settings

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
        say(f"{'ID':<36}   AGE  WHAT, AND WHY")
    for letter in found:
        reason = letter.reason or "received too often, no reason given"
        say(f"{letter.letter_id:<36}  {_age(letter.age):>4}  {letter.about}: {reason}")
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
