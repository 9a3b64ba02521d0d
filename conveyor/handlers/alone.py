"""How one piece of work of many may fail alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from conveyor.domain.errors import ConveyorError

_log = logging.getLogger("conveyor.handlers")


async def alone(what: str, act: Callable[[], Awaitable[None]]) -> None:
    """Do something whose failure is told in one line and stops nothing else."""
    try:
        await act()
    except ConveyorError as error:
        _log.warning("%s failed: %s", what, error)
    except Exception as error:
        _log.error("%s failed: %s: %s", what, type(error).__name__, error)
