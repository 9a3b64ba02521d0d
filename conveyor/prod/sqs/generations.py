"""Which of a run's queues is the present one: the same for every process."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Generation(NamedTuple):
    """The number of a run's present queue, which only grows; 0: it has had none yet, or is gone.

    `live`: the run may still be worked. `moved`: this very call made the number what it is.
    """

    number: int
    live: bool
    moved: bool = False


class Generations(Protocol):
    """The present queues of runs, one number a run."""

    async def current(self, run_id: str) -> Generation:
        """The present one."""
        ...

    async def follow(self, run_id: str, known: int) -> Generation:
        """Make the number of a live run `known` + 1, unless another did so before.

        Returns the present one, so that all who find a queue missing at once agree on the next, and
        one of them knows that it is the first.
        """
        ...
