"""Work that nobody waits for any more is given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Attended(Protocol):
    """Does a piece of work for as long as somebody waits for it.

    Where they have gone the work is cancelled, and an exception tells whoever is behind this.
    """

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work returns. Raises what it raises."""
        ...


async def unattended(work: Callable[[], Awaitable[T]]) -> T:
    """Do the work whether or not somebody waits."""
    return await work()
