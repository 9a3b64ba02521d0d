"""The queues that the conformance tests run over: one entry each, with what it can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import anyio.lowlevel
import pytest
import trio.lowlevel
import trio.testing

from conveyor.dev.queues import MemoryQueues
from conveyor.ports.queues import (
    MAX_BATCH,
    DeleteMessage,
    Delivery,
    Message,
    QueueMissing,
    Queues,
    TaskMessage,
    run_queue,
)
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Gate, Link, Trace
from conveyor.simulation.loop import VirtualLoop, VirtualTime, virtual_time
from conveyor.simulation.queues import QueueService, SimulatedQueues
from conveyor.testing.clock import FakeClock
from tests.conformance.queue_rows import Rows
from tests.conformance.sqs_bench import sqs_bench

JOB, RUN, OTHER_RUN = "JOB", "RUN", "OTHER"
QUEUE = run_queue(RUN)
LIMIT = 3
"""The receive limit of the benches that have one."""


class Timeline(Protocol):
    """The time that a bench runs by: `FakeClock`, or a virtual event loop's. Starts at 0."""

    @property
    def pending(self) -> int:
        """Return the number of sleeps that wait for time to move."""
        ...

    def monotonic(self) -> float:
        """Seconds since the start."""
        ...

    async def advance(self, seconds: float) -> None:
        """Move time on, and let every task come to where it waits."""
        ...


@dataclass
class Bench:
    """Queues under test, the time they run by and the rows behind them."""

    queues: Queues
    clock: Timeline
    rows: Rows

    async def fill(self, *indexes: int, run_id: str = RUN) -> None:
        """Write rows of a run and send references to them."""
        await self.queues.open_run(JOB, run_id)
        await self.queues.send_tasks(JOB, run_id, self.rows.write(run_id, *indexes))

    async def receive(self, queue: str = QUEUE, *, visibility: float = 60) -> list[Delivery]:
        """A batch, without waiting."""
        return await self.queues.receive(queue, limit=MAX_BATCH, visibility=visibility)

    async def drain(self, queue: str = QUEUE) -> list[Delivery]:
        """Everything that is visible, received and deleted."""
        drained: list[Delivery] = []
        while batch := await self.receive(queue):
            drained += batch
            await self.queues.delete(queue, [delivery.receipt for delivery in batch])
        return drained


class Waiter:
    """One receive that runs beside the test; `result` is None until it has returned."""

    def __init__(self, bench: Bench, queue: str, *, wait: float) -> None:
        self.bench, self.queue, self.wait = bench, queue, wait
        self.result: list[Delivery] | None = None
        self.missing: QueueMissing | None = None
        self.returned_at = -1.0

    async def __call__(self) -> None:
        """Receive."""
        try:
            self.result = await self.bench.queues.receive(
                self.queue, limit=MAX_BATCH, visibility=60, wait=self.wait
            )
        except QueueMissing as missing:
            self.missing = missing
        self.returned_at = self.bench.clock.monotonic()


def indexes_of(deliveries: list[Delivery]) -> list[int]:
    """The rows that task messages refer to."""
    return [int(_task(delivery.message).rpartition("-")[2]) for delivery in deliveries]


def _task(message: Message) -> str:
    assert isinstance(message, TaskMessage)
    return message.task_id


