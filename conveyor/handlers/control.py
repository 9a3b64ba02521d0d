"""Pass each message of the control lane to the handler of its kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conveyor.ports.clock import Clock
from conveyor.ports.handler import Handler, Outcome, Throttled
from conveyor.ports.queues import Delivery, Message
from conveyor.ports.tracing import NO_TRACER, Recording, Tracer

_log = logging.getLogger("conveyor.handlers")


class ControlHandler:
    """One handler for each kind of message, with a trace of each message that is sampled."""

    def __init__(
        self,
        handlers: Mapping[type[Message], Handler],
        clock: Clock,
        *,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._handlers = dict(handlers)
        self._clock = clock
        self._tracer = tracer

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Call the handler of the message's kind. Hide a message of an unknown kind for a while: a
        worker of a newer version may know it."""
        message = delivery.message
        handler = self._handlers.get(type(message))
        kind = type(message).__name__
        if handler is None:
            _log.warning("unknown kind of control message: %s", kind)
            return Outcome(hide_for=60.0)
        name = kind.removesuffix("Message").lower()
        trace = self._tracer.begin(name, message.run_id, started_at=self._clock.now())
        if trace is None:
            return await handler.handle(delivery, throttled)
        return await self._traced(handler, delivery, throttled, trace)

    async def _traced(
        self, handler: Handler, delivery: Delivery, throttled: Throttled, trace: Recording
    ) -> Outcome:
        outcome = None
        try:
            outcome = await handler.handle(delivery, throttled)
            return outcome
        finally:
            message = delivery.message
            word = "failed" if outcome is None else "hidden" if outcome.hide_for else "done"
            attributes = {"job_id": message.job_id, "run_id": message.run_id, "outcome": word}
            trace.end(self._clock.now(), attributes, failed=outcome is None)

    async def renew(self) -> None:
        """Renew what each handler holds."""
        for handler in self._handlers.values():
            await handler.renew()
