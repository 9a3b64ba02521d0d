"""The outbox port: what is owed to those who wait for the end of a run.

A notice is written together with its run and stays until it was delivered, or nobody waits for it
any more: neither a crash after the run's end nor a destination that is away loses it. While the
run goes on it is due now and then, for a sign of life.

The callbacks port: telling a state machine that waits with a task token how a run ended.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import Callback, Run, RunStatus
from conveyor.domain.run_events import RunFinished


class TokenExpired(Exception):
    """The token is of nobody who waits: its task has timed out, was told before, or never was."""


class Callbacks(Protocol):
    """Callbacks by task token. A token is a secret: no error and no log names it.

    Each method raises TokenExpired; ConveyorError(unavailable) where it may be well later.
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
"""Milliseconds that a lease may last at most."""
CLOCKS_APART = 60_000
"""Milliseconds by which a lease may outlast one that is taken now. One that lasts longer was taken
before a clock was set back, and counts for nothing."""


class OutboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A notice, leased to whoever delivers it.

    `run` is how its run stands, None where it is gone. `ended_as` is the state in which it ended,
    whatever became of it since: None while it goes on, or where that was not noted. `ending`, once
    it was decided, is what is told, the same at every attempt; `decided_at` tells since when,
    `attempts` how many deliveries of it have failed. `lease` is the instant at which the lease
    lapses.
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
    """Notices, one for each run of a job with a callback; `JobWriter.create_job` writes them, due
    at once.

    They outlive their runs: `purge_run` and `purge_job` leave them alone.
    """

    async def due_entries(self, *, now: int, limit: int) -> list[str]:
        """The run ids of notices that are due by `now`, the longest due first; not those that are
        leased, unless for longer than any lease lasts.

        The end of a run makes its notice due at the time of that end. A store that cannot write
        both in one step may fail to do so after a crash: then the notice is due when it was before.
        """
        ...

    async def lease_entry(self, run_id: str, *, now: int, lapses_at: int) -> OutboxEntry | None:
        """Take a notice for one delivery; None where there is none, it is not due, or another holds
        it.

        Until `lapses_at` it is not due, and nobody else gets it. A lease that lapses more than a
        minute after `lapses_at` is of a clock that was set back since, and does not count.
        """
        ...

    async def fix_payload(self, notice: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        """Settle what is told, once its run has ended; False where the lease was lost, or that was
        settled before."""
        ...

    async def reschedule_entry(self, notice: OutboxEntry, *, due_at: int, attempts: int) -> None:
        """Give the lease back: the notice is due at `due_at`, after so many failed deliveries.

        Where its run has ended meanwhile without being told, it is due at that end already. Without
        effect where the lease was lost.
        """
        ...

    async def drop_entry(self, notice: OutboxEntry) -> None:
        """Remove a notice. Without effect where the lease was lost."""
        ...
