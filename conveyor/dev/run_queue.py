"""A run's queue: a window of references over the task rows, refilled by keyset.

The rows are the truth. What lies behind the mark is in the window, or was and is done with; what
lies ahead is read from the store when the window runs low. A reference that was received too often
has left: reads pass it over until it is sent again, while a new window takes it as any other. Pure
and synchronous; a refill is the store's answer between `begin_refill` and `end_refill`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from conveyor.dev.message_queue import Faults, Held, MessageQueue, ReceiveLimit
from conveyor.domain.ids import MAX_INDEX
from conveyor.ports.queues import MAX_BATCH, TaskMessage, run_queue

_BEFORE_ALL = -1
_BEYOND_ALL = MAX_INDEX + 1
_REFILL_SHARE = 8
_LOW_SHARE = 16
_SLACK = 1_024


@dataclass(frozen=True, slots=True)
class Refill:
    """A read to make: rows with an index above `after`, at most `limit`.

    `present` holds the indexes in the window where the read may meet them again.
    """

    after: int
    limit: int
    present: frozenset[int]


class RunQueue(MessageQueue):
    """Task references of one run; at most `window` of them in memory."""

    def __init__(
        self,
        job_id: str,
        run_id: str,
        *,
        window: int,
        receipts: Callable[[], int],
        faults: Faults | None,
        receive_limit: ReceiveLimit | None = None,
    ) -> None:
        super().__init__(
            run_queue(run_id), receipts=receipts, faults=faults, receive_limit=receive_limit
        )
        self.run_id = run_id
        self._job_id = job_id
        self._window = window
        self._refill_size = min(window, max(MAX_BATCH, window // _REFILL_SHARE))
        self._low = min(window, max(MAX_BATCH, window // _LOW_SHARE))
        self._indexes = array("q")
        self._task_ids: list[str] = []
        self._taken = 0
        # What is above `_highest` was never in the window. The mark is below it after it went back.
        self._mark = _BEFORE_ALL
        self._highest = _BEFORE_ALL
        self._more = True
        self._beyond = 0
        self._refill: Refill | None = None
        self._came_during = _BEYOND_ALL
        self._left: set[str] = set()

    @property
    def refilling(self) -> bool:
        """Whether a refill has begun and not ended."""
        return self._refill is not None

    @property
    def starved(self) -> bool:
        """Whether few references wait, rows may lie ahead, and there is room for them."""
        return self._more and self._waiting + len(self._ready) < self._low and self._room > 0

    @property
    def in_memory(self) -> int:
        """How many references are held, waiting or received."""
        return self._waiting + self.size

    @property
    def depth(self) -> int:
        """About how many references wait; of those ahead only the ones sent here are counted."""
        if not self._more:
            return self.in_memory
        return self.in_memory + self._beyond or 1

    def add(self, tasks: Sequence[tuple[int, str]]) -> None:
        """Take in what follows the mark without a gap, as far as there is room.

        What lies ahead is left to a refill. For what lies behind, or comes while a refill is under
        way and may be in its answer or not, the mark goes back, and the store decides.
        """
        if self._left:
            self._left.difference_update(task_id for _, task_id in tasks)
        if self._refill is not None:
            self._more = True
            self._beyond += len(tasks)
            first = min((index for index, _ in tasks), default=self._came_during)
            self._came_during = min(self._came_during, first)
            return
        taken = self._append_following(tasks)
        if taken < len(tasks):
            self._more = True
            self._beyond += len(tasks) - taken
            self._go_back(min(index for index, _ in tasks[taken:]))

    def begin_refill(self) -> Refill:
        """The read to make now. No second one begins before `end_refill`."""
        went_back = self._mark < self._highest
        present = frozenset(self._present() if went_back else ())
        self._refill = Refill(self._mark, self._refill_size, present)
        self._came_during = _BEYOND_ALL
        self._more = False
        return self._refill

    def end_refill(self, rows: Sequence[tuple[int, str]] | None) -> None:
        """Take in what the store answered, in order; None where it gave no answer."""
        refill, self._refill = self._refill, None
        if refill is None:
            return
        if rows is None or not self._append_rows(rows, refill):
            self._more = True
        else:
            self._mark = self._highest
        self._go_back(self._came_during)
        if not self._more:
            self._beyond = 0

    @property
    def _waiting(self) -> int:
        return len(self._task_ids) - self._taken

    @property
    def _room(self) -> int:
        return self._window - self.in_memory

    def _append_following(self, tasks: Sequence[tuple[int, str]]) -> int:
        """Append the head of `tasks` that fits; how many that was."""
        if self._mark < self._highest:
            return 0
        taken = 0
        for index, task_id in islice(tasks, max(self._room, 0)):
            if index != self._mark + 1:
                break
            self._append(index, task_id)
            taken += 1
        return taken

    def _append_rows(self, rows: Sequence[tuple[int, str]], refill: Refill) -> bool:
        """Append what the window does not hold yet; whether that was all the store has."""
        room = self._room
        for index, task_id in rows:
            if index in refill.present or task_id in self._left:
                self._mark = index
            elif room > 0:
                self._append(index, task_id)
                self._beyond = max(self._beyond - 1, 0)
                room -= 1
            else:
                return False
        return len(rows) < refill.limit

    def _append(self, index: int, task_id: str) -> None:
        self._indexes.append(index)
        self._task_ids.append(task_id)
        self._mark = index
        self._highest = max(self._highest, index)

    def _leave(self, held: Held) -> None:
        super()._leave(held)
        if isinstance(held.message, TaskMessage):
            self._left.add(held.message.task_id)

    def _go_back(self, first: int) -> None:
        self._mark = min(self._mark, first - 1)

    def _present(self) -> set[int]:
        present = set(self._indexes[self._taken :])
        present.update(held.index for held in self._received.values())
        present.update(held.index for held in self._ready)
        return present

    def _fresh(self, limit: int) -> list[Held]:
        start = self._taken
        end = min(start + limit, len(self._task_ids))
        job_id, run_id = self._job_id, self.run_id
        batch = [
            Held(TaskMessage(job_id, run_id, self._task_ids[position]), self._indexes[position])
            for position in range(start, end)
        ]
        self._unseen += len(batch)
        self._taken = end
        if end > _SLACK and 2 * end > len(self._task_ids):
            del self._indexes[:end], self._task_ids[:end]
            self._taken = 0
        return batch
