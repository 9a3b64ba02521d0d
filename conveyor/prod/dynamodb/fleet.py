"""What all processes of a fleet have to agree on: where their permits are kept.

Two ledgers would grant a job's limit twice. So the kind is written in the store by the first who
comes, and every worker says again and again, under the condition that it still is, that it works by
it: `agree_on_ledger` at the start, and then every `BEAT` seconds. `beats` counts these words. An
operator may change the kind while nobody says them: that is watched on the counter alone, no clock
is compared.
"""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Table, met
from conveyor.prod.dynamodb.keys import FLEET
from conveyor.prod.dynamodb.table import ROW_SHAPE

BEAT = 10.0
"""Seconds between two words of a worker."""
WATCH = 60.0
"""Seconds without any, after which no worker is taken to be alive: longer than the leases of one
that was killed."""
LEDGERS = ("redis", "dynamodb")


async def ledger_kind(table: Table) -> str | None:
    """The kind of the fleet's ledger; None where none has been written yet."""
    item = await table.get(FLEET)
    return None if item is None else str(item["ledger"])


async def agree_on_ledger(table: Table, kind: str) -> None:
    """Write the kind where none is, and say that one works by it.

    Raises ConveyorError(conflict) where the fleet has another: the caller must not work.
    """
    _check(kind)
    try:
        await table.update(
            FLEET,
            "SET shape = :shape, ledger = :kind ADD beats :one",
            condition="attribute_not_exists(pk) OR ledger = :kind",
            shape=ROW_SHAPE,
            kind=kind,
            one=1,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        found = met(refused)
        there = "another place" if found is None else found["ledger"]
        raise ConveyorError(
            ErrorCode.CONFLICT,
            f"this fleet keeps its permits in {there} and this process is set to {kind}",
        ) from None


async def change_ledger(table: Table, kind: str, *, watch: float = WATCH) -> bool:
    """Let the fleet keep its permits elsewhere, after `watch` seconds in which no worker spoke;
    False where it does already.

    Raises ConveyorError(conflict) where a worker is alive. One that was stopped for all that time
    and comes back is turned away by its next `agree_on_ledger`.
    """
    _check(kind)
    before = await table.get(FLEET)
    if before is None:
        await agree_on_ledger(table, kind)
        return True
    if before["ledger"] == kind:
        return False
    await table.clock.sleep(watch)
    try:
        await table.update(
            FLEET,
            "SET ledger = :kind",
            condition="beats = :beats AND ledger = :before",
            kind=kind,
            beats=before["beats"],
            before=before["ledger"],
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        now = met(refused)
        if now is not None and (now["ledger"], now["beats"]) == (kind, before["beats"]):
            return True  # carried out, and its answer lost
        raise ConveyorError(
            ErrorCode.CONFLICT, "a worker is alive: stop all workers, then change the ledger"
        ) from None
    return True


def _check(kind: str) -> None:
    if kind not in LEDGERS:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"a ledger is one of {', '.join(LEDGERS)}, not {kind}"
        )
