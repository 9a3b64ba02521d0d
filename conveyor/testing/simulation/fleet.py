"""A fleet of simulated workers and what they share, as faults get at it."""

from __future__ import annotations

from anyio.abc import TaskGroup

from conveyor.testing.simulation.clock import SimulatedClock
from conveyor.testing.simulation.gate import Gate
from conveyor.testing.simulation.gateway import GatewayService
from conveyor.testing.simulation.latency import stream
from conveyor.testing.simulation.loop import VirtualTime
from conveyor.testing.simulation.permits import PermitService
from conveyor.testing.simulation.process import Services, WorkerProcess
from conveyor.testing.simulation.sqs import QueueService
from conveyor.testing.simulation.store import BlobService, Store
from conveyor.testing.simulation.trace import Trace
from conveyor.testing.simulation.world import World


class Fleet:
    """Workers by number, the services by name. `run_ids` are the runs of the jobs, in order of the
    plans; "" before a job has arrived."""

    def __init__(
        self,
        time: VirtualTime,
        world: World,
        *,
        policy: str,
        permit_store: str,
        picking: str,
        workers: int,
        seed: int,
        clock_skew: float,
    ) -> None:
        self.time = time
        self.world = world
        self.trace = Trace(time.seconds)
        self.store = Store()
        self.blobs = BlobService()
        self.clock = SimulatedClock(time, Gate(), seed=seed, process="fleet")
        self.queues = self._queue_service(seed)
        self.permits = PermitService(
            SimulatedClock(time, Gate(), seed=seed, process="permit store"),
            world.permit_latency,
            kind=permit_store,
            lease=world.permit_lease,
            seed=seed,
        )
        self.gateway = GatewayService(time, seed=seed)
        self.run_ids: list[str] = []
        self._group: TaskGroup | None = None
        services = Services(
            time=time,
            trace=self.trace,
            world=world,
            picking=picking,
            seed=seed,
            store=self.store,
            blobs=self.blobs,
            queues=self.queues,
            permits=self.permits,
            gateway=self.gateway,
        )
        skews = stream(seed, "clock skews")
        settings = world.settings(policy)
        self.workers = [
            WorkerProcess(
                services, settings, number=number, skew=skews.uniform(-clock_skew, clock_skew)
            )
            for number in range(workers)
        ]

    def _queue_service(self, seed: int) -> QueueService:
        queues = QueueService(
            self.time,
            self.trace,
            self.store.unfinished,
            seed=seed,
            partitions=self.world.partitions,
            partitions_asked=self.world.partitions_asked,
            max_receives=self.world.max_receives,
        )
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
        """The simulation is over: everything stops where it is."""
        self._group = None
        for worker in self.workers:
            worker.kill()

    async def until(self, second: float) -> None:
        """Return at a virtual second, or at once where it has passed."""
        left = second - self.time.seconds()
        if left > 0:
            await self.time.sleep(left)

    def counted(self, name: str) -> int:
        """A counter of the production telemetry, over the whole fleet."""
        return sum(worker.counted(name) for worker in self.workers)
