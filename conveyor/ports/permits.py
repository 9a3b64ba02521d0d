"""The permits port: the limit on gateway calls in flight for each job, over the whole fleet.

A ledger keeps one entry for each job and holder: a count under a lease. One method changes it. A
call states the count that the holder wants from now on, rather than a difference, and carries a
sequence number. So a call that arrives late or twice, or whose answer was lost, never makes the
ledger count fewer permits than the holder uses.

No wall clock is trusted. The ledger measures leases on a clock of its own, a holder on its own
monotonic clock from the moment *before* its call, and nobody compares the two.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

FENCE_SHARE = 0.1
"""Last part of a lease in which its permits are not used, because the clocks of worker and ledger
may run at different rates."""
FENCE_LEAST = 1.0
"""Least seconds of that part, however short the lease: the worker looks at the fence a few times a
second, and is late at times."""


def usable_part(lease: float) -> float:
    """Return the seconds of a lease in which its permits are used, up to the fence."""
    return lease - max(FENCE_SHARE * lease, FENCE_LEAST)


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One holder's request for a lease on permits of one job, or of another name that has a limit.

    `count` is the number of permits that it wants from now on, `before` the number that it has by
    its own knowledge: a count above `before` asks for more, an equal one renews, one below gives
    back. `sequence` grows with each call of this holder for this job. `wants` is True if the holder
    would like more than it can get, so that others hand over the excess over their fair share.
    """

    job_id: str
    holder: str
    count: int
    before: int
    sequence: int
    wants: bool = False


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """A job's entries after a call.

    If `granted` is True, the holder has the count it asked for, under a fresh lease; otherwise
    nothing was changed and nothing renewed. `free` counts permits that nobody holds; it is 0 while
    a ledger that came back empty cannot know, which lasts for `closed_for` seconds more. `holders`
    counts holders with at least one permit, `wanting` those that want more; both include the caller
    if it is one of them.
    """

    granted: bool
    free: int
    holders: int
    wanting: int
    closed_for: float = 0.0


class PermitHolder(msgspec.Struct, frozen=True, kw_only=True):
    """One holder's entry for a job, as an administrator sees it. `lapses_in` is in seconds, None
    where the ledger does not know."""

    holder: str
    count: int
    wants: bool
    lapses_in: float | None = None


class LedgerReads(Protocol):
    """A ledger of permits, for an administrator."""

    async def holders(self, job_id: str) -> list[PermitHolder]:
        """Return the entries of a job, by their holder; those that lapsed may be among them where
        the ledger does not know."""
        ...


class Permits(Protocol):
    """A ledger of permits, for workers. It never lets the sum of counts under unexpired leases grow
    beyond the limit."""

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Grant a holder `request.count` permits under a lease of `lease` seconds, or change
        nothing: never grant a part of them.

        Grant if the sum of all unexpired counts stays within `limit`, and whenever the count does
        not exceed the one in this holder's own unexpired entry. Refuse if `sequence` is not greater
        than the last one seen in an unexpired entry. Raises ValueError if `count` is negative.

        A ledger that may have lost its entries (it comes back empty) grants nobody more than
        `before` for the length of one lease, and takes `before` as true: so holders announce their
        permits again, and nobody gets a permit that another still uses.
        """
        ...
