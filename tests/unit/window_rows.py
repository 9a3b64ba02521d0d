"""Common parts of the tests of a run's window: rows to be worked, and a drain of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conveyor.dev.queues import MemoryQueues
from conveyor.ports.queues import Delivery, TaskMessage, run_queue
from conveyor.testing.clock import FakeClock

JOB, RUN = "JOB", "RUN"
QUEUE = run_queue(RUN)


def tasks(indexes: range) -> list[tuple[int, str]]:
    """References to rows, as they are sent."""
    return [(index, f"{index:026}") for index in indexes]


@dataclass
class Store:
    """Rows to be worked, by index; a read takes `seconds` and shows what was there at its start."""

    clock: FakeClock
    seconds: float = 0.0
    rows: dict[int, str] = field(default_factory=dict)
    reads: int = 0
    refusals: int = 0
    hosts: Sequence[str] = ("",)
    """The hosts of rows, which take turns."""

    async def unfinished_after(self, _run: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Answer as the tasks port; raise ConnectionError `refusals` times."""
        self.reads += 1
        found = [(index, self.rows[index]) for index in sorted(self.rows) if index > after][:limit]
        await self.clock.sleep(self.seconds)
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError
        return found

    def hosts_of(self, some: Sequence[tuple[int, str]]) -> list[str]:
        """The hosts of rows, one each."""
        return [self.hosts[index % len(self.hosts)] for index, _ in some]

    async def task_hosts(self, _run: str, some: Sequence[tuple[int, str]]) -> list[str]:
        """Answer as the tasks port."""
        await self.clock.sleep(self.seconds)
        return self.hosts_of(some)


def indexes_of(batch: list[Delivery]) -> list[int]:
    """The rows that deliveries refer to."""
    return [int(task_of(delivery)) for delivery in batch]


def task_of(delivery: Delivery) -> str:
    """The task that a delivery refers to."""
    assert isinstance(delivery.message, TaskMessage)
    return delivery.message.task_id


async def take_all(queues: MemoryQueues, store: Store, queue: str = QUEUE) -> list[int]:
    """Everything that is visible, received, finished and deleted."""
    taken = []
    while batch := await queues.receive(queue, limit=10, visibility=60):
        for index in indexes_of(batch):
            taken.append(index)
            store.rows.pop(index, None)
        await queues.delete(queue, [delivery.receipt for delivery in batch])
    return taken
