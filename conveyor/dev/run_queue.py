"""Queues in memory, as weak as SQS; pure and synchronous, with no clock and no waiting.

`MessageQueue` takes a message from send to delete. `RunQueue` is the queue of a run: a window of
references over the task rows, which are the truth. References up to a mark are in the window, or
were in it and are done with; those beyond it are read from the store when the window runs low,
between `begin_refill` and `end_refill`. A reference that was received too often has left: reads
pass it over until it is sent again, while a new window takes it like any other.

A run whose hosts have queues of their own has a `RunQueue` for each. One read then serves all of
them that have come equally far.

`now` is monotonic seconds.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from conveyor.domain.ids import MAX_INDEX
from conveyor.ports.queues import (
    FIRST_VERSION,
    MAX_BATCH,
    Delivery,
    Message,
    TaskMessage,
    run_queue,
    task_message,
)

_READY = -1.0
_GONE = -2.0
_NO_INDEX = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Weaknesses that tests switch on.

    `reorder`: each message is drawn from among so many that wait; 0 keeps the order.
    `duplicates`: the share of messages that come a second time, whatever happens to the first copy.
    `random`: the source of the draws.
    """

    random: Callable[[], float]
    reorder: int = 0
    duplicates: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLimit:
    """A bound on receives. A message that was received `receives` times, at least 1, and is visible
    again is handed to `move` by the next receive, and forgotten."""

    receives: int
    move: Callable[[Message], None]


class HiddenMessage:
    """A message that is hidden, or was received before.

    `due` is when it becomes visible, or one of two marks: it is visible already, or deleted.
    """

    __slots__ = ("due", "index", "message", "receipt", "receive_count")

    def __init__(self, message: Message, index: int = _NO_INDEX) -> None:
        self.message = message
        self.index = index
        self.due = _READY
        self.receipt: str | None = None
        self.receive_count = 0


