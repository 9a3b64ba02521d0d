"""Claims of tasks and their end, each by one conditional write of the task's row.

`task_rules` decides what happens to a row. The condition of each write repeats the fields that the
rule read, so that DynamoDB refuses a stale decision.

A claim counts only once a strong read after it has shown the run live (`run_reads`). `Claims`
undoes a claim of a run that is not live, and renews, takes over and releases claims. `settle_row`
ends one: the row's new state and its event are one write, under the number of the claim.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import anyio

from conveyor.domain.errors import ConveyorError
from conveyor.domain.failure_groups import failure_kind
from conveyor.domain.model import TaskStatus
from conveyor.domain.task_rules import (
    TERMINAL_TASK_STATES,
    NotYet,
    TaskChange,
    claim_change,
    interrupted_delta,
)
from conveyor.ports.tasks import Claim, Claimed, ClaimedElsewhere, NotClaimable
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    Table,
    UnreadableRow,
    conflicting_item,
    contention_error,
    row_time_to_live,
)
from conveyor.prod.dynamodb.counters import Counters
from conveyor.prod.dynamodb.row_expiry import SET_EXPIRY, RowExpiry, expiry_values
from conveyor.prod.dynamodb.run_reads import RunReads
from conveyor.prod.dynamodb.run_rows import TRIES, RunPlace, RunRow
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.dynamodb.task_rows import (
    ClaimState,
    encode_event,
    encode_record,
    is_too_large,
    read_claim,
    read_task,
    shed_history,
    was_written_by,
)

UNCOUNTED_PAUSE = 1_000
"""Milliseconds after which a worker looks again at a task whose addition is not counted yet."""

_CLAIM = (
    "SET #status = :processing, claim_number = claim_number + :one, claimed_at = :now, "
    "claimed_until = :until, updated_at = :now, #holder = :holder, moved_by = :token"
)
_TAKE_OVER = f"{_CLAIM}, interruptions = :interruptions, #events = list_append(#events, :event)"
_FAIL_INTERRUPTED = (
    "SET #status = :failed, claimed_until = :zero, not_before = :zero, updated_at = :now, "
    "moved_by = :token, interruptions = :interruptions, #events = list_append(#events, :event), "
    "#error = :error, #failure = :failure, failure_group = :group{expiry} REMOVE #holder"
)
_LAPSED = "#status = :processing AND claim_number = :seen_number AND claimed_until = :seen_until"
_UNDO_CLAIM = (
    "SET #status = :pending, claimed_until = :zero, claim_number = claim_number - :one, "
    "moved_by = :undone REMOVE #holder"
)
_RELEASE_CLAIM = "SET #status = :pending, claimed_until = :zero, moved_by = :undone REMOVE #holder"


class ClaimCall(NamedTuple):
    """One call of `claim_task`, and the token of its writes."""

    place: RunPlace
    task_id: str
    key: Key
    worker: str
    now: int
    claimed_until: int
    max_interruptions: int
    token: str


class Claims:
    """Takes, renews, takes over and releases claims; `settle_row` ends them."""

    def __init__(
        self, table: Table, reads: RunReads, counters: Counters, expiry: RowExpiry
    ) -> None:
        self._table = table
        self._reads = reads
        self._counters = counters
        self._expiry = expiry

    async def claim(self, call: ClaimCall) -> Claim:
        """Claim a task; see `Tasks.claim_task`."""
        item = await self._claim_pending(call)
        epoch: int | None = None
        for _ in range(TRIES):
            if item is None:
                return NotClaimable()
            seen = read_claim(item)
            own = seen.moved_by == call.token
            if seen.status in TERMINAL_TASK_STATES:
                return await self._count_failure(call, epoch) if own else NotClaimable()
            if own:
                return await self._confirm(call, item)
            row = await self._live_run(call.place)
            if row is None:
                return NotClaimable()
            change = claim_change(
                seen,
                run_status=row.run.status,
                now=call.now,
                max_interruptions=call.max_interruptions,
            )
            if change is None:
                return NotClaimable()
            if isinstance(change, NotYet):
                return ClaimedElsewhere(change.until, change.is_due_later, change.end)
            if change.event is None:
                item = await self._claim_pending(call)
            else:
                # Before the row moves, so that a recount between the two is noticed.
                epoch = self._counters.epoch(call.place)
                item = await self._take_over(call, row, seen, change)
        raise contention_error()

    async def release(self, key: Key, worker: str) -> None:
        """Undo a claim made under a worker's name; see `Tasks.release_claim`."""
        await self._write_ignoring_refusal(
            key,
            _RELEASE_CLAIM,
            "#status = :processing AND #holder = :holder",
            holder=worker,
            pending=str(TaskStatus.PENDING),
            processing=str(TaskStatus.PROCESSING),
            undone=self._table.clock.new_id(),
            zero=0,
        )

    async def renew(self, key: Key, claim_number: int, *, claimed_until: int) -> None:
        """Extend a claim; ignore a lost one."""
        await self._write_ignoring_refusal(
            key,
            "SET claimed_until = :until",
            "#status = :processing AND claim_number = :number AND claimed_until < :until",
            number=claim_number,
            processing=str(TaskStatus.PROCESSING),
            until=claimed_until,
        )

    async def _confirm(self, call: ClaimCall, item: Item) -> Claim:
        """Confirm a written claim if the run is live after it and the task is part of the run; else
        undo it."""
        task = read_task(call.place.run_id, item)
        row = await self._live_run(call.place)
        if row is not None and row.contains_index(task.index):
            self._counters.note_claim(call.place, call.task_id, call.claimed_until)
            return Claimed(task)
        # Nobody saw this claim, so the row gets its old claim number back.
        await self._write_ignoring_refusal(
            call.key,
            _UNDO_CLAIM,
            "moved_by = :token",
            one=1,
            pending=str(TaskStatus.PENDING),
            token=call.token,
            undone=self._table.clock.new_id(),
            zero=0,
        )
        return NotClaimable() if row is None else ClaimedElsewhere(call.now + UNCOUNTED_PAUSE)

    async def _live_run(self, place: RunPlace) -> RunRow | None:
        """Read the run after this call; return None if its tasks cannot be claimed."""
        row = await self._reads.read_fresh(place)
        if row is None or not row.live:
            return None
        self._counters.observe(row)
        self._expiry.note(row)
        return row

    async def _claim_pending(self, call: ClaimCall) -> Item | None:
        return await self._write(
            call,
            _CLAIM,
            "#status = :pending AND not_before <= :now",
            pending=str(TaskStatus.PENDING),
            **_claim_values(call),
        )

    async def _take_over(
        self, call: ClaimCall, run: RunRow, lapsed: ClaimState, change: TaskChange
    ) -> Item | None:
        """Take over a lapsed claim; fail the task if it has had too many interruptions."""
        assert change.event is not None  # an interruption always has one
        seen: dict[str, Plain] = {
            "event": [encode_event(change.event, call.token)],
            "interruptions": lapsed.interruptions + change.interruptions,
            "seen_number": lapsed.claim_number,
            "seen_until": lapsed.claimed_until,
        }
        if change.error is None:
            return await self._write(call, _TAKE_OVER, _LAPSED, **seen, **_claim_values(call))
        ends = row_time_to_live(self._table, run.result_ttl_days, now=call.now)
        try:
            # Not cancelled: a row that moved must be counted.
            with anyio.CancelScope(shield=True):
                found = await self._write(
                    call,
                    _FAIL_INTERRUPTED.format(expiry="" if ends is None else f", {SET_EXPIRY}"),
                    _LAPSED,
                    failed=str(change.status),
                    now=call.now,
                    **_failure_values(change),
                    processing=str(TaskStatus.PROCESSING),
                    token=call.token,
                    zero=0,
                    **seen,
                    **expiry_values(ends),
                )
        except ConveyorError:
            self._counters.mark_counters_uncertain(call.place)
            raise
        return found

    async def _count_failure(self, call: ClaimCall, epoch: int | None) -> NotClaimable:
        """Count the task that this call has failed, in the epoch known before."""
        delta = interrupted_delta(call.now)
        assert epoch is not None  # the run was seen before the task was ended
        settled = await self._counters.add(call.place, call.task_id, delta, epoch=epoch)
        return NotClaimable(settled.run_status)

    async def _write(
        self, call: ClaimCall, update: str, condition: str, **values: Plain
    ) -> Item | None:
        """Write the row and return it; if the condition failed, return the row as found. A row
        without room for the claim loses its history so far."""
        while True:
            try:
                return await self._table.update(call.key, update, condition=condition, **values)
            except AwsRefused as refused:
                if is_too_large(refused) and await shed_history(self._table, call.key):
                    continue
                if not refused.is_condition:
                    raise
                return conflicting_item(refused)

    async def _write_ignoring_refusal(
        self, key: Key, update: str, condition: str, **values: Plain
    ) -> None:
        """Write the row; ignore a failed condition."""
        try:
            await self._table.update(key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise


def _claim_values(call: ClaimCall) -> dict[str, Plain]:
    """Return the values of a claim's expressions."""
    return {
        "processing": str(TaskStatus.PROCESSING),
        "one": 1,
        "now": call.now,
        "until": call.claimed_until,
        "holder": call.worker,
        "token": call.token,
    }


def _failure_values(change: TaskChange) -> dict[str, Plain]:
    """Return the values of a failed row."""
    assert change.error is not None
    assert change.failure is not None
    return {
        "error": encode_record(change.error),
        "failure": str(change.failure),
        "group": failure_kind(change.failure, change.error).group_id,
    }


SETTLE_PAUSE = 1.0
"""Seconds between two tries of a settlement."""
_COMMON_SETS = (
    "#status = :status",
    "claimed_until = :zero",
    "updated_at = :now",
    "moved_by = :token",
)


async def settle_row(
    table: Table,
    key: Key,
    claim_number: int,
    change: TaskChange,
    *,
    now: int,
    patience: float,
    time_to_live: int | None,
) -> bool:
    """Settle a claimed row; return False if another claim has replaced the caller's.

    A try is not cancelled, because a row that moved must be counted. While the table is
    unavailable, tries are repeated for `patience` seconds: the condition on the claim number makes
    a late one harmless. A row that would outgrow the item limit loses its history so far, but not
    what it spent, so that the task still ends. A row whose task ends gets `time_to_live`, if that
    is given. After ConveyorError(unavailable), or a cancellation between two tries, the row may
    have moved all the same.
    """
    deadline = table.clock.monotonic() + patience
    token = table.clock.new_id()
    move = _RowUpdate.of(change, token, time_to_live)
    while True:
        try:
            with anyio.CancelScope(shield=True):
                await move.write(table, key, claim_number, now=now)
        except AwsRefused as refused:
            if is_too_large(refused) and await shed_history(table, key):
                continue
            if not refused.is_condition:
                raise
            found = conflicting_item(refused)
            # The token is this call's own: an earlier try wrote it, and its answer was lost.
            return found is not None and was_written_by(found, token)
        except UnreadableRow:
            raise
        except ConveyorError:
            if table.clock.monotonic() >= deadline:
                raise
            await table.clock.sleep(SETTLE_PAUSE)
        else:
            return True


class _RowUpdate(NamedTuple):
    """The assignments of a settlement beyond those that every settlement makes, and their
    values."""

    sets: list[str]
    values: dict[str, Plain]
    token: str

    @classmethod
    def of(cls, change: TaskChange, token: str, time_to_live: int | None) -> Self:
        """Express a change as an update."""
        sets: list[str] = []
        values: dict[str, Plain] = {"status": str(change.status)}
        if change.attempts:
            sets.append("attempts = attempts + :attempts")
            values["attempts"] = change.attempts
        if change.not_before is not None:
            sets.append("not_before = :not_before")
            values["not_before"] = change.not_before
        if change.waiting is not None:
            sets += ["#waiting = :waiting", "waiting_since = :since"]
            values["waiting"] = str(change.waiting)
            values["since"] = change.waiting_since
        if change.result is not None:
            sets.append("#result = :result")
            values["result"] = encode_record(change.result)
        if change.error is not None:
            sets += ["#error = :error", "#failure = :failure", "failure_group = :group"]
            values |= _failure_values(change)
        if change.event is not None:
            sets.append("#events = list_append(#events, :event)")
            values["event"] = [encode_event(change.event, token)]
        if time_to_live is not None and change.status in TERMINAL_TASK_STATES:
            sets.append(SET_EXPIRY)
            values |= expiry_values(time_to_live)
        return cls(sets, values, token)

    async def write(self, table: Table, key: Key, claim_number: int, *, now: int) -> None:
        """Write the update under the claim's number. Raises AwsRefused if the row has another
        one."""
        await table.update(
            key,
            f"SET {', '.join([*_COMMON_SETS, *self.sets])} REMOVE #holder",
            condition="#status = :processing AND claim_number = :number",
            processing=str(TaskStatus.PROCESSING),
            number=claim_number,
            zero=0,
            now=now,
            token=self.token,
            **self.values,
        )
