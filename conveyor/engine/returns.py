"""Messages that go back to their queue: hidden for a while, or for others at once."""

from __future__ import annotations

from collections.abc import Iterable

from conveyor.engine.surviving import tell
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, Queues


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
        except Exception as error:
            tell("a message was not hidden", error)

    async def keep(self, deliveries: Iterable[Delivery], *, seconds: float) -> None:
        """Let nobody else receive messages for so many seconds from now."""
        receipts: dict[str, list[str]] = {}
        for delivery in deliveries:
            receipts.setdefault(delivery.queue, []).append(delivery.receipt)
        await self._show(receipts, seconds, "messages were not renewed")

    async def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Let others receive messages at once; worn ones as fresh copies."""
        receipts: dict[str, list[str]] = {}
        for delivery in deliveries:
            if self._is_worn(delivery):
                await self._replace(delivery, 0.0)
            else:
                receipts.setdefault(delivery.queue, []).append(delivery.receipt)
        await self._show(receipts, 0.0, "messages were not given back")

    async def _show(self, receipts: dict[str, list[str]], after: float, failed: str) -> None:
        """Let messages be seen after so many seconds: where one queue fails, the others still."""
        for queue, batch in receipts.items():
            try:
                await self._queues.change_visibility(queue, batch, visibility=after)
            except Exception as error:
                tell(failed, error)

    def _is_worn(self, delivery: Delivery) -> bool:
        return delivery.receive_count >= self._worn_from and delivery.queue != CONTROL_QUEUE

    async def _replace(self, delivery: Delivery, delay: float) -> None:
        try:
            await self._queues.send(delivery.queue, delivery.message, delay=delay)
            await self._queues.delete(delivery.queue, (delivery.receipt,))
        except Exception as error:
            tell("a worn message was not replaced", error)
