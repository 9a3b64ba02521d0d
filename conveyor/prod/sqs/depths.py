"""How many messages wait in queues: asked beside receives, at most every few seconds, and when
somebody wants to know."""

from __future__ import annotations

from typing import NamedTuple

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws
from conveyor.prod.sqs.remembered import Remembered

EVERY = 10.0
"""Seconds between two questions about one queue beside its receives."""
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


class _Known(NamedTuple):
    depth: int
    asked_at: float


class Depths:
    """The last known depths."""

    def __init__(self, aws: Aws, clock: Clock) -> None:
        self._aws = aws
        self._clock = clock
        self._known: Remembered[_Known] = Remembered()

    def of(self, queue: str) -> int:
        """The depth when it was last asked, however long ago; 0 for a queue that never was."""
        known = self._known.get(queue)
        return 0 if known is None else known.depth

    def forget(self, queue: str) -> None:
        """The queue is gone."""
        self._known.forget(queue)

    async def refresh(self, queue: str, url: str) -> None:
        """Ask again, where the answer is old. Without an answer the last one stands."""
        now, known = self._clock.monotonic(), self._known.get(queue)
        if known is not None and now - known.asked_at < EVERY:
            return
        # Noted before it is answered, so that receives side by side ask once.
        self._known.put(queue, _Known(self.of(queue), now))
        try:
            await self.ask(queue, url)
        except ConveyorError:
            return  # the receive that follows finds out what is wrong

    async def ask(self, queue: str, url: str) -> int:
        """What SQS says. Raises AwsRefused, and ConveyorError(unavailable)."""
        asked_at = self._clock.monotonic()
        answer = await self._aws.call(
            "sqs", "get_queue_attributes", {"QueueUrl": url, "AttributeNames": list(_COUNTS)}
        )
        depth = sum(int(answer["Attributes"].get(count, 0)) for count in _COUNTS)
        self._known.put(queue, _Known(depth, asked_at))
        return depth
