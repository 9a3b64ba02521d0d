"""The deliveries port: records of events on their way to receivers, which are queue and log in one.

A record changes under its version: whoever changes it names the record as it was read. The rules of
attempts and ladders are in `domain/deliveries.py`; a store only keeps, finds and compares. A
caller's deliveries are invisible to other callers. Instants are in milliseconds since the epoch.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.deliveries import DeliveryStatus, EventDelivery


class DeliveryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The deliveries of a caller to list: of one job, in one status, created at or after `since`
    and before `until`, with an id below `before`."""

    caller: str
    job_id: str | None = None
    status: DeliveryStatus | None = None
    since: int = 0
    until: int | None = None
    before: str | None = None


class DeliveryLog(Protocol):
    """Reading and replay of deliveries, for the API."""

    async def get_delivery(self, caller: str, delivery_id: str) -> EventDelivery | None:
        """Return a caller's delivery; None if there is none."""
        ...

    async def list_deliveries(self, wanted: DeliveryFilter, *, limit: int) -> list[EventDelivery]:
        """Return at most `limit` deliveries, newest first by id."""
        ...

    async def create_delivery(self, delivery: EventDelivery) -> bool:
        """Write a new record; return False and change nothing if its id exists already for the
        caller."""
        ...

    async def change_delivery(self, before: EventDelivery, after: EventDelivery) -> bool:
        """Replace a record by its next version; return False and change nothing if it is no longer
        at the version of `before`, or gone.

        Of several calls that name one version a single one returns True, though all write the same:
        who has True makes the attempt. A store that repeats its own write after a lost answer has
        to know it again as its own.
        """
        ...


class DeliveryQueue(DeliveryLog, Protocol):
    """Due deliveries, for workers."""

    async def due_deliveries(self, *, now: int, limit: int) -> list[EventDelivery]:
        """Return at most `limit` pending deliveries that are due by `now` and not leased, longest
        due first. A lease that is longer than any lease may be (`outbox.LONGEST_LEASE`) does not
        count."""
        ...


class DeliveryUpkeep(Protocol):
    """Removal of old deliveries, for the sweeper. Those of a job go with it (`JobPurge`)."""

    async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
        """Remove at most `limit` deliveries that are not pending and last changed before `before`;
        return their number."""
        ...


class Deliveries(DeliveryQueue, DeliveryUpkeep, Protocol):
    """All of DeliveryQueue and DeliveryUpkeep."""
