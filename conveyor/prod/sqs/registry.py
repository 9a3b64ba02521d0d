"""The registry of queues: their names, attributes and URLs, and the current queues of each run.

SQS blocks the name of a deleted queue for a minute, so each queue of a run has a name of its own,
which ends in a generation number. All processes agree on the current generation of a run, and of
the queue of each of its hosts, since they keep them in one place. A process remembers the queues
that it used last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from cachetools import LRUCache

from conveyor.aio.concurrency import for_each_collect
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import (
    DEAD_LETTER_QUEUE,
    MOST_HOST_QUEUES,
    QueueMissing,
    host_queue,
    run_queue,
)
from conveyor.prod.aws.calls import Aws, AwsRefused


class Generation(NamedTuple):
    """The number of a current queue of a run. It only grows; it is 0 before the first queue, and
    once the run is gone.

    `live`: the run may still be worked. `moved`: this call raised the number. `hosts` are the
    numbers of the queues of its hosts, as far as they had any.
    """

    number: int
    live: bool
    moved: bool = False
    hosts: Mapping[int, int] = {}


class Generations(Protocol):
    """The current queues of runs, a number for each: for a run's own, and with `host` for that of
    a host of it."""

    async def current(self, run_id: str, host: int | None = None) -> Generation:
        """Return the current generation of a run."""
        ...

    async def follow(self, run_id: str, known: int, host: int | None = None) -> Generation:
        """Raise the number of a live run to `known` + 1, unless another process did so before.

        Return the current generation: all processes that find a queue missing agree on the next
        one, and exactly one of them has `moved` it.
        """
        ...


RETENTION = 1_209_600
"""Seconds for which SQS keeps a message: 14 days, its maximum."""
_RUN = re.compile(r"run-(.+?)(?:-h(\d+))?")


def prefix(environment: str) -> str:
    """Return the prefix of the names of an environment's queues."""
    return f"conveyor-{environment}-"


def run_of(queue: str) -> str | None:
    """Return the id of the run that a queue belongs to; None for the other queues."""
    found = _RUN.fullmatch(queue)
    return None if found is None else found[1]


def host_of_queue(queue: str) -> int | None:
    """Return the number of the host that a queue belongs to; None for a run's own queue."""
    found = _RUN.fullmatch(queue)
    return None if found is None or found[2] is None else int(found[2])


def run_queue_name(environment: str, run_id: str, generation: int, host: int | None = None) -> str:
    """Return the name in SQS of one generation of a run's queue, or of that of a host of it."""
    queue = run_queue(run_id) if host is None else host_queue(run_id, host)
    return f"{prefix(environment)}{queue}-{generation}"


def attributes(*, dead_letters: str, max_receives: int) -> dict[str, str]:
    """Return the attributes of a queue with a receive limit. `dead_letters` is the ARN of the queue
    for messages that were received too often."""
    redrive = {"deadLetterTargetArn": dead_letters, "maxReceiveCount": str(max_receives)}
    return {"MessageRetentionPeriod": str(RETENTION), "RedrivePolicy": json.dumps(redrive)}


MOST_REMEMBERED = 10_000
"""Queues or messages that a process remembers: it forgets the one used longest ago."""

NO_QUEUE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
BLOCKED = frozenset({"QueueDeletedRecently", "AWS.SimpleQueueService.QueueDeletedRecently"})
OTHER_ATTRIBUTES = frozenset(
    {
        "QueueAlreadyExists",
        "QueueNameExists",
        "AWS.SimpleQueueService.QueueAlreadyExists",
        "AWS.SimpleQueueService.QueueNameExists",
    }
)
"""Error codes for a queue that exists with other attributes, as after a change of settings."""
YOUNG = 60.0
"""Seconds after its creation in which a part of SQS may not know a queue yet."""
TRIES = 3
"""Generations tried in a row while names are blocked."""
EARLIER_DROPPED = 2
"""Earlier queues of a run to look for when its queue is removed."""
REMOVED_AT_ONCE = 4
"""Queues of one run that are removed at a time."""


