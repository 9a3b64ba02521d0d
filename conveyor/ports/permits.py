"""The permits port: the ceiling of gateway calls in flight a job, over the whole fleet."""

from __future__ import annotations

from typing import Protocol


class Permits(Protocol):
    """A ledger of counts, one a job and holder. The sum of live counts never exceeds the limit."""

    async def grow(self, job_id: str, holder: str, count: int, *, limit: int, lease: float) -> int:
        """Take up to `count` more permits; how many were granted, 0 when full.

        Renews the holder's lease on the job for `lease` seconds.
        """
        ...

    async def give_back(self, job_id: str, holder: str, count: int) -> None:
        """Return permits; more than are held returns them all."""
        ...

    async def renew(self, holder: str, job_ids: list[str], *, lease: float) -> list[str]:
        """Extend leases by `lease` seconds from now; the jobs whose lease had lapsed already."""
        ...

    async def release(self, holder: str) -> None:
        """Return everything that a holder has."""
        ...
