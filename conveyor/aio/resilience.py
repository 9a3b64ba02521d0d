"""What breaks costs a pause, never the worker: whatever a port raises is told, and work goes on.

How one piece of work of many may fail alone.
"""

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
    """One line of what is away; of anything else where it came from, too."""
    if isinstance(error, ConveyorError):
        _log.warning("%s: %s", what, error)
    else:
        _unforeseen.error("%s: %r", what, error, exc_info=error)


async def log_and_continue(what: str, act: Callable[[], Awaitable[T]]) -> T | None:
    """What comes of an act; None where it broke, which `what` says in the log."""
    try:
        return await act()
    except Exception as error:
        log_failure(what, error)
        return None


_alone_log = logging.getLogger("conveyor.handlers")


async def alone(what: str, act: Callable[[], Awaitable[None]]) -> None:
    """Do something whose failure is told in one line, with a traceback where it was unforeseen, and
    stops nothing else."""
    try:
        await act()
    except ConveyorError as error:
        _alone_log.warning("%s failed: %s", what, error)
    except Exception as error:
        _unforeseen.error("%s failed: %r", what, error, exc_info=error)
