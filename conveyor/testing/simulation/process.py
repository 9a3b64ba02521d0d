"""One simulated worker process: the production worker over simulated ports."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from conveyor.bootstrap import build_worker
from conveyor.dev.signals import LocalSignals
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.ports.binding import Binding
from conveyor.settings import Settings
from conveyor.testing.simulation.clock import SimulatedClock
from conveyor.testing.simulation.gate import Gate, ProcessKilled
from conveyor.testing.simulation.gateway import GatewayService, SimulatedGateway
from conveyor.testing.simulation.latency import Latency, stream
from conveyor.testing.simulation.link import Link
from conveyor.testing.simulation.loop import VirtualTime
from conveyor.testing.simulation.permits import PermitService, Reach, SimulatedPermits
from conveyor.testing.simulation.picking import picking
from conveyor.testing.simulation.queues import SimulatedQueues
from conveyor.testing.simulation.sqs import QueueService
from conveyor.testing.simulation.store import (
    BlobService,
    SimulatedBlobs,
    SimulatedJobs,
    SimulatedRuns,
    SimulatedTasks,
    Store,
)
from conveyor.testing.simulation.trace import Trace
from conveyor.testing.simulation.unsimulated import (
    UnsimulatedCallbacks,
    UnsimulatedExports,
    UnsimulatedIdempotency,
    UnsimulatedIngestion,
    UnsimulatedInputs,
    UnsimulatedOutbox,
    UnsimulatedSweeping,
)
from conveyor.testing.simulation.world import NO_TIME, World

SECRET = b"the root secret of a simulation."


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the processes of a fleet share."""

    time: VirtualTime
    trace: Trace
    world: World
    picking: str
    seed: int
    store: Store
    blobs: BlobService
    queues: QueueService
    permits: PermitService
    gateway: GatewayService


class _Boot:
    """One life of a process: its ports behind a gate of their own, and the worker over them."""

    def __init__(
        self, services: Services, settings: Settings, *, name: str, skew: float, reach: Reach
    ) -> None:
        self.name = name
        self.gate = Gate()
        self.scope = anyio.CancelScope()
        self.telemetry = Telemetry()
        self._services = services
        world = services.world
        store = self._link("store", world.store_latency)
        permit_latency = world.permit_latency if services.permits.is_ledger else NO_TIME
        self.permits = SimulatedPermits(
            services.permits, self._link("permits", permit_latency), reach
        )
        self.gateway = SimulatedGateway(services.gateway, self._link("gateway", NO_TIME))
        binding = Binding(
            jobs=SimulatedJobs(services.store, store),
            runs=SimulatedRuns(services.store, store),
            idempotency=UnsimulatedIdempotency(),
            ingestion=UnsimulatedIngestion(),
            inputs=UnsimulatedInputs(),
            exports=UnsimulatedExports(),
            sweeping=UnsimulatedSweeping(),
            outbox=UnsimulatedOutbox(),
            callbacks=UnsimulatedCallbacks(),
            tasks=SimulatedTasks(services.store, store),
            queues=SimulatedQueues(services.queues, self._link("queues", world.queue_latency)),
            blobs=SimulatedBlobs(services.blobs, self._link("blobs", NO_TIME)),
            permits=self.permits,
            signals=LocalSignals(),
            root_secret=SECRET,
            aclose=self.gateway.aclose,
        )
        clock = SimulatedClock(
            services.time, self.gate, seed=services.seed, process=name, skew=skew
        )
        self.worker: Worker = build_worker(
            binding,
            self.gateway,
            settings,
            clock,
            telemetry=self.telemetry,
            polling=world.polling(),
            picking=picking(services.picking, clock),
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

    def __init__(self, services: Services, settings: Settings, *, number: int, skew: float) -> None:
        self._services = services
        self._settings = settings
        self._number = number
        self._skew = skew
        self._reach = Reach()
        self._boots: list[_Boot] = []
        self._boot: _Boot | None = None
        self._ended = anyio.Event()

    @property
    def running(self) -> bool:
        """Whether there is a process now, paused or not."""
        return self._boot is not None

    def counted(self, name: str) -> int:
        """A counter of the production telemetry, over all its lives."""
        return sum(boot.telemetry.counts[name] for boot in self._boots)

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
        """As SIGKILL: nothing that it does from here on reaches anything."""
        boot = self._boot
        if boot is not None:
            self._boot = None
            self._services.trace.note(f"{boot.name} killed")
            boot.gate.kill()
            boot.scope.cancel()

    async def stop(self) -> None:
        """As SIGTERM: stop gracefully, and return when the process is gone."""
        boot, ended = self._boot, self._ended
        if boot is not None:
            self._services.trace.note(f"{boot.name} stops")
            boot.worker.stop()
            await ended.wait()

    async def pause(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after so many seconds."""
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
        """Keep it from the permit store for so long, and the processes that take its place."""
        self._services.trace.note(f"w{self._number} cut off from permits")
        self._reach.cut_off += 1
        await self._services.time.sleep(seconds)
        self._reach.cut_off -= 1
        self._services.trace.note(f"w{self._number} reaches permits")

    async def _live(self, boot: _Boot) -> None:
        with boot.scope:
            try:
                await boot.worker.run(grace=self._settings.shutdown_grace)
            except ProcessKilled:
                pass
            except BaseExceptionGroup as group:
                other = group.split(ProcessKilled)[1]
                if other is not None:
                    raise other from None
        self._services.trace.note(f"{boot.name} ended")
        if self._boot is boot:
            self._boot = None
        self._ended.set()

    async def _let_permits_lapse(self, boot: _Boot) -> None:
        """Calls of a stopped process go on at the gateway, after its permits are somebody else's:
        from then on they are counted apart."""
        while (lapses_at := boot.permits.next_lapse()) is not None:
            await self._services.time.sleep(lapses_at - self._services.time.seconds())
            for job_id in boot.permits.leases:
                boot.gateway.abandon_beyond(job_id, boot.permits.usable(job_id))
