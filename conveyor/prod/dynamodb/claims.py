"""Claims of tasks: taken, taken over, given back, renewed, settled, each by one conditional write.

`task_rules` decides what happens to a row. The condition of a write repeats what the rule looked
at, so that a row that has changed since is looked at again.

A claim counts only once the run was seen live after it was taken. One that was taken for a run
that is not live, or by a caller that is gone, is undone.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import anyio

from conveyor.domain.errors import ConveyorError
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
    changed_too_often,
    condition_met,
)
from conveyor.prod.dynamodb.counters import Counters
from conveyor.prod.dynamodb.run_rows import TRIES, RunPlace, RunReads, RunRow
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.dynamodb.task_rows import (
    ClaimState,
    event_text,
    read_claim,
    read_task,
    to_text,
    was_moved_by,
)

PAUSE = 1.0
"""Seconds between two tries."""
_SETS = ("#status = :status", "claimed_until = :zero", "updated_at = :now", "moved_by = :token")


async def settle_row(
    table: Table,
    key: Key,
    claim_number: int,
    change: TaskChange,
    *,
    now: int,
    patience: float,
) -> bool:
    """Move a claimed row on; False where the claim is not the caller's any more.

    Not cancelled on its way: a row that has moved has to be counted. A table that is away is waited
    for, `patience` seconds: the condition on the claim's number makes that safe however late it is.
    A row that would outgrow what an item may have loses its history so far: it must come to an end.
    Raises ConveyorError(unavailable), after which the row may have moved all the same, as it may
    after a cancellation between two tries.
    """
    deadline = table.clock.monotonic() + patience
    token = table.clock.new_id()
    begins_anew = False
    while True:
        move = _Move.of(change, token, begins_anew=begins_anew)
        try:
            with anyio.CancelScope(shield=True):
                await move.write(table, key, claim_number, now=now)
        except AwsRefused as refused:
            if _outgrows(refused) and not begins_anew:
                begins_anew = True
                continue
            if not refused.is_condition:
                raise
            found = condition_met(refused)
            # Carried out before, if its own token is there; only the answer was lost.
            return found is not None and was_moved_by(found, token)
        except UnreadableRow:
            raise
        except ConveyorError:
            if table.clock.monotonic() >= deadline:
                raise
            await table.clock.sleep(PAUSE)
        else:
            return True


def _outgrows(refused: AwsRefused) -> bool:
    return refused.word == "ValidationException" and "size" in refused.message


class _Move(NamedTuple):
    """What is set beside what every settlement sets, and with which values."""

    sets: list[str]
    values: dict[str, Plain]
    token: str

    @classmethod
    def of(cls, change: TaskChange, token: str, *, begins_anew: bool) -> Self:
        """Express a change as an update; `begins_anew` replaces the history by its event."""
        sets: list[str] = []
        values: dict[str, Plain] = {"status": str(change.status)}
        if change.attempts:
            sets.append("attempts = attempts + :attempts")
            values["attempts"] = change.attempts
        if change.not_before is not None:
            sets.append("not_before = :not_before")
            values["not_before"] = change.not_before
        if change.result is not None:
            sets.append("#result = :result")
            values["result"] = to_text(change.result)
        if change.error is not None:
            sets += ["#error = :error", "#failure = :failure"]
            values["error"] = to_text(change.error)
            values["failure"] = str(change.failure)
        if change.event is not None:
            history = ":event" if begins_anew else "list_append(#events, :event)"
            sets.append(f"#events = {history}")
            values["event"] = [event_text(change.event, token)]
        return cls(sets, values, token)

    async def write(self, table: Table, key: Key, claim_number: int, *, now: int) -> None:
        """Make it, under the claim's number. Raises AwsRefused where that is another."""
        await table.update(
            key,
            f"SET {', '.join([*_SETS, *self.sets])} REMOVE #holder",
            condition="#status = :processing AND claim_number = :number",
            processing=str(TaskStatus.PROCESSING),
            number=claim_number,
            zero=0,
            now=now,
            token=self.token,
            **self.values,
        )


NOT_YET = 1_000
"""Milliseconds until a task that is not yet a part of its run is looked at again."""

_TAKE = (
    "SET #status = :processing, claim_number = claim_number + :one, claimed_at = :now, "
    "claimed_until = :until, updated_at = :now, #holder = :holder, moved_by = :token"
)
_TAKE_OVER = f"{_TAKE}, interruptions = :interruptions, #events = list_append(#events, :event)"
_GIVE_UP = (
    "SET #status = :failed, claimed_until = :zero, not_before = :zero, updated_at = :now, "
    "moved_by = :token, interruptions = :interruptions, #events = list_append(#events, :event), "
    "#error = :error, #failure = :failure REMOVE #holder"
)
_LAPSED = "#status = :processing AND claim_number = :seen_number AND claimed_until = :seen_until"
_UNDO = (
    "SET #status = :pending, claimed_until = :zero, claim_number = claim_number - :one, "
    "moved_by = :undone REMOVE #holder"
)
_RELEASE = "SET #status = :pending, claimed_until = :zero, moved_by = :undone REMOVE #holder"


