"""The clock of one simulated process: virtual time as this process reads it."""

from __future__ import annotations

from ulid import ULID

from conveyor.testing.clock import START
from conveyor.testing.simulation.gate import Gate
from conveyor.testing.simulation.latency import stream
from conveyor.testing.simulation.loop import VirtualTime

_ORIGINS = 100_000


class SimulatedClock:
    """The clock port over virtual time.

    Monotonic time has an origin of its own, wall time is `skew` seconds off; ids and random numbers
    come from the process's own stream, named by the seed and the process.
    """

    def __init__(
        self, time: VirtualTime, gate: Gate, *, seed: int, process: str, skew: float = 0.0
    ) -> None:
        self._seconds = time.seconds
        self._sleep = time.sleep
        self._gate = gate
        self._random = stream(seed, f"clock of {process}")
        self._origin = float(self._random.randrange(_ORIGINS))
        self._start = START + round(skew * 1_000)
        self._last_id = 0

    def now(self) -> int:
        """Milliseconds since the epoch, by this process's wall clock."""
        return self._start + int(self._seconds() * 1_000)

    def monotonic(self) -> float:
        """Seconds since an origin that no other process shares."""
        return self._origin + self._seconds()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`, if the process runs then."""
        gate = self._gate
        if gate.halted:
            await gate.passed()
        await self._sleep(max(seconds, 0.0))
        if gate.halted:
            await gate.passed()

    def random(self) -> float:
        """A number in [0, 1), by the seed."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Bytes by the seed."""
        return self._random.randbytes(length)

    def new_id(self) -> str:
        """A ULID of this process's wall time; each is greater than the one before."""
        fresh = self.now() << 80 | self._random.getrandbits(79)
        self._last_id = max(fresh, self._last_id + 1)
        return str(ULID.from_bytes(self._last_id.to_bytes(16, "big")))
