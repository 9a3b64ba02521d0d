"""The queues port of one simulated process: the shared service behind latency and lost answers."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import Delivery, Message
from conveyor.testing.simulation.link import Link
from conveyor.testing.simulation.sqs import QueueService


class SimulatedQueues:
    """The queues port. `service` is the same for the whole fleet."""

    def __init__(self, service: QueueService, link: Link) -> None:
        self._service = service
        self._link = link

    async def open_run(self, job_id: str, run_id: str) -> None:
        """Nothing has to be made ready here: a queue that is missing stays missing."""
        await self._link.come_back(await self._link.go())

    async def remake_run(self, job_id: str, run_id: str) -> None:
        """Make a missing queue again, from the rows of its run."""
        back = await self._link.go()
        await self._service.remake(job_id, run_id)
        await self._link.come_back(back)

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queue."""
        back = await self._link.go()
        self._service.drop(run_id)
        await self._link.come_back(back)

    async def send_tasks(self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        """Enqueue references."""
        back = await self._link.go()
        self._service.send_tasks(job_id, run_id, tasks)
        await self._link.come_back(back)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message."""
        back = await self._link.go()
        self._service.send(queue, message, delay=delay)
        await self._link.come_back(back)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Up to `limit` messages. Without a `wait` only some partitions are asked.

        A cancelled receive gives back what it took; one of a killed process keeps it hidden.
        """
        service, link = self._service, self._link
        back = await link.go()
        everywhere = wait > 0
        taken = service.receive(queue, limit=limit, visibility=visibility, everywhere=everywhere)
        if everywhere and not taken:
            taken = await self._wait(queue, limit, visibility, wait)
        service.asked(queue, len(taken))
        link.note(f"receive {queue} {limit} {' '.join([one.receipt for one in taken])}")
        try:
            await link.come_back(back)
        except BaseException:
            if taken and not link.gate.killed:
                receipts = [delivery.receipt for delivery in taken]
                service.change_visibility(queue, receipts, visibility=0.0)
            raise
        return taken

    async def _wait(self, queue: str, limit: int, visibility: float, wait: float) -> list[Delivery]:
        until = self._link.seconds() + wait
        taken: list[Delivery] = []
        while not taken and await self._service.wait_for_message(queue, until):
            taken = self._service.receive(
                queue, limit=limit, visibility=visibility, everywhere=True
            )
        return taken

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Acknowledge. Raises ConveyorError(unavailable) where a fault loses call or answer."""
        back = await self._link.go()
        lost, applied = self._service.loses_answer()
        if applied:
            self._service.delete(queue, receipts)
            self._link.note(f"delete {' '.join(receipts)}")
        await self._link.come_back(back)
        if lost:
            raise _lost()

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide received messages, or give them back. Raises as `delete` does."""
        back = await self._link.go()
        lost, applied = self._service.loses_answer()
        if applied:
            self._service.change_visibility(queue, receipts, visibility=visibility)
            self._link.note(f"hide {visibility:.6f} {' '.join(receipts)}")
        await self._link.come_back(back)
        if lost:
            raise _lost()

    def depth(self, queue: str) -> int:
        """How many messages wait, hidden ones included."""
        return self._service.depth(queue)

    async def count(self, queue: str) -> int:
        """The same."""
        return self._service.depth(queue)


def _lost() -> ConveyorError:
    return ConveyorError(ErrorCode.UNAVAILABLE, "the queue's answer was lost")
