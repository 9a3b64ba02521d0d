"""Which of a run's queues is the present one, kept on the run's row beside its version."""

from __future__ import annotations

from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Item, met
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.sqs.generations import Generation

ATTRIBUTE = "queue_generation"
MOVED_BY = "queue_moved_by"
"""Holds the token of the call that moved the number last: its answer may have been lost."""

_GONE = Generation(0, live=False)


class DynamoGenerations:
    """Generations of the queues of runs. Moves without the run's version: no decision about the run
    hangs on it."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._table = records.table

    async def current(self, run_id: str) -> Generation:
        """The present one."""
        place = await self._records.places.find(run_id)
        return _GONE if place is None else _read(await self._table.get(place.key))

    async def follow(self, run_id: str, known: int) -> Generation:
        """Make the number of a live run `known` + 1, unless another did so before; the present
        one."""
        place = await self._records.places.find(run_id)
        if place is None:
            return _GONE
        token = self._table.clock.new_id()
        live = {f"live_{number}": str(status) for number, status in enumerate(LIVE_RUN_STATES)}
        among = ", ".join(f":{name}" for name in live)
        try:
            item = await self._table.update(
                place.key,
                f"SET {ATTRIBUTE} = :next, {MOVED_BY} = :token",
                condition=f"{ATTRIBUTE} = :known AND #status IN ({among})",
                next=known + 1,
                token=token,
                known=known,
                **live,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return _read(met(refused), token=token)
        return _read(item, token=token)


def _read(item: Item | None, *, token: str = "") -> Generation:
    if item is None:
        return _GONE
    return Generation(
        item[ATTRIBUTE],
        live=item["status"] in LIVE_RUN_STATES,
        moved=bool(token) and item.get(MOVED_BY) == token,
    )
