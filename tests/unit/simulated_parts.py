"""Single parts of a simulation, in virtual time, for tests that look at one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Gate, Link, Trace
from conveyor.simulation.loop import VirtualTime, run

T = TypeVar("T")
NO_TIME = Latency(0.0)


class Place:
    """The common parts of tests: the time, the trace, and processes with their gates and links."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time
        self.trace = Trace(time.seconds)

    def link(self, gate: Gate, *, process: str = "w1", latency: Latency = NO_TIME) -> Link:
        """A process's way to a service."""
        return Link(
            process=process,
            gate=gate,
            trace=self.trace,
            seconds=self.time.seconds,
            sleep=self.time.sleep,
            latency=latency,
            stream=stream(0, process),
        )


def in_place(main: Callable[[Place], Awaitable[T]]) -> T:
    """Run a test in virtual time."""

    async def placed(time: VirtualTime) -> T:
        return await main(Place(time))

    return run(placed, backend="asyncio")
