"""How a run is counted while its rows are being written.

A large rerun begins with the counters that it will probably have: the plan. What is really copied
is added up beside it, in the same write that moves the checkpoint, and the end of the ingestion
adds the difference. So nothing that workers count meanwhile is overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from conveyor.domain.model import RunStats, TaskFailure, TaskStatus
from conveyor.prod.dynamodb.items import Item
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import REASON, RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.shapes import whole


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows as they were written: `fresh` ones, that are to be worked, and inherited ones by their
    end, the failed ones by reason too."""

    fresh: int = 0
    successful: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}

    @property
    def inherited(self) -> int:
        """Rows that came with their end."""
        return self.successful + self.failed

    @property
    def total(self) -> int:
        """All rows."""
        return self.fresh + self.inherited

    def __add__(self, other: Counts) -> Counts:
        reasons = dict(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return Counts(
            self.fresh + other.fresh,
            self.successful + other.successful,
            self.failed + other.failed,
            reasons,
        )

    def with_end(self, status: str, failure: str | None) -> Counts:
        """With one inherited row more."""
        if status == TaskStatus.SUCCESSFUL:
            return self + Counts(successful=1)
        return self + Counts(failed=1, reasons={failure or str(TaskFailure.OTHER): 1})

    def stats(self) -> RunStats:
        """The counters of a run of which nothing has been worked yet."""
        return RunStats(
            total=self.total,
            successful=self.successful,
            failed=self.failed,
            failure_reasons=self.reasons,
        )


_counts = msgspec.json.Decoder(Counts)


class IngestRow(NamedTuple):
    """A run's row with the counts that go with its ingestion.

    `planned` is what the run's counters presume of the rows written, `copied` what was added up.
    `recopied`: rows may have been written that nobody added up; only the rows tell. The texts are
    the counts as they lie there, "" where there are none.
    """

    row: RunRow
    planned: Counts
    copied: Counts
    recopied: bool
    planned_text: str
    copied_text: str

    @property
    def goes_on(self) -> bool:
        """Whether rows may still be written."""
        return self.row.live and self.row.run.ingesting

    @property
    def next_index(self) -> int:
        """The checkpoint."""
        ingest = self.row.run.ingest
        return 0 if ingest is None else ingest.next_index


async def find_ingest_row(records: RunRecords, run_id: str) -> IngestRow | None:
    """A run by its id, strongly read; None where there is none."""
    place = await records.places.find(run_id)
    return None if place is None else await ingest_row_at(records, place)


async def ingest_row_at(records: RunRecords, place: Place) -> IngestRow | None:
    """A run by its place, strongly read."""
    item = await records.table.get(place.key)
    return None if item is None else read_ingest_row(item)


@whole
def read_ingest_row(item: Item) -> IngestRow:
    """A run from its item."""
    row = read_run_row(item)
    planned, copied = item.get("planned", ""), item.get("copied", "")
    return IngestRow(
        row,
        # Of a submit every row is a fresh one.
        _counts.decode(planned) if planned else Counts(fresh=row.run.stats.total),
        _counts.decode(copied) if copied else Counts(),
        item.get("recopied", False),
        planned,
        copied,
    )


def difference(before: Counts, after: Counts) -> dict[str, int]:
    """What is to be added to a run's row for its counters to presume other rows."""
    reasons = sorted(before.reasons.keys() | after.reasons.keys())
    adds = {
        "total": after.total - before.total,
        "successful": after.successful - before.successful,
        "failed": after.failed - before.failed,
        "inherited": after.inherited - before.inherited,
        **{
            f"{REASON}{reason}": after.reasons.get(reason, 0) - before.reasons.get(reason, 0)
            for reason in reasons
        },
    }
    return {name: change for name, change in adds.items() if change}
