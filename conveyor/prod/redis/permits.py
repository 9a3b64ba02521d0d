"""The permits port on Redis: one script, so that each call is atomic, on the server's own time. The
reports of workers lie beside it.

**How Redis may lose a ledger.** It may restart empty, restart from an old snapshot, fail over to a
replica that has not received the last writes, be flushed, or evict keys. After each of these the
ledger would grant permits that are still in use, unless it notices. It notices as follows:

- The ledger of a fleet is a hash, and beside it a sorted set of the ends of all leases. The hash
  has an entry for each job and holder, the sum of each job, and the fields `#server` (the run id of
  the Redis process that began this ledger), `#since` (when it did so), `#seen` (the latest time of
  a call) and `#entries` (the number of ends). Redis never loses a part of a key, and if it loses
  one of the two, the numbers differ. So either everything is gone, or nobody holds permits of a job
  without a sum, and its first permit is granted at once. The keys have no time to live: eviction
  policies that evict only keys with one cannot touch them.
- If the hash is absent or carries another run id, if the number of ends is another, or if the clock
  went back by more than a second, entries may be missing or old. The ledger then begins anew,
  empty, and is closed for one lease from that moment on, for all jobs: holders announce their
  permits by their renewals, and nobody gets more. When it opens, every earlier grant has lapsed or
  has been announced. A run id changes with every start of a Redis process and differs on a replica.

It does not notice two servers that both believe to be the primary at the same time, nor a server's
clock that is *stepped forward* by more than the part of a lease that holders leave unused (its last
tenth). Managed services fence the old primary off and slew their clocks.

One fleet has one lease. While an operator changes it, calls name several. A closed ledger stays
closed for all as long as the longest lease that any call named meanwhile: the caller may hold older
permits under it. Once the ledger has opened, a longer lease closes it only for the calls that name
it, as long as that lease would have lasted: so a call with a short lease opens it for nobody else.

**What a call costs.** It finds lapsed entries by their ends, of whatever job, and drops at most
100; until an entry is dropped it counts. It reads and writes its own entry and the sum of its job,
however many holders share the job.

Redis 6.2 or newer, or Valkey; one primary, in cluster mode too (both keys lie in one slot); the
scripts use INFO and TIME.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from conveyor.domain.run_waits import WorkerReport, decode_report, encode_report
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.permits import LeaseRequest, LedgerState, PermitHolder
from conveyor.prod.redis.server import RedisServer, Script

HOLD = Script(
    """
local ledger, ends, job, holder = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local count, before, sequence = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local wants, limit, lease = ARGV[6] == '1', tonumber(ARGV[7]), tonumber(ARGV[8])
local now = tonumber(ARGV[9])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function text(number) return string.format('%.0f', number) end

local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local name = job .. '|' .. holder
local entries = redis.call('ZCARD', ends)
local kept = redis.call('HMGET', ledger, '#server', '#since', '#seen', '#lease', '#entries')
if kept[1] ~= server or entries ~= tonumber(kept[5]) or now < tonumber(kept[3]) - 1000 then
  redis.call('DEL', ledger, ends)
  kept, entries = {server, text(now), text(now), text(lease)}, 0
  redis.call('HSET', ledger, '#server', server, '#since', kept[2])
end
local since, longest = tonumber(kept[2]), tonumber(kept[4])
local opens = since + math.max(lease, longest)
local closed = now < opens
if now < since + longest then longest = math.max(lease, longest) end

local sums = {}
local function sum(of)
  if not sums[of] then
    local packed = redis.call('HGET', ledger, of)
    sums[of] = packed and cmsgpack.unpack(packed) or {0, 0, 0, 0}
  end
  return sums[of]
end
local function add(of, entry, sign)
  local into = sum(of)
  into[1] = into[1] + sign * entry[1]
  into[2] = into[2] + (entry[1] > 0 and sign or 0)
  into[3] = into[3] + sign * entry[3]
  into[4] = into[4] + sign
  into.moved = true
end
local function find(of)
  local packed = redis.call('HGET', ledger, of)
  return packed and cmsgpack.unpack(packed)
end
local function drop(gone, entry)
  add(string.match(gone, '^[^|]*'), entry, -1)
  redis.call('HDEL', ledger, gone)
  redis.call('ZREM', ends, gone)
  entries = entries - 1
end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', text(now), 'LIMIT', 0, 100)) do
  drop(gone, find(gone))
end
local own = find(name)
if own and own[4] <= now then
  drop(name, own)
  own = nil
end

local known, granted = own and own[1] or 0, false
if own and sequence <= own[2] then granted = false
elseif closed then granted = count <= before
else granted = count <= known or sum(job)[1] - known + count <= limit end

if granted then
  if own then add(job, own, -1) else entries = entries + 1 end
  own = {count, sequence, wants and 1 or 0, now + lease}
  add(job, own, 1)
  redis.call('HSET', ledger, name, cmsgpack.pack(own))
  redis.call('ZADD', ends, text(now + lease), name)
end
local total, holders, wanting = unpack(sum(job))
for of, one in pairs(sums) do
  if one[4] == 0 then redis.call('HDEL', ledger, of)
  elseif one.moved then
    redis.call('HSET', ledger, of, cmsgpack.pack({one[1], one[2], one[3], one[4]}))
  end
