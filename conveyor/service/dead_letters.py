"""The dead letters of a fleet for its operators: read by the page, sent back, and removed.

They are the letters of all callers: whoever calls this has made sure that an operator asks.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.dead_letters import DeadLetter, DeadLetterQueue
from conveyor.service.page_schemas import LetterLine, LettersPage
from conveyor.service.results import Cursors

LETTERS_SHOWN = 30
"""Letters on one page."""
MOST_REASON = 1_000
"""Characters of a reason: anybody with access to a queue may have written it."""
_SCOPE = "dead-letters"


class OperatorLetters:
    """Reads and moves dead letters; a server without a `queue` has none to show."""

    def __init__(self, queue: DeadLetterQueue | None, cursors: Cursors) -> None:
        self._queue = queue
        self._cursors = cursors

    @property
    def has_queue(self) -> bool:
        """Tell whether this server can show letters."""
        return self._queue is not None

    async def page(self, cursor: str | None) -> LettersPage:
        """Read a page of letters, oldest first.

        Raises ConveyorError: invalid_argument for a cursor of another list; unavailable.
        """
        after = None if cursor is None else _place(self._cursors.decode(cursor, scope=_SCOPE))
        if self._queue is None:
            return LettersPage(has_queue=False, letters=[])
        found = await self._queue.page(after, limit=LETTERS_SHOWN)
        onward: str | UnsetType = UNSET
        if found.has_more:
            sent, letter_id = found.letters[-1].place
            onward = self._cursors.encode(f"{sent} {letter_id}", scope=_SCOPE)
        return LettersPage(
            has_queue=True,
            letters=[_line(letter) for letter in found.letters],
            looked=found.looked,
            is_cut=found.is_cut,
            next_cursor=onward,
        )

    async def redrive(self, letter_id: str) -> None:
        """Send a letter back to the queue that it came from.

        Raises ConveyorError: not_found; conflict for one that cannot go back; unavailable.
        """
        if self._queue is None:
            raise not_found("dead letter")
        _check(await self._queue.redrive(frozenset({letter_id})), letter_id)

    async def drop(self, letter_id: str) -> None:
        """Remove a letter for good. Raises ConveyorError: not_found; unavailable."""
        if self._queue is None:
            raise not_found("dead letter")
        _check(await self._queue.drop(frozenset({letter_id})), letter_id)


def _place(position: str) -> tuple[int, str]:
    sent, _, letter_id = position.partition(" ")
    return int(sent), letter_id


def _line(letter: DeadLetter) -> LetterLine:
    return LetterLine(
        letter_id=letter.letter_id,
        kind=letter.kind or UNSET,
        job_id=letter.job_id or UNSET,
        run_id=letter.run_id or UNSET,
        task_id=letter.task_id or UNSET,
        export_id=letter.export_id or UNSET,
        reason=letter.reason[:MOST_REASON] or UNSET,
        first_sent_at=rfc3339(letter.first_sent),
        kept_until=rfc3339(letter.kept_until),
    )


def _check(done: dict[str, str | None], letter_id: str) -> None:
    """Raise for a letter that was not found, or that stays."""
    if letter_id not in done:
        raise ConveyorError(
            ErrorCode.NOT_FOUND,
            "no such dead letter; while somebody else looks at the letters it is hidden for half a"
            " minute at most",
        )
    problem = done[letter_id]
    if problem is not None:
        raise ConveyorError(ErrorCode.CONFLICT, f"the letter stays: {problem}")