class ClaimCall(NamedTuple):
    """One call of `claim_task`, and the token that it writes under."""

    place: RunPlace
    key: Key
    worker: str
    now: int
    claimed_until: int
    max_interruptions: int
    token: str


class Claims:
    """What may be done about the claim of a task, other than settling it."""

    def __init__(self, table: Table, reads: RunReads, counters: Counters) -> None:
        self._table = table
        self._reads = reads
        self._counters = counters

    async def claim(self, call: ClaimCall) -> Claim:
        """Claim a task; see `Tasks.claim_task`."""
        item = await self._take(call)
        for _ in range(TRIES):
            if item is None:
                return NotClaimable()
            seen = read_claim(item)
            own = seen.moved_by == call.token
            if seen.status in TERMINAL_TASK_STATES:
                return await self._gave_up(call) if own else NotClaimable()
            if own:
                return await self._begin(call, item)
            row = await self._live(call.place)
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
                return ClaimedElsewhere(change.until)
            if change.event is None:
                item = await self._take(call)
            else:
                item = await self._take_over(call, seen, change)
        raise changed_too_often()

    async def release(self, key: Key, worker: str) -> None:
        """Undo a claim that was made under a name; see `Tasks.release_claim`."""
        await self._attempt(
            key,
            _RELEASE,
            "#status = :processing AND #holder = :holder",
            holder=worker,
            pending=str(TaskStatus.PENDING),
            processing=str(TaskStatus.PROCESSING),
            undone=self._table.clock.new_id(),
            zero=0,
        )

    async def renew(self, key: Key, claim_number: int, *, claimed_until: int) -> None:
        """Extend a claim; a lost one is passed over."""
        await self._attempt(
            key,
            "SET claimed_until = :until",
            "#status = :processing AND claim_number = :number AND claimed_until < :until",
            number=claim_number,
            processing=str(TaskStatus.PROCESSING),
            until=claimed_until,
        )

    async def _begin(self, call: ClaimCall, item: Item) -> Claim:
        """A claim was written: it counts, if the run is live after that and the task a part of
        it."""
        task = read_task(call.place.run_id, item)
        row = await self._live(call.place)
        if row is not None and row.holds(task.index):
            return Claimed(task)
        # Nobody was told of this claim: the row is left as if it had never been made.
        await self._attempt(
            call.key,
            _UNDO,
            "moved_by = :token",
            one=1,
            pending=str(TaskStatus.PENDING),
            token=call.token,
            undone=self._table.clock.new_id(),
            zero=0,
        )
        return NotClaimable() if row is None else ClaimedElsewhere(call.now + NOT_YET)

    async def _live(self, place: RunPlace) -> RunRow | None:
        """The run as it is after this call; None where none of its tasks may be worked."""
        row = await self._reads.fresh(place)
        if row is None or not row.live:
            return None
        self._counters.seen(row)
        return row

    async def _take(self, call: ClaimCall) -> Item | None:
        return await self._write(
            call,
            _TAKE,
            "#status = :pending AND not_before <= :now",
            pending=str(TaskStatus.PENDING),
            **_taking(call),
        )

    async def _take_over(
        self, call: ClaimCall, lapsed: ClaimState, change: TaskChange
    ) -> Item | None:
        """Take over a claim that has lapsed, or end the task where that is one too many."""
        assert change.event is not None  # an interruption always has one
        seen: dict[str, Plain] = {
            "event": [event_text(change.event, call.token)],
            "interruptions": lapsed.interruptions + change.interruptions,
            "seen_number": lapsed.claim_number,
            "seen_until": lapsed.claimed_until,
        }
        if change.error is None:
            return await self._write(call, _TAKE_OVER, _LAPSED, **seen, **_taking(call))
        try:
            # A row that has moved has to be counted: not cancelled on its way.
            with anyio.CancelScope(shield=True):
                found = await self._write(
                    call,
                    _GIVE_UP,
                    _LAPSED,
                    error=to_text(change.error),
                    failed=str(change.status),
                    failure=str(change.failure),
                    now=call.now,
                    processing=str(TaskStatus.PROCESSING),
                    token=call.token,
                    zero=0,
                    **seen,
                )
        except ConveyorError:
            self._counters.doubt(call.place)
            raise
        return found

    async def _gave_up(self, call: ClaimCall) -> NotClaimable:
        """This call ended the task: account for it."""
        delta = interrupted_delta(call.now)
        epoch = self._counters.epoch(call.place)
        assert epoch is not None  # the run was seen before the task was ended
        settled = await self._counters.add(call.place, delta, epoch=epoch)
        return NotClaimable(settled.run_status)

    async def _write(
        self, call: ClaimCall, update: str, condition: str, **values: Plain
    ) -> Item | None:
        """The row after a write, or, where its condition was not met, as it was found."""
        try:
            return await self._table.update(call.key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return condition_met(refused)

    async def _attempt(self, key: Key, update: str, condition: str, **values: Plain) -> None:
        """A write of which it does not matter whether its condition was met."""
        try:
            await self._table.update(key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise


def _taking(call: ClaimCall) -> dict[str, Plain]:
    """The values of a claim."""
    return {
        "processing": str(TaskStatus.PROCESSING),
        "one": 1,
        "now": call.now,
        "until": call.claimed_until,
        "holder": call.worker,
        "token": call.token,
    }
