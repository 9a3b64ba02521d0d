"""One simulated worker process, its clock, and the fleet of them that faults act on.

A process is the production worker over simulated ports; its clock is virtual time as this process
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import anyio
from anyio.abc import TaskGroup
from ulid import ULID

from conveyor.bootstrap import Chores, LoopOptions, WorkerPorts, assemble_worker
from conveyor.dev.permits import MemoryWorkers
from conveyor.dev.queues import LocalSignals
from conveyor.domain.api_keys import KeySealer
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.settings import Settings
from conveyor.simulation.gateway import GatewayService, SimulatedGateway
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Gate, Link, ProcessKilled, Trace
from conveyor.simulation.loop import VirtualTime
from conveyor.simulation.permits import (
    LedgerReach,
    PermitService,
    SimulatedPacing,
    SimulatedPermits,
)
from conveyor.simulation.policies import picking
from conveyor.simulation.queues import QueueService, SimulatedQueues
from conveyor.simulation.store import (
    BlobService,
    SimulatedBlobs,
    SimulatedJobs,
    SimulatedRuns,
    SimulatedTasks,
    SimulatedWorkers,
    Store,
)
from conveyor.simulation.world import NO_TIME, World

_ORIGINS = 100_000

START = 1_767_225_600_000
"""Milliseconds since 1970 at which virtual time begins: 2026-01-01T00:00:00Z."""


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
        """Return milliseconds since the epoch, by this process's wall clock."""
        return self._start + int(self._seconds() * 1_000)

    def monotonic(self) -> float:
        """Return seconds since an origin that no other process shares."""
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
        """Return a number in [0, 1), by the seed."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Return bytes by the seed."""
        return self._random.randbytes(length)

    def new_id(self) -> str:
        """Return a ULID of this process's wall time; each is greater than the one before."""
        fresh = self.now() << 80 | self._random.getrandbits(79)
        self._last_id = max(fresh, self._last_id + 1)
        return str(ULID.from_bytes(self._last_id.to_bytes(16, "big")))


SECRET = b"the root secret of a simulation."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServices:
    """The services that the processes of a fleet share."""

    time: VirtualTime
    trace: Trace
    world: World
    policy: str
    picking: str
    seed: int
    store: Store
    blobs: BlobService
    queues: QueueService
    permits: PermitService
    gateway: GatewayService
    run_workers: int
    reports: MemoryWorkers


class _Boot:
    """One life of a process: its ports behind a gate of their own, and the worker over them."""

    def __init__(
        self,
        services: SimulatedServices,
        settings: Settings,
        *,
        name: str,
        skew: float,
        reach: LedgerReach,
    ) -> None:
        self.name = name
        self.gate = Gate()
        self.scope = anyio.CancelScope()
        self.telemetry = Telemetry()
        self._services = services
        world = services.world
        store = self._link("store", world.store_latency)
        ledger = services.permits
        latency = world.permit_latency if ledger.is_ledger else NO_TIME
        self.permits = SimulatedPermits(ledger, self._link("permits", latency), reach)
        self.gateway = SimulatedGateway(services.gateway, self._link("gateway", NO_TIME))
        ports = WorkerPorts(
            jobs=SimulatedJobs(services.store, store),
            runs=SimulatedRuns(services.store, store),
            tasks=SimulatedTasks(services.store, store),
            blobs=SimulatedBlobs(services.blobs, self._link("blobs", NO_TIME)),
            queues=SimulatedQueues(services.queues, self._link("queues", world.queue_latency)),
            permits=self.permits,
            pacing=SimulatedPacing(ledger, self._link("pacing", world.permit_latency), reach),
            signals=LocalSignals(),
            gateway=self.gateway,
            sealer=KeySealer([SECRET]),
            workers=SimulatedWorkers(services.reports, store) if services.run_workers else None,
        )
        clock = SimulatedClock(
            services.time, self.gate, seed=services.seed, process=name, skew=skew
        )
        self.worker: Worker = assemble_worker(
            ports,
            settings,
            clock,
            telemetry=self.telemetry,
            chores=Chores(),
            options=LoopOptions(
                policy=world.policy(services.policy),
                polling=world.polling(),
                picking=partial(picking, services.picking, clock),
                run_workers=services.run_workers,
            ),
        )

    def _link(self, service: str, latency: Latency) -> Link:
        return Link(
            process=self.name,
            gate=self.gate,
            trace=self._services.trace,
            seconds=self._services.time.seconds,
            sleep=self._services.time.sleep,
            latency=latency,
            stream=stream(self._services.seed, f"{service} of {self.name}"),
        )


