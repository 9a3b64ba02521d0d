"""A scripted callbacks port: keeps every callback, and refuses those that the script says."""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.outbox import TokenExpired


class ScriptedCallbacks:
    """Keeps callbacks, in order, as (kind, token, text, text).

    The next `away` calls fail as unavailable. Tokens in `unknown` belong to no waiting task; after
    a success or failure, a token joins them.
    """

    def __init__(self) -> None:
        self.received: list[tuple[str, ...]] = []
        self.away = 0
        self.unknown: set[str] = set()

    async def send_heartbeat(self, task_token: str) -> None:
        """Keep a heartbeat."""
        self._take("heartbeat", task_token)

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Keep a success."""
        self._take("success", task_token, output)
        self.unknown.add(task_token)

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Keep a failure."""
        self._take("failure", task_token, error, cause)
        self.unknown.add(task_token)

    def _take(self, *callback: str) -> None:
        if self.away:
            self.away -= 1
            raise ConveyorError(ErrorCode.UNAVAILABLE, "Step Functions is away", retry_after=5)
        if callback[1] in self.unknown:
            raise TokenExpired
        self.received.append(callback)
