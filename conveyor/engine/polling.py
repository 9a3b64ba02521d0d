"""How queues are asked: the size of a receive, and how often a queue that was empty is asked
again."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.ports.queues import MAX_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """The same for every permit policy. All times in seconds.

    `batch`: most messages asked for at once. `wait`: how long one slot waits on a queue that was
    empty, where it has nothing better to do. `pause` after the first empty receive in a row,
    doubling up to `pause_cap`.
    """

    batch: int = MAX_BATCH
    wait: float = 5.0
    pause: float = 0.02
    pause_cap: float = 5.0

    def pause_after(self, empties: int, jitter: float) -> float:
        """Seconds until a queue is asked again after so many empty receives; `jitter` in [0, 1)
        spreads them from half of it to one and a half."""
        return min(self.pause_cap, self.pause * 2.0 ** min(empties - 1, 20)) * (0.5 + jitter)
