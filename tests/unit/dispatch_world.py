"""A dispatcher in virtual time: one worker or more over in-memory queues whose rows are lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio

from conveyor.dev.pacing import MemoryPacing
from conveyor.dev.permits import MemoryPermits
from conveyor.dev.queues import LocalSignals, MemoryQueues
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.hosts import HostPolicies, HostRules, Politeness
from conveyor.domain.ids import task_id
from conveyor.domain.model import DispatchableRun
from conveyor.engine.discovery import Discovery, DiscoveryOptions
from conveyor.engine.dispatcher import Dispatcher, DispatchOptions
from conveyor.engine.hosts import HostPaces, MessageTurns
from conveyor.engine.planner import Polling
from conveyor.engine.policy import LeaseOptions, PolicyFactory
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.telemetry import LOOK, Telemetry
from conveyor.engine.worker import Worker
from conveyor.ports.gateway import Postponed
from conveyor.ports.handler import ACKNOWLEDGE, Handler, Outcome, Throttled
from conveyor.ports.pacing import Pacing
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.ports.queues import Delivery, TaskMessage
from conveyor.ports.records import DispatchChange
from conveyor.ports.workers import FleetPause
from conveyor.settings import Settings
from conveyor.simulation.policies import BOUNCES, Bounces, policy_factory
from conveyor.testing.clock import FakeClock

GRACE = 2.0


class Work:
    """A handler that takes virtual time and keeps count."""

    def __init__(self, clock: FakeClock, duration: Callable[[Delivery], float]) -> None:
        self.clock = clock
        self.duration = duration
        self.outcome: Callable[[Delivery], Outcome] = lambda _delivery: ACKNOWLEDGE
        self.refuses: Callable[[Delivery], bool] = lambda _delivery: False
        self.in_flight: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.done: list[str] = []
        self.finished_at: dict[str, float] = {}
        self.cancelled = 0

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        self.in_flight[delivery.queue] += 1
        for name, count in (
            (delivery.queue, self.in_flight[delivery.queue]),
            ("all", self.in_flight.total()),
        ):
            self.peak[name] = max(self.peak[name], count)
        try:
            await self.clock.sleep(self.duration(delivery))
        except BaseException:
            self.cancelled += 1
            raise
        finally:
            self.in_flight[delivery.queue] -= 1
        outcome = self.outcome(delivery)
        if self.refuses(delivery):
            throttled()
        if outcome.hide_for is None:
            message = delivery.message
            self.done.append(message.task_id if isinstance(message, TaskMessage) else "control")
            self.finished_at[delivery.queue] = self.clock.monotonic()
        return outcome

    async def renew(self) -> None:
        """Nothing is held."""


async def _no_robots(_url: str) -> None:
    """Read no robots.txt."""


class PoliteWork:
    """A handler that waits for the host of each message, as tasks do before their calls."""

    def __init__(self, world: World, turns: MessageTurns) -> None:
        self._world = world
        self._turns = turns

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        world, message = self._world, delivery.message
        assert isinstance(message, TaskMessage)
        url = f"https://{world.host_of(message.task_id)}/"
        try:
            asked = await world.admit(url)
            await self._turns.come(message.run_id, message.task_id, url, asked)
        except Postponed as full:
            return Outcome(hide_for=full.retry_after, waiting=full.waiting)
        world.starts.append((world.clock.monotonic(), url))
        return await world.tasks.handle(delivery, throttled)

    async def renew(self) -> None:
        """Nothing is held."""


class BrokenLedger:
    """A ledger that is away whenever `away` says so of a call, and as slow as set.

    A call takes `there` seconds and its answer `back`. Leases last `rate` of the requested time: 1
    unless the ledger's clock is faster than those of the workers. `asked` are the calls, answered
    or not; `granted_at` is when the ledger granted the latest one.
    """

    def __init__(self, permits: Permits, clock: FakeClock) -> None:
        self._permits = permits
        self.clock = clock
        self.away: Callable[[LeaseRequest], bool] = lambda _request: False
        self.there = self.back = 0.0
        self.rate = 1.0
        self.asked: list[LeaseRequest] = []
        self.granted_at = 0.0

    @property
    def calls(self) -> int:
        """Return the number of calls."""
        return len(self.asked)

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        self.asked.append(request)
        if self.there:
            await self.clock.sleep(self.there)
        if self.away(request):
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the ledger is away")
        state = await self._permits.acquire_or_renew(request, limit=limit, lease=lease * self.rate)
        if state.granted:
            self.granted_at = self.clock.monotonic()
        if self.back:
            await self.clock.sleep(self.back)
        return state


class SlowQueues(MemoryQueues):
    """Queues whose opening and whose receives take `open_time` and `receive_time` seconds."""

    open_time = 0.0
    receive_time = 0.0

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        if self.open_time:
            await self._clock.sleep(self.open_time)
        await super().open_run(job_id, run_id, hosts)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        if self.receive_time:
            await self._clock.sleep(self.receive_time)
        return await super().receive(queue, limit=limit, visibility=visibility, wait=wait)


class Member:
    """One worker of a fleet: a dispatcher that is tended and renewed as a worker does it."""

    def __init__(
        self,
        world: World,
        name: str,
        settings: Settings,
        *,
        polling: Polling,
        policy: PolicyFactory,
        visibility: float,
    ) -> None:
        self.telemetry = Telemetry()
        self._clock = world.clock
        self._heartbeat = settings.heartbeat
        leases = LeaseOptions(
            holder=name,
            lease=settings.permit_lease,
            heartbeat=settings.heartbeat,
            slots=settings.workers,
            batch=polling.batch,
            caller_limit=settings.caller_max_inflight,
        )
        self.policy = policy(world.ledger, world.clock, leases)
        self.turns: MessageTurns | None = None
        tasks: Handler = world.tasks
        if world.policies is not None:
            assert isinstance(self.policy, ReservePolicy)
            pacing = world.pacing_of_worker()
            self.policy.hosts = HostPaces(pacing, world.policies, world.clock)
            self.turns = MessageTurns(self.policy.hosts, self.policy, world.clock)
            tasks = PoliteWork(world, self.turns)
        self.dispatcher = Dispatcher(
            world.queues,
            self.policy,
            world.clock,
            task_handler=tasks,
            control_handler=world.control,
            telemetry=self.telemetry,
            options=DispatchOptions(
                slots=settings.workers,
                visibility=visibility,
                polling=polling,
                max_receives=settings.max_receives,
                pause=world.pause,
                turns=self.turns,
            ),
        )

    async def run(self) -> None:
        """Work until the dispatcher is stopped."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._tick)
            group.start_soon(self._beat)
            await self.dispatcher.run(grace=GRACE)
            group.cancel_scope.cancel()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(LOOK)
            self.dispatcher.tend()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._heartbeat)
            self.dispatcher.renew()


