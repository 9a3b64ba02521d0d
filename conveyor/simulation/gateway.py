"""The gateway of a simulation: the duration of calls, and the number in flight."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from itertools import accumulate

from conveyor.domain.hosts import host_and_port
from conveyor.domain.model import Problem, TaskFailure
from conveyor.engine.reserve import CALLER_KEY
from conveyor.gateway.problems import unconnected
from conveyor.ports.gateway import (
    Absence,
    HostRefusal,
    ScrapeFailed,
    ScrapeRequest,
    Shared,
    Success,
)
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Link
from conveyor.simulation.loop import VirtualTime
from conveyor.wire.errors import TransportError, TransportTrouble

WINDOW = 0.9
"""Seconds over which starts of calls are counted: a second, but for the time of an answer of the
ledger on its way."""
REFUSAL = 0.05
"""Seconds until the gateway has refused a call for load."""

_SUCCESS = Success(b"<p>simulated</p>", "text/html")
NEWS = 0.25
"""Seconds after a host's refusal in which all workers hear of it."""
_THROTTLED = Problem(code="rate_limited", title="Too many requests", status=429)
_TIMEOUT = Problem(code="timeout", title="The gateway did not answer in time", status=504)


class HostPicker:
    """Picks the host of each task: one after the other, or by Zipf's law, with that exponent, where
    `skew` is not 0. One job has one host of its own."""

    def __init__(self, hosts: int, *, skew: float = 0.0, seed: int = 0) -> None:
        self._hosts = hosts
        self._random = stream(seed, "hosts")
        weights = [1 / (number + 1) ** skew for number in range(hosts)] if skew else []
        self._shares = list(accumulate(weights))

    def url(self, job: int, index: int) -> str:
        """Return the URL of a task, by the numbers of its job and of itself, from 0."""
        if self._hosts == 1:
            return f"{host_url(job, is_shared=False)}{index}"
        host = index % self._hosts
        if self._shares:
            host = bisect(self._shares, self._random.random() * self._shares[-1])
        return f"{host_url(host)}{job}/{index}"


def host_url(host: int, *, is_shared: bool = True) -> str:
    """Return the URL of a host by its number from 0: of one that jobs share, or that of a job."""
    return f"https://{host}.{'host.' if is_shared else ''}simulated.example/"


def call_time(latency: Latency, seed: int, *, url: str, attempt: int) -> float:
    """Return the seconds that an attempt, from 1, at a task takes, independent of worker and
    time."""
    return latency.draw_for(seed, f"{url} {attempt}")


class Load:
    """The calls in flight of one job, whose key is the job's id. `names` are those under which the
    ledger keeps permits for them: the job's and the caller's."""

    __slots__ = ("at", "cap", "in_flight", "latency", "names", "over", "peak")

    def __init__(self, cap: int, latency: Latency, at: float, names: tuple[str, ...]) -> None:
        self.cap = cap
        self.names = names
        self.latency = latency
        self.in_flight = 0
        self.peak = 0
        self.over = 0.0
        self.at = at


class HostLoad:
    """The calls of one host: `peak` is the most in flight, `most_starts` the most that began within
    WINDOW, `starts` all that began, `seconds` the time spent in calls up to the last of them. It
    refuses calls until `refuses_until`, and has told of that since `told_at` unless it `is_silent`;
    `uninvited` calls began all the same, later than NEWS."""

    __slots__ = (
        "_at",
        "_recent",
        "_spent",
        "first",
        "in_flight",
        "is_silent",
        "last",
        "most_starts",
        "peak",
        "refuses_until",
        "seconds",
        "starts",
        "told_at",
        "uninvited",
    )

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self.in_flight = self.peak = self.most_starts = self.starts = self.uninvited = 0
        self._spent = self._at = self.first = self.last = self.seconds = 0.0
        self.refuses_until = -math.inf
        self.told_at = math.inf
        self.is_silent = False

    def begin(self, now: float) -> None:
        """Note a call that begins."""
        recent = self._recent
        self._move(now, 1)
        self.peak = max(self.peak, self.in_flight)
        while recent and recent[0] <= now - WINDOW:
            recent.popleft()
        recent.append(now)
        self.most_starts = max(self.most_starts, len(recent))
        self.uninvited += self.told_at + NEWS < now < self.refuses_until
        self.first = self.first if self.starts else now
        self.starts += 1
        self.last, self.seconds = now, self._spent

    def end(self, now: float) -> None:
        """Note a call that ends."""
        self._move(now, -1)

    def refuse(self, now: float, seconds: float, *, is_silent: bool = False) -> None:
        """Refuse all calls for a time."""
        self.refuses_until, self.told_at = now + seconds, math.inf
        self.is_silent = is_silent

    def tell(self, now: float) -> float:
        """Return for how long calls are refused, as the answer to one; 0 if they are not."""
        left = max(0.0, self.refuses_until - now)
        if left and not self.is_silent:
            self.told_at = min(self.told_at, now)
        return left

    def use(self, limit: int, rate: float) -> float:
        """Return the part of its limits that was used, from its first to its last start."""
        span = self.last - self.first
        if span <= 0:
            return 0.0
        by_limit = self.seconds / (limit * span) if limit else 0.0
        by_rate = (self.starts - 1) / (rate * span) if rate else 0.0
        return max(by_limit, by_rate)

    def _move(self, now: float, change: int) -> None:
        self._spent += self.in_flight * (now - self._at)
        self._at = now
        self.in_flight += change


