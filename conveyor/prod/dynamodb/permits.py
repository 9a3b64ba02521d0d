"""The permits port on DynamoDB: one row a job, moved by conditional writes. No clock is compared.

**The row.** `entries` maps a holder to its count, sequence, want, lease and `stamp`, a text that no
other write ever has. `generation` is the stamp of the write that added permits last.

**Leases.** DynamoDB has no clock that a condition could use, and those of processes may differ by
any amount. So nobody writes down when a lease ends. A process lets an entry lapse once *it has
itself watched that entry unchanged for its lease*, on its own monotonic clock, counted from the
answer that it first saw the entry in. The holder counts the same lease from before the call that
made the entry, which is earlier than anybody can see it. So the holder always stops first, whatever
the clocks say, as long as they run at about the same rate (holders leave the last tenth of a lease
unused for that).

**The limit.** Permits are added under the condition that `generation` is the one which the sum was
taken of: nobody has added any since. Only such a write raises the sum; renewing and giving back
lower it or leave it, so they need no more than that the holder's own entry is as it was. An entry
that is left out of the sum because it has lapsed is removed *in the same write*, under the
condition that its stamp has not changed: a holder that renews in that very moment wins or loses as
a whole. So the sum of all counts in the row, lapsed ones included, is within the limit at every
write that raises it.

**A lost answer.** A write made twice is refused the second time; the row that the refusal returns
carries its stamp, and the call is granted.

**The price.** Renewing and giving back: one write, also where many holders share a job. Taking
more: one write where this process saw the row last, else a refused one and one that goes through,
and one more for each race that is lost. A refusal: one strongly consistent read, or the refused
write that showed the row. A holder that died is counted until somebody has watched it for a lease:
about a lease plus the time between two calls of another holder of that job, and a whole lease from
its first look for a process that has just started. A row is 1 KB with about ten holders.

The row's time to live is a day, by the wall clock, moved on with every write: far more than any
lease and any difference of clocks.

What a process knows of one job's ledger row: the row as it was seen last, and since when.

Pure: no table, no clock. An entry lapses for whoever has watched it unchanged for its lease.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from cachetools import LRUCache

from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Given,
    Item,
    Name,
    Table,
    changed_too_often,
    condition_met,
    whole,
)
from conveyor.prod.dynamodb.schema import ROW_SHAPE, TIME_TO_LIVE, Key, permits_key

MOST_REMOVED = 40
"""Lapsed entries that one write removes: an expression has a bounded length."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one holder has. `stamp` is the write that it comes from; `lease` in milliseconds."""

    count: int
    sequence: int
    wants: bool
    lease: int
    stamp: str

    def attributes(self) -> dict[str, Any]:
        """As it lies in the row."""
        return msgspec.structs.asdict(self)


@whole
def _read(item: Item) -> tuple[str | None, dict[str, LeaseRow]]:
    """The generation and the entries of a row. Raises DamagedRow."""
    return item["generation"], msgspec.convert(item["entries"], dict[str, LeaseRow])


class Plan(msgspec.Struct, frozen=True):
    """A write that a call needs: which state of the row it was decided on, and what it removes.

    `own` is the stamp of the holder's entry, None where it has none. `generation` is given where
    permits are added: nobody else may have added any meanwhile.
    """

    own: str | None
    generation: str | None
    removed: dict[str, str]


class Watch:
    """One job's row, seen by one process. Moments are monotonic seconds of this process."""

    def __init__(self) -> None:
        self.generation: str | None = None
        self.entries: dict[str, LeaseRow] = {}
        self._since: dict[str, float] = {}

    def learn(self, item: Item | None, now: float) -> None:
        """Take in the row as it was answered; `now` is after the answer."""
        generation, entries = (None, {}) if item is None else _read(item)
        self._since = {
            holder: self._since[holder] if entry == self.entries.get(holder) else now
            for holder, entry in entries.items()
        }
        self.entries = entries
        self.generation = generation

    def is_live(self, holder: str, now: float) -> bool:
        """Whether an entry may still be in use, as far as this process can tell."""
        entry = self.entries.get(holder)
        return entry is not None and now < self._since[holder] + entry.lease / 1_000

    def plan(self, holding: LeaseRequest, limit: int, now: float) -> Plan | None:
        """What has to be written so that a call is granted; None where it is refused."""
        own = self.entries.get(holding.holder)
        live = own if self.is_live(holding.holder, now) else None
        if live is not None and holding.sequence <= live.sequence:
            return None
        stamp = None if own is None else own.stamp
        known = 0 if live is None else live.count
        if holding.count <= known:
            return Plan(stamp, None, {})
        lapsed = [
            (holder, entry.stamp)
            for holder, entry in self.entries.items()
            if holder != holding.holder and not self.is_live(holder, now)
        ]
        removed = dict(lapsed[:MOST_REMOVED])
        others = sum(
            entry.count
            for holder, entry in self.entries.items()
            if holder != holding.holder and holder not in removed
        )
        if others + holding.count > limit:
            return None
        return Plan(stamp, self.generation, removed)

    def standing(self, *, granted: bool, limit: int, now: float) -> LedgerState:
        """How things stand by what was seen last."""
        live = [entry for holder, entry in self.entries.items() if self.is_live(holder, now)]
        return LedgerState(
            granted=granted,
            free=max(0, limit - sum(entry.count for entry in live)),
            holders=sum(entry.count > 0 for entry in live),
            wanting=sum(entry.wants for entry in live),
        )


