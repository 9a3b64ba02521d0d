"""How one piece of work of many may fail alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from conveyor.domain.errors import ConveyorError
from conveyor.ports.work import UNFORESEEN

_log = logging.getLogger("conveyor.handlers")
_unforeseen = logging.getLogger(UNFORESEEN)


async def alone(what: str, act: Callable[[], Awaitable[None]]) -> None:
    """Do something whose failure is told in one line, with a traceback where it was unforeseen, and
    stops nothing else."""
    try:
        await act()
    except ConveyorError as error:
        _log.warning("%s failed: %s", what, error)
    except Exception as error:
        _unforeseen.error("%s failed: %r", what, error, exc_info=error)
