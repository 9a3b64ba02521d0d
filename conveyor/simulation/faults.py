"""The faults of a simulation and their times, in virtual seconds from its start.

Making a fault raises ValueError for a field out of its bounds; making a Scenario raises it for a
fault of a worker or job that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random  # noqa: TID251  (seeded: a simulation is repeatable)

from conveyor.domain.hosts import host_and_port
from conveyor.simulation.checks import INSTANT, check_count, check_number, check_time
from conveyor.simulation.gateway import host_url
from conveyor.simulation.latency import stream
from conveyor.simulation.process import SimulatedFleet

MOST_SLOW = 1e6
"""The largest factor by which calls may slow down."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL for a worker (from 0); a new process takes its place after `back_after`, if set."""

    worker: int
    at: float
    back_after: float | None = None

    def __post_init__(self) -> None:
        check_count("Kill.worker", self.worker, least=0)
        check_time("Kill.at", self.at)
        if self.back_after is not None:
            check_time("Kill.back_after", self.back_after)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Kill the worker, and start it again."""
        await fleet.until(self.at)
        fleet.workers[self.worker].kill()
        if self.back_after is not None:
            await fleet.time.sleep(self.back_after)
            fleet.start(self.worker)


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP for a worker (from 0), and SIGCONT after `seconds`: a machine that was suspended."""

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        check_count("Pause.worker", self.worker, least=0)
        check_time("Pause.at", self.at)
        check_time("Pause.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Pause the worker."""
        await fleet.until(self.at)
        await fleet.workers[self.worker].pause(self.seconds)


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """Stops or kills the workers one by one, one `every` so many seconds; a new process takes the
    place of each at once."""

    at: float
    every: float
    graceful: bool = True

    def __post_init__(self) -> None:
        check_time("RollingRestart.at", self.at)
        check_time("RollingRestart.every", self.every)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Restart all workers."""
        for number, worker in enumerate(fleet.workers):
            await fleet.until(self.at + number * self.every)
            if self.graceful:
                await worker.stop()
            else:
                worker.kill()
            fleet.start(number)


@dataclass(frozen=True, slots=True)
class PermitsDown:
    """The permit store answers no call for a time, but applies some all the same."""

    at: float
    seconds: float

    def __post_init__(self) -> None:
        check_time("PermitsDown.at", self.at)
        check_time("PermitsDown.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Stop the store's answers, and restore them."""
        await fleet.until(self.at)
        fleet.permits.down += 1
        await fleet.time.sleep(self.seconds)
        fleet.permits.down -= 1


@dataclass(frozen=True, slots=True)
class PermitsCutOff:
    """One worker (from 0) gets no answer from the permit store for a time, though it reaches all
    other services, and the other workers reach the store.

    Some of its calls are applied all the same. A process that takes its place meanwhile is cut off,
    too.
    """

    worker: int
    at: float
    seconds: float

    def __post_init__(self) -> None:
        check_count("PermitsCutOff.worker", self.worker, least=0)
        check_time("PermitsCutOff.at", self.at)
        check_time("PermitsCutOff.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Cut the worker off, and reconnect it."""
        await fleet.until(self.at)
        await fleet.workers[self.worker].cut_off_permits(self.seconds)


@dataclass(frozen=True, slots=True)
class PermitsRestartEmpty:
    """The permit store is away for `down` seconds and comes back without its entries."""

    at: float
    down: float = 1.0

    def __post_init__(self) -> None:
        check_time("PermitsRestartEmpty.at", self.at)
        check_time("PermitsRestartEmpty.down", self.down)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Take the store away, and bring it back empty."""
        await fleet.until(self.at)
        fleet.permits.down += 1
        await fleet.time.sleep(self.down)
        fleet.permits.restart_empty()
        fleet.permits.down -= 1


@dataclass(frozen=True, slots=True)
class GatewaySlow:
    """Calls that start within `seconds` take `factor` times as long."""

    at: float
    seconds: float
    factor: float

    def __post_init__(self) -> None:
        check_time("GatewaySlow.at", self.at)
        check_time("GatewaySlow.seconds", self.seconds, least=INSTANT)
        check_number("GatewaySlow.factor", self.factor, least=1 / MOST_SLOW, most=MOST_SLOW)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Slow the gateway down, and restore its speed."""
        await fleet.until(self.at)
        fleet.gateway.slowness *= self.factor
        await fleet.time.sleep(self.seconds)
        fleet.gateway.slowness /= self.factor


@dataclass(frozen=True, slots=True)
class GatewayLimit:
    """The gateway refuses calls beyond `limit` at a time with 429, all of them if it is 0.

    Lasts for `seconds`, or to the end if None. Where limits overlap, the lowest applies.
    """

    limit: int
    at: float = 0.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_count("GatewayLimit.limit", self.limit, least=0)
        check_time("GatewayLimit.at", self.at)
        if self.seconds is not None:
            check_time("GatewayLimit.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Start refusing, and stop."""
        await fleet.until(self.at)
        fleet.gateway.limits.append(self.limit)
        if self.seconds is not None:
            await fleet.time.sleep(self.seconds)
            fleet.gateway.limits.remove(self.limit)


@dataclass(frozen=True, slots=True)
class GatewayDown:
    """Nobody can reach the gateway for a time, and the calls under way break."""

    at: float
    seconds: float

    def __post_init__(self) -> None:
        check_time("GatewayDown.at", self.at)
        check_time("GatewayDown.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Take the gateway away, and bring it back."""
        await fleet.until(self.at)
        fleet.gateway.down += 1
        await fleet.time.sleep(self.seconds)
        fleet.gateway.down -= 1


@dataclass(frozen=True, slots=True)
class HostRefuses:
    """A host (from 0, or that of a job where each has its own) refuses calls for a time, with a
    Retry-After unless it `is_silent`."""

    host: int
    at: float
    seconds: float
    is_silent: bool = False

    def __post_init__(self) -> None:
        check_count("HostRefuses.host", self.host, least=0)
        check_time("HostRefuses.at", self.at)
        check_time("HostRefuses.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Refuse calls from then on."""
        await fleet.until(self.at)
        for is_shared in (True, False):
            name = host_and_port(host_url(self.host, is_shared=is_shared))
            load = fleet.gateway.hosts.of(name)
            load.refuse(fleet.time.seconds(), self.seconds, is_silent=self.is_silent)


@dataclass(frozen=True, slots=True)
class BodiesDown:
    """The store of bodies refuses bodies for a time."""

    at: float
    seconds: float

    def __post_init__(self) -> None:
        check_time("BodiesDown.at", self.at)
        check_time("BodiesDown.seconds", self.seconds, least=INSTANT)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Take the store away, and bring it back."""
        await fleet.until(self.at)
        fleet.blobs.down += 1
        await fleet.time.sleep(self.seconds)
        fleet.blobs.down -= 1


@dataclass(frozen=True, slots=True)
class LostAcks:
    """Answers a share of acknowledgements and visibility changes with an error; half of them are
    applied all the same."""

    share: float

    def __post_init__(self) -> None:
        check_number("LostAcks.share", self.share, most=1.0)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Lose answers from now on."""
        fleet.queues.lost_answers = self.share


@dataclass(frozen=True, slots=True)
class Duplicates:
    """After that share of receipts, the message is delivered once more."""

    share: float

    def __post_init__(self) -> None:
        check_number("Duplicates.share", self.share, most=1.0)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Duplicate messages from now on."""
        fleet.queues.duplicates = self.share


@dataclass(frozen=True, slots=True)
class QueueLost:
    """The queue of a job (from 0) is lost with all its messages; without effect before the job has
    arrived."""

    at: float
    job: int = 0

    def __post_init__(self) -> None:
        check_time("QueueLost.at", self.at)
        check_count("QueueLost.job", self.job, least=0)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Lose the queue, once."""
        await fleet.until(self.at)
        fleet.queues.drop(fleet.run_ids[self.job])


@dataclass(frozen=True, slots=True)
class YoungQueues:
    """A queue becomes available only some seconds after its creation."""

    seconds: float

    def __post_init__(self) -> None:
        check_time("YoungQueues.seconds", self.seconds)

    async def happen(self, fleet: SimulatedFleet) -> None:
        """Delay new queues from now on."""
        fleet.queues.young = self.seconds


Fault = (
    Kill
    | Pause
    | RollingRestart
    | PermitsDown
    | PermitsCutOff
    | PermitsRestartEmpty
    | GatewaySlow
    | GatewayLimit
    | GatewayDown
    | HostRefuses
    | BodiesDown
    | LostAcks
    | Duplicates
    | QueueLost
    | YoungQueues
)


def random_faults(
    seed: int, *, workers: int, duration: float, cap: int, lease: float = 30.0
) -> tuple[Fault, ...]:
    """Make the faults of a bad day, the same for the same seed.

    Workers are killed, and paused beyond their leases; the permit store is away, for all or for
    one; the gateway is slow or refuses; answers are lost and messages doubled. The faults are
    spread over `duration` seconds. Raises ValueError for a number out of its bounds.
    """
    check_count("workers", workers)
    check_count("cap", cap)
    check_time("duration", duration)
    check_time("lease", lease, least=INSTANT)
    return (
        *_bad_day(stream(seed, "faults"), workers, duration, cap, lease),
        *_partitions(stream(seed, "partitions"), workers, duration, lease),
    )


def _bad_day(draw: Random, workers: int, duration: float, cap: int, lease: float) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 2 * workers)):
        at, worker = draw.uniform(0, duration), draw.randrange(workers)
        faults.append(Kill(worker, at, back_after=draw.uniform(0, 2 * lease)))
    for _ in range(draw.randint(0, workers)):
        at, worker = draw.uniform(0, duration), draw.randrange(workers)
        faults.append(Pause(worker, at, max(draw.uniform(0, 2 * lease), INSTANT)))
    faults.extend(
        PermitsDown(draw.uniform(0, duration), draw.uniform(1, 2 * lease))
        for _ in range(draw.randint(0, 3))
    )
    if draw.random() < 0.3:
        faults.append(PermitsRestartEmpty(draw.uniform(0, duration), draw.uniform(0, lease)))
    if draw.random() < 0.5:
        slow_at, slow_for = draw.uniform(0, duration), draw.uniform(5, 60)
        faults.append(GatewaySlow(slow_at, slow_for, draw.uniform(2, 8)))
    if draw.random() < 0.5:
        limit = max(1, int(cap * draw.uniform(0.3, 0.9)))
        faults.append(GatewayLimit(limit, draw.uniform(0, duration), draw.uniform(5, 60)))
    if draw.random() < 0.5:
        faults.append(LostAcks(draw.uniform(0.01, 0.3)))
    if draw.random() < 0.5:
        faults.append(Duplicates(draw.uniform(0.01, 0.5)))
    if draw.random() < 0.2:
        faults.append(QueueLost(draw.uniform(0, duration)))
    if draw.random() < 0.3:
        faults.append(RollingRestart(draw.uniform(0, duration), draw.uniform(1, 10)))
    return faults


def _partitions(draw: Random, workers: int, duration: float, lease: float) -> list[Fault]:
    """Draw partitions from a stream of their own, so that the rest of a seed's day stays the
    same."""
    faults: list[Fault] = []
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, workers)):
            at, worker = draw.uniform(0, duration), draw.randrange(workers)
            faults.append(PermitsCutOff(worker, at, draw.uniform(1, 2 * lease)))
    return faults
