"""How often a caller may ask: looked at once it is known who asks, before anything is done."""

from __future__ import annotations

import math

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.rate_limit import RateLimit


async def admit(limit: RateLimit | None, caller_id: str) -> None:
    """Let a request of a caller pass. Raises ConveyorError(rate_limited), with the whole seconds
    after which the next one passes; without a limit every request does."""
    wait = 0.0 if limit is None else await limit.take(caller_id)
    if wait > 0.0:
        raise ConveyorError(
            ErrorCode.RATE_LIMITED,
            "you have made too many requests: try again later",
            retry_after=math.ceil(wait),
        )
