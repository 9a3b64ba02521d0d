"""The permits port: the ceiling of gateway calls in flight a job, over the whole fleet.

A ledger keeps one entry a job and holder: a count under a lease. One method moves it. A call states
the count that the holder wants to have from now on rather than a difference, and carries a sequence
number, so that a call whose answer was lost, that arrives late, or twice, can never make the ledger
believe in fewer permits than a holder uses.

No wall clock is believed. The ledger measures leases on a clock of its own, a holder on its own
monotonic clock from the moment *before* its call, and nobody compares the two.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder says about its permits of one job.

    `count`: how many it wants to have from now on. `before`: how many it has by its own knowledge;
    a count above it asks for more, one equal to it renews, one below it gives back.
    `sequence`: greater in each call of this holder for this job. `wants`: it would like more than
    it can get, so others shall hand over what exceeds their fair share.
    """

    job_id: str
    holder: str
    count: int
    before: int
    sequence: int
    wants: bool = False


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """A job's entries after a call.

    `granted`: the holder has the count it asked for, under a fresh lease. Where it is False nothing
    was changed and nothing renewed. `free`: permits that nobody holds; 0 while a ledger that came
    back empty cannot know. `holders`: how many hold some, `wanting`: how many want more; the caller
    is among them where it does.
    """

    granted: bool
    free: int
    holders: int
    wanting: int


class Permits(Protocol):
    """A ledger of permits. The sum of counts under unexpired leases never exceeds the limit."""

    async def acquire_or_renew(
        self, holding: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Let a holder have `holding.count` permits under a lease of `lease` seconds, or change
        nothing: never a part of it.

        Granted where the sum of all unexpired counts stays within `limit`, and whenever the count
        is not above what the ledger knows this holder to have under an unexpired lease. Refused
        where `sequence` is not greater than the last one seen of an unexpired entry.
        Raises ValueError where `count` is below zero.

        A ledger that may have lost its entries (it comes back empty) grants for one lease no more
        than `before` to anybody, and takes that as true: so holders announce again what they have,
        and nobody gets what another still uses.
        """
        ...
