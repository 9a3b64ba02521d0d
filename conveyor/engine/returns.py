"""Messages that go back to their queue: hidden for a while, or for others at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from conveyor.domain.errors import ConveyorError
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, Queues

_log = logging.getLogger("conveyor.engine")


class Returns:
    """Gives messages back. What a queue does not hear comes back when its visibility lapses."""

    def __init__(self, queues: Queues, telemetry: Telemetry, *, max_receives: int) -> None:
        self._queues = queues
        self._telemetry = telemetry
        self._worn_from = max_receives // 2

    async def hide(self, delivery: Delivery, seconds: float) -> None:
        """Hide a message for so many seconds from now.

        Before the queue's receive limit could end it, a fresh copy takes the place of one that is
        worn: attempts are counted in the store, where bounces count for nothing.
        """
        self._telemetry.hidden()
        if self._is_worn(delivery):
            await self._replace(delivery, seconds)
            return
        try:
            await self._queues.change_visibility(
                delivery.queue, (delivery.receipt,), visibility=seconds
            )
        except ConveyorError:
            _log.warning("a message was not hidden", exc_info=True)

    async def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Let others receive messages at once; worn ones as fresh copies."""
        receipts: dict[str, list[str]] = {}
        for delivery in deliveries:
            if self._is_worn(delivery):
                await self._replace(delivery, 0.0)
            else:
                receipts.setdefault(delivery.queue, []).append(delivery.receipt)
        for queue, batch in receipts.items():
            try:
                await self._queues.change_visibility(queue, batch, visibility=0.0)
            except ConveyorError:
                _log.warning("messages were not given back", exc_info=True)

    def _is_worn(self, delivery: Delivery) -> bool:
        return delivery.receive_count >= self._worn_from and delivery.queue != CONTROL_QUEUE

    async def _replace(self, delivery: Delivery, delay: float) -> None:
        try:
            await self._queues.send(delivery.queue, delivery.message, delay=delay)
            await self._queues.delete(delivery.queue, (delivery.receipt,))
        except ConveyorError:
            _log.warning("a worn message was not replaced", exc_info=True)
