"""The event of a lapsed claim in the history of its task, the same for every store."""

from __future__ import annotations

from conveyor.domain.model import Event, EventKind, Problem

INTERRUPTED = Problem(
    code="interrupted",
    title="Interrupted",
    status=503,
    detail="the worker that held the task was lost before it had finished",
)


def interruption(*, attempts: int, claimed_at: int, now: int) -> Event:
    """Build the event of a claim taken at `claimed_at`, after `attempts` attempts, and found lapsed
    at `now`; times in milliseconds since 1970.

    It counts as no attempt and carries the number of the next.
    """
    return Event(
        kind=EventKind.INTERRUPTION,
        attempt=attempts + 1,
        started_at=claimed_at,
        ended_at=now,
        error=INTERRUPTED,
    )
