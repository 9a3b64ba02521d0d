"""Keep going when a dependency fails: log an error and go on, or stop calling a dependency that is
down and try it again now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from conveyor.aio.outages import Outage
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Shared
from conveyor.ports.handler import UNEXPECTED_LOGGER

FIRST_PAUSE = 2.0
LONGEST_PAUSE = 60.0
"""Seconds from a failure to the next trial call; the pause doubles with each failed trial."""

HIDING = Backoff(2.0, 256.0)
"""Seconds that a message is hidden after its work failed, by how often it was received."""

_BACKOFF = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

_log = logging.getLogger("conveyor.tasks")


class CircuitBreaker:
    """Guards the calls of one process to one dependency, and makes one trial call at a time.

    `dependency` names it in errors and in the log, such as "the result store".
    """

    def __init__(self, clock: Clock, *, dependency: str) -> None:
        self._clock = clock
        self._dependency = dependency
        self._failures = 0
        self._since = 0
        self._why = ""
        self._open_until = 0.0
        self._has_trial = False

    @property
    def is_closed(self) -> bool:
        """True while the dependency answers, as far as is known: all work passes."""
        return not self._failures

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Wrap work that may need the dependency.

        Raises ConveyorError(unavailable) before the work starts if the dependency is down, unless
        this work is the trial call.
        """
        if not self._failures:
            yield
            return
        if self._has_trial or self._clock.monotonic() < self._open_until:
            raise ConveyorError(ErrorCode.UNAVAILABLE, f"{self._dependency} is unavailable")
        self._has_trial = True
        try:
            yield
        finally:
            self._has_trial = False

    def succeeded(self) -> None:
        """Note that the dependency answered, if only to refuse one request: let all work pass."""
        if self._failures:
            self._failures = 0
            _log.info("%s is available again", self._dependency)

    def outage(self) -> Outage | None:
        """Return since when the dependency is away, and why, if it is."""
        if not self._failures:
            return None
        return Outage(Shared.STORE, self._why or self._dependency, self._since)

    def failed(self, why: str = "") -> None:
        """Note that the dependency failed: let no work pass but trial calls.

        Ignore calls that were under way at the first failure and fail during the pause.
        """
        now = self._clock.monotonic()
        if self._failures and now < self._open_until:
            return
        if not self._failures:
            self._since, self._why = self._clock.now(), why
            _log.error(
                "%s is unavailable: work that needs it is paused, except for trials",
                self._dependency,
            )
        self._failures += 1
        self._open_until = now + _BACKOFF.delay(self._failures)


T = TypeVar("T")

_unexpected = logging.getLogger(UNEXPECTED_LOGGER)


async def log_and_continue(
    log: logging.Logger, failed: str, act: Callable[[], Awaitable[T]]
) -> T | None:
    """Return the result of `act`. If it raises, log the error after `failed` and return None."""
    try:
        return await act()
    except Exception as error:
        log_failure(log, failed, error)
        return None


@contextmanager
def logging_failure(log: logging.Logger, failed: str) -> Iterator[None]:
    """Wrap work that others do not depend on: if it raises, log the error after `failed`."""
    try:
        yield
    except Exception as error:
        log_failure(log, failed, error)


def log_failure(log: logging.Logger, failed: str, error: Exception) -> None:
    """Log an error after `failed`: a ConveyorError as one warning, any other with its traceback."""
    if isinstance(error, ConveyorError):
        log.warning("%s: %s", failed, error)
    else:
        _unexpected.error("%s: %r", failed, error, exc_info=error)
