"""Where the queues are: their URLs, and which queue of a run is its present one.

Which of a run's queues is the present one: the same for every process.

What the queues of an environment are called, and what each is made with.

What a process remembers of many queues: the latest used, so that memory stays bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Generic, NamedTuple, Protocol, TypeVar

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import DEAD_LETTER_QUEUE, QueueMissing
from conveyor.prod.aws.calls import Aws, AwsRefused


class Generation(NamedTuple):
    """The number of a run's present queue, which only grows; 0: it has had none yet, or is gone.

    `live`: the run may still be worked. `moved`: this very call made the number what it is.
    """

    number: int
    live: bool
    moved: bool = False


class Generations(Protocol):
    """The present queues of runs, one number a run."""

    async def current(self, run_id: str) -> Generation:
        """The present one."""
        ...

    async def follow(self, run_id: str, known: int) -> Generation:
        """Make the number of a live run `known` + 1, unless another did so before.

        Returns the present one, so that all who find a queue missing at once agree on the next, and
        one of them knows that it is the first.
        """
        ...


RETENTION = 1_209_600
"""Seconds that a message is kept: 14 days, the most that SQS takes."""
_RUN = re.compile(r"run-(.+)")


def prefix(environment: str) -> str:
    """What the names of an environment's queues begin with."""
    return f"conveyor-{environment}-"


def run_of(queue: str) -> str | None:
    """The run whose queue this is; None for the others."""
    found = _RUN.fullmatch(queue)
    return None if found is None else found[1]


def run_queue_name(environment: str, run_id: str, generation: int) -> str:
    """The name in SQS of a run's queue: a name that was deleted is blocked for a minute, so each
    queue of a run has its own."""
    return f"{prefix(environment)}run-{run_id}-{generation}"


def attributes(*, dead_letters: str, max_receives: int) -> dict[str, str]:
    """What a queue with a receive limit is made with. `dead_letters` is the ARN of the queue that
    takes what was received too often."""
    redrive = {"deadLetterTargetArn": dead_letters, "maxReceiveCount": str(max_receives)}
    return {"MessageRetentionPeriod": str(RETENTION), "RedrivePolicy": json.dumps(redrive)}


MOST = 10_000
"""Names remembered at a time."""

Value = TypeVar("Value")


