"""Indexes of a run that tasks are being added under.

Adding goes: reserve, write rows, count them. A reservation stands on the run's row from the first
step to the last; its rows are no part of the run meanwhile. Reserving leaves the version alone: it
compares the next index, which nothing else moves in an open run. Every end of a reservation is
under the version.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunRecords
from conveyor.prod.dynamodb.task_writes import remove_untouched
from conveyor.prod.dynamodb.values import Given, Name, untag_all

_RESERVE = "SET #reserved.#mark = :count, #next_index = :end"
_OPEN = (
    "#next_index = :start AND #status IN (:running, :pending) "
    "AND #last_batch_received = :no AND #ingesting = :no"
)


class Reservation(NamedTuple):
    """`size` indexes from `start` on."""

    start: int
    size: int

    @property
    def mark(self) -> str:
        """Its name on the run's row."""
        return str(self.start)

    def stands(self, row: RunRow) -> bool:
        """Whether it can still be counted."""
        return row.reserved.get(self.mark) == self.size


def refuse_closed(row: RunRow) -> None:
    """Raise ConveyorError where a run takes no tasks: job_not_open, run_not_terminal while its own
    rows are being written, last_batch_received."""
    if not row.live:
        raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
    if row.run.ingesting:
        raise ConveyorError(
            ErrorCode.RUN_NOT_TERMINAL, "the tasks of the submit are still being written"
        )
    if row.run.last_batch_received:
        raise ConveyorError(ErrorCode.LAST_BATCH_RECEIVED, "the last batch has been received")


def takes_tasks(row: RunRow) -> bool:
    """Whether `refuse_closed` has nothing against it."""
    return row.live and not row.run.ingesting and not row.run.last_batch_received


def refuse_excess(row: RunRow, count: int, *, max_tasks: int) -> None:
    """Raise ConveyorError(quota_exceeded) where a run would hold more than `max_tasks`, with those
    that are being added."""
    if row.run.stats.total + sum(row.reserved.values()) + count > max_tasks:
        raise ConveyorError(
            ErrorCode.QUOTA_EXCEEDED, f"the run would hold more than {max_tasks} tasks"
        )


async def reserve(
    records: RunRecords, row: RunRow, count: int, *, max_tasks: int
) -> tuple[Reservation, RunRow] | None:
    """Take the next indexes of a run; its row with them. None where it takes no tasks any more.

    Raises ConveyorError(quota_exceeded).
    """
    table = records.table
    for _ in range(TRIES):
        refuse_excess(row, count, max_tasks=max_tasks)
        wanted = Reservation(row.run.next_index, count)
        values: dict[str, Given] = {
            "mark": Name(wanted.mark),
            "count": count,
            "start": wanted.start,
            "end": wanted.start + count,
            "running": str(RunStatus.RUNNING),
            "pending": str(RunStatus.PENDING),
            "no": False,
        }
        part = table.update_part(row.place.key, _RESERVE, condition=_OPEN, **values)
        try:
            # A transaction of one, for the sake of its token: made twice, it reserves once.
            await table.transact([part], token=table.clock.new_id())
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            [there] = refused.items
            if not there:
                return None
            row = read_run_row(untag_all(there))
            if not takes_tasks(row):
                return None
        else:
            return wanted, reserved_row(row, wanted)
    raise changed_too_often()


async def give_back(
    records: RunRecords, place: Place, reservation: Reservation, *, now: int
) -> bool:
    """Undo an addition that has not been counted; False where it has been, or somebody else undoes
    it.

    It is marked as given up first, so that it cannot be counted any more; then its rows go, but
    for those that were claimed somehow, which a recount finds; then the mark. Whoever finds it half
    done goes on from there.
    """
    row = await records.read_at(place)
    if row is None or not await _give_up(records, row, reservation, now=now):
        return False
    await forget(records, place, reservation)
    return True


async def forget(records: RunRecords, place: Place, reservation: Reservation) -> None:
    """What is left to do for an addition that is marked as given up."""
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    await remove_untouched(records.table, [place.task(task_id) for task_id in task_ids])
    try:
        await records.table.update(
            place.key,
            "REMOVE #given_up.#mark",
            condition="attribute_exists(#given_up.#mark)",
            mark=Name(reservation.mark),
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise


async def _give_up(records: RunRecords, row: RunRow, reservation: Reservation, *, now: int) -> bool:
    def decision(known: RunRow) -> Change | None:
        if not reservation.stands(known):
            return None
        return Change(
            sets={"given_up": {**known.given_up, reservation.mark: reservation.size}},
            removes=["#reserved.#mark"],
            values={"mark": Name(reservation.mark)},
        )

    return await records.decide(row, decision, now=now) is not None


def reserved_row(row: RunRow, reservation: Reservation) -> RunRow:
    """A run's row with a reservation."""
    end = reservation.start + reservation.size
    return structs.replace(
        row,
        run=structs.replace(row.run, next_index=end),
        reserved={**row.reserved, reservation.mark: reservation.size},
    )
