"""The tasks ports: the bulk collection, one role for each kind of caller.

Task rows are the truth, a run's counters a cache of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.model import Event, RunStatus, Task, TaskStatus
from conveyor.domain.task_rules import Settlement


class Claimed(msgspec.Struct, frozen=True):
    """The task is this worker's until `task.claimed_until`; its run was live when it was
    claimed."""

    task: Task


class ClaimedElsewhere(msgspec.Struct, frozen=True):
    """Somebody else's live claim, or a retry not due yet: hide the message until `until`."""

    until: int


class NotClaimable(msgspec.Struct, frozen=True):
    """The task is terminal, or its run is not live, or it is gone: acknowledge and forget.

    `run_status` is set where this very claim ended the task as failed: where the run stands then.
    """

    run_status: RunStatus | None = None


Claim = Claimed | ClaimedElsewhere | NotClaimable


class Settled(msgspec.Struct, frozen=True):
    """Whether the write applied (the claim was still the writer's own), and where the run
    stands."""

    applied: bool
    run_status: RunStatus | None


class TaskPage(msgspec.Struct, frozen=True):
    """Rows of one shard in submission order; `next_index` is the index to go on after, None at the
    shard's end.

    `rows_read` counts store rows touched, for the read-amplification metric. A page that was cut
    off at its bound of rows read goes on after the last row that was read, returned or not.
    """

    tasks: list[Task]
    next_index: int | None
    rows_read: int


class TaskClaims(Protocol):
    """Tasks as a worker claims and settles them. A run that does not exist has no tasks."""

    async def claim_task(
        self,
        run_id: str,
        task_id: str,
        *,
        worker: str,
        now: int,
        claimed_until: int,
        max_interruptions: int,
    ) -> Claim:
        """Claim a pending task, or one whose claim has lapsed, of a live run.

        A lapsed claim is written to the history as an interruption. One that lapsed more than
        `max_interruptions` times ends the task as failed (code `interrupted`): the answer is
        NotClaimable with the run's status. A paused run's tasks can still be claimed: the message
        was already received.
        """
        ...

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        """Undo a claim made under this very `worker` name; else without effect.

        For a `claim_task` that was cancelled, so that nobody knows the claim's number or works the
        task. A caller that may claim a task twice gives each call of `claim_task` a name of its
        own.
        """
        ...

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        """Extend claims, given as (run_id, task_id, claim_number); skip those that were lost. If
        one fails, renew the others before raising."""
        ...

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        """Move a claimed row on, if the claim is still the caller's, and account for it exactly
        once.

        Row, event and counters move so that no reader sees them disagree at the end. Where the
        counters that this write returned show the run drained, the run's status moves too.
        """
        ...


class TaskReader(Protocol):
    """Tasks and their histories as the API and exports read them. A run that does not exist has no
    tasks."""

    async def page_tasks(
        self,
        run_id: str,
        *,
        shard: int = 0,
        statuses: frozenset[TaskStatus] | None,
        after: int | None,
        limit: int,
        most_read: int | None = None,
    ) -> TaskPage:
        """Return at most `limit` rows of a shard with an index above `after`; None as statuses
        means all.

        Read at most `most_read` rows of the store (None: no bound), so that a rare status cannot
        make one page read a whole run.
        """
        ...

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        """Return one row; None if there is no such task."""
        ...

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        """Return the events of a task, oldest first; None if there is no such task."""
        ...


class UnfinishedTasks(Protocol):
    """References to tasks that still need a message, for queues that are filled from the rows."""

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Return (index, task_id) of rows that are not terminal, in order, with an index above
        `after`; none for a run that does not exist."""
        ...
