"""The pacing port: the starts of calls of one host, over the whole fleet, so many a second."""

from __future__ import annotations

from typing import Protocol

HORIZON = 10.0
"""Most seconds ahead for which a start is booked. A ledger that may have lost bookings gives none
for as long."""
IDLE = 10.0
"""Seconds without a start after which a host's line is empty: those in it will not all come."""


class Pacing(Protocol):
    """Starts by name of a host, for workers. No two are closer than their interval, on the ledger's
    own clock: what was not used is not made up for."""

    async def book(self, host: str, interval: float) -> float | None:
        """Book the next start that nobody else has; return the seconds until then, counted from
        now. None if none can be had within HORIZON: ask again a little later.

        Raises ConveyorError(unavailable) if the ledger does not answer.
        """
        ...

    async def line_up(self, host: str, interval: float) -> float:
        """Take the next place in the line of a host, `interval` behind the last one; return the
        seconds until it comes. It says when to come back, and books nothing.

        Raises ConveyorError(unavailable) if the ledger does not answer.
        """
        ...