class MessageQueue:
    """Messages by visibility and receipt. A receipt is void once its message is received again."""

    def __init__(
        self,
        name: str,
        *,
        receipts: Callable[[], int],
        faults: Faults | None,
        receive_limit: ReceiveLimit | None = None,
    ) -> None:
        self.name = name
        self._next_receipt = receipts
        self._faults = faults
        self._receive_limit = receive_limit
        self._ready: deque[HiddenMessage] = deque()
        self._received: dict[str, HiddenMessage] = {}
        self._unseen = 0
        self._order = 0
        # One entry for all that were hidden together; what moved on meanwhile is passed over.
        self._hidden: list[tuple[float, int, list[HiddenMessage]]] = []
        self._in_hidden = 0

    @property
    def size(self) -> int:
        """The number of messages held here, hidden ones included."""
        return len(self._received) + self._unseen

    @property
    def refilling(self) -> bool:
        """True while the store is read for more messages."""
        return False

    @property
    def starved(self) -> bool:
        """True if more messages should be read from the store."""
        return False

    @property
    def depth(self) -> int:
        """An estimate of the messages that wait, hidden ones included."""
        return self.size

    def put(self, message: Message, *, now: float, delay: float) -> None:
        """Add a message, to be seen after `delay` seconds."""
        self._put(HiddenMessage(message), now=now, delay=delay)

    def take(self, limit: int, *, visibility: float, now: float) -> list[Delivery]:
        """Receive up to `limit` visible messages and hide them."""
        self.surface(now)
        batch = self._draw(limit)
        if not batch:
            return []
        deliveries = []
        due = now + visibility
        received, name, next_receipt = self._received, self.name, self._next_receipt
        for held in batch:
            if held.receipt is None:
                self._unseen -= 1
            else:
                del received[held.receipt]
            held.receipt = receipt = str(next_receipt())
            received[receipt] = held
            held.due = due
            held.receive_count += 1
            deliveries.append(Delivery(name, held.message, receipt, held.receive_count))
        self._hide(batch, due)
        return deliveries

    def delete(self, receipts: Iterable[str]) -> None:
        """Forget messages; void receipts are passed over."""
        for receipt in receipts:
            held = self._received.pop(receipt, None)
            if held is not None:
                held.due = _GONE

    def change_visibility(self, receipts: Sequence[str], *, visibility: float, now: float) -> None:
        """Hide messages from now on; those whose visibility has lapsed are passed over."""
        changed = []
        due = now + visibility if visibility > 0 else _READY
        for receipt in receipts:
            held = self._received.get(receipt)
            if held is not None and held.due > now:
                held.due = due
                changed.append(held)
        if visibility > 0:
            self._hide(changed, due)
        else:
            self._ready.extend(changed)

    def surface(self, now: float) -> None:
        """Make the messages visible whose time has come."""
        hidden = self._hidden
        while hidden and (hidden[0][0] <= now or not self._alive(hidden[0])):
            due, _, batch = heapq.heappop(hidden)
            self._in_hidden -= len(batch)
            for held in batch:
                if held.due == due:
                    held.due = _READY
                    self._ready.append(held)

    def next_due(self) -> float | None:
        """Tell when the next hidden message becomes visible; None where none is hidden."""
        return self._hidden[0][0] if self._hidden else None

    def visible_at(self, now: float) -> float | None:
        """Tell when there is a message to be received: `now`, or later; None where none waits."""
        self.surface(now)
        if self.starved or self._may_have_fresh or any(held.due == _READY for held in self._ready):
            return now
        return self.next_due()

    @property
    def _may_have_fresh(self) -> bool:
        """True if messages wait in another form."""
        return False

    def _put(self, held: HiddenMessage, *, now: float, delay: float) -> None:
        self._unseen += 1
        if delay > 0:
            held.due = now + delay
            self._hide([held], held.due)
        else:
            self._ready.append(held)

    def _draw(self, limit: int) -> list[HiddenMessage]:
        if self._faults is not None:
            return self._draw_badly(limit, self._faults)
        batch: list[HiddenMessage] = []
        ready = self._ready
        while ready and len(batch) < limit:
            held = ready.popleft()
            if self._may_be_received(held):
                batch.append(held)
        if len(batch) < limit:
            batch += self._fresh(limit - len(batch))
        return batch

    def _draw_badly(self, limit: int, faults: Faults) -> list[HiddenMessage]:
        pool = [held for held in self._ready if self._may_be_received(held)]
        self._ready.clear()
        wanted = limit + faults.reorder - len(pool)
        if wanted > 0:
            pool += self._fresh(wanted)
        batch: list[HiddenMessage] = []
        while pool and len(batch) < limit:
            among = min(len(pool), faults.reorder + 1)
            held = pool.pop(int(faults.random() * among))
            batch.append(held)
            if held.receive_count == 0 and faults.random() < faults.duplicates:
                copy = HiddenMessage(held.message, held.index)
                copy.receive_count = 1
                self._put(copy, now=0.0, delay=0.0)
        self._ready.extendleft(reversed(pool))
        return batch

    def _may_be_received(self, held: HiddenMessage) -> bool:
        """Tell whether a visible message may be received; one received too often leaves now."""
        if held.due == _GONE:
            return False
        limit = self._receive_limit
        if limit is None or held.receive_count < limit.receives:
            return True
        self._leave(held)
        limit.move(held.message)
        return False

    def _leave(self, held: HiddenMessage) -> None:
        if held.receipt is None:
            self._unseen -= 1
        else:
            del self._received[held.receipt]

    def _fresh(self, _limit: int) -> list[HiddenMessage]:
        """Draw further messages, for a queue that holds some in another form."""
        return []

    def _hide(self, batch: list[HiddenMessage], due: float) -> None:
        if not batch:
            return
        self._order += 1
        heapq.heappush(self._hidden, (due, self._order, batch))
        self._in_hidden += len(batch)
        if self._in_hidden > 4 * self.size + _SLACK:
            self._sweep()

    def _sweep(self) -> None:
        self._hidden = [
            (due, order, alive)
            for due, order, batch in self._hidden
            if (alive := [held for held in batch if held.due == due])
        ]
        heapq.heapify(self._hidden)
        self._in_hidden = sum(len(batch) for _, _, batch in self._hidden)

    @staticmethod
    def _alive(entry: tuple[float, int, list[HiddenMessage]]) -> bool:
        due, _, batch = entry
        return any(held.due == due for held in batch)