class HostLoads:
    """The calls of each host, by name and port."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.loads: dict[str, HostLoad] = {}

    def of(self, host: str) -> HostLoad:
        """Return the calls of a host."""
        return self.loads.setdefault(host, HostLoad())

    def begin(self, url: str) -> None:
        """Note a call that begins."""
        self.of(host_and_port(url)).begin(self._time.seconds())

    def end(self, url: str) -> None:
        """Note a call that ends."""
        self.of(host_and_port(url)).end(self._time.seconds())

    def left(self, url: str) -> float:
        """Return for how long the host of a call refuses calls."""
        return self.of(host_and_port(url)).refuses_until - self._time.seconds()

    def tell(self, url: str) -> HostRefusal | None:
        """Return the refusal of a call, if its host refuses calls."""
        load = self.of(host := host_and_port(url))
        seconds = load.tell(self._time.seconds())
        if not seconds:
            return None
        return HostRefusal(host, None if load.is_silent else seconds)

    @property
    def peak(self) -> int:
        """The most calls in flight of any host."""
        return max((load.peak for load in self.loads.values()), default=0)

    @property
    def most_starts(self) -> int:
        """The most calls that began to any host within WINDOW."""
        return max((load.most_starts for load in self.loads.values()), default=0)

    @property
    def uninvited(self) -> int:
        """The calls that began to a host that was closed."""
        return sum(load.uninvited for load in self.loads.values())

    def use(self, limit: int, rate: float) -> float:
        """Return the mean part of their limits that hosts with several calls used."""
        used = [load.use(limit, rate) for load in self.loads.values() if load.starts > 1]
        return sum(used) / len(used) if used else 0.0


class GatewayService:
    """The gateway that every process calls. The key of a call is its job's id.

    `limits`: calls beyond the lowest of them at a time are refused with 429. `slowness` multiplies
    the time of calls that start. While `down` is not 0 nobody reaches it; `unreached` counts who
    tried. `calls` and `throttled` count calls and refusals. `abandoned`
    counts calls of processes that were paused until their permits had lapsed: nothing can end such
    a call, so it counts as in flight only up to that moment. `steady` is the moment of the last
    first start of a task, with the call-seconds spent up to then.
    """

    def __init__(self, time: VirtualTime, *, seed: int) -> None:
        self._time = time
        self._seed = seed
        self.loads: dict[str, Load] = {}
        self.hosts = HostLoads(time)
        self.limits: list[int] = []
        self.slowness = 1.0
        self.down = self.unreached = 0
        self.calls = self.throttled = self.abandoned = 0
        self.in_flight = self.peak = self.admitted = 0
        self.steady = (0.0, 0.0)
        self.attempts: dict[str, int] = {}
        self._area = 0.0
        self._at = 0.0

    def is_down(self) -> bool:
        """Return whether nobody reaches it now."""
        return self.down > 0

    def open(self, job_id: str, cap: int, latency: Latency, *, caller: str = "") -> None:
        """Register a job of a caller: its cap, and the latency of its calls."""
        names = (job_id, CALLER_KEY + caller)
        self.loads[job_id] = Load(cap, latency, self._time.seconds(), names)

    def call_seconds(self) -> float:
        """Return the seconds spent in calls up to now."""
        return self._area + self.in_flight * (self._time.seconds() - self._at)

    def seconds_over_cap(self) -> float:
        """Return the seconds that jobs had more calls in flight than their caps, added up."""
        for load in self.loads.values():
            self.move(load, 0)
        return sum(load.over for load in self.loads.values())

    def begin(self, load: Load, url: str) -> tuple[int, float]:
        """Start a call; return its number among the calls of its task, and its duration."""
        self.calls += 1
        attempt = self.attempts.get(url, 0) + 1
        self.attempts[url] = attempt
        self.move(load, 1)
        if attempt == 1:
            self.steady = (self._at, self._area)
        seconds = call_time(load.latency, self._seed, url=url, attempt=attempt)
        return attempt, seconds * self.slowness

    def move(self, load: Load, change: int) -> None:
        """Change the number of a job's calls in flight, from now on.

        A peak counts only lasting calls: one that is cut off at the very moment at which it begins,
        as when a process wakes up to find its permits gone, has not left its process.
        """
        now = self._time.seconds()
        if now > load.at:
            load.peak = max(load.peak, load.in_flight)
            if load.in_flight > load.cap:
                load.over += now - load.at
        load.at = now
        load.in_flight += change
        if now > self._at:
            self.peak = max(self.peak, self.in_flight)
        self._area += self.in_flight * (now - self._at)
        self._at = now
        self.in_flight += change


class SimulatedGateway:
    """The gateway port of one process. `running` holds its calls, oldest first."""

    def __init__(self, service: GatewayService, link: Link) -> None:
        self.service = service
        self.link = link
        self.running: dict[SimulatedCall, None] = {}

    def scrape(self, request: ScrapeRequest) -> SimulatedCall:
        """Make one call; a refused or timed out one raises ScrapeFailed on entry."""
        return SimulatedCall(self, request)

    def abandon_beyond(self, name: str, usable: int) -> None:
        """Abandon the oldest calls beyond `usable`, the number that still have permits under a
        name: those of a job, or of a caller."""
        calls = [call for call in self.running if name in call.load.names and not call.abandoned]
        for call in calls[: max(0, len(calls) - usable)]:
            call.abandoned = True
            self.service.abandoned += 1
            self.service.move(call.load, -1)

    async def aclose(self) -> None:
        """Close nothing: no connection is open."""


class SimulatedCall:
    """One call, as a context: made when it is entered.

    It ends at the gateway when its time is up, whether or not its process runs then, or when it is
    cancelled, or when its process is killed.
    """

    __slots__ = ("_gateway", "_timeout", "_url", "abandoned", "load")

    def __init__(self, gateway: SimulatedGateway, request: ScrapeRequest) -> None:
        self._gateway = gateway
        self._url = request.url
        self._timeout = request.timeout
        self.load = gateway.service.loads[request.api_key]
        self.abandoned = False

    async def __aenter__(self) -> Success:
        gateway, link = self._gateway, self._gateway.link
        if link.gate.halted:
            await link.gate.passed()
        service = gateway.service
        if service.is_down():
            service.unreached += 1
            link.note(f"unreached {self._url}")
            error = TransportError(TransportTrouble.UNREACHABLE, is_connecting=True)
            raise unconnected(error, Absence(Shared.GATEWAY))
        attempt, seconds = service.begin(self.load, self._url)
        link.note(f"call {self._url} {attempt}")
        refused = bool(service.limits) and service.admitted >= min(service.limits)
        if refused:
            service.throttled += 1
            seconds = REFUSAL
        else:
            service.admitted += 1
        if service.hosts.left(self._url) > 0:
            seconds = REFUSAL
        gateway.running[self] = None
        service.hosts.begin(self._url)
        try:
            await link.sleep(min(seconds, self._timeout))
        finally:
            service.hosts.end(self._url)
            service.admitted -= not refused
            del gateway.running[self]
            if not self.abandoned:
                service.move(self.load, -1)
        if link.gate.halted:
            await link.gate.passed()
        if service.is_down():
            link.note(f"broken {self._url} {attempt}")
            broken = TransportError(TransportTrouble.INTERRUPTED, sent=1)
            raise unconnected(broken, Absence(Shared.GATEWAY))
        link.note(f"answer {self._url} {attempt}")
        if refused:
            raise ScrapeFailed(
                _THROTTLED, TaskFailure.RATE_LIMITED, retryable=True, burns_attempt=False
            )
        if (refusal := service.hosts.tell(self._url)) is not None:
            raise _refused(refusal)
        if seconds > self._timeout:
            raise ScrapeFailed(_TIMEOUT, TaskFailure.TIMEOUT, retryable=True)
        return _SUCCESS

    async def __aexit__(self, *_error: object) -> None:
        """Do nothing: the body has arrived already."""


def _refused(refusal: HostRefusal) -> ScrapeFailed:
    """Return the verdict on a call that its host refused."""
    left = refusal.seconds or 0.0
    failed = ScrapeFailed(_THROTTLED, TaskFailure.RATE_LIMITED, retryable=True, retry_after=left)
    failed.refusal = refusal
    return failed
