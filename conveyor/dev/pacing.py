"""The pacing and the robots port in memory, for the workers of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from conveyor.domain.hosts import HostLine
from conveyor.ports.clock import Clock
from conveyor.ports.pacing import (
    CEILING_LASTS,
    HORIZON,
    IDLE,
    NOTHING_ELSE,
    Booking,
    HostState,
    Pacing,
)
from conveyor.ports.robots import KeptFile, RobotsFiles

_SLACK = 64
KEPT_FROM = 1.0
"""Least seconds of a pause that is kept for the next process: a shorter one is over by its
start."""


@dataclass(slots=True)
class _Host:
    """The next start of a host, `apart` from the last one, its line, the end of the time for which
    it is closed, its ceiling, which changed last at `lowered_at` and was `halved_at`, and its own
    `interval`, until it is slow no more; in monotonic seconds."""

    following: float
    apart: float = 0.0
    line: HostLine = field(default_factory=HostLine)
    closed_until: float = -math.inf
    ceiling: int = 0
    lowered_at: float = -math.inf
    halved_at: float = -math.inf
    interval: float = 0.0
    slow_until: float = -math.inf

    def state(self, now: float) -> HostState:
        ceiling = self.ceiling if now < self.lowered_at + CEILING_LASTS else 0
        closed_for, interval = max(0.0, self.closed_until - now), self.step(0.0, now)
        return HostState(closed_for, ceiling, interval, self.line.to_come(now))

    def step(self, interval: float, now: float) -> float:
        return max(interval, self.interval) if now < self.slow_until else interval

    def start(self, moment: float, step: float) -> None:
        """Note a start, and the seconds until the next one."""
        self.following, self.apart = moment + step, step

    def hasten(self, step: float) -> None:
        """Let the next start be no further from the last one than that."""
        if step < self.apart:
            self.following, self.apart = self.following - self.apart + step, step

    def is_idle(self, now: float) -> bool:
        is_plain = self.state(now) == HostState()
        return is_plain and max(self.following, self.line.end) < now - IDLE


class ClosedHosts(Protocol):
    """The hosts that are closed, for the next process; instants are milliseconds since 1970."""

    async def add(self, host: str, *, now: int, until: int) -> None:
        """Keep a host that is closed; it never opens sooner than was said before."""
        ...

    async def left(self, *, now: int) -> Mapping[str, float]:
        """Return the seconds for which hosts stay closed: no more than was said, wherever the clock
        was set since."""
        ...


class MemoryPacing(Pacing):
    """The state of each host, by name. Hosts that are idle are forgotten now and then. One that
    may have lost bookings books nothing for `closed_for` seconds; where hosts `were_called` before,
    nobody knows when, each is taken to have been called just now. With `kept` closed hosts are
    known to the next process, once it has done `take_up`."""

    def __init__(
        self,
        clock: Clock,
        *,
        closed_for: float = 0.0,
        were_called: bool = False,
        kept: ClosedHosts | None = None,
    ) -> None:
        self._clock = clock
        self._kept = kept
        self._opens_at = clock.monotonic() + closed_for
        self._called_at = clock.monotonic() if were_called else -math.inf
        self._hosts: dict[str, _Host] = {}
        self._sweep_at = _SLACK

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        now = self._clock.monotonic()
        asked = [(self._host(name, now), step) for name, step in {**also, host: interval}.items()]
        states = [known.state(now) for known, _ in asked]
        ceiling = min((one.ceiling for one in states if one.ceiling), default=0)
        wanted = max(known.step(0.0, now) for known, _ in asked)
        if closed_for := max(one.closed_for for one in states):
            return Booking((), closed_for, ceiling, wanted)
        paced = [(known, known.step(step, now)) for known, step in asked]
        self._host(host, now).hasten(self._host(host, now).step(interval, now))
        starts: list[float] = []
        while len(starts) < count:
            start = max(now, self._opens_at, *(self._following(*one) for one in paced))
            if start - now > HORIZON:
                break
            starts.append(start - now)
            for known, step in paced:
                known.start(start, step)
        return Booking(tuple(starts), 0.0, ceiling, wanted)

    async def line_up(self, host: str, interval: float, run: str = "") -> float:
        now = self._clock.monotonic()
        known = self._host(host, now)
        if known.following < now - IDLE and known.closed_until < now - IDLE:
            known.line, known.following, known.apart = HostLine(), now, 0.0
        step = known.step(interval, now)
        # The last start may have been one of a rule that is no more.
        following = known.following - known.apart + min(known.apart, step)
        begins = max(now, following, known.closed_until)
        return known.line.take(run, begins, step, now) - now

    async def leave(self, run: str, hosts: Sequence[str] | None = None) -> None:
        for known in filter(None, map(self._hosts.get, self._hosts if hosts is None else hosts)):
            known.line.leave(run, self._clock.monotonic())

    async def close(self, host: str, seconds: float) -> None:
        now = self._clock.monotonic()
        known = self._host(host, now)
        known.closed_until = max(known.closed_until, now + seconds)
        if self._kept is not None and seconds >= KEPT_FROM:
            wall = self._clock.now()
            await self._kept.add(host, now=wall, until=wall + math.ceil(seconds * 1_000))

    async def take_up(self) -> None:
        """Have the hosts closed that an earlier process has closed, for as long as is left."""
        if self._kept is not None:
            left = await self._kept.left(now=self._clock.now())
            now = self._clock.monotonic()
            for host, seconds in left.items():
                known = self._host(host, now)
                known.closed_until = max(known.closed_until, now + seconds)

    async def lower(self, host: str, limit: int, age: float = 0.0) -> int:
        now = self._clock.monotonic()
        known = self._host(host, now)
        ceiling = known.state(now).ceiling
        if ceiling and known.halved_at > now - age:
            return ceiling
        known.ceiling = max(1, (ceiling or limit) // 2)
        known.lowered_at = known.halved_at = now
        return known.ceiling

    async def lift(self, host: str, limit: int) -> None:
        now = self._clock.monotonic()
        known = self._host(host, now)
        if known.state(now).ceiling:
            known.ceiling = known.ceiling + 1 if known.ceiling + 1 < limit else 0
            known.lowered_at = now

    async def slow(self, host: str, interval: float, seconds: float) -> None:
        now = self._clock.monotonic()
        known = self._host(host, now)
        known.interval, known.slow_until = interval, now + seconds

    async def state(self, hosts: Iterable[str]) -> dict[str, HostState]:
        now = self._clock.monotonic()
        known = {name: self._hosts[name].state(now) for name in hosts if name in self._hosts}
        return {name: state for name, state in known.items() if state != HostState()}

    def clear(self) -> None:
        """Forget all hosts."""
        self._hosts.clear()

    def _following(self, known: _Host, step: float) -> float:
        return max(known.following, self._called_at + step)

    def _host(self, name: str, now: float) -> _Host:
        if name not in self._hosts:
            if len(self._hosts) >= self._sweep_at:
                kept = {of: known for of, known in self._hosts.items() if not known.is_idle(now)}
                self._hosts = kept
                self._sweep_at = 2 * len(kept) + _SLACK
            self._hosts[name] = _Host(following=now)
        return self._hosts[name]


class MemoryRobots(RobotsFiles):
    """The robots port in memory. Files that are over are forgotten now and then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._files: dict[str, tuple[bytes, float]] = {}
        self._sweep_at = _SLACK

    async def find(self, origin: str) -> KeptFile | None:
        content, until = self._files.get(origin, (b"", 0.0))
        left = until - self._clock.monotonic()
        return KeptFile(content, left) if content and left > 0 else None

    async def keep(self, origin: str, content: bytes, seconds: float) -> None:
        now = self._clock.monotonic()
        if len(self._files) >= self._sweep_at:
            self._files = {of: file for of, file in self._files.items() if file[1] > now}
            self._sweep_at = 2 * len(self._files) + _SLACK
        self._files[origin] = content, now + seconds

    def clear(self) -> None:
        """Forget all files."""
        self._files.clear()
