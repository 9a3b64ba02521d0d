"""One queue in memory, as weak as SQS: what a message goes through between send and delete.

Pure and synchronous: no clock, no waiting. `now` is monotonic seconds. Used by `queues` alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from conveyor.ports.queues import Delivery, Message

_READY = -1.0
_GONE = -2.0
_SLACK = 1_024
_NO_INDEX = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Weaknesses that tests switch on.

    `reorder`: each message is drawn from among so many that wait; 0 keeps the order.
    `duplicates`: the share of messages of which a second copy comes, whatever happens to the first.
    `random`: where the draws come from.
    """

    random: Callable[[], float]
    reorder: int = 0
    duplicates: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLimit:
    """What happens to a message that was received `receives` times, at least 1, and is visible
    again: the next receive hands it to `move` and forgets it."""

    receives: int
    move: Callable[[Message], None]


class Held:
    """A message that is more than a waiting reference: it was received once, or is delayed.

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
        self._ready: deque[Held] = deque()
        self._received: dict[str, Held] = {}
        self._unseen = 0
        self._order = 0
        # One entry for all that were hidden together; what moved on meanwhile is passed over.
        self._hidden: list[tuple[float, int, list[Held]]] = []
        self._in_hidden = 0

    @property
    def size(self) -> int:
        """How many messages are held here, hidden ones included."""
        return len(self._received) + self._unseen

    @property
    def refilling(self) -> bool:
        """Whether more is being fetched from elsewhere."""
        return False

    @property
    def starved(self) -> bool:
        """Whether more should be fetched from elsewhere."""
        return False

    @property
    def depth(self) -> int:
        """About how many messages wait, hidden ones included."""
        return self.size

    def put(self, message: Message, *, now: float, delay: float) -> None:
        """Add a message, to be seen after `delay` seconds."""
        self._put(Held(message), now=now, delay=delay)

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
        """Make visible what has been hidden for long enough."""
        hidden = self._hidden
        while hidden and (hidden[0][0] <= now or not self._alive(hidden[0])):
            due, _, batch = heapq.heappop(hidden)
            self._in_hidden -= len(batch)
            for held in batch:
                if held.due == due:
                    held.due = _READY
                    self._ready.append(held)

    def next_due(self) -> float | None:
        """When the next hidden message becomes visible, if there is one."""
        return self._hidden[0][0] if self._hidden else None

    def _put(self, held: Held, *, now: float, delay: float) -> None:
        self._unseen += 1
        if delay > 0:
            held.due = now + delay
            self._hide([held], held.due)
        else:
            self._ready.append(held)

    def _draw(self, limit: int) -> list[Held]:
        if self._faults is not None:
            return self._draw_badly(limit, self._faults)
        batch: list[Held] = []
        ready = self._ready
        while ready and len(batch) < limit:
            held = ready.popleft()
            if self._may_be_received(held):
                batch.append(held)
        if len(batch) < limit:
            batch += self._fresh(limit - len(batch))
        return batch

    def _draw_badly(self, limit: int, faults: Faults) -> list[Held]:
        pool = [held for held in self._ready if self._may_be_received(held)]
        self._ready.clear()
        wanted = limit + faults.reorder - len(pool)
        if wanted > 0:
            pool += self._fresh(wanted)
        batch: list[Held] = []
        while pool and len(batch) < limit:
            among = min(len(pool), faults.reorder + 1)
            held = pool.pop(int(faults.random() * among))
            batch.append(held)
            if held.receive_count == 0 and faults.random() < faults.duplicates:
                copy = Held(held.message, held.index)
                copy.receive_count = 1
                self._put(copy, now=0.0, delay=0.0)
        self._ready.extendleft(reversed(pool))
        return batch

    def _may_be_received(self, held: Held) -> bool:
        """Whether a message that was visible still is there; one received too often leaves now."""
        if held.due == _GONE:
            return False
        limit = self._receive_limit
        if limit is None or held.receive_count < limit.receives:
            return True
        self._leave(held)
        limit.move(held.message)
        return False

    def _leave(self, held: Held) -> None:
        if held.receipt is None:
            self._unseen -= 1
        else:
            del self._received[held.receipt]

    def _fresh(self, _limit: int) -> list[Held]:
        """More messages than those held, for a queue that keeps some elsewhere."""
        return []

    def _hide(self, batch: list[Held], due: float) -> None:
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
    def _alive(entry: tuple[float, int, list[Held]]) -> bool:
        due, _, batch = entry
        return any(held.due == due for held in batch)
