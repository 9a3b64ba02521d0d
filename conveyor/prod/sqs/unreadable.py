"""What becomes of messages that cannot be read.

One of another version, or of a kind that is not known here, stays hidden for a process that knows
it. No process will ever read the others: they are dead letters at once, not only once they were
received too often.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.ports.queues import DEAD_LETTER_QUEUE
from conveyor.prod.aws.calls import Aws
from conveyor.prod.sqs.addresses import Addresses
from conveyor.prod.sqs.batches import in_batches
from conveyor.prod.sqs.messages import NOT_BEFORE, Unreadable
from conveyor.prod.sqs.remembered import Remembered

_SENT = ("DataType", "StringValue", "BinaryValue")
"""What of a received attribute can be sent."""

_log = logging.getLogger("conveyor.queues")


class UnreadableMessages:
    """Tells of each once, and gives up those that nobody can read. Belongs to one event loop."""

    def __init__(self, aws: Aws, clock: Clock, addresses: Addresses) -> None:
        self._aws = aws
        self._clock = clock
        self._addresses = addresses
        self._told: Remembered[bool] = Remembered()

    async def deal_with(
        self, queue: str, found: Sequence[tuple[dict[str, Any], Unreadable]]
    ) -> None:
        """Deal with messages of a queue, each as it was received. One that cannot be given up now
        comes again, as it stays where it is."""
        for received, why in found:
            self._tell(queue, received["MessageId"], why.reason)
            if not why.may_be_read_elsewhere and queue != DEAD_LETTER_QUEUE:
                with suppress(ConveyorError):
                    await self._give_up(queue, received)

    async def _give_up(self, queue: str, received: dict[str, Any]) -> None:
        """Sent before it is deleted: if need be it is there twice, but never nowhere."""
        letter: dict[str, Any] = {"MessageBody": received["Body"]}
        instant = received.get("MessageAttributes", {}).get(NOT_BEFORE)
        if instant is not None:
            kept = {name: instant[name] for name in _SENT if name in instant}
            letter["MessageAttributes"] = {NOT_BEFORE: kept}
        gone = {"ReceiptHandle": received["ReceiptHandle"]}
        for operation, there, one in (
            ("send_message_batch", DEAD_LETTER_QUEUE, letter),
            ("delete_message_batch", queue, gone),
        ):
            url = await self._addresses.find(there)
            await in_batches(self._aws, self._clock, operation, url, [one])

    def _tell(self, queue: str, message_id: str, reason: str) -> None:
        if self._told.get(message_id) is None:
            self._told.put(message_id, True)
            _log.error(
                "a message cannot be read: %s",
                reason,
                extra={"queue": queue, "message_id": message_id},
            )
