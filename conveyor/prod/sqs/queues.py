"""The queues port on SQS: sending, receiving, refilling lost queues, and counting messages.

Depths are refreshed beside receives, once in `DEPTH_AGE` seconds at most, and when `count` is
called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
from cachetools import LRUCache

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.ports.queues import (
    MAX_BATCH,
    Delivery,
    HasPolicy,
    Message,
    QueueMissing,
    TaskMessage,
    no_policy,
    run_queues,
    task_messages,
)
from conveyor.ports.tasks import UnfinishedTasks
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.sqs.messages import (
    DELAY,
    FIRST_RECEIVED_AT,
    LONGEST_HIDING,
    NOT_BEFORE,
    RECEIVES,
    SENT_AT,
    UnreadableMessage,
    UnreadableMessages,
    entry,
    find_misplaced,
    handle_of,
    hiding,
    in_batches,
    read,
    receipt_of,
    seconds_early,
)
from conveyor.prod.sqs.registry import (
    MOST_REMEMBERED,
    NO_QUEUE,
    Generations,
    Made,
    QueueRegistry,
    refusal,
    run_of,
)

DEPTH_AGE = 10.0
"""Seconds after which a receive refreshes the depth of its queue."""
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


class _Known(NamedTuple):
    depth: int
    asked_at: float


class QueueDepths:
    """Remembers the last known depth of each queue."""

    def __init__(self, aws: Aws, clock: Clock) -> None:
        self._aws = aws
        self._clock = clock
        self._known: LRUCache[str, _Known] = LRUCache(MOST_REMEMBERED)

    def of(self, queue: str) -> int:
        """Return the last known depth, however old; 0 for a queue that was never asked."""
        known = self._known.get(queue)
        return 0 if known is None else known.depth

    def forget(self, queue: str) -> None:
        """Drop the depth of a queue that is gone."""
        self._known.pop(queue, None)

    async def refresh(self, queue: str, url: str) -> None:
        """Ask SQS if the depth is old. Keep the last depth if SQS does not answer."""
        now, known = self._clock.monotonic(), self._known.get(queue)
        if known is not None and now - known.asked_at < DEPTH_AGE:
            return
        # Noted before SQS answers, so that concurrent receives ask once.
        self._known[queue] = _Known(self.of(queue), now)
        try:
            await self.ask(queue, url)
        except ConveyorError:
            return  # the receive that follows reports the error

    async def ask(self, queue: str, url: str) -> int:
        """Ask SQS for the depth. Raises AwsRefused, and ConveyorError(unavailable)."""
        asked_at = self._clock.monotonic()
        answer = await self._aws.call(
            "sqs", "get_queue_attributes", {"QueueUrl": url, "AttributeNames": list(_COUNTS)}
        )
        depth = sum(int(answer["Attributes"].get(count, 0)) for count in _COUNTS)
        self._known[queue] = _Known(depth, asked_at)
        return depth


LONGEST_POLL = 1
"""Seconds for which one call waits for messages. A cancelled receive ends no later than this, as it
has to give back the messages that still arrive."""
LONG_POLLS = 16
"""Concurrent calls that wait for messages: half of the receive threads. However many lanes wait, a
call that does not wait finds a thread at once."""
YOUNG_PAUSE = 1.0
"""Seconds between two tries to send to a queue that was just made."""
YOUNG_TRIES = 10
GIVE_BACK = 5.0
"""Seconds for which a cancelled receive tries to give its messages back."""
REFILL = 1_000
"""References read at a time to refill a queue."""
VOID = frozenset(
    {
        "InvalidParameterValue",
        "MessageNotInflight",
        "AWS.SimpleQueueService.MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)
"""Error codes of SQS for receipts that are void."""

SENT_AT_ONCE = 8
"""Queues of one run that are sent to at a time."""


class SqsQueues:
    """The queues port. Belongs to one event loop.

    `tasks` finds the references that refill a queue; those of a run that `has_policy` name their
    hosts. `long_polls`: concurrent calls that wait for
    messages; receives beyond them poll once a second.
    """

    def __init__(
        self,
        aws: Aws,
        clock: Clock,
        generations: Generations,
        tasks: UnfinishedTasks,
        *,
        environment: str,
        max_receives: int = 1_000,
        long_polls: int = LONG_POLLS,
    ) -> None:
        self._aws = aws
        self._clock = clock
        self._tasks = tasks
        self.has_policy: HasPolicy = no_policy
        self._registry = QueueRegistry(
            aws, clock, generations, environment=environment, max_receives=max_receives
        )
        self._depths = QueueDepths(aws, clock)
        self._free_polls = long_polls
        self._unreadable = UnreadableMessages(aws, clock, self._registry)

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Do nothing: a receive finds the queue, or raises QueueMissing."""

    async def remake_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Leave the refill of a lost queue to the process that replaced it, if another one did."""
        refilled = []
        for queue in run_queues(run_id, hosts):
            self._registry.forget(queue)
            try:
                await self._registry.find(queue)
            except QueueMissing:
                if await self._registry.make(job_id, run_id, queue) in (Made.FIRST, Made.LOST):
                    refilled.append(queue)
        if refilled:
            await self._refill(job_id, run_id, hosts, refilled)

    async def drop_run(self, run_id: str) -> None:
        for queue in await self._registry.remove(run_id):
            self._depths.forget(queue)

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        """Make the queues that the run does not have yet, and refill those that were lost.

        Does nothing if the run is no longer live.
        """
        lost: list[str] = []

        async def send(part: tuple[str, Sequence[TaskMessage]]) -> None:
            queue, messages = part
            try:
                if messages:
                    await self._send(queue, self._entries(messages))
                else:
                    # The workers ask it, and would take it for lost.
                    await self._registry.find(queue)
            except QueueMissing:
                made = await self._registry.make(job_id, run_id, queue)
                if made is Made.LOST:
                    lost.append(queue)
                elif made is not Made.NOTHING:
                    await self._send(queue, self._entries(messages))

        parts = task_messages(job_id, run_id, tasks, hosts, lanes)
        await for_each(send, parts.items(), limit=SENT_AT_ONCE)
        if lost:
            await self._refill(job_id, run_id, lanes, lost)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        await self._send(queue, [entry(message, delay=delay, now=self._clock.now())])

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        if limit < 1:
            return []
        deadline = self._clock.monotonic() + wait
        while True:
            left = deadline - self._clock.monotonic()
            seconds = min(LONGEST_POLL, math.ceil(max(0.0, left))) if self._free_polls else 0
            self._free_polls -= bool(seconds)
            try:
                deliveries = await self._poll(
                    queue, limit=min(limit, MAX_BATCH), visibility=visibility, seconds=seconds
                )
            finally:
                self._free_polls += bool(seconds)
            left = deadline - self._clock.monotonic()
            if deliveries or left <= 0:
                return deliveries or []
            if not seconds or deliveries is None:
                await self._clock.sleep(min(LONGEST_POLL, left))

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        handles = filter(None, map(handle_of, receipts))
        entries = [{"ReceiptHandle": handle} for handle in handles]
        await self._by_receipt(queue, "delete_message_batch", entries)

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide messages for no longer than SQS allows. Ignore void receipts."""
        await self._hide(queue, dict.fromkeys(receipts, visibility))

    def depth(self, queue: str) -> int:
        return self._depths.of(queue)

    async def count(self, queue: str) -> int:
        """Ask SQS, whose count may be a minute old."""
        try:
            return await self._depths.ask(queue, await self._registry.find(queue))
        except QueueMissing:
            pass
        except AwsRefused as refused:
            with suppress(QueueMissing):
                await self._raise_unless_young(queue, refused)
        self._depths.forget(queue)
        return 0

    async def _refill(
        self, job_id: str, run_id: str, lanes: Sequence[str], queues: Sequence[str]
    ) -> None:
        """Send the references that belong into some queues of a run."""
        named = bool(lanes) or await self.has_policy(run_id)
        after = -1
        while references := await self._tasks.unfinished_after(run_id, after, REFILL):
            hosts = await self._tasks.task_hosts(run_id, references) if named else ()
            parts = task_messages(job_id, run_id, references, hosts, lanes)
            for queue in queues:
                await self._send(queue, self._entries(parts.get(queue, ())))
            after = references[-1][0]

    def _entries(self, messages: Sequence[TaskMessage]) -> list[dict[str, Any]]:
        now = self._clock.now()
        return [entry(message, delay=0.0, now=now) for message in messages]

    async def _send(self, queue: str, entries: Sequence[dict[str, Any]]) -> None:
        """Send; wait for a queue that was just made and that SQS does not know everywhere yet."""
        for _ in range(YOUNG_TRIES):
            url = await self._registry.find(queue)
            try:
                await in_batches(self._aws, self._clock, "send_message_batch", url, entries)
            except AwsRefused as refused:
                await self._raise_unless_young(queue, refused)
            else:
                return
            await self._clock.sleep(YOUNG_PAUSE)
        raise QueueMissing(queue)

    async def _poll(
        self, queue: str, *, limit: int, visibility: float, seconds: int
    ) -> list[Delivery] | None:
        """Receive once; None if the queue was just made and SQS does not know it yet.

        If cancelled, give back the messages that still arrive.
        """
        url = await self._registry.find(queue)
        await self._depths.refresh(queue, url)
        asked_at = self._clock.monotonic()
        try:
            answer = await self._aws.call(
                "sqs",
                "receive_message",
                {
                    "QueueUrl": url,
                    "MaxNumberOfMessages": limit,
                    "VisibilityTimeout": min(math.ceil(visibility), LONGEST_HIDING),
                    "WaitTimeSeconds": seconds,
                    "AttributeNames": [RECEIVES, SENT_AT, FIRST_RECEIVED_AT],
                    "MessageAttributeNames": [NOT_BEFORE, DELAY],
                },
            )
        except AwsRefused as refused:
            await self._raise_unless_young(queue, refused)
            return None
        received = {
            receipt_of(one["ReceiptHandle"], asked_at=asked_at): one
            for one in answer.get("Messages", [])
        }
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            return await self._sort_out(queue, received)
        except anyio.get_cancelled_exc_class():
            # If SQS does not answer, they come again by themselves, a little later.
            with anyio.move_on_after(GIVE_BACK, shield=True), suppress(ConveyorError):
                await self.change_visibility(queue, list(received), visibility=0.0)
            raise

    async def _sort_out(self, queue: str, received: dict[str, dict[str, Any]]) -> list[Delivery]:
        """Return the messages that are due and readable; hide or move the others."""
        now = self._clock.now()
        deliveries = []
        unreadable = []
        early: dict[str, float] = {}
        for receipt, one in received.items():
            message = read(one)
            if not isinstance(message, UnreadableMessage):
                message = find_misplaced(queue, message) or message
            if isinstance(message, UnreadableMessage):
                unreadable.append((one, message))
            elif seconds := seconds_early(one, now=now):
                early[receipt] = seconds
            else:
                count = int(one["Attributes"][RECEIVES])
                deliveries.append(Delivery(queue, message, receipt, count))
        # A message that cannot be hidden now is hidden when it comes again.
        with suppress(ConveyorError):
            await self._hide(queue, early)
        await self._unreadable.handle(queue, unreadable)
        return deliveries

    async def _hide(self, queue: str, wishes: dict[str, float]) -> None:
        """Hide messages: seconds by receipt."""
        now = self._clock.monotonic()
        entries: list[dict[str, Any]] = []
        for receipt, visibility in wishes.items():
            handle, seconds = handle_of(receipt), hiding(receipt, visibility, now=now)
            if handle is not None and seconds is not None:
                entries.append({"ReceiptHandle": handle, "VisibilityTimeout": seconds})
        await self._by_receipt(queue, "change_message_visibility_batch", entries)

    async def _by_receipt(
        self, queue: str, operation: str, entries: Sequence[dict[str, Any]]
    ) -> None:
        if not entries:
            return
        try:
            url = await self._registry.find(queue)
            await in_batches(self._aws, self._clock, operation, url, entries, void=VOID, apart=True)
        except QueueMissing:
            return
        except AwsRefused as refused:
            # The receipts of a queue that is gone are void.
            if refused.word not in VOID | NO_QUEUE:
                raise refusal(queue, refused) from None

    async def _raise_unless_young(self, queue: str, refused: AwsRefused) -> None:
        """Return if SQS does not know a queue yet that was made a moment ago.

        Raises QueueMissing if the queue is gone; ConveyorError(unavailable) for other refusals.
        """
        run_id = run_of(queue)
        if refused.word not in NO_QUEUE:
            raise refusal(queue, refused) from None
        if run_id is not None and await self._registry.is_coming(run_id, queue):
            return
        self._registry.forget(queue)
        if run_id is None:
            raise refusal(queue, refused) from None
        self._depths.forget(queue)
        raise QueueMissing(queue) from None
