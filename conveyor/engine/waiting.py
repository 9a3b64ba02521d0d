"""Waiting for an event or for the injected clock, whichever comes first."""

from __future__ import annotations

import anyio

from conveyor.ports.clock import Clock


async def wait_at_most(event: anyio.Event, clock: Clock, seconds: float) -> None:
    """Return once the event is set or `seconds` of the clock have passed."""
    async with anyio.create_task_group() as group:

        async def ring() -> None:
            await clock.sleep(seconds)
            group.cancel_scope.cancel()

        group.start_soon(ring)
        await event.wait()
        group.cancel_scope.cancel()
