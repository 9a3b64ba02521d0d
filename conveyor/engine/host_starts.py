"""The starts in hand of one host: instants that the pacing booked for this worker, and all that the
worker knows about the pace of the host.

It is a book-keeper: it neither waits nor asks anybody. All moments are monotonic seconds of this
worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

import anyio

from conveyor.domain.hosts import HostRule
from conveyor.ports.pacing import HORIZON, Booking, HostState

AHEAD = 1.0
"""Seconds ahead for which a worker books the starts of a host, and receives the messages for
them."""
LATE = 0.05
"""Seconds after its instant in which a start is still used: more would let a second see more starts
than the rate."""
KEPT = 2.0
"""Seconds for which a start is kept where nothing spaces them."""
SHORT_SECONDS = 0.05
"""Seconds that a call to a host is taken to last before one has ended: a message that comes too
early waits in hand, one that comes too late leaves the host idle."""
_NEWEST = 0.2
"""Weight of the latest call in the mean time of those to its host."""


class RuleState:
    """The state that hosts under one rule of the server share in this worker: none of them has a
    start before `full_until`, and `freed` is set when a call of one ends."""

    __slots__ = ("freed", "full_until")

    def __init__(self) -> None:
        self.full_until = -math.inf
        self.freed = anyio.Event()

    def wake(self) -> None:
        """Let messages that wait for a permit look again."""
        self.freed.set()
        self.freed = anyio.Event()


class HostStarts:
    """The starts in hand of one host under its `rules`, for the lanes of that host alone. They are
    booked under the keys of `steps`. What the host has said was seen last at `seen_at`: it wants
    starts `slow` seconds apart. So does its robots.txt, by `asked`: starts booked until `asked_at`
    did not heed that. The latest call here began at `begun`. Starts until `void_until` were booked
    under rules that are no more.

    The latest start that was booked is at `last`. No start is booked before `ask_at`, and none
    while the host is closed, until `closed_until`, or while another booking is under way. `seconds`
    is the mean time of its calls, once `has_served`. `knocking` messages wait for the host, one
    after the other. `state` is that of the server's rule.
    """

    __slots__ = (
        "ask_at",
        "asked",
        "asked_at",
        "begun",
        "booked_at",
        "ceiling",
        "closed_until",
        "has_served",
        "is_booking",
        "knocking",
        "last",
        "rules",
        "seconds",
        "seen_at",
        "slow",
        "starts",
        "state",
        "steps",
        "turn",
        "void_until",
    )

    def __init__(self, rules: tuple[HostRule, ...]) -> None:
        self.rules = rules
        self.steps: dict[str, float] = {}
        self.seen_at = -math.inf
        self.slow = self.asked = 0.0
        self.asked_at = self.begun = self.void_until = -math.inf
        self.starts: deque[float] = deque()
        self.booked_at = self.ask_at = self.last = self.closed_until = -math.inf
        self.is_booking = False
        self.ceiling = 0
        self.seconds = SHORT_SECONDS
        self.has_served = False
        self.knocking = 0
        self.turn = anyio.Lock()
        self.state = RuleState()

    def change(self, rules: tuple[HostRule, ...], steps: dict[str, float]) -> None:
        """Heed other rules. Where they space starts more widely, drop those in hand: they are
        lost."""
        before = self.interval
        self.rules, self.steps = rules, steps
        if self.interval > before:
            self.drop_until(self.last)

    def drop_until(self, moment: float) -> None:
        """Use no start until then: it was booked under other rules."""
        self.void_until = max(self.void_until, moment)
        self.starts = deque(start for start in self.starts if start > self.void_until)

    @property
    def line(self) -> str:
        """The name of the line in which its messages have their places."""
        by_rate = max(self.rules, key=lambda rule: (rule.rate > 0, -rule.rate, rule.limit > 0))
        return by_rate.key

    @property
    def interval(self) -> float:
        """The seconds between two starts, 0 where nothing spaces them."""
        return max(self.slow, self.asked, *(1 / rule.rate for rule in self.rules if rule.rate), 0.0)

    @property
    def is_slow(self) -> bool:
        """True if its starts are so far apart that none is to be lost."""
        return self.interval > AHEAD

    @property
    def spacing(self) -> float:
        """The seconds between two calls as fast as all limits allow."""
        by_limit = [self.seconds / rule.limit for rule in self.rules if rule.limit]
        return max(self.interval, *by_limit, 0.0)

    def served(self, took: float) -> None:
        """Take in how long a call lasted."""
        self.seconds += (took - self.seconds) * (_NEWEST if self.has_served else 1.0)
        self.has_served = True

    @property
    def late(self) -> float:
        """The seconds after its instant in which a start is still used: more where starts are far
        apart."""
        interval = self.interval
        return max(LATE, min(interval / 10, interval - 1 + LATE))

    def may_ask(self, now: float) -> bool:
        """Tell whether there may be a start for a message: none is booked beyond HORIZON."""
        return now >= max(self.ask_at, self.last + self.interval - HORIZON)

    def keep(self, start: float) -> None:
        """Have a start in hand that its message cannot wait for."""
        if self.interval:
            self.starts = deque(sorted((*self.starts, start)))

    def pop(self, now: float) -> float | None:
        """Take the next spaced start that is in hand; None if there is none."""
        self.lapse(now)
        if not self.interval or now < self.closed_until:
            return None
        while self.starts and self.starts[0] < now:
            self.starts.popleft()
        return self.starts.popleft() if self.starts else None

    def usable(self, now: float) -> int:
        """Count the starts for which messages may be received now; forget those that are over."""
        self.lapse(now)
        starts, early = self.starts, now + AHEAD
        if not starts or now < self.closed_until:
            return 0
        return len(starts) if starts[-1] <= early else sum(start <= early for start in starts)

    def lapse(self, now: float) -> None:
        """Forget the starts that are over."""
        starts = self.starts
        if self.interval:
            while starts and starts[0] < now - LATE:
                starts.popleft()
        elif starts and now - self.booked_at > KEPT:
            starts.clear()

    def wanted(self, most: int, now: float) -> int:
        """Return how many starts to book now, of `most` that could be used."""
        if self.is_booking or now < self.ask_at or now < self.closed_until:
            return 0
        interval = self.interval
        if not interval:
            return most
        return min(most, math.ceil(AHEAD / interval)) if self.last - now < AHEAD else 0

    def learn(self, booking: Booking, now: float) -> list[float]:
        """Take in what the pacing answered; return the instants of the starts."""
        self.ceiling, self.slow, self.seen_at = booking.ceiling, booking.interval, now
        if booking.closed_for > 0:
            self.closed_until = now + booking.closed_for
            self.starts.clear()
        starts = [now + start for start in booking.starts]
        if starts:
            self.booked_at, self.last = now, max(self.last, starts[-1])
        return starts

    def see(self, states: Collection[HostState], now: float) -> None:
        """Take in what the host has said."""
        self.seen_at = now
        self.ceiling = min((state.ceiling for state in states if state.ceiling), default=0)
        self.slow = max((state.interval for state in states), default=0.0)
        closed_for = max((state.closed_for for state in states), default=0.0)
        if closed_for > 0:
            self.closed_until = now + closed_for
            self.starts.clear()

    def heed(self, asked: float, now: float) -> None:
        """Take in the interval that robots.txt asks for; with a longer one than was known, drop the
        starts in hand."""
        if asked > max(self.asked, self.slow):
            self.asked_at = now
            self.starts.clear()
        self.asked = asked

    def is_stale(self, start: float, booked_at: float) -> bool:
        """Tell whether a start that was booked then does not heed what the host asks for. The
        ledger's starts come a little closer when an answer is slow."""
        asked = max(self.asked, self.slow)
        too_soon = start < self.begun + 0.9 * asked - LATE
        return asked > 0 and (booked_at <= self.asked_at or too_soon)

    def next_due(self, now: float) -> float | None:
        """Return when starts may be used or booked, if that is later than `now`."""
        due = max(self.ask_at, self.closed_until)
        if self.starts and self.starts[0] - AHEAD > now:
            due = max(due, self.starts[0] - AHEAD)
        elif self.interval and not self.starts:
            due = max(due, self.last - AHEAD)
        return due if due > now else None
