"""The queues port on SQS.

How many messages wait in queues: asked beside receives, at most every few seconds, and when
somebody wants to know.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MAX_BATCH, Delivery, Message, QueueMissing, TaskMessage, run_queue
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.sqs.messages import (
    LONGEST_HIDING,
    NOT_BEFORE,
    UnreadableMessage,
    UnreadableMessages,
    entry,
    handle_of,
    hiding,
    in_batches,
    read,
    receipt_of,
    seconds_early,
)
from conveyor.prod.sqs.registry import (
    NO_QUEUE,
    Generations,
    Made,
    QueueRegistry,
    RecentlyUsed,
    refusal,
    run_of,
)

EVERY = 10.0
"""Seconds between two questions about one queue beside its receives."""
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


class _Known(NamedTuple):
    depth: int
    asked_at: float


class QueueDepths:
    """The last known depths."""

    def __init__(self, aws: Aws, clock: Clock) -> None:
        self._aws = aws
        self._clock = clock
        self._known: RecentlyUsed[_Known] = RecentlyUsed()

    def of(self, queue: str) -> int:
        """The depth when it was last asked, however long ago; 0 for a queue that never was."""
        known = self._known.get(queue)
        return 0 if known is None else known.depth

    def forget(self, queue: str) -> None:
        """The queue is gone."""
        self._known.forget(queue)

    async def refresh(self, queue: str, url: str) -> None:
        """Ask again, where the answer is old. Without an answer the last one stands."""
        now, known = self._clock.monotonic(), self._known.get(queue)
        if known is not None and now - known.asked_at < EVERY:
            return
        # Noted before it is answered, so that receives side by side ask once.
        self._known.put(queue, _Known(self.of(queue), now))
        try:
            await self.ask(queue, url)
        except ConveyorError:
            return  # the receive that follows finds out what is wrong

    async def ask(self, queue: str, url: str) -> int:
        """What SQS says. Raises AwsRefused, and ConveyorError(unavailable)."""
        asked_at = self._clock.monotonic()
        answer = await self._aws.call(
            "sqs", "get_queue_attributes", {"QueueUrl": url, "AttributeNames": list(_COUNTS)}
        )
        depth = sum(int(answer["Attributes"].get(count, 0)) for count in _COUNTS)
        self._known.put(queue, _Known(depth, asked_at))
        return depth


LONGEST_POLL = 1
"""Seconds that one call waits for messages: a cancelled receive gives back what still arrives, and
ends no later than this."""
LONG_POLLS = 16
"""Calls that wait for messages at a time, half of the threads there are for receiving: however many
lanes wait, one that only looks finds a thread at once."""
YOUNG_PAUSE = 1.0
"""Seconds after which a queue that was just made is asked again."""
YOUNG_TRIES = 10
GIVE_BACK = 5.0
"""Seconds that a cancelled receive tries to give back what it brought."""
REFILL = 1_000
"""References read at a time to fill a queue that was made again."""
VOID = frozenset(
    {
        "InvalidParameterValue",
        "MessageNotInflight",
        "AWS.SimpleQueueService.MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)
"""What is said of receipts that are worth nothing any more."""

Unfinished = Callable[[str, int, int], Awaitable[list[tuple[int, str]]]]
"""`Tasks.unfinished_after`."""


class SqsQueues:
    """The queues port. Belongs to one event loop.

    `unfinished` tells what a queue that was made again is to be filled with. `long_polls`: calls
    that wait for messages at a time; the others look once a second.
    """

    def __init__(
        self,
        aws: Aws,
        clock: Clock,
        generations: Generations,
        unfinished: Unfinished,
        *,
        environment: str,
        max_receives: int = 1_000,
        long_polls: int = LONG_POLLS,
    ) -> None:
        self._aws = aws
        self._clock = clock
        self._unfinished = unfinished
        self._addresses = QueueRegistry(
            aws, clock, generations, environment=environment, max_receives=max_receives
        )
        self._depths = QueueDepths(aws, clock)
        self._free_polls = long_polls
        self._unreadable = UnreadableMessages(aws, clock, self._addresses)

    async def open_run(self, job_id: str, run_id: str) -> None:
        """Nothing is needed: whoever receives finds the queue, or that it is missing."""

    async def remake_run(self, job_id: str, run_id: str) -> None:
        """Make a missing queue again and fill it from the rows. Where another process is about to
        do so, that one fills it."""
        queue = run_queue(run_id)
        self._addresses.forget(queue)
        try:
            await self._addresses.find(queue)
        except QueueMissing:
            made = await self._addresses.make(job_id, run_id, queue)
            if made in (Made.FIRST, Made.LOST):
                await self._refill(job_id, run_id)

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queue with whatever is in it."""
        queue = run_queue(run_id)
        self._depths.forget(queue)
        await self._addresses.remove(run_id, queue)

    async def send_tasks(self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        """Enqueue references, into a new queue where the run has none; with all others where it had
        one that was lost. Without effect where the run is not live any more."""
        queue = run_queue(run_id)
        try:
            await self._send(queue, self._entries(job_id, run_id, tasks))
        except QueueMissing:
            made = await self._addresses.make(job_id, run_id, queue)
            if made is Made.LOST:
                await self._refill(job_id, run_id)
            elif made is not Made.NOTHING:
                await self._send(queue, self._entries(job_id, run_id, tasks))

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message. Raises QueueMissing."""
        await self._send(queue, [entry(message, delay=delay, now=self._clock.now())])

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Up to `limit` messages, waiting for the first. Raises QueueMissing."""
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
        """Acknowledge. Void receipts are passed over."""
        handles = filter(None, map(handle_of, receipts))
        entries = [{"ReceiptHandle": handle} for handle in handles]
        await self._by_receipt(queue, "delete_message_batch", entries)

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide received messages for so long from now, but for no longer than SQS allows; 0 gives
        them back. Void receipts are passed over."""
        await self._hide(queue, dict.fromkeys(receipts, visibility))

    def depth(self, queue: str) -> int:
        """About how many messages wait, as of when it was last asked."""
        return self._depths.of(queue)

    async def count(self, queue: str) -> int:
        """About how many messages wait, by SQS's own word, which may be a minute old."""
        try:
            return await self._depths.ask(queue, await self._addresses.find(queue))
        except QueueMissing:
            pass
        except AwsRefused as refused:
            with suppress(QueueMissing):
                await self._missing(queue, refused)
        self._depths.forget(queue)
        return 0

    async def _refill(self, job_id: str, run_id: str) -> None:
        after = -1
        while references := await self._unfinished(run_id, after, REFILL):
            await self._send(run_queue(run_id), self._entries(job_id, run_id, references))
            after = references[-1][0]

    def _entries(
        self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]
    ) -> list[dict[str, Any]]:
        now = self._clock.now()
        messages = [TaskMessage(job_id, run_id, task_id) for _, task_id in tasks]
        return [entry(message, delay=0.0, now=now) for message in messages]

    async def _send(self, queue: str, entries: Sequence[dict[str, Any]]) -> None:
        """Send to a queue that is there, or is about to be."""
        for _ in range(YOUNG_TRIES):
            url = await self._addresses.find(queue)
            try:
                await in_batches(self._aws, self._clock, "send_message_batch", url, entries)
            except AwsRefused as refused:
                await self._missing(queue, refused)
            else:
                return
            await self._clock.sleep(YOUNG_PAUSE)
        raise QueueMissing(queue)

    async def _poll(
        self, queue: str, *, limit: int, visibility: float, seconds: int
    ) -> list[Delivery] | None:
        """One receive; None where the queue is yet to come. What a cancelled one brings is given
        back."""
        url = await self._addresses.find(queue)
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
                    "AttributeNames": ["ApproximateReceiveCount"],
                    "MessageAttributeNames": [NOT_BEFORE],
                },
            )
        except AwsRefused as refused:
            await self._missing(queue, refused)
            return None
        received = {
            receipt_of(one["ReceiptHandle"], asked_at=asked_at): one
            for one in answer.get("Messages", [])
        }
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            return await self._sort_out(queue, received)
        except anyio.get_cancelled_exc_class():
            # Where SQS is away they come again by themselves, a little later.
            with anyio.move_on_after(GIVE_BACK, shield=True), suppress(ConveyorError):
                await self.change_visibility(queue, list(received), visibility=0.0)
            raise

    async def _sort_out(self, queue: str, received: dict[str, dict[str, Any]]) -> list[Delivery]:
        """What may be seen now, and can be read here; the rest is hidden again, left hidden, or
        given up."""
        now = self._clock.now()
        deliveries = []
        unreadable = []
        early: dict[str, float] = {}
        for receipt, one in received.items():
            message = read(one)
            if isinstance(message, UnreadableMessage):
                unreadable.append((one, message))
            elif seconds := seconds_early(one, now=now):
                early[receipt] = seconds
            else:
                count = int(one["Attributes"]["ApproximateReceiveCount"])
                deliveries.append(Delivery(queue, message, receipt, count))
        # What is not hidden now is hidden when it comes again.
        with suppress(ConveyorError):
            await self._hide(queue, early)
        await self._unreadable.deal_with(queue, unreadable)
        return deliveries

    async def _hide(self, queue: str, wishes: dict[str, float]) -> None:
        """Hide messages, each by its receipt, for so many seconds."""
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
            url = await self._addresses.find(queue)
            await in_batches(self._aws, self._clock, operation, url, entries, void=VOID, apart=True)
        except QueueMissing:
            return
        except AwsRefused as refused:
            # Where a queue is gone, its receipts are too.
            if refused.word not in VOID | NO_QUEUE:
                raise refusal(queue, refused) from None

    async def _missing(self, queue: str, refused: AwsRefused) -> None:
        """Return where a refusal says that a queue is not there which was made a moment ago.

        Raises QueueMissing where it is gone; ConveyorError(unavailable) for other refusals.
        """
        run_id = run_of(queue)
        if refused.word not in NO_QUEUE:
            raise refusal(queue, refused) from None
        if run_id is not None and await self._addresses.is_coming(run_id, queue):
            return
        self._addresses.forget(queue)
        if run_id is None:
            raise refusal(queue, refused) from None
        self._depths.forget(queue)
        raise QueueMissing(queue) from None
