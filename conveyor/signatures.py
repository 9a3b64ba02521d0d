"""Verify the events that Conveyor sends; for receivers, who need nothing else of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conveyor.clock import SystemClock
from conveyor.domain import signatures
from conveyor.domain.signatures import TOLERANCE

__all__ = ["TOLERANCE", "verify"]


def verify(
    raw: bytes,
    headers: Mapping[str, object],
    secrets: str | bytes | Sequence[str | bytes],
    *,
    tolerance: int = TOLERANCE,
) -> bool:
    """Return whether a request was signed with one of the secrets at about this moment.

    `raw` is the request's body exactly as it came. The rules are those of
    `conveyor.domain.signatures.verify`. Raises ValueError for a secret that cannot be one.
    """
    now = SystemClock().now() // 1_000
    return signatures.verify(raw, headers, secrets, now=now, tolerance=tolerance)
