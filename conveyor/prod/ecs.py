"""Protection of a task on ECS: no deploy and no scale-in stops it while its calls are in flight, or
their answers are not settled.

ECS gives a task that it stops two minutes at most, and a call may take longer. It would be paid
twice then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import anyio.to_thread
import msgspec

from conveyor.aio.resilience import log_and_continue
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock

PATH = "/task-protection/v1/state"
LOOK_EVERY = 5.0
"""Seconds between two looks at what is in hand."""
EXPIRES_MINUTES = 5
"""Minutes after which ECS forgets a protection, in case the worker does not end it."""
RENEW_AFTER = EXPIRES_MINUTES * 60 / 2
LONGEST = 600.0
"""Seconds of protection in a row: a worker that is never idle is to be replaced, too."""
REST = 120.0
"""Seconds without protection after the longest one, for ECS to stop the task in. Its calls have the
grace of a stop then."""
ANSWERS_WITHIN = 5.0

_log = logging.getLogger("conveyor.roles")


class TaskProtection:
    """Protect this task while `busy`, by the agent of ECS at the URL `agent`."""

    def __init__(self, agent: str, clock: Clock, *, busy: Callable[[], bool]) -> None:
        self._agent = urlsplit(agent)
        self._clock = clock
        self._busy = busy
        self._since: float | None = None
        self._renewed_at = 0.0
        self._rests_until = 0.0

    async def run(self) -> None:
        """Look until cancelled. What the agent refuses is logged, and asked for again."""
        while True:
            await log_and_continue(_log, "the protection of this task did not change", self.look)
            await self._clock.sleep(LOOK_EVERY)

    async def look(self) -> None:
        """Begin, renew or end the protection. Raises ConveyorError(unavailable)."""
        now = self._clock.monotonic()
        if self._since is None:
            if self._busy() and now >= self._rests_until:
                await self._ask(protected=True)
                self._since = self._renewed_at = now
            return
        overdue = now - self._since >= LONGEST
        if overdue or not self._busy():
            await self._ask(protected=False)
            self._since = None
            self._rests_until = now + REST if overdue else now
        elif now - self._renewed_at >= RENEW_AFTER:
            await self._ask(protected=True)
            self._renewed_at = now

    async def _ask(self, *, protected: bool) -> None:
        wanted: dict[str, object] = {"ProtectionEnabled": protected}
        if protected:
            wanted["ExpiresInMinutes"] = EXPIRES_MINUTES
        body = msgspec.json.encode(wanted)
        try:
            status, answer = await anyio.to_thread.run_sync(self._put, body)
        except (OSError, HTTPException) as error:
            raise _unavailable(type(error).__name__) from None
        if status != 200 or b'"protection"' not in answer:
            raise _unavailable(f"status {status}")

    def _put(self, body: bytes) -> tuple[int, bytes]:
        host, port = self._agent.hostname or "", self._agent.port
        connection = HTTPConnection(host, port, timeout=ANSWERS_WITHIN)
        try:
            path = self._agent.path.rstrip("/") + PATH
            connection.request("PUT", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _unavailable(why: str) -> ConveyorError:
    return ConveyorError(ErrorCode.UNAVAILABLE, f"the agent of ECS does not protect: {why}")
