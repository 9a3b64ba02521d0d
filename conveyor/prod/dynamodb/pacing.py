"""The pacing port on DynamoDB, for a fleet without Redis: a row for each host whose starts are
taken, and one for each that has refused calls. The robots port, one row an origin, is here too.

**Starts.** DynamoDB has no clock. Who wants starts takes a stretch of time behind all that is
taken, by a write that is refused if another one came between. The row says how long after its
writing that stretch ends, by the clock of who wrote it. Whoever reads it later counts so long from
when it first saw the row, or by a bound on how far the two clocks are apart (`ClockBounds`): never
too short, and too long by little more than a call lasts. So no two starts are closer than their
interval, as long as the clocks run at about the same rate. Who dies loses what it took.

**The line** is each worker's own, paced by the rate over the number of workers that share the host,
which hold a permit of its line.

**Closed hosts.** A host is closed for as long as was said from the moment at which a worker first
saw that. One that comes by later goes by its wall clock too, and by CLOCKS_APART.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import anyio
import msgspec
from cachetools import LRUCache

from conveyor.domain.hosts import HostLine
from conveyor.ports.clock import Clock
from conveyor.ports.pacing import (
    CEILING_LASTS,
    HORIZON,
    IDLE,
    NOTHING_ELSE,
    Booking,
    HostState,
    Pacing,
)
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.ports.robots import KeptFile, RobotsFiles
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Table,
    conflicting_item,
    contention_error,
    decodes_row,
)
from conveyor.prod.dynamodb.permits import ROW_TTL, TRIES
from conveyor.prod.dynamodb.schema import (
    ROW_SHAPE,
    TIME_TO_LIVE,
    host_row_key,
    host_starts_key,
    robots_row_key,
)

LINE_KEY = "line:"
"""Begins the names of the ledger's entries of workers that share a host."""
LINE_LEASE = 60.0
"""Seconds for which a worker counts among those that share a host."""
PATIENCE = 2.0
"""Seconds for which a worker waits until it can take all the starts that it wants."""
DRIFT = 0.0001
"""Seconds by which two monotonic clocks may come apart in one."""
REMEMBERED = 600.0
"""Seconds for which a comparison of two clocks holds."""
COMPARED_AGAIN = 30.0
"""Seconds after which clocks are compared anew with care."""
MOST_RELAYED = 12
"""Clocks of which a worker tells others how far its own is ahead: a row stays below a unit."""
WRITTEN_WITHIN = 10.0
"""Most seconds from when a row was made until it was there."""
LOOK_PAUSE, LOOK_TIME, LOOK_SPARE = 0.02, 1.0, 0.5
"""Least seconds between two looks for a row of another worker, and for which they go on; seconds
before its own start at which a worker ends them."""
JUMP = 0.05
"""Seconds by which a wall clock that was set, or a monotonic one that stood still, changes against
the other."""
CLOCKS_APART = 60.0
"""Most seconds that the wall clocks of two machines may differ."""
ROUNDED = 1e-6
"""Seconds that are no difference."""
MOST_WORKERS = 1_000_000
MOST_HOSTS = 5_000


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the starts of a host that workers have: all until `ends`. `holder` wrote it, at
    `written`; both are microseconds of its monotonic clock, which is ahead of others by no more
    than `ahead` has. `stamp` is a text that no other write has."""

    stamp: str
    holder: str
    written: int
    ends: int
    ahead: dict[str, int] = {}

    @property
    def lasts(self) -> float:
        """The seconds from its writing to its end."""
        return (self.ends - self.written) / 1_000_000


@decodes_row
def _read_taken(item: Item) -> _Taken:
    return msgspec.convert(item["taken"], _Taken)


class ClockBounds:
    """The most seconds that this worker's monotonic clock is ahead of those of others: a row that
    somebody wrote at an instant of its own clock was seen here later than that. Workers relay
    theirs: who always sees the rows of one late has seen those of another soon. Uses no clock."""

    def __init__(self) -> None:
        self._seen: LRUCache[str, tuple[float, float]] = LRUCache(MOST_HOSTS)
        self._compared_at: LRUCache[str, float] = LRUCache(MOST_HOSTS)

    def is_due(self, holder: str, now: float) -> bool:
        """Tell whether somebody's clock is to be compared with care."""
        return bool(holder) and now - self._compared_at.get(holder, -math.inf) > COMPARED_AGAIN

    def compared(self, holder: str, now: float) -> None:
        """Note that a row was seen just after it was written."""
        self._compared_at[holder] = now

    def observe(self, holder: str, written: float, now: float) -> None:
        """Note that a row that was written then has been seen."""
        self._note(holder, now - written, now)

    def relayed(self, row: _Taken, age: float, now: float) -> None:
        """Note what somebody knew of others when it wrote a row, no longer ago than that."""
        ahead = self.ahead_of(row.holder, now)
        if ahead is None:
            return
        for holder, more in row.ahead.items():
            self._note(holder, ahead + more / 1_000_000 + DRIFT * age, now)

    def to_relay(self, now: float) -> dict[str, int]:
        """Return the bounds for the clocks that were seen last, in microseconds."""
        lately = sorted(self._seen.items(), key=lambda item: item[1][1])[-MOST_RELAYED:]
        found = ((holder, self.ahead_of(holder, now)) for holder, _ in lately)
        return {one: math.ceil(ahead * 1_000_000) for one, ahead in found if ahead is not None}

    def _note(self, holder: str, ahead: float, now: float) -> None:
        known = self.ahead_of(holder, now)
        if known is None or ahead <= known:
            self._seen[holder] = ahead, now

    def ahead_of(self, holder: str, now: float) -> float | None:
        """Return the bound for somebody's clock; None if nothing was seen of it lately."""
        ahead, since = self._seen.get(holder, (0.0, -math.inf))
        return ahead + DRIFT * (now - since) if now - since < REMEMBERED else None


