"""The rate limit port on Redis: all processes share the buckets of callers."""

from __future__ import annotations

from collections.abc import Callable

from conveyor.domain.errors import ConveyorError
from conveyor.domain.token_bucket import ROUNDING
from conveyor.prod.redis.server import RedisServer, Script

TAKE = Script("""
local rate, burst, rounding = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = tonumber(ARGV[4])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local kept = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = burst
if kept[1] then
  local passed = math.max(0, now - tonumber(kept[2])) / 1000
  tokens = math.min(burst, tonumber(kept[1]) + passed * rate)
end
local wait = 0
if tokens >= 1 - rounding then tokens = math.max(0, tokens - 1) else wait = (1 - tokens) / rate end
redis.call('HSET', KEYS[1], 'tokens', string.format('%.17g', tokens),
  'at', string.format('%.0f', now))
redis.call('EXPIRE', KEYS[1], math.ceil((burst - tokens) / rate) + 1)
return string.format('%.17g', wait)
""")
"""Does the same as `conveyor.domain.token_bucket.take`. Redis drops buckets that are full again."""


class RedisRateLimit:
    """Token buckets by caller: `rate` requests a second, `burst` at once.

    `instant` returns whole milliseconds in place of the server's time, if time is virtual.
    """

    def __init__(
        self,
        server: RedisServer,
        *,
        environment: str,
        rate: float,
        burst: int,
        instant: Callable[[], int] | None = None,
    ) -> None:
        self._server = server
        self._prefix = f"conveyor:{environment}:rate:"
        self._rate = rate
        self._burst = burst
        self._instant = instant

    async def take(self, caller: str) -> float:
        """Let every request pass while Redis does not answer."""
        if self._server.resting:
            return 0.0
        try:
            wait = await self._server.run(
                TAKE,
                self._prefix + caller,
                self._rate,
                self._burst,
                ROUNDING,
                "" if self._instant is None else self._instant(),
            )
        except ConveyorError:
            return 0.0
        return float(wait)
