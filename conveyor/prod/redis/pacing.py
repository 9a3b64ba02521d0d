"""The pacing port on Redis: one script, so that each call is atomic, on the server's own time.

One hash holds all hosts of an environment: the next start and the end of the line of each, and the
run id of the Redis process that began it. Redis never loses a part of a key. A hash that is gone,
or of another process, begins anew, and books nothing for HORIZON: every start that was booked
before is over by then. The hash ends by itself a day after its last call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from conveyor.ports.pacing import HORIZON, IDLE
from conveyor.prod.redis.server import RedisServer, Script

BOOK = Script("""
local host, interval, lines_up = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local horizon, idle, now = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local function text(number) return string.format('%.0f', number) end
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local kept = redis.call('HMGET', KEYS[1], '#server', '#opens', '#seen', host, host .. '|line')
if kept[1] ~= server or now < tonumber(kept[3]) - 1000000 then
  redis.call('DEL', KEYS[1])
  kept = {server, text(now + horizon), text(now), false, false}
  redis.call('HSET', KEYS[1], '#server', server, '#opens', kept[2])
end
redis.call('HSET', KEYS[1], '#seen', text(now))
redis.call('EXPIRE', KEYS[1], 86400)
local following = math.max(tonumber(kept[2]), tonumber(kept[4] or '0'))
if lines_up then
  local place = tonumber(kept[5] or '0')
  if following < now - idle then
    place = now
    redis.call('HSET', KEYS[1], host, text(now))
  end
  place = math.max(now, following, place) + interval
  redis.call('HSET', KEYS[1], host .. '|line', text(place))
  return place - now
end
local start = math.max(now, following)
if start - now > horizon then return -1 end
redis.call('HSET', KEYS[1], host, text(start + interval))
return start - now
""")
"""Times are whole microseconds; -1 books nothing."""


class RedisPacing:
    """The starts of one environment.

    `instant` returns whole microseconds in place of the server's time, if time is virtual.
    """

    def __init__(
        self, server: RedisServer, *, environment: str, instant: Callable[[], int] | None = None
    ) -> None:
        self._server = server
        self._key = pacing_key(environment)
        self._instant = instant

    async def book(self, host: str, interval: float) -> float | None:
        wait = await self._run(host, interval, lines_up=False)
        return None if wait < 0 else wait / 1_000_000

    async def line_up(self, host: str, interval: float) -> float:
        return await self._run(host, interval, lines_up=True) / 1_000_000

    async def _run(self, host: str, interval: float, *, lines_up: bool) -> int:
        wait = await self._server.run(
            BOOK,
            self._key,
            host,
            math.ceil(interval * 1_000_000),
            int(lines_up),
            int(HORIZON * 1_000_000),
            int(IDLE * 1_000_000),
            "" if self._instant is None else self._instant(),
        )
        return int(wait)


def pacing_key(environment: str) -> str:
    """Return the key of a fleet's starts."""
    return f"conveyor:{environment}:pacing"