@dataclass(slots=True)
class _Host:
    """A host as this worker knows it; instants are monotonic seconds of this worker.

    It has the starts from `following` on, which is `apart` from the last one that it used, that
    leave an interval until `ends`. The `row` was seen first at `seen_at` and last at `looked_at`;
    `is_own` if that is the latest write of this worker, `other` is the clock of the latest one of
    another. It waits for more starts to be free since `waits_since`.
    """

    following: float
    apart: float = 0.0
    ends: float = -math.inf
    row: _Taken | None = None
    seen_at: float = -math.inf
    looked_at: float = -math.inf
    is_own: bool = False
    other: str = ""
    waits_since: float = -math.inf
    line: HostLine = field(default_factory=HostLine)
    shared_by: int = 1
    counted_at: float = -math.inf
    asking: anyio.Lock = field(default_factory=anyio.Lock)

    def following_by(self, step: float) -> float:
        """Return the next start, no further from the last one here than a step: the rule may have
        changed since."""
        return self.following - self.apart + min(self.apart, step)

    def hasten(self, step: float) -> None:
        """Let the next start be no further from the last one here than that."""
        self.following, self.apart = self.following_by(step), min(self.apart, step)

    def is_idle(self, now: float) -> bool:
        lasts = 0.0 if self.row is None else self.row.lasts
        latest = max(self.following, self.seen_at + lasts, self.line.end)
        return latest < now - LINE_LEASE and not self.asking.locked()


class _Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """A row of what a host has said: closed until an instant by the wall clock of who wrote it, for
    `lasts` milliseconds from then; its ceiling, and its own interval in milliseconds. `closing` is
    a text that no other closing has, `stamp` one that no other write has."""

    stamp: str = ""
    closing: str = ""
    closed_until: int = 0
    lasts: int = 0
    ceiling: int = 0
    lowered_at: int = 0
    halved_at: int = 0
    interval: int = 0
    slow_until: int = 0

    def ceiling_at(self, now: int) -> int:
        return self.ceiling if now < self.lowered_at + CEILING_LASTS * 1_000 else 0

    def interval_at(self, now: int) -> float:
        return self.interval / 1_000 if now < self.slow_until else 0.0


