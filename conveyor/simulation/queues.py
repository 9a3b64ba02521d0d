"""The queue service of a simulation, and each process's port to it.

The queues undercount, repeat and forget as SQS may. One service serves every simulated process; the
port of each adds latency and lost answers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import anyio

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    MOST_HOST_QUEUES,
    Delivery,
    HasPolicy,
    Message,
    QueueMissing,
    TaskMessage,
    no_policy,
    run_queue,
    run_queues,
    task_messages,
)
from conveyor.simulation.latency import stream
from conveyor.simulation.link import Link, Trace
from conveyor.simulation.loop import VirtualTime


class QueueRows(Protocol):
    """The rows from which lost queues come back."""

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        """Return every (index, task_id) of a run that is not terminal."""
        ...

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """Return the host of each of these tasks."""
        ...


class _Item:
    """One message in a queue.

    `turn` grows with each change of the time it is seen, and voids earlier schedules; an
    acknowledged message is `gone`. It is `held` from its receipt until its task is settled or it is
    acknowledged, its `visibility` lapses, or it is hidden for another time.
    """

    __slots__ = (
        "gone",
        "held",
        "hidden",
        "message",
        "number",
        "partition",
        "receipt",
        "received",
        "turn",
        "visibility",
    )

    def __init__(self, message: Message, number: int, partition: int) -> None:
        self.message = message
        self.number = number
        self.partition = partition
        self.received = 0
        self.receipt = ""
        self.visibility = 0.0
        self.held = False
        self.turn = 0
        self.hidden = False
        self.gone = False


class _Queue:
    """Visible items by partition, hidden ones by the moment they are seen again. `counted` queues
    are those of runs: the others are asked alike whatever the policy."""

    __slots__ = (
        "born_at",
        "counted",
        "hidden",
        "in_hand",
        "length",
        "next_partition",
        "partitions",
        "visible",
        "waiters",
    )

    def __init__(self, partitions: int, born_at: float, *, counted: bool) -> None:
        self.partitions: list[deque[_Item]] = [deque() for _ in range(partitions)]
        self.hidden: list[tuple[float, int, int, _Item]] = []
        self.in_hand: dict[str, _Item] = {}
        self.waiters: deque[anyio.Event] = deque()
        self.visible = 0
        self.length = 0
        self.next_partition = 0
        self.born_at = born_at
        self.counted = counted


class QueueService:
    """Standard queues by name.

    A short poll asks `partitions_asked` of a queue's `partitions`, so it may find nothing although
    something is there; a long poll asks them all. A queue does not exist within the first `young`
    seconds after its creation. `duplicates` is the share of receipts after which the message is
    delivered once more although it may be acknowledged, `lost_answers` the share of
    acknowledgements and changes answered with an error, half of them applied all the same.

    The figures leave out the control queue, which every worker asks alike: `received` counts
    messages handed out, `most_received` is the most times that one was, `calls` receive calls,
    `empties` the empty ones, `dead_lettered` messages given up; `on_hand` counts messages received
    whose task has not ended, `peak_on_hand` the most of them.
    """

    def __init__(
        self,
        time: VirtualTime,
        trace: Trace,
        rows: QueueRows,
        *,
        seed: int = 0,
        partitions: int = 1,
        partitions_asked: int = 1,
        max_receives: int = 1_000,
    ) -> None:
        self._time = time
        self._seconds = time.seconds
        self._trace = trace
        self._rows = rows
        self._random = stream(seed, "queues")
        self._partitions = partitions
        self._asked = min(partitions_asked, partitions)
        self._max_receives = max_receives
        self.young = 0.0
        self._queues: dict[str, _Queue] = {}
        for name in (CONTROL_QUEUE, DEAD_LETTER_QUEUE):
            self._make(name)
        self._numbers = 0
        self.duplicates = self.lost_answers = 0.0
        self.received = self.calls = self.empties = self.dead_lettered = 0
        self.on_hand = self.peak_on_hand = self.most_received = 0
        self._held: dict[str, _Item] = {}
        self.has_policy: HasPolicy = no_policy

    # -- queues --

    def drop(self, run_id: str) -> None:
        """Remove the queues of a run, their messages and their receipts."""
        for name in self._of_run(run_id):
            queue = self._queues.pop(name)
            self._trace.note(f"queue dropped {name.removeprefix(run_queue(''))}")
            for item in queue.in_hand.values():
                self._release(item)
            while queue.waiters:
                queue.waiters.popleft().set()

    async def remake(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Make the missing queues of a run again, with a message for each task of theirs that has
        not ended."""
        names = run_queues(run_id, hosts)
        if all(name in self._queues for name in names):
            return
        tasks = await self._rows.unfinished(run_id)
        named = bool(hosts) or await self.has_policy(run_id)
        of_tasks = await self._rows.task_hosts(run_id, tasks) if named else ()
        messages = task_messages(job_id, run_id, tasks, of_tasks, hosts)
        for name in names:
            if name not in self._queues:
                self._trace.note(f"queue made again {name.removeprefix(run_queue(''))}")
                self._fill(name, messages.get(name, ()))

    def depth(self, name: str) -> int:
        """Return the number of waiting messages, hidden ones included."""
        queue = self._queues.get(name)
        return queue.length if queue is not None else 0

    def holds(self, run_id: str) -> set[str]:
        """Return the tasks of a run that a message still names."""
        queues = [self._queues[name] for name in self._of_run(run_id)]
        waiting = [item for queue in queues for part in queue.partitions for item in part]
        hidden = [item for queue in queues for *_, item in queue.hidden]
        return {
            item.message.task_id
            for item in [*waiting, *hidden]
            if isinstance(item.message, TaskMessage) and not item.gone
        }

    # -- messages --

    def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        """Enqueue references."""
        for name, messages in task_messages(job_id, run_id, tasks, hosts, lanes).items():
            self._fill(name, messages)

    def _fill(self, name: str, messages: Sequence[TaskMessage]) -> None:
        if name not in self._queues:
            self._make(name)
        for message in messages:
            self.send(name, message)

    def _of_run(self, run_id: str) -> list[str]:
        """Return the names of the queues that a run has."""
        names = run_queues(run_id, [""] * MOST_HOST_QUEUES)
        return [name for name in names if name in self._queues]

    def send(self, name: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message, to be seen after `delay` seconds."""
        queue = self._queues.get(name)
        if queue is None:
            if name not in (CONTROL_QUEUE, DEAD_LETTER_QUEUE):
                raise QueueMissing(name)
            queue = self._make(name)
        self._numbers += 1
        item = _Item(message, self._numbers, queue.next_partition)
        queue.next_partition = (queue.next_partition + 1) % len(queue.partitions)
        queue.length += 1
        if delay > 0:
            self._hide(queue, item, delay)
        else:
            self._show(queue, item)

    def receive(
        self, name: str, *, limit: int, visibility: float, everywhere: bool
    ) -> list[Delivery]:
        """Receive up to `limit` messages, from some partitions or from all. Raises QueueMissing."""
        queue = self._queue(name)
        taken: list[Delivery] = []
        self._surface(queue)
        if queue.visible:
            partitions = queue.partitions
            if not everywhere and self._asked < len(partitions):
                partitions = self._random.sample(partitions, self._asked)
            for partition in partitions:
                while partition and len(taken) < min(limit, MAX_BATCH):
                    item = partition.popleft()
                    if not item.gone:
                        self._take(name, queue, item, visibility, taken)
        return taken

    async def wait_for_message(self, name: str, until: float) -> bool:
        """Return True once a message may be there, or False at `until`. Raises QueueMissing."""
        queue = self._queue(name)
        while self._queues.get(name) is queue:
            self._surface(queue)
            if queue.visible:
                return True
            now = self._seconds()
            if now >= until:
                return False
            due = min(queue.hidden[0][0], until) if queue.hidden else until
            await self._arrival(queue, due - now)
        raise QueueMissing(name)

    def delete(self, name: str, receipts: Sequence[str]) -> None:
        """Acknowledge by receipts; ignore void ones."""
        queue = self._queues.get(name)
        if queue is None:
            return
        for receipt in receipts:
            item = queue.in_hand.pop(receipt, None)
            if item is None:
                continue
            self._surface(queue)
            self._release(item)
            queue.visible -= not item.hidden
            item.gone = True
            item.turn += 1
            queue.length -= 1

    def change_visibility(self, name: str, receipts: Sequence[str], *, visibility: float) -> None:
        """Hide received messages for `visibility` seconds from now; visible ones stay visible."""
        queue = self._queues.get(name)
        if queue is None:
            return
        self._surface(queue)
        for receipt in receipts:
            item = queue.in_hand.get(receipt)
            if item is None or not item.hidden:
                continue
            if visibility != item.visibility:
                self._release(item)
            if visibility > 0:
                self._hide(queue, item, visibility)
            else:
                self._show(queue, item)

    def settled(self, task_id: str) -> None:
        """Note that the task of a message has ended: its receiver has only to acknowledge it."""
        item = self._held.pop(task_id, None)
        if item is not None:
            self._release(item)

    def asked(self, name: str, found: int) -> None:
        """Count a receive call that found `found` messages."""
        queue = self._queues.get(name)
        if queue is None or queue.counted:
            self.calls += 1
            self.empties += not found

    def loses_answer(self) -> tuple[bool, bool]:
        """Return whether the answer to a call is lost, and whether the call is applied."""
        if not self.lost_answers:
            return False, True
        drawn = self._random.random()
        return drawn < self.lost_answers, drawn >= self.lost_answers / 2

    # -- inside --

    def _make(self, name: str) -> _Queue:
        counted = name not in (CONTROL_QUEUE, DEAD_LETTER_QUEUE)
        queue = _Queue(self._partitions, self._seconds(), counted=counted)
        self._queues[name] = queue
        return queue

    def _queue(self, name: str) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            raise QueueMissing(name)
        if queue.counted and self.young and self._seconds() < queue.born_at + self.young:
            raise QueueMissing(name)
        return queue

    def _take(
        self, name: str, queue: _Queue, item: _Item, visibility: float, taken: list[Delivery]
    ) -> None:
        queue.visible -= 1
        if item.receipt:
            del queue.in_hand[item.receipt]
        if item.received >= self._max_receives and name != DEAD_LETTER_QUEUE:
            self.dead_lettered += 1
            self._trace.note(f"dead {item.number}")
            queue.length -= 1
            item.gone = True
            self.send(DEAD_LETTER_QUEUE, item.message)
            return
        item.received += 1
        self.most_received = max(self.most_received, item.received)
        item.receipt = f"{item.number}.{item.received}"
        queue.in_hand[item.receipt] = item
        item.visibility = visibility
        if queue.counted:
            item.held = True
            if isinstance(item.message, TaskMessage):
                self._held[item.message.task_id] = item
            self.received += 1
            self.on_hand += 1
            self.peak_on_hand = max(self.peak_on_hand, self.on_hand)
        self._hide(queue, item, visibility)
        if self.duplicates and self._random.random() < self.duplicates:
            self.send(name, item.message, delay=self._random.random() * visibility)
        taken.append(Delivery(name, item.message, item.receipt, item.received))

    def _release(self, item: _Item) -> None:
        if item.held:
            item.held = False
            self.on_hand -= 1

    def _hide(self, queue: _Queue, item: _Item, seconds: float) -> None:
        item.hidden = True
        item.turn += 1
        entry = (self._seconds() + seconds, item.number, item.turn, item)
        heapq.heappush(queue.hidden, entry)
        if queue.waiters and queue.hidden[0] is entry:
            # Receivers that wait for a later moment look again.
            for waiter in queue.waiters:
                waiter.set()

    def _show(self, queue: _Queue, item: _Item) -> None:
        item.hidden = False
        item.turn += 1
        queue.partitions[item.partition].append(item)
        queue.visible += 1
        if queue.waiters:
            queue.waiters.popleft().set()

    def _surface(self, queue: _Queue) -> None:
        """Show messages whose time has come, and forget void schedules."""
        hidden, now = queue.hidden, self._seconds()
        while hidden and (hidden[0][0] <= now or hidden[0][3].turn != hidden[0][2]):
            _, _, turn, item = heapq.heappop(hidden)
            if item.turn == turn:
                self._release(item)
                self._show(queue, item)

    async def _arrival(self, queue: _Queue, seconds: float) -> None:
        event = anyio.Event()
        queue.waiters.append(event)
        try:
            with anyio.move_on_after(seconds):
                await event.wait()
        finally:
            if event in queue.waiters:
                queue.waiters.remove(event)
            elif queue.visible and queue.waiters:
                # Woken, but perhaps cancelled meanwhile: wake another so that it does not miss the
                # message.
                queue.waiters.popleft().set()


class SimulatedQueues:
    """The queues port. `service` is the same for the whole fleet."""

    def __init__(self, service: QueueService, link: Link) -> None:
        self._service = service
        self._link = link

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Do nothing: a queue needs no preparation, and a missing one stays missing."""
        await self._link.come_back(await self._link.go())

    async def remake_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Make a missing queue again, from the rows of its run."""
        back = await self._link.go()
        await self._service.remake(job_id, run_id, hosts)
        await self._link.come_back(back)

    async def drop_run(self, run_id: str) -> None:
        back = await self._link.go()
        self._service.drop(run_id)
        await self._link.come_back(back)

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        back = await self._link.go()
        self._service.send_tasks(job_id, run_id, tasks, hosts, lanes)
        await self._link.come_back(back)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        back = await self._link.go()
        self._service.send(queue, message, delay=delay)
        await self._link.come_back(back)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Receive up to `limit` messages. Without a `wait`, asks only some partitions.

        A cancelled receive gives back its messages; that of a killed process keeps them hidden.
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
        """Acknowledge. Raises ConveyorError(unavailable) if a fault loses call or answer."""
        back = await self._link.go()
        lost, applied = self._service.loses_answer()
        if applied:
            self._service.delete(queue, receipts)
            self._link.note(f"delete {' '.join(receipts)}")
        await self._link.come_back(back)
        if lost:
            raise _answer_lost()

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
            raise _answer_lost()

    def depth(self, queue: str) -> int:
        """Return the number of waiting messages, hidden ones included."""
        return self._service.depth(queue)

    async def count(self, queue: str) -> int:
        """Return the same as `depth`."""
        return self._service.depth(queue)


def _answer_lost() -> ConveyorError:
    return ConveyorError(ErrorCode.UNAVAILABLE, "the queue's answer was lost")
