"""The idle port: the work that is open outside of the event loop, on a clock that is moved by hand.

A server on such a clock is idle once none of its tasks can run and none of this work is open. On
the system's clock nobody counts, and adapters get None in place of a counter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple, Protocol

from conveyor.ports.clock import Clock

POSTS = "calls of receivers"
"""The kind of the calls that post events."""


class OpenWork(Protocol):
    """A counter of open work by its kind, a noun in the plural. It belongs to one event loop."""

    def enter(self, kind: str) -> None:
        """Count one more piece of work; for work of any length, which may wait for other work."""
        ...

    def leave(self, kind: str) -> None:
        """Count one less: it has ended, and the task that waits for it can run."""
        ...

    def is_open(self, kind: str) -> bool:
        """Tell whether any work of this kind is counted."""
        ...

    async def take_turn(self, kind: str) -> None:
        """Wait until nothing on the loop can run and each earlier turn has ended; then count one
        more.

        So threads, however slow, change the order of nothing. The work must wait for no other turn.
        """
        ...

    def end_turn(self, kind: str) -> None:
        """Count one less, and let the next one have its turn."""
        ...


@contextmanager
def counted(work: OpenWork | None, kind: str) -> Iterator[None]:
    """Count a piece of work while the context is open; without a counter, do nothing."""
    if work is None:
        yield
        return
    work.enter(kind)
    try:
        yield
    finally:
        work.leave(kind)


@asynccontextmanager
async def turn(work: OpenWork | None, kind: str) -> AsyncIterator[None]:
    """Hold a turn while the context is open; without a counter, do nothing."""
    if work is None:
        yield
        return
    await work.take_turn(kind)
    try:
        yield
    finally:
        work.end_turn(kind)


class Due(NamedTuple):
    """Something to be done `after` seconds from now, none or less if it is due. `is_work` tells
    work that was asked for from what the calendar brings: fires of schedules, and expiry.
    `is_expiry` tells the end of what is kept."""

    after: float
    what: str
    is_work: bool
    is_expiry: bool = False


DueSource = Callable[[], Awaitable[Sequence[Due]]]
"""Tell what is due next, in a store or in hand."""


class MovedClock(Protocol):
    """The parts of a clock that is moved by hand, for the adapters of one machine.

    `work` counts open work. On `looks` those sleep who only look whether there is anything to do:
    while nothing is due the clock passes over them.
    """

    @property
    def work(self) -> OpenWork:
        """The counter of open work."""
        ...

    @property
    def looks(self) -> Clock:
        """The same clock, for loops that only look."""
        ...


class ClockState(NamedTuple):
    """The state of a server's clock: its mode, the present in milliseconds, what is due next, the
    number of sleeps that wait and of loops that look, open work by kind, and how often the clock
    has woken a sleeper."""

    mode: str
    now: int
    next: Due | None = None
    sleeps: int = 0
    looks: int = 0
    open: tuple[tuple[str, int], ...] = ()
    wakes: int = 0


class ClockControl(Protocol):
    """Moves the clock of a server. Each move returns once the server is idle.

    Raises ConveyorError: invalid_argument for a move that the clock cannot make, conflict if it
    does not come to rest.
    """

    async def state(self) -> ClockState:
        """Return the state of the clock."""
        ...

    async def advance(self, seconds: float) -> None:
        """Move on, stopping at each instant at which something is due."""
        ...

    async def advance_to(self, instant: int) -> None:
        """Move on to an instant in milliseconds."""
        ...

    async def shift_wall(self, seconds: float) -> None:
        """Set the wall clock alone forward or back, as an administrator would."""
        ...

    async def run_until_idle(self) -> None:
        """Move from instant to instant until no work is left."""
        ...
