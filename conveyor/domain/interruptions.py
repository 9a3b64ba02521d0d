"""What a lapsed claim leaves in the history of its task, whichever store writes it."""

from __future__ import annotations

from conveyor.domain.model import Event, EventKind, Problem

INTERRUPTED = Problem(
    code="interrupted",
    title="Interrupted",
    status=503,
    detail="the worker that held the task was lost before it had finished",
)


def interruption(*, attempts: int, claimed_at: int, now: int) -> Event:
    """The event of a claim that was taken at `claimed_at`, after so many attempts, and was found
    lapsed `now`; milliseconds since 1970. It is no attempt, and carries the number of the next."""
    return Event(
        kind=EventKind.INTERRUPTION,
        attempt=attempts + 1,
        started_at=claimed_at,
        ended_at=now,
        error=INTERRUPTED,
    )