_NONE = _Refusals()


@decodes_row
def _read_refusals(item: Item) -> _Refusals:
    return msgspec.convert(item["refusals"], _Refusals)


class DynamoPacing(Pacing):
    """The pacing port on one table. Each worker has its own instance."""

    def __init__(self, permits: Permits, table: Table, clock: Clock) -> None:
        self._permits = permits
        self._table = table
        self._clock = clock
        self._holder = clock.new_id()
        self._sequence = 0
        self._hosts: dict[str, _Host] = {}
        self._sweep_at = MOST_HOSTS
        self._clocks = ClockBounds()
        # The name of its monotonic clock, and the seconds that the wall clock is ahead of it.
        self._of_clock, self._ahead = "", -math.inf
        # The seconds that the latest write took.
        self._took = 0.0
        self._seen: LRUCache[str, tuple[str, float]] = LRUCache(MOST_HOSTS)

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        names = {**also, host: interval}
        known, now = await self._look(names), self._clock.now()
        ceilings = [one.ceiling_at(now) for one in known.values()]
        ceiling = min(filter(None, ceilings), default=0)
        closed = [self._closed_for(name, one) for name, one in known.items()]
        wanted = max((one.interval_at(now) for one in known.values()), default=0.0)
        if closed_for := max(closed, default=0.0):
            return Booking((), closed_for, ceiling, wanted)
        for name, one in known.items():
            names[name] = max(names[name], one.interval_at(now))
        paced = {name: names[name] for name in sorted(names) if names[name] > 0}
        if not paced:
            return Booking((0.0,) * count, 0.0, ceiling, wanted)
        async with AsyncExitStack() as locks:
            # In one order, so that no two bookings wait for what the other one has.
            for name in paced:
                await locks.enter_async_context(self._known(name).asking)
            self._known(host).hasten(names[host])
            starts = self._allot(paced, count)
            while not starts and await self._take(paced, count):
                await self._compare_clocks(paced)
                starts = self._allot(paced, count)
        return Booking(starts, 0.0, ceiling, wanted)

    async def line_up(self, host: str, interval: float, run: str = "") -> float:
        known = self._known(host)
        await self._count(known, host)
        said = (await self._look([host])).get(host, _NONE)
        step = max(interval, said.interval_at(self._clock.now()))
        now = self._clock.monotonic()
        free_at = self._free_at(known, now, step)
        begins = max(now + self._closed_for(host, said), free_at)
        if begins <= now and free_at < now - max(IDLE, step):
            known.line = HostLine()
        return known.line.take(run, begins, step * known.shared_by, now) - now

    async def leave(self, run: str, hosts: Sequence[str] | None = None) -> None:
        for known in filter(None, map(self._hosts.get, self._hosts if hosts is None else hosts)):
            known.line.leave(run, self._clock.monotonic())

    async def close(self, host: str, seconds: float) -> None:
        def closed(before: _Refusals, stamp: str) -> _Refusals:
            now, lasts = self._clock.now(), math.ceil(seconds * 1_000)
            lasts = max(lasts, before.closed_until - now)
            return msgspec.structs.replace(
                before, closing=stamp, closed_until=now + lasts, lasts=lasts
            )

        began = self._clock.monotonic()
        after = await self._change(host, closed)
        self._seen[host] = after.closing, began

    async def lower(self, host: str, limit: int, age: float = 0.0) -> int:
        def lowered(before: _Refusals, stamp: str) -> _Refusals:
            now = self._clock.now()
            ceiling = before.ceiling_at(now)
            if ceiling and before.halved_at > now - age * 1_000:
                return before
            halved = max(1, (ceiling or limit) // 2)
            return msgspec.structs.replace(before, ceiling=halved, lowered_at=now, halved_at=now)

        return (await self._change(host, lowered)).ceiling

    async def lift(self, host: str, limit: int) -> None:
        def lifted(before: _Refusals, stamp: str) -> _Refusals:
            now = self._clock.now()
            ceiling = before.ceiling_at(now)
            if not ceiling:
                return before
            raised = ceiling + 1 if ceiling + 1 < limit else 0
            return msgspec.structs.replace(before, ceiling=raised, lowered_at=now)

        await self._change(host, lifted)

    async def slow(self, host: str, interval: float, seconds: float) -> None:
        def slowed(before: _Refusals, stamp: str) -> _Refusals:
            until = self._clock.now() + math.ceil(seconds * 1_000)
            step = math.ceil(interval * 1_000)
            return msgspec.structs.replace(before, interval=step, slow_until=until)

        await self._change(host, slowed)

    async def state(self, hosts: Iterable[str]) -> dict[str, HostState]:
        now, found = self._clock.now(), {}
        for name, said in (await self._refusals(hosts)).items():
            state = HostState(
                self._closed_for(name, said), said.ceiling_at(now), said.interval_at(now)
            )
            if state != HostState():
                found[name] = state
        return found

    # -- starts --

    def _allot(self, paced: Mapping[str, float], count: int) -> tuple[float, ...]:
        """Use the next starts of all these hosts that this worker has."""
        now, starts = self._clock.monotonic(), list[float]()
        hosts = [(self._known(name), step) for name, step in paced.items()]
        while len(starts) < count:
            start = max(now, *(known.following for known, _ in hosts))
            is_over = any(start > known.ends - step + ROUNDED for known, step in hosts)
            if is_over or start - now > HORIZON:
                break
            starts.append(start - now)
            for known, step in hosts:
                known.following, known.apart = start + step, step
        return tuple(starts)

    async def _take(self, paced: Mapping[str, float], count: int) -> bool:
        """Take starts that nobody has, of all these hosts at once; return False where there are
        none within HORIZON. What one of them has lost to another worker is taken of none."""
        hosts = {name: self._known(name) for name in paced}
        spacing = max(paced.values())
        for _ in range(TRIES):
            now = self._clock.monotonic()
            begins = max(now, *(self._free_at(known, now) for known in hosts.values()))
            room = HORIZON - (begins - now)
            if room < 0:
                return False
            # A start that is over when the answers are there is none.
            slack = max(0.0, now + 2 * len(hosts) * self._took - begins)
            starts = min(count, 1 + int(room / spacing))
            if starts < count and self._is_patient(hosts.values(), now):
                return False
            for name, known in hosts.items():
                ends = begins + (starts - 1) * spacing + paced[name] + slack
                if not await self._write(name, known, begins, ends):
                    break
            else:
                return True
        raise contention_error()

    async def _compare_clocks(self, paced: Mapping[str, float]) -> None:
        """See the next row of another worker as soon as it is written, if that was last so long ago
        and the starts that were taken are far off: by chance it might always be seen late."""
        for name, step in paced.items():
            known, now = self._known(name), self._clock.monotonic()
            until = min(now + max(LOOK_TIME, 2 * step), known.following - LOOK_SPARE)
            while now < until and self._clocks.is_due(known.other, now):
                await self._clock.sleep(max(LOOK_PAUSE, step / 50))
                self._see(known, await self._table.get(host_starts_key(name)))
                now = self._clock.monotonic()
                if not known.is_own:
                    self._clocks.compared(known.other, now)
            # One that has gone is not waited for again.
            known.other = ""

    def _is_patient(self, hosts: Iterable[_Host], now: float) -> bool:
        """Tell whether to leave the last few starts within HORIZON alone: soon there will be as
        many as are wanted, and a little time is lost each time that starts change hands."""
        patient = False
        for known in hosts:
            if now - known.waits_since > 2 * PATIENCE:
                known.waits_since = now
            patient = patient or (not known.is_own and now - known.waits_since < PATIENCE)
        return patient

    async def _write(self, name: str, known: _Host, begins: float, ends: float) -> bool:
        """Take the starts of a host between two moments; return False if another write came first,
        and see what that took."""
        began = self._clock.monotonic()
        taken = _Taken(
            stamp=self._clock.new_id(),
            holder=self._clock_name(began),
            written=math.floor(began * 1_000_000),
            ends=math.ceil((ends + ROUNDED) * 1_000_000),
            ahead=self._clocks.to_relay(began),
        )
        item: Item = {
            "shape": ROW_SHAPE,
            "stamp": taken.stamp,
            "taken": msgspec.to_builtins(taken),
            TIME_TO_LIVE: self._clock.now() // 1_000 + ROW_TTL,
        }
        condition, own = "attribute_not_exists(#stamp)", {}
        if known.row is not None:
            condition, own = "#stamp = :own", {"own": known.row.stamp}
        try:
            await self._table.put(host_starts_key(name), item, condition=condition, **own)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = conflicting_item(refused)
            if found is None or found["stamp"] != taken.stamp:
                self._see(known, found)
                return False
        now = self._clock.monotonic()
        self._took = now - began
        known.row, known.seen_at, known.looked_at, known.is_own = taken, now, now, True
        known.following, known.apart, known.ends = begins, 0.0, ends
        return True

    def _clock_name(self, now: float) -> str:
        """Return the name by which others know this worker's monotonic clock: another one once it
        may have stood still, with which they have not compared theirs."""
        ahead = self._clock.now() / 1_000 - now
        if abs(ahead - self._ahead) > JUMP:
            self._of_clock = self._clock.new_id()
        self._ahead = ahead
        return self._of_clock

    def _see(self, known: _Host, item: Item | None) -> None:
        """Take in the row of an answer."""
        row = None if item is None else _read_taken(item)
        now = self._clock.monotonic()
        age, known.looked_at = now - known.looked_at + WRITTEN_WITHIN, now
        if row is not None and known.row is not None and row.stamp == known.row.stamp:
            return
        known.row, known.seen_at, known.is_own = row, now, False
        if row is not None:
            known.other = row.holder
            self._clocks.observe(row.holder, row.written / 1_000_000, now)
            if age < REMEMBERED:
                self._clocks.relayed(row, age, now)

    def _free_at(self, known: _Host, now: float, step: float = math.inf) -> float:
        """Return the moment from which on nobody has starts of a host, as far as was seen, if the
        next one is to be no further than a step from the last one here."""
        row = known.row
        if known.is_own or row is None:
            return known.following_by(step)
        ends = row.ends / 1_000_000
        if row.holder == self._of_clock:
            return ends
        ahead, by_sight = self._clocks.ahead_of(row.holder, now), known.seen_at + row.lasts
        return by_sight if ahead is None else min(by_sight, ends + ahead)

    async def _count(self, known: _Host, name: str) -> None:
        """Count the workers that share a host, now and then."""
        now = self._clock.monotonic()
        if now - known.counted_at > LINE_LEASE / 3:
            known.counted_at = now
            state = await self._hold(LINE_KEY + name, limit=MOST_WORKERS, lease=LINE_LEASE)
            known.shared_by = max(1, state.holders)

    def _known(self, name: str) -> _Host:
        now = self._clock.monotonic()
        if name not in self._hosts:
            if len(self._hosts) >= self._sweep_at:
                kept = {of: one for of, one in self._hosts.items() if not one.is_idle(now)}
                self._hosts, self._sweep_at = kept, 2 * len(kept) + MOST_HOSTS
            self._hosts[name] = _Host(following=now)
        return self._hosts[name]

    async def _hold(self, name: str, *, limit: int, lease: float, count: int = 1) -> LedgerState:
        self._sequence += 1
        request = LeaseRequest(
            job_id=name, holder=self._holder, count=count, before=0, sequence=self._sequence
        )
        return await self._permits.acquire_or_renew(request, limit=limit, lease=lease)

    # -- what hosts have said --

    async def _look(self, hosts: Iterable[str]) -> dict[str, _Refusals]:
        """Return what hosts have said, and see which starts are taken."""
        said = {host_row_key(name): name for name in hosts}
        taken = {host_starts_key(name): self._known(name) for name in hosts}
        locked = [key for key, known in taken.items() if known.asking.locked()]
        items = await self._table.get_many([*said, *(key for key in taken if key not in locked)])
        for key, known in taken.items():
            # While one is written, an answer that is older than that may come.
            if key not in locked and not known.asking.locked():
                self._see(known, items.get(key))
        return {said[key]: _read_refusals(item) for key, item in items.items() if key in said}

    async def _refusals(self, hosts: Iterable[str]) -> dict[str, _Refusals]:
        keys = {host_row_key(name): name for name in hosts}
        items = await self._table.get_many(list(keys))
        return {keys[key]: _read_refusals(item) for key, item in items.items()}

    def _closed_for(self, name: str, refusals: _Refusals) -> float:
        now = self._clock.monotonic()
        closing, since = self._seen.get(name, ("", now))
        if closing != refusals.closing:
            since = now
            self._seen[name] = refusals.closing, now
        by_clock = (refusals.closed_until - self._clock.now()) / 1_000 + CLOCKS_APART
        return max(0.0, min(since + refusals.lasts / 1_000 - now, by_clock))

    async def _change(self, name: str, change: Callable[[_Refusals, str], _Refusals]) -> _Refusals:
        """Write what a host has said, and return it. If another write comes between, try again."""
        key = host_row_key(name)
        item = await self._table.get(key)
        for _ in range(TRIES):
            before = _NONE if item is None else _read_refusals(item)
            stamp = self._clock.new_id()
            after = change(before, stamp)
            if after == before:
                return after
            after = msgspec.structs.replace(after, stamp=stamp)
            ends_at = max(after.closed_until, after.lowered_at, after.slow_until) / 1_000
            row: Item = {
                "shape": ROW_SHAPE,
                "stamp": stamp,
                "refusals": msgspec.to_builtins(after),
                TIME_TO_LIVE: math.ceil(ends_at) + ROW_TTL,
            }
            condition, own = "attribute_not_exists(#stamp)", {}
            if before.stamp:
                condition, own = "#stamp = :own", {"own": before.stamp}
            try:
                await self._table.put(key, row, condition=condition, **own)
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                item = conflicting_item(refused)
                if item is not None and item["stamp"] == stamp:
                    return after
            else:
                return after
        raise contention_error()


class DynamoRobots(RobotsFiles):
    """The robots port: a row for each origin, kept by wall clocks."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def find(self, origin: str) -> KeptFile | None:
        item = await self._table.get(robots_row_key(origin))
        kept = None if item is None else _read_file(item)
        left = 0.0 if kept is None else (kept[1] - self._clock.now()) / 1_000
        return KeptFile(kept[0], left) if kept is not None and left > 0 else None

    async def keep(self, origin: str, content: bytes, seconds: float) -> None:
        until = self._clock.now() + math.ceil(seconds * 1_000)
        row: Item = {
            "shape": ROW_SHAPE,
            "content": content,
            "kept_until": until,
            TIME_TO_LIVE: math.ceil(until / 1_000),
        }
        await self._table.put(robots_row_key(origin), row)


@decodes_row
def _read_file(item: Item) -> tuple[bytes, int]:
    return bytes(item["content"]), int(item["kept_until"])
