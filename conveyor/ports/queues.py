"""The queues port: a control queue and one queue a run, as weak as SQS.

Messages may come twice, late and out of order; a receive may find nothing although something is
there. Messages hold ids only, and a version, so that old and new processes can share a queue.

The signals port: hints between rooms of one process that a run has changed.

A hint may be lost or come from nowhere; discovery over the records is the truth. In production,
where api and workers are apart, there are none and discovery alone does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode


class Signals(Protocol):
    """Hints about runs."""

    def run_changed(self, run_id: str) -> None:
        """Say that a run has new work, or may no longer be worked."""
        ...

    async def wait(self) -> set[str]:
        """The runs hinted at since the last call, once there is one. One waiter at a time."""
        ...


MESSAGE_VERSION = 1
MAX_BATCH = 10
"""Most messages that one receive returns, one send or one delete takes in an adapter's batch."""
CONTROL_QUEUE = "control"
DEAD_LETTER_QUEUE = "dead-letter"
"""Where a queue moves what was received too often: a backstop, since attempts are counted in the
store."""


def run_queue(run_id: str) -> str:
    """The name of a run's queue."""
    return f"run-{run_id}"


class TaskMessage(msgspec.Struct, frozen=True, tag="task"):
    """Work one task."""

    job_id: str
    run_id: str
    task_id: str
    version: int = MESSAGE_VERSION


class DeleteMessage(msgspec.Struct, frozen=True, tag="delete"):
    """Scrub a deleted run, and its job's tombstone once no run of a deleted job is left.

    `final` marks the second pass, one visibility timeout after the first.
    """

    job_id: str
    run_id: str
    final: bool = False
    version: int = MESSAGE_VERSION


class IngestMessage(msgspec.Struct, frozen=True, tag="ingest"):
    """Write the rows of a large run: staged ones, or copies of another run's.

    `reason` says, in the dead-letter queue, why it could not be done.
    """

    job_id: str
    run_id: str
    reason: str = ""
    version: int = MESSAGE_VERSION


class ExportMessage(msgspec.Struct, frozen=True, tag="export"):
    """Produce an export of a run. `reason` as of an ingest message."""

    job_id: str
    run_id: str
    export_id: str
    reason: str = ""
    version: int = MESSAGE_VERSION


Message = TaskMessage | DeleteMessage | IngestMessage | ExportMessage


class Delivery(msgspec.Struct, frozen=True):
    """One receipt of one message. `receive_count` is 1 at the first receipt."""

    queue: str
    message: Message
    receipt: str
    receive_count: int


class QueueMissing(ConveyorError):
    """A run's queue that was asked for messages does not exist."""

    def __init__(self, queue: str) -> None:
        super().__init__(ErrorCode.NOT_FOUND, f"there is no queue {queue}")


class Queues(Protocol):
    """Queues by name. A run's queue comes into being by `send_tasks`, with its first references;
    the others are always there.

    With a receive limit, a message that was received that often and is visible again moves to the
    dead-letter queue instead of being received once more.
    """

    async def open_run(self, job_id: str, run_id: str) -> None:
        """Get ready to receive from a run's queue.

        This never puts an empty queue in the place of one that was lost: a queue that lives in this
        process comes back from the rows, one that lives elsewhere stays missing.
        """
        ...

    async def remake_run(self, job_id: str, run_id: str) -> None:
        """Make a missing queue again and refill it with references to every row of the run that is
        not terminal. Some may come twice. Without effect where the queue is there."""
        ...

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queue with whatever is in it. Receipts of it become void."""
        ...

    async def send_tasks(self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        """Enqueue references, (index, task_id) each, to rows that are already written."""
        ...

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message, to be seen after `delay` seconds.

        Raises QueueMissing where the queue of a run is missing and would be made without its other
        messages.
        """
        ...

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Up to `limit` messages (at most MAX_BATCH), each hidden for `visibility` seconds.

        With nothing to give it waits up to `wait` seconds for the first. A cancelled receive takes
        nothing: what is on its way by then is given back. Raises QueueMissing.
        """
        ...

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Acknowledge: the messages never come again. Void receipts are passed over."""
        ...

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide received messages for `visibility` seconds from now; 0 gives them back."""
        ...

    def depth(self, queue: str) -> int:
        """About how many messages wait, hidden ones included, as far as this process has seen."""
        ...

    async def count(self, queue: str) -> int:
        """About how many messages wait, hidden ones included, whoever receives them; none where
        there is no such queue. Raises ConveyorError(unavailable)."""
        ...
