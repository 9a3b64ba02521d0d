"""The permits port on DynamoDB: one ledger row a job, changed by conditional writes. It compares no
wall clocks. The workers port, one row a worker, is here too.

**The row.** `entries` maps each holder to its count, sequence, want, lease and `stamp`, a text that
no other write has. `generation` is the stamp of the last write that added permits.

**Leases.** DynamoDB has no clock that a condition could use, and clocks of processes differ by any
amount, so the row holds no end of a lease. A process lets an entry lapse once *it has itself
watched that entry unchanged for its lease*, on its own monotonic clock, from the answer that first
showed the entry. The holder counts the same lease from before the call that wrote the entry, which
is earlier than any watcher. So the holder always stops first, as long as the clocks run at about
the same rate; holders leave the last tenth of a lease unused for that.

**The limit.** Adding permits is conditional on the `generation` that the sum was taken of: no other
process has added any since. No other write raises the sum, so renewing and giving back only require
that the holder's own entry is unchanged. The write that leaves a lapsed entry out of its sum also
removes that entry, under the condition that its stamp is unchanged; a holder that renews at the
same moment wins or loses as a whole. At every write that raises it, the sum of all counts in the
row is therefore within the limit.

**A lost answer.** The repetition of a write is refused; the row returned with the refusal carries
the stamp of that write, and the call is granted.

**The price.** Renewing or giving back: one write, however many holders share a job. Taking more:
one write if this process saw the row last; else a refused write and a second one, and one more for
each lost race. A refusal: one strong read, or the refused write that showed the row. A dead holder
counts until another has watched its entry for a lease: about a lease plus the time between two
calls of another holder of the job, and a whole lease from its first look for a new process.

**The growth.** An entry takes about 60 bytes, and lapsed ones are never much more than half of a
row. Each holder renews some six times in a lease, and each write pays for the whole row: with the
usual lease, 300 holders of one job use the 1,000 write units a second that a partition takes. A
fleet with more workers for one job keeps its permits in Redis.

The row's time to live is a day by the wall clock, renewed with every write: far more than any lease
and any difference of clocks.
"""

from __future__ import annotations

import math
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
from cachetools import LRUCache

from conveyor.domain.run_waits import WorkerReport, decode_report, encode_report
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState, PermitHolder
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    AttributeName,
    Item,
    PlaceholderValue,
    Query,
    Table,
    conflicting_item,
    contention_error,
    decode_intact,
    decodes_row,
)
from conveyor.prod.dynamodb.schema import (
    ROW_SHAPE,
    TIME_TO_LIVE,
    WORKERS,
    Key,
    permits_key,
    worker_key,
)

STAMP = 4
"""The place of the stamp in an entry."""
MOST_REMOVED = 40
"""Lapsed entries that one write removes, because the length of an expression is bounded."""
MOST_LAPSED = 10
"""Lapsed entries that renewals leave to writes that add permits, unless they are most of a row."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One holder's entry. `stamp` identifies the write that made it; `lease` in milliseconds."""

    count: int
    sequence: int
    wants: bool
    lease: int
    stamp: str

    def attributes(self) -> list[Any]:
        """Return the entry as stored: its fields without their names, which would be most of it."""
        return list(msgspec.structs.astuple(self))


@decodes_row
def _read(item: Item) -> tuple[str | None, dict[str, LeaseRow]]:
    """Decode the generation and entries of a row. Raises DamagedRow."""
    return item["generation"], msgspec.convert(item["entries"], dict[str, LeaseRow])


class LedgerWrite(msgspec.Struct, frozen=True):
    """The write that a call needs: the row's state that it depends on, and the entries that it
    removes.

    `own` is the stamp of the holder's entry, None if it has none. `generation` is set if the write
    adds permits, which requires that no other process has added any since.
    """

    own: str | None
    generation: str | None
    removed: dict[str, str]