def deletion(run_id: str) -> DeleteMessage:
    """A message of the control queue."""
    return DeleteMessage(JOB, run_id)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of the queues port: how it is opened, with a receive limit or without one.

    `ordered`: messages come in the order sent. `exact_depth`: `depth` is not approximate.
    `reads_rows`: a run's queue fills itself from the rows, without being made again.
    `waits_in_virtual_time`: a waiting receive wakes when the bench's time moves, and no later.
    `keeps_lapsed_receipts`: a receipt that lapsed still deletes its message, and hides it no more,
    as long as that did not come again.
    `slack`: seconds before an instant at which a test may look and be sure to come in time; real
    time passes beside the bench's where there are many.
    `backends`: the event loops that it is tested on, as anyio's plugin takes them.
    """

    open: Callable[[int | None], AbstractAsyncContextManager[Bench]]
    ordered: bool = True
    exact_depth: bool = True
    reads_rows: bool = True
    waits_in_virtual_time: bool = True
    keeps_lapsed_receipts: bool = True
    slack: float = 1
    backends: Mapping[str, object] = field(
        default_factory=lambda: {"asyncio": ("asyncio", {}), "trio": "trio"}
    )


def _memory(*, reorder: int) -> Callable[[int | None], AbstractAsyncContextManager[Bench]]:
    @asynccontextmanager
    async def opened(max_receives: int | None) -> AsyncIterator[Bench]:
        clock, rows = FakeClock(), Rows()
        queues = MemoryQueues(
            rows.unfinished_after,
            clock,
            task_hosts=rows.task_hosts,
            window=50,
            reorder=reorder,
            max_receives=max_receives,
        )
        yield Bench(queues, clock, rows)

    return opened


@asynccontextmanager
async def _simulated(max_receives: int | None) -> AsyncIterator[Bench]:
    time, rows = virtual_time(), Rows()
    trace = Trace(time.seconds)

    service = QueueService(
        time,
        trace,
        rows,
        max_receives=max_receives or 1_000_000,
    )
    link = Link(
        process="tested",
        gate=Gate(),
        trace=trace,
        seconds=time.seconds,
        sleep=time.sleep,
        latency=Latency(0.0),
        stream=stream(0, "tested"),
    )
    yield Bench(SimulatedQueues(service, link), LoopTime(time), rows)


class LoopTime:
    """The time of a loop that jumps, from where it stands."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._start = time.seconds()

    @property
    def pending(self) -> int:
        """1 where anything waits for time to move."""
        try:
            loop: Any = asyncio.get_running_loop()
        except RuntimeError:
            return int(trio.lowlevel.current_statistics().seconds_to_next_deadline < inf)
        return int(any(not timer.cancelled() for timer in loop._scheduled))

    def monotonic(self) -> float:
        """Seconds since the bench was opened."""
        return self._time.seconds() - self._start

    async def advance(self, seconds: float) -> None:
        """Sleep, and give every other task its turns."""
        await self._time.sleep(seconds)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def _sqs(max_receives: int | None) -> AsyncIterator[Bench]:
    async with sqs_bench(max_receives=max_receives or 1_000) as opened:
        yield Bench(opened.queues, opened, opened.rows)


ADAPTERS: dict[str, Adapter] = {
    "memory": Adapter(_memory(reorder=0)),
    "memory-out-of-order": Adapter(_memory(reorder=4), ordered=False),
    "simulated": Adapter(
        _simulated,
        reads_rows=False,
        backends={
            "asyncio": ("asyncio", {"loop_factory": VirtualLoop}),
            "trio": ("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}),
        },
    ),
    "sqs": Adapter(
        _sqs,
        ordered=False,
        exact_depth=False,
        reads_rows=False,
        waits_in_virtual_time=False,
        # The emulator forgets the receipt for deleting, and takes it for hiding; SQS does neither.
        keeps_lapsed_receipts=False,
        slack=20,
        backends={"asyncio": ("asyncio", {})},
    ),
}


def those_that(able: Callable[[Adapter], bool]) -> pytest.MarkDecorator:
    """Runs a test over the adapters that are able to."""
    names = [name for name, adapter in ADAPTERS.items() if able(adapter)]
    return pytest.mark.parametrize("adapter", names, indirect=True)


def fixtures(*, max_receives: int | None) -> tuple[Any, Any, Any]:
    """The fixtures `adapter`, `anyio_backend` and `bench` of a test module."""

    @pytest.fixture(params=ADAPTERS)
    def adapter(request: pytest.FixtureRequest) -> Adapter:
        return ADAPTERS[request.param]

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(request: pytest.FixtureRequest, adapter: Adapter) -> object:
        if request.param not in adapter.backends:
            pytest.skip(f"this adapter belongs to {', '.join(adapter.backends)}")
        return adapter.backends[request.param]

    @pytest.fixture
    async def bench(adapter: Adapter) -> AsyncIterator[Bench]:
        async with adapter.open(max_receives) as opened:
            yield opened

    return adapter, anyio_backend, bench
