"""The outbox port and the callbacks port: reports of runs to those who wait for their ends.

An outbox entry reports the end of one run to one subscriber: the state machine of a callback, or
the webhook of the job. It is written together with the run (that of a webhook also with a webhook
that is set while the run goes on), and stays until it is delivered, handed on as a delivery, or no
longer wanted: neither a crash after the run's end nor a destination that is away loses it. While
the run goes on, its entry is due now and then, for a heartbeat, or to notice an end whose write was
cut off.

Callbacks deliver heartbeats and results to a state machine by its task token.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from conveyor.domain.model import Callback, Run, RunStatus
from conveyor.domain.run_events import RunFinished


class TokenExpired(Exception):
    """A token that no state machine waits with: its task timed out, was answered before, or never
    existed."""


class Callbacks(Protocol):
    """Callbacks by task token, for workers. A token is a secret: no error and no log names it.

    Each method raises TokenExpired if nobody waits with the token; ConveyorError(unavailable) if a
    later try may succeed.
    """

    async def send_heartbeat(self, task_token: str) -> None:
        """Report that the work goes on."""
        ...

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Report that the work is done; `output` is a JSON document of at most 256 KiB."""
        ...

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Report that the work will not be done; `error` has at most 256 characters, `cause` at
        most 32,768."""
        ...


class SentCallback(msgspec.Struct, frozen=True, omit_defaults=True):
    """A notification that was sent: its instant as RFC 3339 writes it, a digest of its token, and
    what it said."""

    at: str
    task_token: str
    succeeded: bool
    output: Any = None
    error: str | None = None
    cause: Any = None


LONGEST_LEASE = 120_000
"""The longest lease, in milliseconds."""
CLOCKS_APART = 60_000
"""Milliseconds by which an earlier lease may outlast one taken now. A lease that lasts longer was
taken before a clock was set back, and is ignored."""


class Subscriber(StrEnum):
    """The one to whom an entry reports."""

    CALLBACK = "callback"
    WEBHOOK = "webhook"


class EntryKey(NamedTuple):
    """The run of an entry, and its subscriber."""

    run_id: str
    subscriber: Subscriber


class OutboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry, leased to one worker for delivery.

    `callback` is None for a webhook, which stands in the job. `run` is its run as it is now, None
    if it is gone. `ended_as` is the state in which the run ended, also after its deletion, and
    `ended_at` the instant of that end; None and 0 while the run goes on, or if they were not noted.
    `ending` is the payload, None until it is fixed at `decided_at` and the same at every attempt
    from then on; `attempts` counts its failed deliveries. `lease` is the instant at which the lease
    lapses. `webhook_number` is that of the job's webhook which waits for the end: the event is owed
    to no later one. Instants are in milliseconds since the epoch.
    """

    job_id: str
    run_id: str
    subscriber: Subscriber
    callback: Callback | None
    lease: int
    run: Run | None
    ended_as: RunStatus | None = None
    ended_at: int = 0
    ending: RunFinished | None = None
    decided_at: int = 0
    attempts: int = 0
    webhook_number: int = 0

    @property
    def key(self) -> EntryKey:
        """The key of the entry."""
        return EntryKey(self.run_id, self.subscriber)


class Outbox(Protocol):
    """Entries, for workers: one for the first run of each job with a callback, and one for each run
    of a job with a webhook.

    Whatever makes a run (`JobWriter.create_job`, `RunWriter.rerun`, `Schedules.change_schedule`)
    writes them in the same step, due at once; `JobWriter.set_webhook` writes that of a live run.
    They outlive their runs: `purge_run` and `purge_job` leave them alone.
    """

    async def due_entries(self, *, now: int, limit: int) -> list[EntryKey]:
        """Return the keys of at most `limit` entries that are due by `now`, longest due first.
        Leave out leased ones, unless the lease is longer than any lease may be.

        The end of a run makes its entry due at the time of that end. In a store that cannot write
        both in one step, a crash between them leaves the entry due when it was before.
        """
        ...

    async def lease_entry(self, key: EntryKey, *, now: int, lapses_at: int) -> OutboxEntry | None:
        """Lease an entry for one delivery; return None if it is gone, not due, or leased.

        Until `lapses_at` it is not due, and nobody else gets it. An earlier lease that lapses more
        than a minute after `lapses_at` was taken before a clock was set back, and is ignored.
        """
        ...

    async def fix_payload(self, entry: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        """Fix the payload of an entry whose run has ended; return False and change nothing if the
        lease was lost, or the payload was fixed before."""
        ...

    async def reschedule_entry(self, entry: OutboxEntry, *, due_at: int, attempts: int) -> None:
        """Release the lease of an entry, due again at `due_at`, after `attempts` failed deliveries.

        If its run has ended meanwhile and no payload is fixed, the entry is due at the time of that
        end instead. Do nothing if the lease was lost.
        """
        ...

    async def drop_entry(self, entry: OutboxEntry) -> None:
        """Remove an entry; do nothing if the lease was lost."""
        ...
