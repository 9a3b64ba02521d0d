"""Pass each message of the control lane to the handler of its kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conveyor.ports.handler import Handler, Outcome, Throttled
from conveyor.ports.queues import Delivery, Message

_log = logging.getLogger("conveyor.handlers")


class ControlHandler:
    """One handler for each kind of message."""

    def __init__(self, handlers: Mapping[type[Message], Handler]) -> None:
        self._handlers = dict(handlers)

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Call the handler of the message's kind. Hide a message of an unknown kind for a while: a
        worker of a newer version may know it."""
        handler = self._handlers.get(type(delivery.message))
        if handler is None:
            kind = type(delivery.message).__name__
            _log.warning("unknown kind of control message: %s", kind)
            return Outcome(hide_for=60.0)
        return await handler.handle(delivery, throttled)

    async def renew(self) -> None:
        """Renew what each handler holds."""
        for handler in self._handlers.values():
            await handler.renew()
