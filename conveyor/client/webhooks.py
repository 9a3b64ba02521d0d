"""Signing keys, and tests of receivers."""

from __future__ import annotations

from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.output import printable
from conveyor.client.program import FAILED, SUCCEEDED


async def list_keys(target: ServerTarget, terminal: Terminal) -> int:
    """Print which signing keys there are."""
    async with target.connect(terminal) as api:
        keys = await api.signing_keys()
    slots = {"active": keys.active, "candidate": keys.candidate}
    for slot, key in slots.items():
        if key is not None:
            terminal.say(f"{slot:<10} {printable(key.kid)}  made {printable(key.created_at)}")
    if keys.active is None:
        terminal.warn("no signing key yet: conveyor keys rotate")
    terminal.give(keys)
    return SUCCEEDED


async def rotate_key(target: ServerTarget, terminal: Terminal) -> int:
    """Make a key, and print its secret alone on standard output."""
    async with target.connect(terminal) as api:
        key = await api.rotate_key()
    terminal.warn(f"key {printable(key.kid)}: keep its secret, it is shown this once")
    if not terminal.gives_json:
        print(printable(key.secret), flush=True)
    terminal.give(key)
    return SUCCEEDED


async def finalize_key(target: ServerTarget, terminal: Terminal) -> int:
    """Let the candidate sign, and print its id."""
    async with target.connect(terminal) as api:
        key = await api.finalize_key()
    terminal.say(f"key {printable(key.active_kid)} signs from now on; the one before is gone")
    terminal.give(key)
    return SUCCEEDED


async def cancel_rotation(target: ServerTarget, terminal: Terminal) -> int:
    """Remove the candidate."""
    async with target.connect(terminal) as api:
        await api.cancel_rotation()
    terminal.say("no rotation is under way")
    terminal.give({"candidate": None})
    return SUCCEEDED


async def test_webhook(target: ServerTarget, terminal: Terminal, url: str, *, signed: bool) -> int:
    """Have the server post a test event, and say what came of it; fail if it did not arrive."""
    async with target.connect(terminal) as api:
        tested = await api.test_webhook(url, signed=signed)
    outcome = "delivered" if tested.delivered else f"not delivered: {printable(tested.error or '')}"
    terminal.say(f"{outcome} ({tested.elapsed_ms} ms)")
    terminal.give(tested)
    return SUCCEEDED if tested.delivered else FAILED