class RowWatch:
    """One job's ledger row as this process last saw it, with the time since when each entry is
    unchanged, in monotonic seconds. Uses no table and no clock."""

    def __init__(self) -> None:
        self.generation: str | None = None
        self.entries: dict[str, LeaseRow] = {}
        self._since: dict[str, float] = {}

    def observe(self, item: Item | None, now: float) -> None:
        """Take in the row of an answer; `now` is after that answer."""
        generation, entries = (None, {}) if item is None else _read(item)
        self._since = {
            holder: self._since[holder] if entry == self.entries.get(holder) else now
            for holder, entry in entries.items()
        }
        self.entries = entries
        self.generation = generation

    def is_live(self, holder: str, now: float) -> bool:
        """Return whether a holder may still use its permits, as far as this process can tell."""
        entry = self.entries.get(holder)
        return entry is not None and now < self._since[holder] + entry.lease / 1_000

    def plan(self, holding: LeaseRequest, limit: int, now: float) -> LedgerWrite | None:
        """Plan the write that grants a call; None refuses it."""
        own = self.entries.get(holding.holder)
        live = own if self.is_live(holding.holder, now) else None
        if live is not None and holding.sequence <= live.sequence:
            return None
        stamp = None if own is None else own.stamp
        known = 0 if live is None else live.count
        lapsed = [
            (holder, entry.stamp)
            for holder, entry in self.entries.items()
            if holder != holding.holder and not self.is_live(holder, now)
        ]
        removed = dict(lapsed[:MOST_REMOVED])
        if holding.count <= known:
            # Each write pays for the whole row; but who removes what another has is refused.
            is_due = len(lapsed) > max(MOST_LAPSED, len(self.entries) // 2)
            return LedgerWrite(stamp, None, removed if is_due else {})
        others = sum(
            entry.count
            for holder, entry in self.entries.items()
            if holder != holding.holder and holder not in removed
        )
        if others + holding.count > limit:
            return None
        return LedgerWrite(stamp, self.generation, removed)

    def ledger_state(self, *, granted: bool, limit: int, now: float) -> LedgerState:
        """Return the state of the ledger as last seen."""
        live = [entry for holder, entry in self.entries.items() if self.is_live(holder, now)]
        return LedgerState(
            granted=granted,
            free=max(0, limit - sum(entry.count for entry in live)),
            holders=sum(entry.count > 0 for entry in live),
            wanting=sum(entry.wants for entry in live),
        )


TRIES = 20
"""Lost races after which a call gives up."""
MOST_WATCHED = 5_000
"""Jobs whose rows are remembered. A forgotten row is watched anew from its next look on."""
ROW_TTL = 86_400
"""Seconds that a row outlives its last write."""


class DynamoPermits:
    """The permits port on one table. Each process has its own instance, and watches the rows that
    it asks for."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._watched: LRUCache[str, RowWatch] = LRUCache(MOST_WATCHED)
        self._name = urlsafe_b64encode(clock.token(6)).decode()
        self._writes = 0

    async def acquire_or_renew(
        self, holding: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        if holding.count < 0:
            raise ValueError("a count of permits is not negative")
        key = permits_key(holding.job_id)
        watch = self._watch(holding.job_id)
        fresh = False
        for _ in range(TRIES):
            plan = watch.plan(holding, limit, self._clock.monotonic())
            if plan is None and fresh:
                return self._ledger_state(watch, limit, granted=False)
            if plan is None:
                watch.observe(await self._table.get(key), self._clock.monotonic())
                fresh = True
                continue
            entry = self._entry(holding, lease)
            try:
                item: Item | None = await self._write(key, holding.holder, entry, plan, watch)
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                item, fresh = conflicting_item(refused), True
            watch.observe(item, self._clock.monotonic())
            if watch.entries.get(holding.holder) == entry:
                return self._ledger_state(watch, limit, granted=True)
        raise contention_error()

    async def holders(self, job_id: str) -> list[PermitHolder]:
        item = await self._table.get(permits_key(job_id))
        entries = {} if item is None else _read(item)[1]
        return [
            PermitHolder(holder=holder, count=entry.count, wants=entry.wants)
            for holder, entry in sorted(entries.items())
        ]

    async def _write(
        self, key: Key, holder: str, entry: LeaseRow, plan: LedgerWrite, watch: RowWatch
    ) -> Item:
        """Make the planned write and return the row afterwards. Raises AwsRefused with the row as
        found."""
        expires = self._clock.now() // 1_000 + ROW_TTL
        if watch.generation is None:
            item: Item = {
                "shape": ROW_SHAPE,
                "entries": {holder: entry.attributes()},
                "generation": entry.stamp,
                TIME_TO_LIVE: expires,
            }
            await self._table.put(key, item, condition="attribute_not_exists(pk)")
            return item
        values: dict[str, PlaceholderValue] = {
            "holder": AttributeName(holder),
            "entry": entry.attributes(),
            "expires": expires,
        }
        update = f"SET #entries.#holder = :entry, #{TIME_TO_LIVE} = :expires"
        condition = "attribute_exists(#entries) AND "
        if plan.own is None:
            condition += "attribute_not_exists(#entries.#holder)"
        else:
            values["own"] = plan.own
            condition += f"#entries.#holder[{STAMP}] = :own"
        if plan.generation is not None:
            values |= {"generation": plan.generation, "next": entry.stamp}
            update += ", #generation = :next"
            condition += " AND #generation = :generation"
        for number, (gone, stamp) in enumerate(plan.removed.items()):
            values |= {f"gone{number}": AttributeName(gone), f"stamp{number}": stamp}
            update += f"{', ' if number else ' REMOVE '}#entries.#gone{number}"
            condition += f" AND #entries.#gone{number}[{STAMP}] = :stamp{number}"
        return await self._table.update(key, update, condition=condition, **values)

    def _entry(self, holding: LeaseRequest, lease: float) -> LeaseRow:
        self._writes += 1
        return LeaseRow(
            count=holding.count,
            sequence=holding.sequence,
            wants=holding.wants,
            lease=math.ceil(lease * 1_000),
            stamp=f"{self._name}.{self._writes}",
        )

    def _watch(self, job_id: str) -> RowWatch:
        watch = self._watched.get(job_id)
        if watch is None:
            watch = self._watched[job_id] = RowWatch()
        return watch

    def _ledger_state(self, watch: RowWatch, limit: int, *, granted: bool) -> LedgerState:
        return watch.ledger_state(granted=granted, limit=limit, now=self._clock.monotonic())


# -- reports of workers --


class DynamoWorkers:
    """Reports of workers, one row each with a time to live; DynamoDB removes it late, and a look
    leaves out what has ended."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def say(self, report: WorkerReport) -> None:
        ends_at = self._clock.now() + math.ceil(report.kept_for * 1_000)
        item: Item = {
            "shape": ROW_SHAPE,
            "report": encode_report(report),
            "ends_at": ends_at,
            TIME_TO_LIVE: math.ceil(ends_at / 1_000),
        }
        await self._table.put(worker_key(report.worker_id), item)

    async def leave(self, worker_id: str) -> None:
        await self._table.delete(worker_key(worker_id))

    async def all(self) -> Sequence[WorkerReport]:
        now = self._clock.now()
        found: list[tuple[WorkerReport | None, int]] = []
        async for page in self._table.pages(Query(WORKERS, known_only=True, consistent=False)):
            found += decode_intact(_read_report, page.items)
        return [report for report, ends_at in found if report is not None and ends_at > now]


@decodes_row
def _read_report(item: Item) -> tuple[WorkerReport | None, int]:
    return decode_report(item["report"]), item["ends_at"]
