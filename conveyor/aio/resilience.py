"""Log errors from ports and keep the worker running: one failed piece of work stops no other."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor.domain.errors import ConveyorError
from conveyor.ports.handler import UNEXPECTED_LOGGER

T = TypeVar("T")

_log = logging.getLogger("conveyor.engine")
_unforeseen = logging.getLogger(UNEXPECTED_LOGGER)


def log_failure(what: str, error: Exception) -> None:
    """Log a failed port in one line, and any other error with its traceback."""
    if isinstance(error, ConveyorError):
        _log.warning("%s: %s", what, error)
    else:
        _unforeseen.error("%s: %r", what, error, exc_info=error)


async def log_and_continue(what: str, act: Callable[[], Awaitable[T]]) -> T | None:
    """Run `act` and return its result; if it fails, log that and return None."""
    try:
        return await act()
    except Exception as error:
        log_failure(what, error)
        return None


_alone_log = logging.getLogger("conveyor.handlers")


async def alone(what: str, act: Callable[[], Awaitable[None]]) -> None:
    """Run `act`; if it fails, log that and go on. Any error but ConveyorError is logged with its
    traceback."""
    try:
        await act()
    except ConveyorError as error:
        _alone_log.warning("%s failed: %s", what, error)
    except Exception as error:
        _unforeseen.error("%s failed: %r", what, error, exc_info=error)