TRIES = 20
"""Times that a call is decided anew, because the row moved meanwhile."""
MOST_WATCHED = 5_000
"""Jobs whose rows are remembered. A forgotten one is watched anew, from its next look on."""
KEPT = 86_400
"""Seconds that a row outlives its last write."""


class DynamoPermits:
    """A ledger on one table. Every process has its own, and watches the rows that it asks of."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._watched: LRUCache[str, Watch] = LRUCache(MOST_WATCHED)
        self._name = clock.token(8).hex()
        self._writes = 0

    async def acquire_or_renew(
        self, holding: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Let a holder have `holding.count` permits for `lease` seconds, or change nothing.

        Raises ValueError where `holding.count` is below zero; ConveyorError(unavailable) where the
        table does not answer, or the row moves too fast.
        """
        if holding.count < 0:
            raise ValueError("a count of permits is not negative")
        key = permits_key(holding.job_id)
        watch = self._watch(holding.job_id)
        fresh = False
        for _ in range(TRIES):
            plan = watch.plan(holding, limit, self._clock.monotonic())
            if plan is None and fresh:
                return self._standing(watch, limit, granted=False)
            if plan is None:
                watch.learn(await self._table.get(key), self._clock.monotonic())
                fresh = True
                continue
            entry = self._entry(holding, lease)
            try:
                item: Item | None = await self._write(key, holding.holder, entry, plan, watch)
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                item, fresh = condition_met(refused), True
            watch.learn(item, self._clock.monotonic())
            if watch.entries.get(holding.holder) == entry:
                return self._standing(watch, limit, granted=True)
        raise changed_too_often()

    async def _write(
        self, key: Key, holder: str, entry: LeaseRow, plan: Plan, watch: Watch
    ) -> Item:
        """Carry out a plan; the row afterwards. Raises AwsRefused with the row that it met."""
        expires = self._clock.now() // 1_000 + KEPT
        if watch.generation is None:
            item: Item = {
                "shape": ROW_SHAPE,
                "entries": {holder: entry.attributes()},
                "generation": entry.stamp,
                TIME_TO_LIVE: expires,
            }
            await self._table.put(key, item, condition="attribute_not_exists(pk)")
            return item
        values: dict[str, Given] = {
            "holder": Name(holder),
            "entry": entry.attributes(),
            "expires": expires,
        }
        update = f"SET #entries.#holder = :entry, #{TIME_TO_LIVE} = :expires"
        condition = "attribute_exists(#entries) AND "
        if plan.own is None:
            condition += "attribute_not_exists(#entries.#holder)"
        else:
            values["own"] = plan.own
            condition += "#entries.#holder.#stamp = :own"
        if plan.generation is not None:
            values |= {"generation": plan.generation, "next": entry.stamp}
            update += ", #generation = :next"
            condition += " AND #generation = :generation"
        for number, (gone, stamp) in enumerate(plan.removed.items()):
            values |= {f"gone{number}": Name(gone), f"stamp{number}": stamp}
            update += f"{', ' if number else ' REMOVE '}#entries.#gone{number}"
            condition += f" AND #entries.#gone{number}.#stamp = :stamp{number}"
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

    def _watch(self, job_id: str) -> Watch:
        watch = self._watched.get(job_id)
        if watch is None:
            watch = self._watched[job_id] = Watch()
        return watch

    def _standing(self, watch: Watch, limit: int, *, granted: bool) -> LedgerState:
        return watch.standing(granted=granted, limit=limit, now=self._clock.monotonic())
