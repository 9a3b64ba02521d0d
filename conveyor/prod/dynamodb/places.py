"""Where runs lie: looked up once by a run's id, and remembered, since a place never changes."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from conveyor.domain.shards import Shards
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import Key, place_key, run_key, task_key
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.table import ROW_SHAPE

MOST_REMEMBERED = 10_000


class Place(msgspec.Struct, frozen=True):
    """The job and number of a run, and the shards of its rows."""

    run_id: str
    job_id: str
    run_sequence: int
    shards: Shards

    @property
    def key(self) -> Key:
        """Where the run's own row lies."""
        return run_key(self.job_id, self.run_sequence)

    def task(self, task_id: str) -> Key:
        """Where a task's row lies. Raises ValueError where the text is not a task id."""
        return task_key(self.job_id, self.run_id, task_id, self.shards)

    def item(self) -> Item:
        """The item to be written beside the run's."""
        return {
            "shape": ROW_SHAPE,
            "job_id": self.job_id,
            "run_sequence": self.run_sequence,
            "shard_count": self.shards.count,
            "shard_scheme": str(self.shards.scheme),
        }


@whole
def read_place(item: Item) -> Place:
    """A place from an item that has it, and the run's id. Raises Damaged."""
    shards = {"count": item["shard_count"], "scheme": item["shard_scheme"]}
    place = {name: item[name] for name in ("run_id", "job_id", "run_sequence")}
    return msgspec.convert({**place, "shards": shards}, Place)


class Places:
    """Finds places by run ids."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: OrderedDict[str, Place] = OrderedDict()

    async def find(self, run_id: str) -> Place | None:
        """The place of a run; None where there is no such run.

        A run that was purged may be found a while longer: its row tells.
        """
        known = self._known.get(run_id)
        if known is not None:
            self._known.move_to_end(run_id)
            return known
        item = await self._table.get(place_key(run_id))
        if item is None:
            return None
        place = read_place({**item, "run_id": run_id})
        self.remember(place)
        return place

    def remember(self, place: Place) -> None:
        """Keep a place that was just made or found."""
        self._known[place.run_id] = place
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