class World:
    """Workers over queues whose rows are lists. `dispatcher` and `telemetry` are the first one's.

    `ledger` is handed to the policies, and may be put around `permits` to disturb them.
    """

    def __init__(
        self,
        *,
        slots: int,
        duration: Callable[[Delivery], float],
        workers: int = 1,
        polling: Polling = Polling(wait=1.0),  # noqa: B008  (frozen)
        ledger: Callable[[Permits, FakeClock], Permits] = lambda permits, _clock: permits,
        redrive: int | None = None,
        visibility: float = 60.0,
        permit_policy: str = "reserve",
        bounces: Bounces = BOUNCES,
        work: Callable[[FakeClock, Callable[[Delivery], float]], Work] = Work,
        limits: HostRules | None = None,
        pacing: Callable[[FakeClock], Callable[[], Pacing]] | None = None,
        **settings: object,
    ) -> None:
        self.clock = FakeClock(seed=7)
        self.pause = FleetPause()
        self.rows: dict[str, list[tuple[int, str]]] = {}
        self.read_time = 0.0
        self.hosts: tuple[str, ...] = ()
        self.limits = limits or HostRules()
        self.policies = None if limits is None else HostPolicies(lambda: self.limits)
        self.pacing = MemoryPacing(self.clock)
        # Workers have one pacing in common, or each a view of its own on a ledger.
        self.pacing_of_worker = pacing(self.clock) if pacing else lambda: self.pacing
        self.starts: list[tuple[float, str]] = []
        self.admit: Callable[[str], Awaitable[float | None]] = _no_robots
        self.queues = SlowQueues(
            self._unfinished,
            self.clock,
            task_hosts=self._hosts_of,
            window=100,
            max_receives=redrive,
        )
        self.permits = MemoryPermits(self.clock)
        self.ledger = ledger(self.permits, self.clock)
        self.tasks = work(self.clock, duration)
        self.control = Work(self.clock, lambda _delivery: 0.0)
        chosen = Settings(**{"workers": slots, **settings})  # type: ignore[arg-type]
        policy = policy_factory(permit_policy, bounces)
        member = partial(Member, self, polling=polling, policy=policy, visibility=visibility)
        self.members = [member(f"w{number}", chosen) for number in range(workers)]
        self.dispatcher = self.members[0].dispatcher
        self.telemetry = self.members[0].telemetry

    async def _unfinished(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        await self.clock.sleep(self.read_time)
        return [row for row in self.rows[run_id] if row[0] > after][:limit]

    async def submit(
        self,
        name: str,
        count: int,
        *,
        limit: int = 100,
        priority: int = 5,
        job: str = "",
        caller: str = "",
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
        politeness: Politeness | None = None,
    ) -> DispatchableRun:
        """Enqueue a run, of a job of its own unless one is named, and open its lane at every
        worker. Its tasks are spread over `hosts`, of which `lanes` have a queue of their own."""
        self.hosts = tuple(hosts)
        self.rows[name] = [(index, task_id(name, index)) for index in range(count)]
        run = DispatchableRun(
            run_id=name,
            job_id=f"job-{job or name}",
            priority=priority,
            max_inflight=limit,
            created_at=self.clock.now(),
            caller=caller,
            hosts=tuple(lanes),
            politeness=politeness,
        )
        rows = self.rows[name]
        of_rows = await self._hosts_of(name, rows) if hosts else ()
        await self.queues.open_run(run.job_id, name, lanes)
        await self.queues.send_tasks(run.job_id, name, rows, of_rows, lanes)
        for member in self.members:
            member.dispatcher.open_lane(run)
        return run

    def host_of(self, task: str) -> str:
        """Return the host of a task."""
        index = next(index for rows in self.rows.values() for index, one in rows if one == task)
        return self.hosts[index % len(self.hosts)]

    async def _hosts_of(self, _run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        return [self.hosts[index % len(self.hosts)] for index, _ in tasks]

    def granted(self, name: str) -> int:
        """Permits in the ledger: all that another worker cannot have."""
        return self.permits.total(f"job-{name}")

    async def take(self, name: str, count: int, *, limit: int = 100) -> bool:
        """Let somebody from outside take permits."""
        request = LeaseRequest(
            job_id=f"job-{name}", holder="other", count=count, before=0, sequence=1
        )
        return (await self.permits.acquire_or_renew(request, limit=limit, lease=1e6)).granted

    async def leave(self, name: str, *, limit: int = 100) -> bool:
        """Let them give back what they took."""
        request = LeaseRequest(
            job_id=f"job-{name}", holder="other", count=0, before=limit, sequence=2
        )
        return (await self.permits.acquire_or_renew(request, limit=limit, lease=1e6)).granted

    def received(self) -> int:
        """Messages received by all workers."""
        return sum(member.telemetry.counts["deliveries"] for member in self.members)

    def bounced(self) -> int:
        """Messages hidden again by all workers."""
        return sum(member.telemetry.counts["bounces"] for member in self.members)

    @property
    def broken(self) -> BrokenLedger:
        """The ledger that the workers talk to."""
        assert isinstance(self.ledger, BrokenLedger)
        return self.ledger

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Every worker at work; stopped at the end."""
        async with anyio.create_task_group() as group:
            for member in self.members:
                group.start_soon(member.run)
            yield
            for member in self.members:
                member.dispatcher.stop()
            await self.clock.advance(GRACE + 2.0)


class NoRuns:
    """A store without a run to work."""

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        return []

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        return []

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        return None


def idle_worker(world: World) -> Worker:
    """Return a worker of the first dispatcher of a world, which finds no run by itself."""
    discovery = Discovery(
        world.dispatcher,
        NoRuns(),
        world.queues,
        LocalSignals(),
        world.clock,
        DiscoveryOptions(interval=3.0, resync=10.0, evict_after=600.0),
    )
    return Worker(world.dispatcher, discovery, world.clock, heartbeat=20.0)
