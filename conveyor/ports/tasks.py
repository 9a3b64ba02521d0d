"""The tasks ports: the rows of tasks and their histories, one role for each kind of caller.

Task rows are the truth, a run's counters a cache of them. A run that does not exist has no tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.failure_groups import FailureGroups
from conveyor.domain.model import Event, GroupFilter, RunStatus, Task, TaskStatus
from conveyor.domain.task_rules import Settlement


class Claimed(msgspec.Struct, frozen=True):
    """A task that belongs to the caller until `task.claimed_until`. Its run was live when it was
    claimed."""

    task: Task


class ClaimedElsewhere(msgspec.Struct, frozen=True):
    """Another worker's live claim, or a retry that is not due yet.

    The message is to be hidden until `until`, in milliseconds since the epoch. `is_due_later`: the
    row waits for that instant, and nobody has claimed it. `end` is the row's own instant where that
    lies further ahead than any could, because a clock was set back; else 0.
    """

    until: int
    is_due_later: bool = False
    end: int = 0

    def hide_for(self, now: int, patience: float) -> float:
        """Return for how many seconds from `now` on to hide the message: where a clock was set back
        for `patience` at least, which grows with the looks that were in vain."""
        seconds = (self.until - now) / 1_000
        if self.end:
            seconds = min(max(seconds, patience), (self.end - now) / 1_000)
        return max(0.0, seconds)


class NotClaimable(msgspec.Struct, frozen=True):
    """A task that is terminal or gone, or whose run is not live: its message is to be acknowledged.

    If this very claim ended the task as failed, `run_status` is the run's status after it.
    """

    run_status: RunStatus | None = None


Claim = Claimed | ClaimedElsewhere | NotClaimable


class Settled(msgspec.Struct, frozen=True):
    """The result of a settlement. `applied` is False if the claim was no longer the caller's;
    `run_status` is the run's status after it."""

    applied: bool
    run_status: RunStatus | None


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """One claim of many; see `TaskClaims.claim_task`."""

    run_id: str
    task_id: str
    worker: str
    now: int
    claimed_until: int
    max_interruptions: int


class SettleRequest(msgspec.Struct, frozen=True, gc=False):
    """One settlement of many; see `TaskClaims.settle_task`."""

    run_id: str
    task_id: str
    claim_number: int
    settlement: Settlement
    now: int


class TaskPage(msgspec.Struct, frozen=True):
    """Rows of one shard in submission order. The next page goes on after `next_index`, which is
    None at the shard's end.

    `rows_read` counts the store's rows that were touched, for the read-amplification metric. After
    a page that was cut off at its bound of rows read, `next_index` is the index of the last row
    read, returned or not.
    """

    tasks: list[Task]
    next_index: int | None
    rows_read: int


class TaskClaims(Protocol):
    """Claims and settlements of tasks, for workers."""

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
        """Claim a pending task of a live run, or one whose claim has lapsed, until `claimed_until`.

        Return Claimed with the row; ClaimedElsewhere if another claim is live, or a retry is not
        due yet; NotClaimable if the task is terminal or gone, or its run is not live. Write a
        lapsed claim to the history as an interruption. If claims on the task have lapsed more than
        `max_interruptions` times, end it as failed (code `interrupted`) and return NotClaimable
        with the run's status. Tasks of a paused run can still be claimed, because their message was
        already received.
        """
        ...

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        """Undo a claim made under this very `worker` name; else do nothing.

        Callers use this after a `claim_task` that was cancelled, since nobody knows that claim's
        number or works the task. A caller that may claim a task twice gives each call of
        `claim_task` a name of its own.
        """
        ...

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        """Extend claims, given as (run_id, task_id, claim_number), to `claimed_until`; skip lost
        ones. If one fails, renew the others before raising."""
        ...

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        """Apply a settlement to a claimed row and to its run's counters, exactly once.

        Change nothing if the claim is no longer the caller's. Row, event and counters move so that
        no reader sees them disagree in the end. If the counters that this write returned show the
        run drained, the run's status moves too.
        """
        ...


class TaskBatches(Protocol):
    """Claims and settlements of many tasks, in one operation each.

    Each request has the effect and the result that it would have alone. In the place of a result
    there is the error that it would have raised; the others are not affected.
    """

    async def claim_tasks(self, requests: Sequence[ClaimRequest]) -> list[Claim | Exception]:
        """Claim tasks; see `TaskClaims.claim_task`."""
        ...

    async def settle_tasks(self, requests: Sequence[SettleRequest]) -> list[Settled | Exception]:
        """Settle claimed tasks; see `TaskClaims.settle_task`."""
        ...


class KeptTask(msgspec.Struct, frozen=True):
    """A task of a job and run that are there, and the days for which the job keeps results."""

    task: Task
    result_ttl_days: int


class TaskReader(Protocol):
    """Reading of tasks and their histories, for the API and exports."""

    async def page_tasks(
        self,
        run_id: str,
        *,
        shard: int = 0,
        statuses: frozenset[TaskStatus] | None,
        after: int | None,
        limit: int,
        most_read: int | None = None,
        groups: GroupFilter | None = None,
    ) -> TaskPage:
        """Return at most `limit` rows of a shard with an index above `after`, in any of `statuses`
        (None: all), and of the failure groups that `groups` takes (None: all rows).

        Read at most `most_read` rows of the store, so that a rare status cannot make one page read
        a whole run; None sets no bound.
        """
        ...

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        """Return one row; None if the task does not exist."""
        ...

    async def get_kept_task(self, job_id: str, run_id: str, task_id: str) -> KeptTask | None:
        """Return one row of a job's run, in one operation of the store. None if job, run or task
        does not exist, is being deleted, or cannot be read like that."""
        ...

    async def failure_groups(self, run_id: str) -> FailureGroups | None:
        """Return the failure groups of a run, with the `failed` that they add up to, of one read;
        None for a run that does not exist. The group of what is in no other is left out."""
        ...

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        """Return the events of a task, oldest first; None if the task does not exist."""
        ...


class UnfinishedTasks(Protocol):
    """References to tasks that still need a message, to fill queues from the rows."""

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Return (index, task_id) of at most `limit` rows that are not terminal, in order of their
        index, which is above `after`; an empty list for a run that does not exist."""
        ...

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """Return the host of each of these rows, (index, task_id) each: name and port of its URL,
        "" where the row is gone."""
        ...
