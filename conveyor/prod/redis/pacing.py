"""The pacing port on Redis: one script, so that each call is atomic, on the server's own time;
and the robots port beside it.

One hash holds all hosts of an environment: the next start, the end of the line, the end of the time
for which it is closed, the ceiling and the interval of each; the lines in which a run has places;
and the run id of the Redis process that began it. Redis never loses a part of a key. A hash that is
gone, or of another process, begins anew, and books nothing for HORIZON: every start that was booked
before is over by then. Hosts that are idle are dropped as calls come by; the hash ends by itself a
day after its last call.

A client remembers for how long hosts are closed, also beyond such a loss, and asks nothing
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cachetools import LRUCache

from conveyor.domain.hosts import MOST_RUNS
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
from conveyor.ports.robots import KeptFile, RobotsFiles
from conveyor.prod.redis.server import RedisServer, Script

PACE = Script("""
local hosts, op, now = KEYS[1], ARGV[1], tonumber(ARGV[2])
local horizon, idle, lasts = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local function text(number) return string.format('%.0f', number) end
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local kept = redis.call('HMGET', hosts, '#server', '#opens', '#seen')
if kept[1] ~= server or now < tonumber(kept[3]) - 1000000 then
  redis.call('DEL', hosts)
  kept = {server, text(now + horizon)}
  redis.call('HSET', hosts, '#server', server, '#opens', kept[2])
end
redis.call('HSET', hosts, '#seen', text(now))
redis.call('EXPIRE', hosts, 86400)
local opens = tonumber(kept[2])

local function find(name)
  local packed = redis.call('HGET', hosts, name)
  local one = packed and cmsgpack.unpack(packed) or {0, 0, 0, 0, 0, 0, 0, 0}
  if not one[12] then one[9], one[10], one[11], one[12] = 0, 0, 0, {} end
  if not one[13] then one[13] = 0 end
  if one[4] > 0 and now >= one[5] + lasts then one[4] = 0 end
  if now >= one[7] then one[6] = 0 end
  return one
end
local function keep(name, one) redis.call('HSET', hosts, name, cmsgpack.pack(one)) end
local function drop_idle()
  local cursor = redis.call('HGET', hosts, '#cursor') or '0'
  local page = redis.call('HSCAN', hosts, cursor, 'COUNT', 10)
  redis.call('HSET', hosts, '#cursor', page[1])
  for place = 1, #page[2], 2 do
    local name = page[2][place]
    if string.sub(name, 1, 5) == '#run:' then
      if cmsgpack.unpack(page[2][place + 1])[1] < now then redis.call('HDEL', hosts, name) end
    elseif string.sub(name, 1, 1) ~= '#' then
      local one = find(name)
      if one[4] + one[6] == 0 and math.max(one[1], one[2], one[3]) < now - idle then
        redis.call('HDEL', hosts, name)
      end
    end
  end
end

