"""The queues port and the signals port: messages between processes, and hints within one.

There is a control queue and one queue for each run, with guarantees as weak as those of SQS:
messages may come twice, late and out of order, and a receive may find nothing although messages
wait. Messages hold ids only, and a version, so that old and new processes can share a queue.

A signal is a hint from one part of a process to another that a run has changed. A hint may be lost
or be false; discovery over the records is the truth. In production, where the API and the workers
are apart, no hints are sent and discovery alone does the work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import repeat
from typing import Protocol

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode


class Signals(Protocol):
    """Hints about runs, for discovery in the same process."""

    def run_changed(self, run_id: str) -> None:
        """Hint that a run has new work, or may no longer be worked."""
        ...

    def run_halted(self, run_id: str) -> None:
        """Tell the workers of this process to make no further call for a run from what they hold
        of it. This holds when it returns, and until `run_changed`, which is to follow."""
        ...

    def run_ended(self, run_id: str) -> None:
        """Hint that a run has ended, so that it may no longer be worked and may be told of."""
        ...

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call a function at each hint that a run has ended."""
        ...

    def on_halt(self, give_up: Callable[[str], None]) -> None:
        """Call a function with each run that is halted."""
        ...

    async def wait(self) -> set[str]:
        """Wait for a hint; return the ids of the runs hinted at since the last call. One waiter at
        a time."""
        ...


MESSAGE_VERSION = 2
"""The newest version of messages that this process reads. Each message bears the oldest version
that works it as it should be worked."""
FIRST_VERSION, HOST_VERSION = 1, 2
"""The versions of messages without and with a host: a process that knows no limits of hosts leaves
the latter alone."""
MAX_BATCH = 10
"""The most messages of one receive, and of one batch in which an adapter sends or deletes."""
CONTROL_QUEUE = "control"
DEAD_LETTER_QUEUE = "dead-letter"
"""The queue of messages that were received too often elsewhere: a backstop, since attempts are
counted in the store."""


def run_queue(run_id: str) -> str:
    """Return the name of a run's queue, which holds the tasks of all hosts without their own."""
    return f"run-{run_id}"


MOST_HOST_QUEUES = 63
"""The most hosts of a run that have a queue of their own: the first ones of its list."""


def host_queue(run_id: str, number: int) -> str:
    """Return the name of the queue for the run's host of that number, from 0."""
    return f"run-{run_id}-h{number}"


def run_queues(run_id: str, hosts: Sequence[str]) -> list[str]:
    """Return the names of all queues of a run: its own, and those of its `hosts`."""
    return [run_queue(run_id), *(host_queue(run_id, number) for number in range(len(hosts)))]


class TaskMessage(msgspec.Struct, frozen=True, tag="task", omit_defaults=True):
    """An order to work one task. `host` is name and port of its URL where limits of hosts held when
    it was sent; "" elsewhere."""

    job_id: str
    run_id: str
    task_id: str
    # Written even where it is the default: not all versions take the same one for granted.
    version: int = msgspec.field(default_factory=lambda: FIRST_VERSION)
    host: str = ""


def task_message(job_id: str, run_id: str, task_id: str, host: str) -> TaskMessage:
    """Make the order to work one task, of a host that is known or of none."""
    if not host:
        return TaskMessage(job_id, run_id, task_id)
    return TaskMessage(job_id, run_id, task_id, HOST_VERSION, host)


def task_messages(
    job_id: str,
    run_id: str,
    tasks: Sequence[tuple[int, str]],
    hosts: Sequence[str],
    lanes: Sequence[str],
) -> dict[str, list[TaskMessage]]:
    """Make the orders to work tasks, of `hosts` or of none, by the queue that each goes into: that
    of a host if it is among `lanes`, else the run's own, which is there in any case."""
    queue_of = dict(zip(lanes, run_queues(run_id, lanes)[1:], strict=True))
    own = run_queue(run_id)
    messages: dict[str, list[TaskMessage]] = {own: []}
    for (_, task_id), host in zip(tasks, hosts or repeat("", len(tasks)), strict=True):
        message = task_message(job_id, run_id, task_id, host)
        messages.setdefault(queue_of.get(host, own), []).append(message)
    return messages


