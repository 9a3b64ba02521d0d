"""What every part of one simulated process shares."""

from __future__ import annotations

import random  # noqa: TID251  (seeded: a simulation is repeatable)
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from conveyor.testing.simulation.gate import Gate
from conveyor.testing.simulation.latency import Latency
from conveyor.testing.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one process to one service and back, which takes a `latency` in all.

    By chance all of it lies before the effect or all of it behind: a process that is killed
    meanwhile has either done nothing, or never learns what it did.
    """

    process: str
    gate: Gate
    trace: Trace
    seconds: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    latency: Latency
    stream: random.Random

    async def go(self) -> float:
        """Reach the service; the seconds that the way back takes."""
        gate = self.gate
        if gate.halted:
            await gate.passed()
        seconds = self.latency.draw(self.stream)
        if seconds <= 0 or self.stream.random() < 0.5:
            return seconds
        await self.sleep(seconds)
        if gate.killed:
            gate.check()
        return 0.0

    async def come_back(self, seconds: float) -> None:
        """Bring the answer back, to a process that runs."""
        if seconds > 0:
            await self.sleep(seconds)
        gate = self.gate
        if gate.halted:
            await gate.passed()

    def note(self, event: str) -> None:
        """Write down what this process did."""
        self.trace.note(f"{self.process} {event}")
