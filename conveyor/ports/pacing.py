"""The pacing port: the starts of calls of a host, over the whole fleet, so many a second; and what
the host has said of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

HORIZON = 10.0
"""Most seconds ahead for which a start is booked. A ledger that may have lost bookings gives none
for as long."""
IDLE = 10.0
"""Seconds without a start after which a host's line is empty: those in it will not all come."""
CEILING_LASTS = 3_600.0
"""Seconds without a change after which a lowered ceiling is forgotten."""
NOTHING_ELSE: Mapping[str, float] = {}


class Booking(msgspec.Struct, frozen=True):
    """The starts that one worker got, in seconds from now, in order; none of a host that is closed
    for `closed_for` seconds more. `ceiling` is that of the calls in flight, 0 if none was lowered;
    `interval` is what the host itself wants between starts, 0 if it has not said."""

    starts: tuple[float, ...] = ()
    closed_for: float = 0.0
    ceiling: int = 0
    interval: float = 0.0


class HostState(msgspec.Struct, frozen=True):
    """The word of a host: closed for so many seconds more, with a `ceiling` on its calls in
    flight, and the `interval` that it wants between starts; 0 for none. In its line are `in_line`
    places that are still to come, as far as the ledger knows of it."""

    closed_for: float = 0.0
    ceiling: int = 0
    interval: float = 0.0
    in_line: int = 0


class Pacing(Protocol):
    """Starts by name of a host, for workers. No two are closer than their interval, on the ledger's
    own clock: what was not used is not made up for.

    Each method raises ConveyorError(unavailable) if the ledger does not answer.
    """

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        """Book the next starts that nobody else has: `count` at most, as far as they lie within
        HORIZON; an `interval` of 0 spaces none. They are starts of the names in `also` too, each
        with an interval of its own: where one of all these is closed, nothing is booked. Where
        there is no start, ask again a little later.

        A shorter `interval` than that of the last start of `host` holds from that start on: its
        rule has changed. Of a name in `also` the last start keeps its own: others ask for it with
        other intervals.
        """
        ...

    async def line_up(self, host: str, interval: float, run: str = "") -> float:
        """Take the next place in the line of a host, `interval` behind the last one, and not before
        there may be a start, nor within the time for which it is closed; return the seconds until
        it comes. It says when to come back, and books nothing. It is kept for a `run`, until that
        leaves the line.
        """
        ...

    async def leave(self, run: str, hosts: Sequence[str] | None = None) -> None:
        """Let others have the places that this run has in the lines of hosts; in all lines of the
        ledger where none are given. Raises ConveyorError(unavailable)."""
        ...

    async def close(self, host: str, seconds: float) -> None:
        """Book no start of a host before so many seconds are over; never sooner than was said
        before. Starts that are booked stay, and their holders look at `state`."""
        ...

    async def lower(self, host: str, limit: int, age: float = 0.0) -> int:
        """Halve the ceiling of a host, 1 at least, and return it; `limit` is that of one which was
        not lowered. Leave it if it was halved in the last `age` seconds: then the call that was
        refused was in flight together with another one."""
        ...

    async def lift(self, host: str, limit: int) -> None:
        """Let the ceiling of a host grow by one, if it was lowered; at `limit` it is one no
        more."""
        ...

    async def slow(self, host: str, interval: float, seconds: float) -> None:
        """Let no two starts of a host be closer than this for so many seconds, whatever interval is
        asked for. It takes the place of what was said before."""
        ...

    async def state(self, hosts: Iterable[str]) -> dict[str, HostState]:
        """Return what those hosts have said that are closed, have a lowered ceiling, want their
        starts further apart, or have a line."""
        ...
