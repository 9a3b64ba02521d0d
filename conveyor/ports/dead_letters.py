"""The dead letters port: the messages that a fleet gave up, for its operators.

Letters belong to no caller. A queue shows a letter only by delivering it, which hides it from
everybody else meanwhile: two who look at the same time may each see a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that was given up. `kind` is that of the message, "" where it cannot be read; ids
    that it does not have are "". `reason` is "" for one that was received too often.

    Instants are milliseconds since the epoch: when the message was `first_sent`, and until when it
    is kept.
    """

    letter_id: str
    kind: str = ""
    job_id: str = ""
    run_id: str = ""
    task_id: str = ""
    export_id: str = ""
    reason: str = ""
    first_sent: int
    kept_until: int

    @property
    def place(self) -> tuple[int, str]:
        """Its place in a list, oldest first."""
        return self.first_sent, self.letter_id


class LetterPage(NamedTuple):
    """Some of the `looked` letters that were looked through, oldest first. `has_more` tells that
    others of them follow, `is_cut` that the queue may have more than were looked through."""

    letters: Sequence[DeadLetter]
    looked: int
    has_more: bool
    is_cut: bool


class DeadLetterQueue(Protocol):
    """The dead letters of a fleet. Each call looks through a bounded number of letters, and leaves
    visible those that stay. Raises ConveyorError(unavailable)."""

    async def page(self, after: tuple[int, str] | None, *, limit: int) -> LetterPage:
        """Return at most `limit` letters behind a place in the list; None: from the beginning."""
        ...

    async def redrive(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        """Send letters back to the control queue or to the queue of their run; None: all.

        Returns by letter id None, or the reason why the letter stays. Letters that were not found
        are missing.
        """
        ...

    async def drop(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        """Remove letters for good; None: all. Returns as `redrive` does."""
        ...
