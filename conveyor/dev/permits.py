"""The permits port in memory: a ledger of counts with leases, for the workers of one process."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.ports.clock import Clock

_SLACK = 64


@dataclass(slots=True)
class _Share:
    """What one holder has of one job; nothing any more from `lapses_at` on, in monotonic
    seconds."""

    count: int
    lapses_at: float


class MemoryPermits:
    """Permits by job and holder. A lease outlives its last permit, so that renewing it is no
    loss."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[str, dict[str, _Share]] = {}
        self._sweep_at = _SLACK

    async def grow(self, job_id: str, holder: str, count: int, *, limit: int, lease: float) -> int:
        """Take up to `count` more permits; how many were granted."""
        now = self._clock.monotonic()
        shares = self._live(job_id, now)
        in_use = sum(share.count for share in shares.values())
        granted = max(min(count, limit - in_use), 0)
        share = shares.get(holder)
        if share is not None:
            share.count += granted
            share.lapses_at = now + lease
        elif granted:
            shares[holder] = _Share(granted, now + lease)
            self._jobs[job_id] = shares
            self._sweep(now)
        return granted

    async def give_back(self, job_id: str, holder: str, count: int) -> None:
        """Return permits; more than are held returns them all."""
        share = self._live(job_id, self._clock.monotonic()).get(holder)
        if share is not None:
            share.count = max(share.count - max(count, 0), 0)

    async def renew(self, holder: str, job_ids: list[str], *, lease: float) -> list[str]:
        """Extend leases from now; the jobs on which the holder has none any more."""
        now = self._clock.monotonic()
        lapsed = []
        for job_id in job_ids:
            share = self._live(job_id, now).get(holder)
            if share is None:
                lapsed.append(job_id)
            else:
                share.lapses_at = now + lease
        return lapsed

    async def release(self, holder: str) -> None:
        """Return everything that a holder has."""
        for job_id, shares in list(self._jobs.items()):
            if shares.pop(holder, None) is not None and not shares:
                del self._jobs[job_id]

    def _live(self, job_id: str, now: float) -> dict[str, _Share]:
        """The shares of a job, lapsed ones dropped."""
        shares = self._jobs.get(job_id)
        if shares is None:
            return {}
        for holder in [name for name, share in shares.items() if share.lapses_at <= now]:
            del shares[holder]
        if not shares:
            del self._jobs[job_id]
        return shares

    def _sweep(self, now: float) -> None:
        """Forget jobs that nobody asks about any more, each time their number has doubled."""
        if len(self._jobs) >= self._sweep_at:
            for job_id in list(self._jobs):
                self._live(job_id, now)
            self._sweep_at = 2 * len(self._jobs) + _SLACK
