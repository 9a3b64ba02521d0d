"""Places of deliveries in one worker: who may be posted to now, and who waits for a turn."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

MOST_AT_A_TIME = 20
"""Attempts of a worker under way."""
MOST_SLOW = 10
"""Attempts under way to slow hosts, all together. With as many under way in all, a host that is not
known to be prompt gets one at a time."""
MOST_UNPROVEN = 15
"""Attempts under way of one caller to hosts that are not known to be prompt: the rest is for other
callers."""
MOST_TO_A_HOST = 8
"""Attempts under way to one host."""
MOST_OF_A_CALLER = 4
"""Attempts under way of one caller to one host."""
FAILING_AFTER = 20
"""Failures in a row of one caller at one URL after which one attempt at a time goes there."""
SLOW_AFTER = 3.0
"""Seconds of its last attempt that make a host a slow one."""
MOST_REMEMBERED = 10_000
"""URLs whose failures are counted, and hosts whose pace and turns are known; those that were heard
of longest ago are forgotten first."""
MOST_WAITING = 100
"""Deliveries of one caller to one host that follow as soon as there is a place. Others are found by
a later look."""
MOST_WAITING_IN_ALL = 5_000

K = TypeVar("K")
V = TypeVar("V")


class Place(NamedTuple):
    """The place of an attempt: a caller's connection to a host, for a URL."""

    caller: str
    host: str
    url: str


class Places:
    """The attempts under way in one worker, the URLs that keep failing, and the pace of hosts."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, ...]] = Counter()
        self._failures: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._is_slow: OrderedDict[str, bool] = OrderedDict()
        self._turns: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._turn = 0

    def take(self, place: Place) -> bool:
        """Take a place; return False if it is full."""
        if not self.is_free(place):
            return False
        self._taken.update(_shares(place))
        self._turn += 1
        for one in ((place.caller,), (place.caller, place.host)):
            _remember(self._turns, one, self._turn)
        return True

    def is_free(self, place: Place) -> bool:
        """Return whether one more attempt may go there."""
        everything, host, caller, url = _shares(place)
        is_failing = self._failures.get((place.caller, place.url), 0) >= FAILING_AFTER
        return (
            self._taken[everything] < MOST_AT_A_TIME
            and self._taken[host] < MOST_TO_A_HOST
            and self._taken[caller] < MOST_OF_A_CALLER
            and not (is_failing and self._taken[url])
            and self._has_share(place)
        )

    def _has_share(self, place: Place) -> bool:
        """Return whether one more attempt leaves enough places to other hosts and callers."""
        is_slow = self._is_slow.get(place.host)
        if is_slow is False:
            return True
        if is_slow and self._slow_under_way() >= MOST_SLOW:
            return False
        if self._unproven_under_way(place.caller) >= MOST_UNPROVEN:
            return False
        return self._taken[()] < MOST_SLOW or not self._taken[place.host,]

    def _slow_under_way(self) -> int:
        hosts = [share[0] for share in self._taken if len(share) == 1]
        return sum(self._taken[host,] for host in hosts if self._is_slow.get(host))

    def _unproven_under_way(self, caller: str) -> int:
        mine = [share for share in self._taken if len(share) == 2 and share[0] == caller]
        return sum(self._taken[share] for share in mine if self._is_slow.get(share[1]) is not False)

    def last_turn(self, caller: str, host: str) -> tuple[int, int]:
        """Return when the caller, and the caller at that host, last had a turn: the order in which
        those that wait have the next one."""
        return self._turns.get((caller,), 0), self._turns.get((caller, host), 0)

    def give_back(self, place: Place) -> None:
        """Give a place back."""
        self._taken.subtract(_shares(place))
        for share in _shares(place):
            if not self._taken[share]:
                del self._taken[share]

    def is_idle(self) -> bool:
        """Return whether no attempt is under way."""
        return not self._taken

    def note(self, place: Place, *, delivered: bool, seconds: float) -> None:
        """Note the outcome of an attempt, and how long it took."""
        _remember(self._is_slow, place.host, seconds >= SLOW_AFTER)
        url = (place.caller, place.url)
        failures = self._failures.pop(url, 0) + 1
        if not delivered:
            _remember(self._failures, url, failures)


class WaitingDelivery(NamedTuple):
    """A delivery that was put off: the place that it had none of, and its version since."""

    delivery_id: str
    place: Place
    version: int


class DeliveryLine:
    """Deliveries that were put off, and follow as soon as they have a place. Callers take turns,
    and so do the hosts of a caller."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], dict[str, WaitingDelivery]] = {}
        self._size = 0

    def length(self, place: Place) -> int:
        """Return how many of the caller wait for the host."""
        return len(self._lines.get((place.caller, place.host), ()))

    def join(self, waiting: WaitingDelivery) -> None:
        """Let a delivery wait, in its former place if it waits already; turn it away if too many
        do."""
        place, delivery_id = waiting.place, waiting.delivery_id
        line = self._lines.get((place.caller, place.host), {})
        if delivery_id not in line:
            if len(line) >= MOST_WAITING or self._size >= MOST_WAITING_IN_ALL:
                return
            self._lines[place.caller, place.host] = line
            self._size += 1
        line[delivery_id] = waiting

    def leave(self, place: Place, delivery_id: str) -> None:
        """Let a delivery wait no more, if it does."""
        line = self._lines.get((place.caller, place.host), {})
        if line.pop(delivery_id, None) is not None:
            self._size -= 1
            if not line:
                del self._lines[place.caller, place.host]

    def take_next(self, places: Places) -> WaitingDelivery | None:
        """Take a place for the one whose turn it is, and let it leave; return None if none of them
        has a place."""
        for waiting in self._in_turn(places):
            if places.take(waiting.place):
                self.leave(waiting.place, waiting.delivery_id)
                return waiting
        return None

    def _in_turn(self, places: Places) -> Iterator[WaitingDelivery]:
        for line in sorted(self._lines, key=lambda line: places.last_turn(*line)):
            yield from self._lines[line].values()

    def clear(self) -> None:
        """Let all leave."""
        self._lines.clear()
        self._size = 0


def _shares(place: Place) -> tuple[tuple[str, ...], ...]:
    """Return what is counted: all attempts, those to the host, of the caller to it, and to the
    URL."""
    caller, host, url = place
    return (), (host,), (caller, host), (caller, host, url)


def _remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Note a value as the newest, and forget the oldest one of too many."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > MOST_REMEMBERED:
        known.popitem(last=False)
