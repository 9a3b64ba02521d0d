"""Circuit breaker for the blob store: stop calling the gateway while bodies cannot be stored.

A gateway call whose body is lost was paid for in vain. After one, a worker makes only a trial now
and then, until a body is stored again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock

FIRST_PAUSE = 2.0
LONGEST_PAUSE = 60.0
"""Seconds from a lost body to the next trial; the pause doubles with each."""

_log = logging.getLogger("conveyor.tasks")


class CircuitBreaker:
    """One worker's view of the blob store. One trial is under way at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pause = 0.0
        self._closed_until = 0.0
        self._is_tried = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guard work that may call the gateway.

        Raises ConveyorError(unavailable), before anything is done, if the body would most likely be
        lost and it is not time for a trial.
        """
        if not self._pause:
            yield
            return
        if self._is_tried or self._clock.monotonic() < self._closed_until:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "bodies cannot be kept at present")
        self._is_tried = True
        try:
            yield
        finally:
            self._is_tried = False

    def succeeded(self) -> None:
        """Let all calls through again: the store kept a body, or refused this very one."""
        if self._pause:
            self._pause = 0.0
            _log.info("bodies can be kept again")

    def failed(self) -> None:
        """Stop calls, because the store could not keep a body. Later failures of calls that were
        under way by then change nothing."""
        now = self._clock.monotonic()
        if self._pause and now < self._closed_until:
            return
        if not self._pause:
            _log.error("bodies cannot be kept: the gateway is called for a trial now and then")
        self._pause = min(max(2.0 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        self._closed_until = now + self._pause
