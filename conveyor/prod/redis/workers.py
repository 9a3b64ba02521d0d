"""The workers port on Redis: one hash for all workers of a fleet, so that a script needs one key.

Each field ends by itself, on the server's own time: the next look removes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from conveyor.ports.workers import WorkerReport, decode_report, encode_report
from conveyor.prod.redis.server import RedisServer, Script

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
    """Reports of the workers of one environment.

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
