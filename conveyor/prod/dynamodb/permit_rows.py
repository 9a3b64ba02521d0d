"""What a process knows of one job's ledger row: the row as it was seen last, and since when.

Pure: no table, no clock. An entry lapses for whoever has watched it unchanged for its lease.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.ports.permits import Holding, Standing
from conveyor.prod.dynamodb.items import Item
from conveyor.prod.dynamodb.shapes import whole

MOST_REMOVED = 40
"""Lapsed entries that one write removes: an expression has a bounded length."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one holder has. `stamp` is the write that it comes from; `lease` in milliseconds."""

    count: int
    sequence: int
    wants: bool
    lease: int
    stamp: str

    def attributes(self) -> dict[str, Any]:
        """As it lies in the row."""
        return msgspec.structs.asdict(self)


@whole
def _read(item: Item) -> tuple[str | None, dict[str, Entry]]:
    """The generation and the entries of a row. Raises Damaged."""
    return item["generation"], msgspec.convert(item["entries"], dict[str, Entry])


class Plan(msgspec.Struct, frozen=True):
    """A write that a call needs: which state of the row it was decided on, and what it removes.

    `own` is the stamp of the holder's entry, None where it has none. `generation` is given where
    permits are added: nobody else may have added any meanwhile.
    """

    own: str | None
    generation: str | None
    removed: dict[str, str]


class Watch:
    """One job's row, seen by one process. Moments are monotonic seconds of this process."""

    def __init__(self) -> None:
        self.generation: str | None = None
        self.entries: dict[str, Entry] = {}
        self._since: dict[str, float] = {}

    def learn(self, item: Item | None, now: float) -> None:
        """Take in the row as it was answered; `now` is after the answer."""
        generation, entries = (None, {}) if item is None else _read(item)
        self._since = {
            holder: self._since[holder] if entry == self.entries.get(holder) else now
            for holder, entry in entries.items()
        }
        self.entries = entries
        self.generation = generation

    def is_live(self, holder: str, now: float) -> bool:
        """Whether an entry may still be in use, as far as this process can tell."""
        entry = self.entries.get(holder)
        return entry is not None and now < self._since[holder] + entry.lease / 1_000

    def plan(self, holding: Holding, limit: int, now: float) -> Plan | None:
        """What has to be written so that a call is granted; None where it is refused."""
        own = self.entries.get(holding.holder)
        live = own if self.is_live(holding.holder, now) else None
        if live is not None and holding.sequence <= live.sequence:
            return None
        stamp = None if own is None else own.stamp
        known = 0 if live is None else live.count
        if holding.count <= known:
            return Plan(stamp, None, {})
        lapsed = [
            (holder, entry.stamp)
            for holder, entry in self.entries.items()
            if holder != holding.holder and not self.is_live(holder, now)
        ]
        removed = dict(lapsed[:MOST_REMOVED])
        others = sum(
            entry.count
            for holder, entry in self.entries.items()
            if holder != holding.holder and holder not in removed
        )
        if others + holding.count > limit:
            return None
        return Plan(stamp, self.generation, removed)

    def standing(self, *, granted: bool, limit: int, now: float) -> Standing:
        """How things stand by what was seen last."""
        live = [entry for holder, entry in self.entries.items() if self.is_live(holder, now)]
        return Standing(
            granted=granted,
            free=max(0, limit - sum(entry.count for entry in live)),
            holders=sum(entry.count > 0 for entry in live),
            wanting=sum(entry.wants for entry in live),
        )