class Made(Enum):
    """The result of making a run's queue.

    NOTHING: the run is no longer live. FIRST: the run had no queue before. LOST: the queue replaces
    one that was lost, or may have been, and has to be refilled. ANOTHER: another process replaced
    the lost queue, and refills it.
    """

    NOTHING = auto()
    FIRST = auto()
    LOST = auto()
    ANOTHER = auto()


@dataclass(frozen=True, slots=True)
class _Known:
    """A queue as this process knows it.

    `url` is "" if unknown, `generation` the latest that it saw, `made_at` when it made the queue.
    """

    url: str = ""
    generation: int = 0
    made_at: float = -math.inf


class QueueRegistry:
    """Finds, makes and removes queues, and remembers their URLs."""

    def __init__(
        self,
        aws: Aws,
        clock: Clock,
        generations: Generations,
        *,
        environment: str,
        max_receives: int,
    ) -> None:
        self._aws = aws
        self._clock = clock
        self._generations = generations
        self._environment = environment
        self._max_receives = max_receives
        self._remembered: LRUCache[str, _Known] = LRUCache(MOST_REMEMBERED)
        self._dead_letters = ""

    async def find(self, queue: str) -> str:
        """Return the URL of a queue.

        Raises QueueMissing for the missing queue of a run; ConveyorError(unavailable) for others.
        """
        known = self._known(queue)
        if known.url:
            return known.url
        run_id = run_of(queue)
        if run_id is not None:
            return await self._find_run(run_id, queue, known)
        url = await self._look(f"{prefix(self._environment)}{queue}")
        if url is None:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"there is no queue {queue} (conveyor admin init makes it)"
            )
        self._remembered[queue] = _Known(url)
        return url

    def forget(self, queue: str) -> None:
        """Drop the URL of a queue, because SQS does not know it."""
        self._remembered[queue] = replace(self._known(queue), url="")

    async def is_coming(self, run_id: str, queue: str) -> bool:
        """Return True if this process made a run's queue so recently that SQS may not know it
        yet."""
        known = self._known(queue)
        if not self._is_young(known):
            return False
        current = await self._generations.current(run_id, host_of_queue(queue))
        return current.live and current.number == known.generation

    async def make(self, job_id: str, run_id: str, queue: str) -> Made:
        """Make a run's queue, which was not found.

        SQS returns the existing queue if there is one. So a queue that this process never saw is
        made under the current number: another process may be about to make it, or SQS does not know
        it everywhere yet. A queue that this process saw, or whose name is blocked, is lost, and the
        next number replaces it. The process that raises the number refills the queue, so that the
        others need not. A process that meets a number for the first time cannot know who raised it,
        and refills to be safe: a reference sent twice costs a look, a lost one costs a task.
        """
        host = host_of_queue(queue)
        current = await self._generations.current(run_id, host)
        for _ in range(TRIES):
            seen = self._known(queue).generation
            made = Made.ANOTHER if 0 < seen < current.number else Made.LOST
            if not current.number or self._is_lost(queue, current.number):
                current = await self._generations.follow(run_id, current.number, host)
                made = _made_by_following(current)
            if not current.live:
                return Made.NOTHING
            name = run_queue_name(self._environment, run_id, current.number, host)
            url = await self._create(job_id, run_id, name)
            if url is not None:
                known = _Known(url, current.number, self._clock.monotonic())
                self._remembered[queue] = known
                return made
            self._remembered[queue] = _Known(generation=current.number)
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, f"queue {queue} could not be created", retry_after=5
        )

    async def remove(self, run_id: str) -> list[str]:
        """Delete the queues of a run, if there are any; return those that it may have had."""
        current = await self._generations.current(run_id)
        latest = {run_queue(run_id): current.number}
        latest |= {host_queue(run_id, host): number for host, number in current.hosts.items()}
        if not current.number:
            # The row is gone: delete at least the queues that this process saw.
            latest |= dict.fromkeys(self._remembered_of(run_id), 0)
        await for_each_collect(self._remove, list(latest.items()), limit=REMOVED_AT_ONCE)
        return list(latest)

    async def _remove(self, one: tuple[str, int]) -> None:
        queue, number = one
        known = self._known(queue)
        latest = number or known.generation
        run_id, host = run_of(queue), host_of_queue(queue)
        assert run_id is not None
        self._remembered[queue] = _Known(generation=latest)
        for number in range(max(1, latest - EARLIER_DROPPED), latest + 1):
            name = run_queue_name(self._environment, run_id, number, host)
            seen = known.url if known.generation == number else ""
            url = seen or await self._look(name)
            if url is not None:
                await self._delete(queue, url)

    def _remembered_of(self, run_id: str) -> list[str]:
        """Return the queues of hosts of a run that this process saw."""
        queues = (host_queue(run_id, number) for number in range(MOST_HOST_QUEUES))
        return [queue for queue in queues if queue in self._remembered]

    def _known(self, queue: str) -> _Known:
        return self._remembered.get(queue) or _Known()

    def _is_young(self, known: _Known) -> bool:
        return self._clock.monotonic() - known.made_at < YOUNG

    def _is_lost(self, queue: str, number: int) -> bool:
        known = self._known(queue)
        return known.generation >= number and not self._is_young(known)

    async def _find_run(self, run_id: str, queue: str, known: _Known) -> str:
        host = host_of_queue(queue)
        number = (await self._generations.current(run_id, host)).number
        name = run_queue_name(self._environment, run_id, number, host)
        url = await self._look(name) if number else None
        if url is None:
            raise QueueMissing(queue)
        found = replace(known, url=url) if known.generation == number else _Known(url, number)
        self._remembered[queue] = found
        return url

    async def _look(self, name: str) -> str | None:
        try:
            answer = await self._aws.call("sqs", "get_queue_url", {"QueueName": name})
        except AwsRefused as refused:
            if refused.word not in NO_QUEUE:
                raise refusal(name, refused) from None
            return None
        return str(answer["QueueUrl"])

    async def _create(self, job_id: str, run_id: str, name: str) -> str | None:
        """Make a run's queue unless it exists, and return its URL; None if its name is blocked."""
        tags = {
            "project": "conveyor",
            "environment": self._environment,
            "job": job_id,
            "run": run_id,
        }
        wanted = attributes(
            dead_letters=await self._dead_letter_arn(), max_receives=self._max_receives
        )
        try:
            answer = await self._aws.call(
                "sqs", "create_queue", {"QueueName": name, "Attributes": wanted, "tags": tags}
            )
        except AwsRefused as refused:
            if refused.word in BLOCKED:
                return None
            if refused.word in OTHER_ATTRIBUTES:
                return await self._look(name)
            raise refusal(name, refused) from None
        return str(answer["QueueUrl"])

    async def _delete(self, queue: str, url: str) -> None:
        try:
            await self._aws.call("sqs", "delete_queue", {"QueueUrl": url})
        except AwsRefused as refused:
            if refused.word not in NO_QUEUE:
                raise refusal(queue, refused) from None

    async def _dead_letter_arn(self) -> str:
        if not self._dead_letters:
            url = await self.find(DEAD_LETTER_QUEUE)
            wanted = {"QueueUrl": url, "AttributeNames": ["QueueArn"]}
            try:
                answer = await self._aws.call("sqs", "get_queue_attributes", wanted)
            except AwsRefused as refused:
                raise refusal(DEAD_LETTER_QUEUE, refused) from None
            self._dead_letters = answer["Attributes"]["QueueArn"]
        return self._dead_letters


def refusal(queue: str, refused: AwsRefused) -> ConveyorError:
    """Return the error for a refusal that the adapter cannot handle.

    It quotes only the code of SQS, since a caller may see it.
    """
    text = f"{refused.detail} (queue {queue})"
    return ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5)


def _made_by_following(current: Generation) -> Made:
    if not current.moved:
        return Made.ANOTHER
    return Made.FIRST if current.number == 1 else Made.LOST
