"""The permits port on Redis: one script, so that each call is atomic, on the server's own time. The
reports of workers lie beside it.

**How Redis may lose a ledger.** It may restart empty, restart from an old snapshot, fail over to a
replica that has not received the last writes, be flushed, or evict keys. After each of these the
ledger would grant permits that are still in use, unless it notices. It notices as follows:

- The whole ledger of a fleet is *one* key: a hash with one field a job, and the fields `#server`
  (the run id of the Redis process that began this ledger), `#since` (when it did so) and `#seen`
  (the latest time of a call). Redis never loses a part of a key. So either everything is gone, or
  nobody holds permits of a job without a field, and its first permit is granted at once. The key
  has no time to live: eviction policies that evict only keys with one cannot touch it, those that
  evict any key take it whole.
- If the hash is absent or carries another run id, or the clock went back by more than a second,
  entries may be missing or old. The ledger then begins anew, empty, and is closed for one lease
  from that moment on, for all jobs: holders announce their permits by their renewals, and nobody
  gets more. When it opens, every earlier grant has lapsed or has been announced. A run id changes
  with every start of a Redis process and differs on a replica.

It does not notice two servers that both believe to be the primary at the same time, nor a server's
clock that is *stepped forward* by more than the part of a lease that holders leave unused (its last
tenth). Managed services fence the old primary off and slew their clocks.

One fleet has one lease. While an operator changes it, calls name several. A closed ledger stays
closed for all as long as the longest lease that any call named meanwhile: the caller may hold older
permits under it. Once the ledger has opened, a longer lease closes it only for the calls that name
it, as long as that lease would have lasted: so a call with a short lease opens it for nobody else.

Each call drops the lapsed entries of its own job, and looks at two more jobs at random, whose
fields it removes if nothing in them is under a lease.

Redis 6.2 or newer, or Valkey; one primary, in cluster mode too (there is one key); the scripts use
INFO and TIME.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from conveyor.domain.run_waits import WorkerReport, decode_report, encode_report
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.permits import LeaseRequest, LedgerState, PermitHolder
from conveyor.prod.redis.server import RedisServer, Script

HOLD = Script("""
local ledger, job, holder = KEYS[1], ARGV[1], ARGV[2]
local count, before, sequence = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local wants, limit, lease = ARGV[6] == '1', tonumber(ARGV[7]), tonumber(ARGV[8])
local now = tonumber(ARGV[9])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function text(number) return string.format('%.0f', number) end
local function is_live(entry) return entry[4] > now end

local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local kept = redis.call('HMGET', ledger, '#server', '#since', '#seen', '#lease', job)
if kept[1] ~= server or now < tonumber(kept[3]) - 1000 then
  redis.call('DEL', ledger)
  kept = {server, text(now), text(now), text(lease), false}
  redis.call('HSET', ledger, '#server', server, '#since', kept[2])
end
local since, longest = tonumber(kept[2]), tonumber(kept[4])
local opens = since + math.max(lease, longest)
local closed = now < opens
if now < since + longest then longest = math.max(lease, longest) end
redis.call('HSET', ledger, '#seen', text(now), '#lease', text(longest))

local entries = kept[5] and cmsgpack.unpack(kept[5]) or {}
local total, holders, wanting, known, own = 0, 0, 0, 0, nil
for name, entry in pairs(entries) do
  if not is_live(entry) then
    entries[name] = nil
  else
    total = total + entry[1]
    if entry[1] > 0 then holders = holders + 1 end
    if entry[3] == 1 then wanting = wanting + 1 end
    if name == holder then own, known = entry, entry[1] end
  end
end

local granted
if own and sequence <= own[2] then granted = false
elseif closed then granted = count <= before
else granted = count <= known or total - known + count <= limit end

if granted then
  total = total - known + count
  holders = holders + (count > 0 and 1 or 0) - (known > 0 and 1 or 0)
  wanting = wanting + (wants and 1 or 0) - (own and own[3] or 0)
  entries[holder] = {count, sequence, wants and 1 or 0, now + lease}
  redis.call('HSET', ledger, job, cmsgpack.pack(entries))
end

for _, field in ipairs(redis.call('HRANDFIELD', ledger, 2)) do
  if field ~= job and string.sub(field, 1, 1) ~= '#' then
    local live = false
    for _, entry in pairs(cmsgpack.unpack(redis.call('HGET', ledger, field))) do
      live = live or is_live(entry)
    end
    if not live then redis.call('HDEL', ledger, field) end
  end
end
local free = closed and 0 or math.max(0, limit - total)
local opens_at, opens_in = '0', 0
if closed then opens_at, opens_in = text(opens), opens - now end
return {granted and 1 or 0, free, holders, wanting, opens_at, opens_in}
""")
"""An entry is {count, sequence, wants, lapses at}; times are whole milliseconds. The last results
are the time at which a ledger that is closed for the call opens, and how long that is from now; 0
for an open one."""

HOLDERS = Script("""
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local kept = redis.call('HGET', KEYS[1], ARGV[1])
local found = {}
for name, entry in pairs(kept and cmsgpack.unpack(kept) or {}) do
  if entry[4] > now then found[#found + 1] = {name, entry[1], entry[3], entry[4] - now} end
end
return found
""")
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
            "" if self._instant is None else self._instant(),
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
        found = [
            PermitHolder(
                holder=name.decode(), count=count, wants=bool(wants), lapses_in=left / 1_000
            )
            for name, count, wants, left in await self._server.run(HOLDERS, self._key, job_id)
        ]
        return sorted(found, key=lambda one: one.holder)

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
    """Return the key of a fleet's ledger. The braces pin it to one hash slot in cluster mode."""
    return f"conveyor:{{{environment}}}:permits"


# -- reports of workers --

_NOW = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""
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