end
redis.call('HSET', ledger, '#seen', text(now), '#lease', text(longest), '#entries', entries)
local free = closed and 0 or math.max(0, limit - total)
local opens_at, opens_in = '0', 0
if closed then opens_at, opens_in = text(opens), opens - now end
return {granted and 1 or 0, free, holders, wanting, opens_at, opens_in}
""",
    beside=(":ends",),
)
"""An entry is {count, sequence, wants, lapses at}, the sum of a job {permits, holders, wanting,
entries}; times are whole milliseconds. The last results are the time at which a ledger that is
closed for the call opens, and how long that is from now; 0 for an open one."""

_NOW = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""
HOLDERS = Script(
    _NOW
    + """
local of, found, cursor = ARGV[2] .. '|', {}, '0'
repeat
  local page = redis.call('HSCAN', KEYS[1], cursor, 'MATCH', of .. '*', 'COUNT', 1000)
  cursor = page[1]
  for place = 1, #page[2], 2 do
    local entry = cmsgpack.unpack(page[2][place + 1])
    if entry[4] > now then
      local holder = string.sub(page[2][place], #of + 1)
      found[#found + 1] = {holder, entry[1], entry[3], entry[4] - now}
    end
  end
until cursor == '0'
return found
"""
)
"""Each result is {holder, count, wants, milliseconds that are left}."""

_log = logging.getLogger("conveyor.permits")


class RedisPermits:
    """A ledger on one server, separate for each environment.

    `instant` returns whole milliseconds in place of the server's time, if time is virtual.
    """

    def __init__(
        self, server: RedisServer, *, environment: str, instant: Callable[[], int] | None = None
    ) -> None:
        self._server = server
        self._key = ledger_key(environment)
        self._instant = instant
        self._opens_at = 0

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Raises ConveyorError(unavailable) if the server does not answer, soon enough for work to
        go on within the permits that are held. The server may have carried out the call: the next
        one, with the next sequence, corrects that.
        """
        if request.count < 0:
            raise ValueError("a count of permits is not negative")
        granted, free, holders, wanting, opens_at, opens_in = await self._server.run(
            HOLD,
            self._key,
            request.job_id,
            request.holder,
            request.count,
            request.before,
            request.sequence,
            int(request.wants),
            limit,
            math.ceil(lease * 1_000),
            self._now(),
        )
        self._log_closing(int(opens_at))
        return LedgerState(
            granted=bool(granted),
            free=free,
            holders=holders,
            wanting=wanting,
            closed_for=opens_in / 1_000,
        )

    async def holders(self, job_id: str) -> list[PermitHolder]:
        """Raises ConveyorError(unavailable)."""
        told = await self._server.run(HOLDERS, self._key, self._now(), job_id)
        found = [
            PermitHolder(
                holder=name.decode(), count=count, wants=bool(wants), lapses_in=left / 1_000
            )
            for name, count, wants, left in told
        ]
        return sorted(found, key=lambda one: one.holder)

    def _now(self) -> int | str:
        return "" if self._instant is None else self._instant()

    def _log_closing(self, opens_at: int) -> None:
        """Log once, each time that the ledger is closed, when it will open."""
        if opens_at > self._opens_at:
            _log.warning(
                "permit ledger %s was reset: until %s it grants no more permits than are held",
                self._key,
                rfc3339(opens_at),
            )
            self._opens_at = opens_at


def ledger_key(environment: str) -> str:
    """Return the key of a fleet's ledger. The braces pin it, and that of the ends, to one hash slot
    in cluster mode."""
    return f"conveyor:{{{environment}}}:permits"


# -- reports of workers --

SAY = Script(
    _NOW
    + """
redis.call('HSET', KEYS[1], ARGV[2], cmsgpack.pack({now + tonumber(ARGV[3]), ARGV[4]}))
redis.call('EXPIRE', KEYS[1], 86400)
"""
)
LEAVE = Script("redis.call('HDEL', KEYS[1], ARGV[1])")
ALL = Script(
    _NOW
    + """
local found, kept = {}, redis.call('HGETALL', KEYS[1])
for place = 1, #kept, 2 do
  local entry = cmsgpack.unpack(kept[place + 1])
  if entry[1] > now then found[#found + 1] = entry[2]
  else redis.call('HDEL', KEYS[1], kept[place]) end
end
return found
"""
)
"""An entry is {ends at, report}; times are whole milliseconds."""


class RedisWorkers:
    """The workers port: the reports of one environment, in one hash, as a script has one key. Each
    field ends by itself, on the server's own time: the next look removes it.

    `instant` returns whole milliseconds in place of the server's time, if time is virtual.
    """

    def __init__(
        self, server: RedisServer, *, environment: str, instant: Callable[[], int] | None = None
    ) -> None:
        self._server = server
        self._key = workers_key(environment)
        self._instant = instant

    async def say(self, report: WorkerReport) -> None:
        kept_for = math.ceil(report.kept_for * 1_000)
        await self._server.run(
            SAY, self._key, self._now(), report.worker_id, kept_for, encode_report(report)
        )

    async def leave(self, worker_id: str) -> None:
        await self._server.run(LEAVE, self._key, worker_id)

    async def all(self) -> Sequence[WorkerReport]:
        found = map(decode_report, await self._server.run(ALL, self._key, self._now()))
        return sorted(filter(None, found), key=lambda report: report.worker_id)

    def _now(self) -> int | str:
        return "" if self._instant is None else self._instant()


def workers_key(environment: str) -> str:
    """Return the key of the reports of a fleet."""
    return f"conveyor:{environment}:workers"
