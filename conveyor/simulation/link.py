"""The parts of one simulated process that stop and delay it, and the trace of its actions.

A stopped process does nothing while time goes on; a killed one never does anything again.
"""

from __future__ import annotations

import hashlib
import random  # noqa: TID251  (seeded: a simulation is repeatable)
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from conveyor.simulation.latency import Latency


class ProcessKilled(BaseException):
    """Raised wherever a killed process touches the outside, so that its shutdown code has no
    effect. Like a cancellation it is not an Exception, so that no handler catches it by mistake."""


class Gate:
    """A gate to pass at each entry to and each return from a port or a sleep.

    `halted` is set while the process is paused or killed; only then need `passed` be awaited.
    """

    __slots__ = ("_resumed", "halted", "killed")

    def __init__(self) -> None:
        self.halted = False
        self.killed = False
        self._resumed = anyio.Event()

    async def passed(self) -> None:
        """Return once the process runs. Raises ProcessKilled."""
        while self.halted:
            if self.killed:
                raise ProcessKilled
            await self._resumed.wait()

    def check(self) -> None:
        """Check the gate in a call that does not wait. Raises ProcessKilled."""
        if self.killed:
            raise ProcessKilled

    def pause(self) -> None:
        """Stop the process, as SIGSTOP."""
        self.halted = True

    def resume(self) -> None:
        """Continue the process, as SIGCONT; without effect on a killed one."""
        self.halted = self.killed
        self._wake()

    def kill(self) -> None:
        """Kill the process, as SIGKILL, which reaches a paused one too."""
        self.halted = self.killed = True
        self._wake()

    def _wake(self) -> None:
        resumed, self._resumed = self._resumed, anyio.Event()
        resumed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one process to one service and back, which takes `latency` in total.

    A random draw puts all of it before the effect or all of it after: a process that is killed
    meanwhile has either done nothing, or never learns the result.
    """

    process: str
    gate: Gate
    trace: Trace
    seconds: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    latency: Latency
    stream: random.Random

    async def go(self) -> float:
        """Reach the service; return the seconds that the way back takes."""
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
        """Record an action of this process."""
        self.trace.note(f"{self.process} {event}")


_CHUNK = 1_000


class Trace:
    """A running sha256 over lines of virtual microseconds and an event with its ids.

    The lines leave out the name of the policy, so that two policies with the same behaviour have
    the same digest.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._hash = hashlib.sha256()
        self._lines: list[str] = []
        self._hashed = 0

    @property
    def events(self) -> int:
        """Return the number of recorded events."""
        return self._hashed + len(self._lines)

    def note(self, event: str) -> None:
        """Record an event at the present time."""
        lines = self._lines
        lines.append(f"{self._seconds() * 1e6:.0f} {event}")
        if len(lines) >= _CHUNK:
            self._flush()

    def digest(self) -> str:
        """Return the fingerprint up to now, 64 hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        if self._lines:
            self._hash.update(("\n".join(self._lines) + "\n").encode())
            self._hashed += len(self._lines)
            self._lines.clear()
