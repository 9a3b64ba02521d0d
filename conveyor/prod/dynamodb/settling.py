"""Ending a claim: the row's move and its event in one conditional write."""

from __future__ import annotations

from typing import NamedTuple, Self

import anyio

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import TaskStatus
from conveyor.ports.tasks import Failed, Retry, Settlement, Succeeded, Undone
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.counters import Delta
from conveyor.prod.dynamodb.items import Table, met
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.shapes import Unfit
from conveyor.prod.dynamodb.task_items import event_text, to_text, was_moved_by
from conveyor.prod.dynamodb.values import Plain

PAUSE = 1.0
"""Seconds between two tries."""
_SETS = ("#status = :status", "claimed_until = :zero", "updated_at = :now", "moved_by = :token")


async def settle_row(
    table: Table,
    key: Key,
    claim_number: int,
    settlement: Settlement,
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
        move = _Move.of(settlement, token, begins_anew=begins_anew)
        try:
            with anyio.CancelScope(shield=True):
                await move.write(table, key, claim_number, now=now)
        except AwsRefused as refused:
            if _outgrows(refused) and not begins_anew:
                begins_anew = True
                continue
            if not refused.is_condition:
                raise
            found = met(refused)
            # Carried out before, if its own token is there; only the answer was lost.
            return found is not None and was_moved_by(found, token)
        except Unfit:
            raise
        except ConveyorError:
            if table.clock.monotonic() >= deadline:
                raise
            await table.clock.sleep(PAUSE)
        else:
            return True


def delta_of(settlement: Settlement, *, now: int) -> Delta | None:
    """What a settlement adds to its run; None for one that leaves no trace."""
    match settlement:
        case Succeeded(event):
            return Delta(now, successful=1, spend=event.spend)
        case Failed(event, _, failure):
            return Delta(now, failed=1, failure=failure, spend=event.spend)
        case Retry(event):
            return Delta(now, spend=event.spend)
        case Undone():
            return None


def _outgrows(refused: AwsRefused) -> bool:
    return refused.word == "ValidationException" and "size" in refused.message


class _Move(NamedTuple):
    """What is set beside what every settlement sets, and with which values."""

    sets: list[str]
    values: dict[str, Plain]
    token: str

    @classmethod
    def of(cls, settlement: Settlement, token: str, *, begins_anew: bool) -> Self:
        """The move of a settlement; `begins_anew`: with a history of its event alone."""
        if isinstance(settlement, Undone):
            return cls([], {"status": str(TaskStatus.PENDING)}, token)
        sets, values = _ends(settlement)
        if not isinstance(settlement, Retry) or settlement.recorded:
            history = ":event" if begins_anew else "list_append(#events, :event)"
            sets.append(f"#events = {history}")
            values["event"] = [event_text(settlement.event, token)]
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


def _ends(settlement: Succeeded | Failed | Retry) -> tuple[list[str], dict[str, Plain]]:
    sets = ["attempts = attempts + :burnt"]
    values: dict[str, Plain] = {"burnt": 1}
    match settlement:
        case Succeeded():
            status = TaskStatus.SUCCESSFUL
            sets.append("#result = :result")
            values["result"] = to_text(settlement.result)
        case Failed():
            status = TaskStatus.FAILED
            sets += ["#error = :error", "#failure = :failure"]
            values["error"] = to_text(settlement.problem)
            values["failure"] = str(settlement.failure)
        case Retry():
            status = TaskStatus.PENDING
            sets.append("not_before = :not_before")
            values["not_before"] = settlement.not_before
            values["burnt"] = int(settlement.burns_attempt)
    return sets, {**values, "status": str(status)}
