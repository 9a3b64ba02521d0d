"""A clock that a test advances, with seeded randomness: hours pass in milliseconds, and the same
seed gives the same ids."""

from __future__ import annotations

import anyio

from conveyor.clock import VirtualClock, all_blocked

START = 1_767_225_600_000
"""The default start of virtual time: 2026-01-01T00:00:00Z."""


class FakeClock(VirtualClock):
    """The clock port over virtual time, for tests of parts.

    `start` is the first `now()` in milliseconds. `grace` is in real seconds: each step of `advance`
    gives threads and sockets so long to come back before time moves on; 0 if there are none.
    """

    def __init__(self, *, start: int = START, seed: int = 0, grace: float = 0.0) -> None:
        super().__init__(start=start, seed=seed)
        self._grace = grace

    def token(self, length: int) -> bytes:
        """Return bytes by the seed: predictable, as tests want them."""
        return self._ids.token(length)

    async def _settle(self) -> None:
        await all_blocked()
        if self._grace:
            await anyio.sleep(self._grace)  # noqa: TID251  (real threads need real time)
            await all_blocked()
