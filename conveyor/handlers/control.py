"""The control lane's handler: gives each message to the handler of its kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conveyor.ports.handler import Handler, Outcome, Throttled
from conveyor.ports.queues import Delivery, Message

_log = logging.getLogger("conveyor.handlers")


class ControlHandler:
    """One handler a kind of message."""

    def __init__(self, handlers: Mapping[type[Message], Handler]) -> None:
        self._handlers = dict(handlers)

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Do what the message means. A kind that this version does not know is left to one that
        does: it is hidden for a while."""
        handler = self._handlers.get(type(delivery.message))
        if handler is None:
            kind = type(delivery.message).__name__
            _log.warning("a control message of an unknown kind: %s", kind)
            return Outcome(hide_for=60.0)
        return await handler.handle(delivery, throttled)

    async def renew(self) -> None:
        """Extend what each of them holds."""
        for handler in self._handlers.values():
            await handler.renew()