HasPolicy = Callable[[str], Awaitable[bool]]
"""Tells of a run whether limits of hosts may hold for it: then references to its tasks name their
hosts, whoever sends them."""


async def no_policy(_run_id: str) -> bool:
    """Know of no limits."""
    return False


class DeleteMessage(msgspec.Struct, frozen=True, tag="delete"):
    """An order to scrub a deleted run, and its job's tombstone once no run of a deleted job is
    left. That of a job without a run has the id of the job as `run_id`.

    `final` marks the second pass, one visibility timeout after the first.
    """

    job_id: str
    run_id: str
    final: bool = False
    version: int = FIRST_VERSION


class IngestMessage(msgspec.Struct, frozen=True, tag="ingest"):
    """An order to write the rows of a large run: staged ones, or copies of another run's.

    In the dead-letter queue `reason` states the cause of the failure.
    """

    job_id: str
    run_id: str
    reason: str = ""
    version: int = FIRST_VERSION


class TemplateMessage(msgspec.Struct, frozen=True, tag="template"):
    """An order to write the rows of a run from the template of its scheduled job. `reason` is the
    same as in an ingest message.

    A kind of its own: versions without schedules would look for these rows in the wrong place.
    """

    job_id: str
    run_id: str
    reason: str = ""
    version: int = FIRST_VERSION


class ExportMessage(msgspec.Struct, frozen=True, tag="export"):
    """An order to produce an export of a run. `reason` is the same as in an ingest message."""

    job_id: str
    run_id: str
    export_id: str
    reason: str = ""
    version: int = FIRST_VERSION


Message = TaskMessage | DeleteMessage | IngestMessage | TemplateMessage | ExportMessage


def ingest_message(job_id: str, run_id: str, *, template: bool) -> IngestMessage | TemplateMessage:
    """Make the order to write the rows of a run, from its job's template or otherwise."""
    return TemplateMessage(job_id, run_id) if template else IngestMessage(job_id, run_id)


class Delivery(msgspec.Struct, frozen=True):
    """One receipt of one message. `receipt` acknowledges or hides it; `receive_count` is 1 at the
    first receipt."""

    queue: str
    message: Message
    receipt: str
    receive_count: int


class QueueMissing(ConveyorError):
    """The absence of a run's queue, in a receive or a send."""

    def __init__(self, queue: str) -> None:
        super().__init__(ErrorCode.NOT_FOUND, f"there is no queue {queue}")


class Queues(Protocol):
    """Queues by name, for the API, the workers and the sweeper.

    `send_tasks` makes a run's queue with its first references; the other queues always exist. With
    a receive limit, a message that was received that often and is visible again moves to the
    dead-letter queue instead of being received once more.
    """

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Prepare to receive from a run's queues: its own, and one for each of its `hosts`.

        Never put an empty queue in the place of one that was lost: a queue that lives in this
        process comes back from the rows, one that lives elsewhere stays missing.
        """
        ...

    async def remake_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        """Make the missing ones of a run's queues again, and refill them with references to every
        row of theirs that is not terminal. Some may come twice. Do nothing if they all exist."""
        ...

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queues with all their messages. Their receipts become void."""
        ...

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        """Enqueue references, (index, task_id) each, to rows that are already written.

        `hosts` are theirs, one each, where limits of hosts hold. `lanes` are the hosts of the run
        that have a queue of their own: the references of the others go into the run's.
        """
        ...

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message, visible after `delay` seconds.

        Raises QueueMissing if the queue of a run is missing and would be made without its other
        messages.
        """
        ...

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Receive up to `limit` messages (at most MAX_BATCH), and hide each for `visibility`
        seconds.

        If the queue has nothing to give, wait up to `wait` seconds for the first message. A
        cancelled receive takes nothing: messages on their way by then are given back. Raises
        QueueMissing if the queue does not exist.
        """
        ...

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Acknowledge messages, so that they never come again. Skip void receipts."""
        ...

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide received messages for `visibility` seconds from now; 0 gives them back."""
        ...

    def depth(self, queue: str) -> int:
        """Return the approximate number of waiting messages, hidden ones included, as far as this
        process has seen."""
        ...

    async def count(self, queue: str) -> int:
        """Return the approximate number of waiting messages, hidden ones included, for all
        receivers; 0 if the queue does not exist. Raises ConveyorError(unavailable)."""
        ...
