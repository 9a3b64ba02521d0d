"""Ports that misbehave as their contracts allow: queues that deliver twice, and callbacks that keep
each call and refuse the ones that a script names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anyio import CancelScope

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.outbox import TokenExpired
from conveyor.ports.queues import Delivery, Message, Queues, TaskMessage


class ScriptedCallbacks:
    """Keeps callbacks, in order, as (kind, token, text, text).

    The next `away` calls fail as unavailable. Tokens in `unknown` belong to no waiting task; after
    a success or failure, a token joins them.
    """

    def __init__(self) -> None:
        self.received: list[tuple[str, ...]] = []
        self.away = 0
        self.unknown: set[str] = set()

    async def send_heartbeat(self, task_token: str) -> None:
        """Keep a heartbeat."""
        self._take("heartbeat", task_token)

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Keep a success."""
        self._take("success", task_token, output)
        self.unknown.add(task_token)

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Keep a failure."""
        self._take("failure", task_token, error, cause)
        self.unknown.add(task_token)

    def _take(self, *callback: str) -> None:
        if self.away:
            self.away -= 1
            raise ConveyorError(ErrorCode.UNAVAILABLE, "Step Functions is away", retry_after=5)
        if callback[1] in self.unknown:
            raise TokenExpired
        self.received.append(callback)


class DuplicatingQueues:
    """The queues port over another one, with every message delivered at least three times.

    A second copy waits as soon as a message is received, so that it comes while the first is in
    work; a third is sent once one of them has been acknowledged. A dropped queue takes its copies
    along, and has no more of them when it is made again. `deliveries` counts the receives of each
    message.
    """

    def __init__(self, queues: Queues) -> None:
        self.deliveries: Counter[Message] = Counter()
        self._queues = queues
        self._doubled: set[Message] = set()
        self._repeated: set[Message] = set()
        self._received: dict[tuple[str, str], Message] = {}
        self._dropped: set[str] = set()

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        self._dropped.discard(run_id)
        await self._queues.open_run(job_id, run_id, hosts)

    async def remake_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        self._dropped.discard(run_id)
        await self._queues.remake_run(job_id, run_id, hosts)

    async def drop_run(self, run_id: str) -> None:
        self._dropped.add(run_id)
        await self._queues.drop_run(run_id)

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        await self._queues.send_tasks(job_id, run_id, tasks, hosts, lanes)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        await self._queues.send(queue, message, delay=delay)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Receive up to `limit` messages; send a copy of each that was never received before."""
        batch = await self._queues.receive(queue, limit=limit, visibility=visibility, wait=wait)
        with CancelScope(shield=True):
            for delivery in batch:
                self._received[queue, delivery.receipt] = delivery.message
                self.deliveries[delivery.message] += 1
                await self._send_copy(queue, delivery.message, self._doubled)
        return batch

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Acknowledge; send a copy of each that was never acknowledged before."""
        await self._queues.delete(queue, receipts)
        for receipt in receipts:
            message = self._received.pop((queue, receipt), None)
            if message is not None:
                await self._send_copy(queue, message, self._repeated)

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        await self._queues.change_visibility(queue, receipts, visibility=visibility)

    def depth(self, queue: str) -> int:
        """Return about how many messages wait, copies included."""
        return self._queues.depth(queue)

    async def count(self, queue: str) -> int:
        """Return about how many messages wait, copies included."""
        return await self._queues.count(queue)

    async def _send_copy(self, queue: str, message: Message, sent: set[Message]) -> None:
        is_gone = isinstance(message, TaskMessage) and message.run_id in self._dropped
        if message not in sent and not is_gone:
            sent.add(message)
            await self._queues.send(queue, message)
