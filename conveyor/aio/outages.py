"""Stop calling while something is away that all tasks share, and try it again each second.

One circuit serves a worker: an answer needs the gateway or the network, the resolver and this
process's own means, so one answer shows that all of them are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import Problem, TaskFailure
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Absence, Postponed, ScrapeFailed, Shared

TRIAL_EVERY = 1.0
"""Seconds from one trial call of a worker to the next."""

UNHEARD_SECONDS = 10.0
"""Seconds after its first call from which a gateway that has not answered yet is named."""

TITLES = {
    Shared.GATEWAY: "the gateway cannot be reached",
    Shared.RESOLVER: "no host name can be looked up",
    Shared.NETWORK: "the network cannot be reached",
    Shared.PROCESS: "this server has no file descriptor or memory left for a call",
}
_log = logging.getLogger("conveyor.tasks")


class Outage(msgspec.Struct, frozen=True):
    """Something shared that is away since a moment, in milliseconds; `was_heard` tells whether an
    answer ever came since the process began. `detail` holds no secret."""

    shared: Shared
    detail: str
    since: int
    was_heard: bool = True


class Outages:
    """The circuit around the calls of one worker. `gateway` is its address, without credentials.

    While `is_shut`, only trials may pass. While `awaits_answer`, an answer is news.
    """

    def __init__(self, clock: Clock, *, gateway: str = "") -> None:
        self._clock = clock
        self._gateway = gateway
        self._now: Outage | None = None
        self._was_heard = False
        self._first_call: tuple[int, float] | None = None
        self._ask_at = self._begin_at = self._began_at = 0.0
        self._has_trial = False
        self._is_late = False
        self.is_shut = False
        self.awaits_answer = True
        self._counts = dict.fromkeys((part.value for part in TITLES), 0)
        self._others: list[Callable[[], Outage | None]] = []

    # -- what the handlers tell --

    def heard(self) -> None:
        """Note that an answer came, whatever it said: let all work pass."""
        self._was_heard = True
        self.awaits_answer = self.is_shut = self._is_late = self._has_trial = False
        if self._now is not None:
            _log.info("%s is back: work goes on", self._now.shared.value)
            self._now = None

    def judge(self, failed: ScrapeFailed) -> None:
        """Learn from a failure, and spare its task if something shared was away."""
        if isinstance(failed, Postponed):
            return
        absence = failed.absence
        if absence is None:
            if failed.sent or failed.retryable:
                self.heard()
            return
        if absence.shared is not None:
            self._shut(absence.shared, failed)
        elif self._now is not None and self._now.shared is Shared.GATEWAY and failed.sent:
            # It takes connections again, and no more.
            self._retell(self._named("the gateway gives no answer", failed.problem.title))
        failed.is_spared = self.is_shut
        if self._now is not None:
            # The wall clock may have been set since.
            lasted = self._clock.monotonic() - self._began_at
            failed.waits_since = self._clock.now() - int(lasted * 1_000)

    def admit(self) -> None:
        """Begin a call while an answer is awaited. Raises ScrapeFailed if none may be made now,
        without a mark on its task."""
        if self._first_call is None:
            self._first_call = self._clock.now(), self._clock.monotonic()
        if self._now is None or self._has_trial:
            self._has_trial = False
            return
        problem = Problem(ErrorCode.GATEWAY_UNREACHABLE.value, TITLES[self._now.shared], 503)
        failed = ScrapeFailed(problem, TaskFailure.GATEWAY_ERROR, retryable=True)
        failed.sent, failed.absence = 0, Absence()
        raise failed

    def ended(self, *, by_deadline: bool) -> None:
        """Note whether a task that was spared has waited for too long. After one that has, all may
        pass, to end without a call."""
        self._is_late = by_deadline

    # -- what the dispatcher asks --

    def most_to_ask(self, now: float) -> int | None:
        """Return how many messages may be asked for now, or None for any number."""
        if not self.is_shut or self._is_late:
            return None
        return 1 if now >= self._ask_at else 0

    def may_begin(self, now: float) -> bool:
        """Return whether a message may be begun now."""
        return not self.is_shut or self._is_late or now >= self._begin_at

    def asked(self, now: float) -> None:
        """Note that messages are asked for."""
        if self.is_shut and now >= self._ask_at:
            self._ask_at = now + TRIAL_EVERY

    def begun(self, now: float) -> None:
        """Note that a message is begun: the call of one a second is a trial."""
        if self.is_shut and now >= self._begin_at:
            self._begin_at = now + TRIAL_EVERY
            self._has_trial = True

    def next_trial(self, now: float) -> float | None:
        """Return when the next trial may be asked for or begun, if one has to wait."""
        if not self.is_shut:
            return None
        return min((at for at in (self._ask_at, self._begin_at) if at > now), default=None)

    # -- what is told to people --

    def counts(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how often each was found away, for metrics."""
        return [((part,), count) for part, count in self._counts.items()]

    def tell_also(self, other: Callable[[], Outage | None]) -> None:
        """Tell of what another circuit guards, too."""
        self._others.append(other)

    def now(self) -> list[Outage]:
        """Return what is away."""
        found = [self._now or self._unheard(), *(other() for other in self._others)]
        return [outage for outage in found if outage is not None]

    def _unheard(self) -> Outage | None:
        """Name a gateway that has not answered since the start, though its first call is old."""
        if self._was_heard or self._first_call is None or "://" not in self._gateway:
            return None
        since, began = self._first_call
        if self._clock.monotonic() - began < UNHEARD_SECONDS:
            return None
        detail = f"the gateway {self._gateway} has not answered yet"
        return Outage(Shared.GATEWAY, detail, since, was_heard=False)

    def _shut(self, shared: Shared, failed: ScrapeFailed) -> None:
        title = TITLES[shared]
        if shared is Shared.GATEWAY:
            # Of a call that broke on its way only the look behind it tells something.
            title = self._named(title, "" if failed.sent else failed.problem.title)
        if self._now is not None:
            self._now = Outage(shared, title, self._now.since, self._was_heard)
            return
        self._now = Outage(shared, title, self._clock.now(), self._was_heard)
        self._counts[shared.value] += 1
        self._ask_at = self._begin_at = self._began_at = self._clock.monotonic()
        self.is_shut = self.awaits_answer = True
        never = "" if self._was_heard else ", and nothing has answered since the start"
        _log.warning("%s%s: work waits, but for a trial each second", title, never)

    def _named(self, title: str, cause: str) -> str:
        """Name the gateway by its address, and say the cause, if it is known."""
        if self._gateway:
            title = title.replace("the gateway", f"the gateway {self._gateway}")
        return f"{title}: {cause}" if cause else title

    def _retell(self, detail: str) -> None:
        """Say in other words what is away."""
        if self._now is not None:
            self._now = Outage(self._now.shared, detail, self._now.since, self._now.was_heard)
