"""The queues port: a control queue and one queue a run, as weak as SQS.

Messages may come twice, late and out of order; a receive may find nothing although something is
there. Messages hold ids only, and a version, so that old and new processes can share a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

MESSAGE_VERSION = 1
MAX_BATCH = 10
"""Most messages that one receive returns, one send or one delete takes in an adapter's batch."""
CONTROL_QUEUE = "control"


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


Message = TaskMessage | DeleteMessage


class Delivery(msgspec.Struct, frozen=True):
    """One receipt of one message. `receive_count` is 1 at the first receipt."""

    queue: str
    message: Message
    receipt: str
    receive_count: int


class Queues(Protocol):
    """Queues by name. A queue comes into being with its first message or by `open_run`."""

    async def open_run(self, job_id: str, run_id: str) -> None:
        """Make a run's queue ready; without effect where it is."""
        ...

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queue with whatever is in it. Receipts of it become void."""
        ...

    async def send_tasks(self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        """Enqueue references, (index, task_id) each, to rows that are already written."""
        ...

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message, to be seen after `delay` seconds."""
        ...

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Up to `limit` messages (at most MAX_BATCH), each hidden for `visibility` seconds.

        With nothing to give it waits up to `wait` seconds for the first. A queue that does not
        exist gives nothing.
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
        """About how many messages wait, hidden ones included."""
        ...