if op == 'book' then
  local asked, ceiling, closed, wanted, following = {}, 0, 0, 0, math.max(now, opens)
  for place = 7, #ARGV, 2 do
    local one = find(ARGV[place])
    local step = math.max(tonumber(ARGV[place + 1]), one[6])
    asked[#asked + 1] = {ARGV[place], step, one}
    if ARGV[place] == ARGV[7] and step < one[13] then
      one[1], one[13] = one[1] - one[13] + step, step
    end
    if one[4] > 0 and (ceiling == 0 or one[4] < ceiling) then ceiling = one[4] end
    closed = math.max(closed, one[3] - now)
    wanted = math.max(wanted, one[6])
    following = math.max(following, one[1])
  end
  local starts = {}
  if closed <= 0 then
    for number = 1, tonumber(ARGV[6]) do
      if following - now > horizon then break end
      starts[number] = following - now
      local start = following
      for _, each in ipairs(asked) do
        each[3][1], each[3][13] = start + each[2], each[2]
        following = math.max(following, each[3][1])
      end
    end
    for _, each in ipairs(asked) do keep(each[1], each[3]) end
    drop_idle()
  end
  return {math.max(0, closed), ceiling, wanted, unpack(starts)}
end
if op == 'state' then
  local told = {}
  for place = 6, #ARGV do
    local one = find(ARGV[place])
    told[#told + 1] = math.max(0, one[3] - now)
    told[#told + 1] = one[4]
    told[#told + 1] = one[6]
    local left = 0
    for _, had in pairs(one[12]) do
      if had[2] >= now then left = left + had[1]
      elseif had[3] > now then left = left + had[1] * (had[3] - now) / (had[3] - had[2]) end
    end
    told[#told + 1] = math.floor(left + 0.5)
  end
  return told
end
if op == 'leave' then
  local names, lines = {}, '#run:' .. ARGV[6]
  for place = 7, #ARGV do names[#names + 1] = ARGV[place] end
  if #ARGV < 7 then
    local packed = redis.call('HGET', hosts, lines)
    names = packed and cmsgpack.unpack(packed) or {}
    redis.call('HDEL', hosts, lines)
  end
  for place = #ARGV < 7 and 2 or 1, #names do
    local one = redis.call('HEXISTS', hosts, names[place]) == 1 and find(names[place])
    local had = one and one[12][ARGV[6]]
    if had then
      one[12][ARGV[6]] = nil
      local is_alone = true
      for _, other in pairs(one[12]) do is_alone = is_alone and other[3] <= now end
      if is_alone then
        one[2], one[9], one[11] = 0, 0, 0
      elseif had[3] > now then
        local since, left = math.max(now, had[2]), had[1]
        if had[2] < now then left = left * (had[3] - now) / (had[3] - had[2]) end
        local has_free = one[9] >= 1 and one[11] > now
        one[10] = has_free and math.min(since, one[10]) or since
        one[11] = has_free and math.max(had[3], one[11]) or had[3]
        one[9] = left + (has_free and one[9] or 0)
      end
      keep(names[place], one)
    end
  end
  return {0}
end
local one = find(ARGV[6])
local value, answer = tonumber(ARGV[7]), 0
if op == 'line' then
  if math.max(opens, one[1], one[3]) < now - idle then
    one[1], one[2], one[9], one[12], one[13] = now, 0, 0, {}, 0
  end
  local step = math.max(value, one[6])
  local following = one[1] - one[13] + math.min(one[13], step)
  local begins = math.max(now, opens, following, one[3])
  local given = math.max(begins > now and begins or begins + step, one[2] + step)
  if one[10] < begins and begins < one[11] then
    one[9] = one[9] * (one[11] - begins) / (one[11] - one[10])
    one[10] = begins
  end
  if one[9] >= 1 and begins < one[11] then
    local freed = one[10] + math.floor(math.max(step, (one[11] - one[10]) / one[9]))
    if freed <= one[11] then given, one[9], one[10] = freed, one[9] - 1, freed end
  end
  one[2] = math.max(one[2], given)
  local runs, run, count = one[12], ARGV[8], 0
  local had = runs[run] or {0, given, given}
  if run ~= '' and not runs[run] then
    local packed = redis.call('HGET', hosts, '#run:' .. run)
    local lines, is_there = packed and cmsgpack.unpack(packed) or {0}, false
    for place = 2, #lines do is_there = is_there or lines[place] == ARGV[6] end
    if not is_there and #lines <= tonumber(ARGV[10]) then
      lines[1], lines[#lines + 1] = now + 86400000000, ARGV[6]
      redis.call('HSET', hosts, '#run:' .. run, cmsgpack.pack(lines))
    end
  end
  runs[run] = nil
  for name, other in pairs(runs) do
    if other[3] <= now then runs[name] = nil else count = count + 1 end
  end
  if run ~= '' and count < tonumber(ARGV[9]) then
    runs[run] = {had[1] + 1, math.min(had[2], given), math.max(had[3], given)}
  end
  answer = given - now
elseif op == 'close' then
  one[3] = math.max(one[3], now + value)
elseif op == 'lower' then
  if one[4] == 0 or one[8] <= now - tonumber(ARGV[8]) then
    local of = one[4] > 0 and one[4] or value
    one[4], one[5], one[8] = math.max(1, math.floor(of / 2)), now, now
  end
  answer = one[4]
elseif op == 'lift' and one[4] > 0 then
  one[4], one[5] = one[4] + 1 < value and one[4] + 1 or 0, now
elseif op == 'slow' then
  one[6], one[7] = value, now + tonumber(ARGV[8])
end
keep(ARGV[6], one)
return {answer}
""")
"""An entry is {next start, end of the line, closed until, ceiling, instant of its last change,
its own interval, the end of that, instant of the last halving, places that runs have left behind,
since when, until when, those of each run (`HostLine`), the time from the last start to the next};
times are whole microseconds."""
MOST_CLOSED = 5_000
LEAVES_AT_ONCE = 500
"""Lines that a run leaves in one call of the script, and most of them that are known of a run."""


class RedisPacing(Pacing):
    """The starts of one environment.

    `instant` returns whole microseconds in place of the server's time, if time is virtual.
    """

    def __init__(
        self,
        server: RedisServer,
        clock: Clock,
        *,
        environment: str,
        instant: Callable[[], int] | None = None,
    ) -> None:
        self._server = server
        self._clock = clock
        self._key = pacing_key(environment)
        self._instant = instant
        self._closed: LRUCache[str, float] = LRUCache(MOST_CLOSED)

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        # That of `host` comes first.
        names = {host: interval} | {**also, host: interval}
        if closed_for := max(map(self._closed_for, names)):
            return Booking((), closed_for)
        asked = [part for name, step in names.items() for part in (name, _micros(step))]
        closed, ceiling, wanted, *starts = await self._run("book", count, *asked)
        if closed and not also:
            self._remember(host, closed / 1_000_000)
        return Booking(
            tuple(start / 1_000_000 for start in starts),
            closed / 1_000_000,
            ceiling,
            wanted / 1_000_000,
        )

    async def line_up(self, host: str, interval: float, run: str = "") -> float:
        (place,) = await self._run("line", host, _micros(interval), run, MOST_RUNS, LEAVES_AT_ONCE)
        return max(int(place) / 1_000_000, self._closed_for(host))

    async def leave(self, run: str, hosts: Sequence[str] | None = None) -> None:
        if hosts is None:
            await self._run("leave", run)
            return
        for first in range(0, len(hosts), LEAVES_AT_ONCE):
            await self._run("leave", run, *hosts[first : first + LEAVES_AT_ONCE])

    async def close(self, host: str, seconds: float) -> None:
        self._remember(host, seconds)
        await self._run("close", host, _micros(seconds))

    async def lower(self, host: str, limit: int, age: float = 0.0) -> int:
        (ceiling,) = await self._run("lower", host, limit, _micros(age))
        return int(ceiling)

    async def lift(self, host: str, limit: int) -> None:
        await self._run("lift", host, limit)

    async def slow(self, host: str, interval: float, seconds: float) -> None:
        await self._run("slow", host, _micros(interval), _micros(seconds))

    async def state(self, hosts: Iterable[str]) -> dict[str, HostState]:
        names = list(hosts)
        told = await self._run("state", *names) if names else []
        found = {}
        parts = (told[part::4] for part in range(4))
        for name, closed, ceiling, interval, in_line in zip(names, *parts, strict=True):
            closed_for = max(closed / 1_000_000, self._closed_for(name))
            state = HostState(closed_for, ceiling, interval / 1_000_000, in_line)
            if state != HostState():
                found[name] = state
        return found

    async def _run(self, op: str, *values: str | int) -> list[Any]:
        told: list[Any] = await self._server.run(
            PACE,
            self._key,
            op,
            "" if self._instant is None else self._instant(),
            _micros(HORIZON),
            _micros(IDLE),
            _micros(CEILING_LASTS),
            *values,
        )
        return told

    def _remember(self, host: str, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        self._closed[host] = max(until, self._closed.get(host, until))

    def _closed_for(self, host: str) -> float:
        until = self._closed.get(host)
        return 0.0 if until is None else max(0.0, until - self._clock.monotonic())


def _micros(seconds: float) -> int:
    return math.ceil(seconds * 1_000_000)


def pacing_key(environment: str) -> str:
    """Return the key of a fleet's starts."""
    return f"conveyor:{environment}:pacing"


# -- files of hosts --

FIND = Script("return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}")


class RedisRobots(RobotsFiles):
    """The robots port: a key with a time to live for each origin of an environment."""

    def __init__(self, server: RedisServer, *, environment: str) -> None:
        self._server = server
        self._environment = environment

    async def find(self, origin: str) -> KeptFile | None:
        content, left = await self._server.run(FIND, robots_key(self._environment, origin))
        return None if content is None else KeptFile(content, max(0, left) / 1_000)

    async def keep(self, origin: str, content: bytes, seconds: float) -> None:
        key = robots_key(self._environment, origin)
        await self._server.put(key, content, seconds=math.ceil(seconds))


def robots_key(environment: str, origin: str) -> str:
    """Return the key of the file of an origin."""
    return f"conveyor:{environment}:robots:{origin}"