class RecentlyUsed(Generic[Value]):
    """Values by name. One that was not used for long may be forgotten, so it must be findable
    again."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, name: str) -> Value | None:
        """The value of a name, None where it is not known (any more)."""
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: str, value: Value) -> None:
        """Remember a value."""
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        """Let go of a name, where it is known."""
        self._values.pop(name, None)


NO_QUEUE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
BLOCKED = frozenset({"QueueDeletedRecently", "AWS.SimpleQueueService.QueueDeletedRecently"})
MADE_OTHERWISE = frozenset(
    {
        "QueueAlreadyExists",
        "QueueNameExists",
        "AWS.SimpleQueueService.QueueAlreadyExists",
        "AWS.SimpleQueueService.QueueNameExists",
    }
)
"""What is said where a queue is there with other attributes, as after a change of settings."""
YOUNG = 60.0
"""Seconds in which a queue that was made may still be unknown to a part of SQS."""
TRIES = 3
"""Generations tried in a row, where names are blocked."""
DROPPED_BEFORE = 2
"""Earlier queues of a run that are looked for when it is dropped."""


class Made(Enum):
    """What came of making a run's queue: nothing, since the run is not live any more; its FIRST, of
    which nothing is missing; one that was LOST, or may have been, to be filled from the rows; or
    one that ANOTHER has made in the place of a lost one, and fills."""

    NOTHING = auto()
    FIRST = auto()
    LOST = auto()
    ANOTHER = auto()


@dataclass(frozen=True, slots=True)
class _Known:
    """A queue as this process knows it. `generation` is the latest that it saw there, "" its URL
    where it has to be looked for, `made_at` when it was made here."""

    url: str = ""
    generation: int = 0
    made_at: float = -math.inf


class QueueRegistry:
    """Finds, makes and removes queues; remembers where they were found."""

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
        self._remembered: RecentlyUsed[_Known] = RecentlyUsed()
        self._dead_letters = ""

    async def find(self, queue: str) -> str:
        """The URL of a queue. Raises QueueMissing where there is none."""
        known = self._known(queue)
        if known.url:
            return known.url
        run_id = run_of(queue)
        if run_id is not None:
            return await self._find_run(run_id, queue, known)
        url = await self._look(f"{prefix(self._environment)}{queue}")
        if url is None:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"there is no queue {queue}: conveyor admin init makes it"
            )
        self._remembered.put(queue, _Known(url))
        return url

    def forget(self, queue: str) -> None:
        """What is known of a queue is wrong: it was not there."""
        self._remembered.put(queue, replace(self._known(queue), url=""))

    async def is_coming(self, run_id: str, queue: str) -> bool:
        """Whether a run's queue was made here so lately that SQS may say that it is not there."""
        known = self._known(queue)
        if not self._is_young(known):
            return False
        present = await self._generations.current(run_id)
        return present.live and present.number == known.generation

    async def make(self, job_id: str, run_id: str, queue: str) -> Made:
        """Make a run's queue, which was not found.

        Making one that is there gives that one. So a queue that was never seen here is made under
        the present number: another may be about to make it, or SQS not know it everywhere yet. One
        that was seen, or whose name is blocked, is lost, and the next number takes its place: who
        moves the number fills the queue, so that not all who miss it do. Where nobody is known to
        have moved it, as for who comes upon a number for the first time, the queue is filled in
        doubt: a reference that is sent twice costs a look, one that is lost a task.
        """
        present = await self._generations.current(run_id)
        for _ in range(TRIES):
            seen = self._known(queue).generation
            made = Made.ANOTHER if 0 < seen < present.number else Made.LOST
            if not present.number or self._is_lost(queue, present.number):
                present = await self._generations.follow(run_id, present.number)
                made = _followed(present)
            if not present.live:
                return Made.NOTHING
            url = await self._create(job_id, run_id, present.number)
            if url is not None:
                known = _Known(url, present.number, self._clock.monotonic())
                self._remembered.put(queue, known)
                return made
            self._remembered.put(queue, _Known(generation=present.number))
        raise ConveyorError(ErrorCode.UNAVAILABLE, f"{queue} cannot be made", retry_after=5)

    async def remove(self, run_id: str, queue: str) -> None:
        """Remove a run's queues, where there are any."""
        known = self._known(queue)
        # The row may be gone already; what was seen here still is to go.
        latest = (await self._generations.current(run_id)).number or known.generation
        self._remembered.put(queue, _Known(generation=latest))
        for number in range(max(1, latest - DROPPED_BEFORE), latest + 1):
            name = run_queue_name(self._environment, run_id, number)
            seen = known.url if known.generation == number else ""
            url = seen or await self._look(name)
            if url is not None:
                await self._delete(queue, url)

    def _known(self, queue: str) -> _Known:
        return self._remembered.get(queue) or _Known()

    def _is_young(self, known: _Known) -> bool:
        return self._clock.monotonic() - known.made_at < YOUNG

    def _is_lost(self, queue: str, number: int) -> bool:
        known = self._known(queue)
        return known.generation >= number and not self._is_young(known)

    async def _find_run(self, run_id: str, queue: str, known: _Known) -> str:
        number = (await self._generations.current(run_id)).number
        name = run_queue_name(self._environment, run_id, number)
        url = await self._look(name) if number else None
        if url is None:
            raise QueueMissing(queue)
        found = replace(known, url=url) if known.generation == number else _Known(url, number)
        self._remembered.put(queue, found)
        return url

    async def _look(self, name: str) -> str | None:
        try:
            answer = await self._aws.call("sqs", "get_queue_url", {"QueueName": name})
        except AwsRefused as refused:
            if refused.word not in NO_QUEUE:
                raise refusal(name, refused) from None
            return None
        return str(answer["QueueUrl"])

    async def _create(self, job_id: str, run_id: str, number: int) -> str | None:
        """The URL of a run's queue, made if need be; None where its name is blocked."""
        name = run_queue_name(self._environment, run_id, number)
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
            if refused.word in MADE_OTHERWISE:
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
    """What is raised where SQS refuses for a reason that nothing here can deal with. A caller may
    see it: of what SQS said it has the word alone."""
    text = f"{refused.detail} (queue {queue})"
    return ConveyorError(ErrorCode.UNAVAILABLE, text, retry_after=5)


def _followed(present: Generation) -> Made:
    if not present.moved:
        return Made.ANOTHER
    return Made.FIRST if present.number == 1 else Made.LOST
