"""The outbox port: entries that each announce the end of one run to a waiting state machine.

An entry is written together with its run and stays until it was delivered or its task token has
expired: neither a crash after the run's end nor a destination that is away loses it. While the run
goes on the entry is due now and then, for a heartbeat.

The callbacks port: heartbeats and results, sent to a state machine by its task token.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import Callback, Run, RunStatus
from conveyor.domain.run_events import RunFinished


class TokenExpired(Exception):
    """Nobody waits with this token: its task timed out, was answered before, or never existed."""


class Callbacks(Protocol):
    """Callbacks by task token. A token is a secret: no error and no log names it.

    Each method raises TokenExpired; ConveyorError(unavailable) if a later try may succeed.
    """

    async def send_heartbeat(self, task_token: str) -> None:
        """Say that the work goes on."""
        ...

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Say that the work is done; `output` is a JSON document of at most 256 KiB."""
        ...

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Say that the work will not be done; `error` has at most 256 characters, `cause` at most
        32,768."""
        ...


LONGEST_LEASE = 120_000
"""The longest lease, in milliseconds."""
CLOCKS_APART = 60_000
"""Milliseconds by which a lease may outlast one that is taken now. One that lasts longer was taken
before a clock was set back, and counts for nothing."""


class OutboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry, leased to one worker for delivery.

    `run` is its run as it is now, None if it is gone. `ended_as` is the state in which the run
    ended, also after its deletion: None while it goes on, or if that was not noted. `ending` is the
    payload, the same at every attempt, once it was fixed at `decided_at`; `attempts` counts failed
    deliveries of it. `lease` is the instant at which the lease lapses.
    """

    job_id: str
    run_id: str
    callback: Callback
    lease: int
    run: Run | None
    ended_as: RunStatus | None = None
    ending: RunFinished | None = None
    decided_at: int = 0
    attempts: int = 0


class Outbox(Protocol):
    """Entries, one for each run of a job with a callback; `JobWriter.create_job` writes them, due
    at once.

    They outlive their runs: `purge_run` and `purge_job` leave them alone.
    """

    async def due_entries(self, *, now: int, limit: int) -> list[str]:
        """Return the run ids of entries that are due by `now`, the longest due first. Leave out
        leased ones, unless the lease is longer than any lease may be.

        The end of a run makes its entry due at the time of that end. In a store that cannot write
        both in one step, a crash between them leaves the entry due when it was before.
        """
        ...

    async def lease_entry(self, run_id: str, *, now: int, lapses_at: int) -> OutboxEntry | None:
        """Lease an entry for one delivery; None if there is no such entry, it is not due, or it is
        leased.

        Until `lapses_at` it is not due, and nobody else gets it. An earlier lease that lapses more
        than a minute after `lapses_at` is of a clock that was set back since, and does not count.
        """
        ...

    async def fix_payload(self, notice: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        """Fix the payload once the run has ended; False if the lease was lost, or the payload was
        fixed before."""
        ...

    async def reschedule_entry(self, notice: OutboxEntry, *, due_at: int, attempts: int) -> None:
        """Give the lease back: the entry is due at `due_at`, after so many failed deliveries.

        If its run has ended meanwhile and no payload is fixed, the entry is due at that end
        already. Without effect if the lease was lost.
        """
        ...

    async def drop_entry(self, notice: OutboxEntry) -> None:
        """Remove an entry. Without effect if the lease was lost."""
        ...