class WorkerProcess:
    """A worker process that can be started, stopped, paused, killed and started again.

    Each start is a new process with a new name. `skew`: seconds that its wall clock is off.
    """

    def __init__(
        self, services: SimulatedServices, settings: Settings, *, number: int, skew: float
    ) -> None:
        self._services = services
        self._settings = settings
        self._number = number
        self._skew = skew
        self._reach = LedgerReach()
        self._boots: list[_Boot] = []
        self._boot: _Boot | None = None
        self._ended = anyio.Event()

    @property
    def running(self) -> bool:
        """Return whether a process exists, paused or not."""
        return self._boot is not None

    def counted(self, name: str) -> int:
        """Return a counter of the production telemetry, over all its lives."""
        return sum(boot.telemetry.counts[name] for boot in self._boots)

    def serving(self) -> list[str]:
        """Return the runs that it serves now."""
        return [] if self._boot is None else self._boot.worker.serving()

    def start(self, group: TaskGroup) -> None:
        """Boot, unless it runs."""
        if self._boot is None:
            name = f"w{self._number}.{len(self._boots) + 1}"
            boot = _Boot(
                self._services, self._settings, name=name, skew=self._skew, reach=self._reach
            )
            self._boots.append(boot)
            self._boot = boot
            self._ended = anyio.Event()
            self._services.trace.note(f"{name} starts")
            group.start_soon(self._live, boot)

    def kill(self) -> None:
        """Kill it, as SIGKILL: none of its later actions has an effect."""
        boot = self._boot
        if boot is not None:
            self._boot = None
            self._services.trace.note(f"{boot.name} killed")
            boot.gate.kill()
            boot.scope.cancel()

    async def stop(self) -> None:
        """Stop it gracefully, as SIGTERM; return when the process is gone."""
        boot, ended = self._boot, self._ended
        if boot is not None:
            self._services.trace.note(f"{boot.name} stops")
            boot.worker.stop()
            await ended.wait()

    async def pause(self, seconds: float) -> None:
        """Pause it, as SIGSTOP, and continue it, as SIGCONT, after `seconds`."""
        boot = self._boot
        if boot is None:
            return
        self._services.trace.note(f"{boot.name} paused")
        boot.gate.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(self._let_permits_lapse, boot)
            await self._services.time.sleep(seconds)
            group.cancel_scope.cancel()
        self._services.trace.note(f"{boot.name} resumed")
        boot.gate.resume()

    async def cut_off_permits(self, seconds: float) -> None:
        """Cut it, and the processes that take its place, off from the permit store for
        `seconds`."""
        self._services.trace.note(f"w{self._number} cut off from permits")
        self._reach.cut_off += 1
        await self._services.time.sleep(seconds)
        self._reach.cut_off -= 1
        self._services.trace.note(f"w{self._number} reaches permits")

    async def _live(self, boot: _Boot) -> None:
        with boot.scope:
            try:
                await boot.worker.run(grace=self._settings.shutdown_grace)
            except* ProcessKilled:
                pass
        self._services.trace.note(f"{boot.name} ended")
        if self._boot is boot:
            self._boot = None
        self._ended.set()

    async def _let_permits_lapse(self, boot: _Boot) -> None:
        """Count its calls apart once its permits have lapsed.

        Calls of a stopped process go on at the gateway after its permits went to another holder.
        """
        while (lapses_at := boot.permits.next_lapse()) is not None:
            await self._services.time.sleep(lapses_at - self._services.time.seconds())
            for job_id in boot.permits.leases:
                boot.gateway.abandon_beyond(job_id, boot.permits.usable(job_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The size of a fleet, and the rules by which it works; the fields are those of Scenario."""

    policy: str
    permit_store: str
    picking: str
    workers: int
    seed: int
    clock_skew: float
    run_workers: int
    caller_max_inflight: int
    host_limit: int
    host_rate: float


class SimulatedFleet:
    """Workers by number, services by name. `run_ids` are the runs of the jobs, in order of the
    plans; "" before a job has arrived."""

    def __init__(self, time: VirtualTime, world: World, options: FleetOptions) -> None:
        seed = options.seed
        self.time = time
        self.world = world
        self.trace = Trace(time.seconds)
        self.store = Store()
        self.blobs = BlobService()
        self.clock = SimulatedClock(time, Gate(), seed=seed, process="fleet")
        self.queues = self._queue_service(options)
        self.permits = self._permit_service(options)
        self.gateway = GatewayService(time, seed=seed)
        self.run_ids: list[str] = []
        self._group: TaskGroup | None = None
        services = SimulatedServices(
            time=time,
            trace=self.trace,
            world=world,
            policy=options.policy,
            picking=options.picking,
            seed=seed,
            store=self.store,
            blobs=self.blobs,
            queues=self.queues,
            permits=self.permits,
            gateway=self.gateway,
            run_workers=options.run_workers,
            reports=MemoryWorkers(self.clock),
        )
        draw, most = stream(seed, "clock skews").uniform, options.clock_skew
        settings = replace(
            world.settings(),
            caller_max_inflight=options.caller_max_inflight,
            host_limit=options.host_limit,
            host_rate=options.host_rate,
        )
        self.workers = [
            WorkerProcess(services, settings, number=number, skew=draw(-most, most))
            for number in range(options.workers)
        ]

    def _permit_service(self, options: FleetOptions) -> PermitService:
        return PermitService(
            SimulatedClock(self.time, Gate(), seed=options.seed, process="permit store"),
            self.world.permit_latency,
            kind=options.permit_store,
            lease=self.world.permit_lease,
            seed=options.seed,
        )

    def _queue_service(self, options: FleetOptions) -> QueueService:
        async def has_policy(_run_id: str) -> bool:
            return bool(options.host_limit or options.host_rate)

        queues = QueueService(
            self.time,
            self.trace,
            self.store,
            seed=options.seed,
            partitions=self.world.partitions,
            partitions_asked=self.world.partitions_asked,
            max_receives=self.world.max_receives,
        )
        queues.has_policy = has_policy
        self.store.on_settled = queues.settled
        return queues

    def start_all(self, group: TaskGroup) -> None:
        """Boot every worker, in a group that outlives them."""
        self._group = group
        for number in range(len(self.workers)):
            self.start(number)

    def start(self, number: int) -> None:
        """Boot one worker, unless it runs, or the simulation is over."""
        if self._group is not None:
            self.workers[number].start(self._group)

    def end(self) -> None:
        """End the simulation: everything stops where it is."""
        self._group = None
        for worker in self.workers:
            worker.kill()

    async def until(self, second: float) -> None:
        """Return at a virtual second, or at once where it has passed."""
        left = second - self.time.seconds()
        if left > 0:
            await self.time.sleep(left)

    def counted(self, name: str) -> int:
        """Return a counter of the production telemetry, over the whole fleet."""
        return sum(worker.counted(name) for worker in self.workers)
