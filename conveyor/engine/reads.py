"""Reads that overlap: an answer is worth something unless a read begun later has answered before.

A read that begins later sees the same or more. Its answer may come first all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Reads:
    """Which read of a run was believed last, for as long as an older answer may still come."""

    def __init__(self) -> None:
        self._begun = 0
        self._under_way = 0
        self._believed: dict[str, int] = {}

    @contextmanager
    def begin(self) -> Iterator[int]:
        """The number of a read that begins now. It is under way until its answer was applied."""
        self._begun += 1
        self._under_way += 1
        try:
            yield self._begun
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._believed.clear()

    def believe(self, run_id: str, read: int) -> bool:
        """Whether what a read says of a run is news; from then on no older read is believed."""
        if read < self._believed.get(run_id, 0):
            return False
        self._believed[run_id] = read
        return True
