"""Log errors and go on, so that one failed call stops nothing else."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor.domain.errors import ConveyorError
from conveyor.ports.handler import UNEXPECTED_LOGGER

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


def log_failure(log: logging.Logger, failed: str, error: Exception) -> None:
    """Log an error after `failed`: a ConveyorError as one warning, any other with its traceback."""
    if isinstance(error, ConveyorError):
        log.warning("%s: %s", failed, error)
    else:
        _unexpected.error("%s: %r", failed, error, exc_info=error)
