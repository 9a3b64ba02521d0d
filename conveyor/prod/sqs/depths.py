"""How many messages wait in queues: asked beside receives, at most every few seconds."""

from __future__ import annotations

from typing import NamedTuple

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws
from conveyor.prod.sqs.remembered import Remembered

EVERY = 10.0
"""Seconds between two questions about one queue."""
STALE = 60.0
"""Seconds after which an answer says nothing any more."""
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
        """The depth when it was last asked; 0 for a queue that nobody received from lately."""
        known = self._known.get(queue)
        if known is None or self._clock.monotonic() - known.asked_at > STALE:
            return 0
        return known.depth

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
            self._known.put(queue, _Known(await self.ask(url), now))
        except ConveyorError:
            return  # the receive that follows finds out what is wrong

    async def ask(self, url: str) -> int:
        """What SQS says. Raises AwsRefused, and ConveyorError(unavailable)."""
        answer = await self._aws.call(
            "sqs", "get_queue_attributes", {"QueueUrl": url, "AttributeNames": list(_COUNTS)}
        )
        return sum(int(answer["Attributes"].get(count, 0)) for count in _COUNTS)