_BEFORE_ALL = -1
_BEYOND_ALL = MAX_INDEX + 1
_REFILL_SHARE = 8
_LOW_SHARE = 16
_SLACK = 1_024


@dataclass(frozen=True, slots=True)
class Refill:
    """A read to make: at most `limit` rows with an index above `after`.

    `present` holds the indexes in the window, where the read may return them again.
    """

    after: int
    limit: int
    present: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The part of a read for several queues that one of them takes: its rows, (index, task_id) and
    host. All rows up to `end` were read; `is_last` if there are no more."""

    rows: Sequence[tuple[int, str]] = ()
    hosts: Sequence[str] = ()
    end: int
    is_last: bool


class RunQueue(MessageQueue):
    """Task references of one run; at most `window` of them in memory. With a `name`, those of one
    host of it."""

    def __init__(
        self,
        job_id: str,
        run_id: str,
        *,
        window: int,
        receipts: Callable[[], int],
        faults: Faults | None,
        receive_limit: ReceiveLimit | None = None,
        name: str = "",
    ) -> None:
        super().__init__(
            name or run_queue(run_id),
            receipts=receipts,
            faults=faults,
            receive_limit=receive_limit,
        )
        self.run_id = run_id
        self._job_id = job_id
        self._window = window
        self._refill_size = min(window, max(MAX_BATCH, window // _REFILL_SHARE))
        self._low = min(window, max(MAX_BATCH, window // _LOW_SHARE))
        self._indexes = array("q")
        self._task_ids: list[str] = []
        self._hosts: dict[str, str] = {}
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
        """True from the beginning of a refill to its end."""
        return self._refill is not None

    @property
    def starved(self) -> bool:
        """True if few references wait, rows may lie ahead, and there is room for them."""
        return self._more and self._waiting + len(self._ready) < self._low and self._room > 0

    @property
    def in_memory(self) -> int:
        """The number of references held, waiting or received."""
        return self._waiting + self.size

    @property
    def depth(self) -> int:
        """An estimate of the references that wait; of those beyond the window it counts only the
        ones sent here."""
        if not self._more:
            return self.in_memory
        return self.in_memory + self._beyond or 1

    def add(self, tasks: Sequence[tuple[int, str]], hosts: Sequence[str] = ()) -> None:
        """Take in the references that follow the mark without a gap, as far as there is room.

        The ones after a gap are left to a refill. For a reference behind the mark, or one that
        comes while a refill is under way and may or may not be in its answer, the mark goes back,
        so that the store is asked again.
        """
        taken = self._append_following(tasks, hosts) if self._refill is None else 0
        self.add_later(tasks[taken:])
        if self._left:
            self._left.difference_update(task_id for _, task_id in tasks[:taken])

    def add_later(self, tasks: Sequence[tuple[int, str]]) -> None:
        """Leave all references to a refill."""
        if not tasks:
            return
        if self._left:
            self._left.difference_update(task_id for _, task_id in tasks)
        self._more = True
        self._beyond += len(tasks)
        first = min(index for index, _ in tasks)
        if self._refill is not None:
            self._came_during = min(self._came_during, first)
        else:
            self._go_back(first)

    @property
    def mark(self) -> int:
        """The index up to which all references are here, or were."""
        return self._mark

    def begin_behind(self, mark: int) -> None:
        """Leave the references up to a mark to another queue."""
        self._mark = self._highest = mark

    def may_join(self, refill: Refill) -> bool:
        """Tell whether a read that another queue makes is one for this queue, too."""
        return self._more and self._refill is None and self._mark == refill.after and self._room > 0

    def begin_refill(self) -> Refill:
        """Begin a refill, and return the read to make. No second one begins before `end_refill`."""
        went_back = self._mark < self._highest
        present = frozenset(self._present() if went_back else ())
        self._refill = Refill(self._mark, self._refill_size, present)
        self._came_during = _BEYOND_ALL
        self._more = False
        return self._refill

    def end_refill(self, rows: Sequence[tuple[int, str]] | None, hosts: Sequence[str] = ()) -> None:
        """Take in the rows that the store returned, in order, with their hosts, if those were read;
        None where the read failed."""
        refill, self._refill = self._refill, None
        if refill is None:
            return
        if rows is None or not self._append_rows(rows, hosts, refill) or len(rows) >= refill.limit:
            self._more = True
        else:
            self._mark = self._highest
        self._end_refill()

    def end_stretch(self, stretch: Stretch | None) -> None:
        """Take in this queue's part of a read for several; None where the read failed."""
        refill, self._refill = self._refill, None
        if refill is None:
            return
        if stretch is None or not self._append_rows(stretch.rows, stretch.hosts, refill):
            self._more = True
        else:
            self._mark = max(self._mark, stretch.end)
            self._highest = max(self._highest, self._mark)
            if stretch.is_last:
                self._mark = self._highest
            else:
                self._more = True
        self._end_refill()

    def _end_refill(self) -> None:
        self._go_back(self._came_during)
        if not self._more:
            self._beyond = 0

    @property
    def _waiting(self) -> int:
        return len(self._task_ids) - self._taken

    @property
    def _may_have_fresh(self) -> bool:
        return self._waiting > 0

    @property
    def _room(self) -> int:
        return self._window - self.in_memory

    def _append_following(self, tasks: Sequence[tuple[int, str]], hosts: Sequence[str]) -> int:
        """Append the head of `tasks` that fits; return how many were appended."""
        if self._mark < self._highest:
            return 0
        taken = 0
        for index, task_id in islice(tasks, max(self._room, 0)):
            if index != self._mark + 1:
                break
            self._append(index, task_id)
            taken += 1
        if hosts:
            ids = (task_id for _, task_id in tasks[:taken])
            self._hosts.update((one, host) for one, host in zip(ids, hosts, strict=False) if host)
        return taken

    def _append_rows(
        self, rows: Sequence[tuple[int, str]], hosts: Sequence[str], refill: Refill
    ) -> bool:
        """Append the rows that the window does not hold yet; tell whether all were for it."""
        host_of = dict(zip((task_id for _, task_id in rows), hosts, strict=True)) if hosts else {}
        room = self._room
        for index, task_id in rows:
            if index in refill.present or task_id in self._left:
                self._mark = index
            elif room > 0:
                self._append(index, task_id)
                if host := host_of.get(task_id):
                    self._hosts[task_id] = host
                self._beyond = max(self._beyond - 1, 0)
                room -= 1
            else:
                return False
        return True

    def _append(self, index: int, task_id: str) -> None:
        self._indexes.append(index)
        self._task_ids.append(task_id)
        self._mark = index
        self._highest = max(self._highest, index)

    def _leave(self, held: HiddenMessage) -> None:
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

    def _fresh(self, limit: int) -> list[HiddenMessage]:
        start = self._taken
        end = min(start + limit, len(self._task_ids))
        task_ids, indexes = self._task_ids[start:end], self._indexes[start:end]
        job_id, run_id, hosts = self._job_id, self.run_id, self._hosts
        if hosts:
            messages = [task_message(job_id, run_id, one, hosts.pop(one, "")) for one in task_ids]
        else:
            messages = [TaskMessage(job_id, run_id, one, FIRST_VERSION) for one in task_ids]
        batch = list(map(HiddenMessage, messages, indexes))
        self._unseen += len(batch)
        self._taken = end
        if end > _SLACK and 2 * end > len(self._task_ids):
            del self._indexes[:end], self._task_ids[:end]
            self._taken = 0
        return batch
