"""A gateway that heeds robots.txt, for the tasks that ask for it, over the direct gateway.

A file is fetched through that gateway by one worker of the fleet, and kept for a day. What is not
allowed is not requested, nor is what a redirect leads to. Files are read as Scrapy reads them.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec
from anyio.to_thread import run_sync
from cachetools import LRUCache
from protego import Protego

from conveyor.aio.resilience import log_failure
from conveyor.domain.errors import ConveyorError
from conveyor.gateway.headers import custom_headers
from conveyor.gateway.http_client import USER_AGENT
from conveyor.gateway.problems import bad_target, host_delay, host_pause
from conveyor.gateway.targets import Target, parse_target
from conveyor.ports.blobs import Content
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    Gateway,
    HostDelay,
    HostRefusal,
    Postponed,
    Robots,
    ScrapeFailed,
    ScrapeRequest,
    Success,
)
from conveyor.ports.permits import LeaseRequest, Permits, usable_part
from conveyor.ports.robots import MOST_KEPT, RobotsFiles

DAY, HOUR = 86_400.0, 3_600.0
MOST_BYTES = 512_000
"""Bytes of a file that are read; the rest is as if it were not there."""
ANY_SIZE = 1 << 62
MOST_AT_HAND = 2_000_000
"""Characters of all files that a worker keeps at hand."""
MOST_NAMES = 50
"""Names in a file that may be those of one agent, and agents whose rules are at hand."""
MOST_DELAY = 60.0
"""Longest Crawl-delay that is heeded, in seconds."""
FETCH_LASTS = 30.0
"""Most seconds that a file may take."""
ASK_AGAIN = 0.25
"""Seconds between two looks whether another worker has fetched a file."""
PATIENCE = 5.0
"""Most seconds that a call waits here for that; after it, it comes again a moment later."""
TELL_EVERY = 600.0
"""Seconds after which a delay is told again, in case the ledger has lost it."""
MOST_TOLD = 10_000
SLOW_TO_READ = 65_536
"""Characters of a file from which on it is read in a thread."""
ROBOTS_KEY = "robots:"
"""Begins the names of the permits to fetch a file."""
_AGENT = re.compile(r"user[\s-]*agent(?:\s*:|\s|$)", re.IGNORECASE)
_OTHER = "User-agent: \x01"
"""The line for an agent of no interest; no name has this character."""

_log = logging.getLogger("conveyor.hosts")


class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request for a robots.txt. An empty text allows everything."""

    text: str = ""
    is_closed: bool = False


@dataclass(slots=True)
class _Known:
    """A file at hand until a monotonic second, and its rules for the agents that asked."""

    file: _File
    until: float
    rules: dict[str, Protego] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.file.text) + 500


class RobotsGateway(Gateway, Robots):
    """A gateway over another one, which it closes with itself. `permits` decides which worker
    fetches a file, under a lease of so many seconds."""

    def __init__(
        self,
        gateway: Gateway,
        files: RobotsFiles,
        permits: Permits,
        clock: Clock,
        *,
        lease: float,
    ) -> None:
        self._gateway = gateway
        self._files = files
        self._permits = permits
        self._clock = clock
        self._lease = lease
        self._holder = clock.new_id()
        self._sequence = 0
        self._known: LRUCache[str, _Known] = LRUCache(MOST_AT_HAND, getsizeof=lambda one: one.size)
        self._asking: dict[str, anyio.Lock] = {}
        self._told: LRUCache[tuple[str, str], float] = LRUCache(MOST_TOLD)

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        if not request.heeds_robots:
            return self._gateway.scrape(request)
        return self._allowed(request)

    async def aclose(self) -> None:
        await self._gateway.aclose()

    async def admit(self, request: ScrapeRequest) -> HostDelay | None:
        seconds = await self._admit(_agent(request), request.url)
        delay = self._to_tell(request, seconds) if seconds else None
        if delay is not None and not request.has_waited:
            # Its start was booked before anybody knew of the delay.
            postponed = host_delay(seconds * (0.5 + self._clock.random()))
            postponed.delay = delay
            raise postponed
        return delay

    @asynccontextmanager
    async def _allowed(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        agent = _agent(request)
        await self._admit(agent, request.url)
        guarded = msgspec.structs.replace(request, guard=partial(self._admit, agent))
        async with self._gateway.scrape(guarded) as success:
            yield success

    def _to_tell(self, request: ScrapeRequest, seconds: float) -> HostDelay | None:
        """Return the delay to tell the fleet, unless it was told lately for the same caller."""
        host, now = _host(parse_target(request.url)), self._clock.monotonic()
        told_at = self._told.get((host, request.api_key))
        if told_at is not None and now - told_at < TELL_EVERY:
            return None
        self._told[host, request.api_key] = now
        return HostDelay(host, seconds, DAY)

    async def _admit(self, agent: str, url: str) -> float:
        """Return the seconds that a host wants between two calls. Raises ScrapeFailed for a URL
        that is not allowed, and for one whose file cannot be had now."""
        target = parse_target(url)
        known = await self._find(target)
        if known.file.is_closed:
            seconds = max(0.0, known.until - self._clock.monotonic())
            closed = host_pause(seconds + self._clock.random())
            closed.refusal = HostRefusal(_host(target), seconds, is_private=True)
            raise closed
        if not known.file.text:
            return 0.0
        rules = await self._rules(known, agent)
        if not rules.can_fetch(target.url, agent):
            disallowed = bad_target("robots_disallowed", "robots.txt does not allow this URL")
            disallowed.sent = 0
            raise disallowed
        return min(rules.crawl_delay(agent) or 0.0, MOST_DELAY)

    async def _rules(self, known: _Known, agent: str) -> Protego:
        rules = known.rules.get(agent)
        if rules is None:
            if len(known.file.text) > SLOW_TO_READ:
                rules = await run_sync(_read, known.file.text, agent)
            else:
                rules = _read(known.file.text, agent)
            if len(known.rules) >= MOST_NAMES:
                known.rules.clear()
            known.rules[agent] = rules
        return rules

    # -- files --

    async def _find(self, target: Target) -> _Known:
        """Return the file of an origin, at hand, kept by the fleet, or fetched now."""
        name = f"{target.scheme}://{_host(target)}"
        if (known := self._at_hand(name)) is not None:
            return known
        lock = self._asking.setdefault(name, anyio.Lock())
        try:
            async with lock:
                known = self._at_hand(name)
                if known is None:
                    known = self._known[name] = await self._kept_or_fetched(target, name)
                return known
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._asking.pop(name, None)

    def _at_hand(self, name: str) -> _Known | None:
        known = self._known.get(name)
        return known if known is not None and self._clock.monotonic() < known.until else None

    async def _kept_or_fetched(self, target: Target, name: str) -> _Known:
        patient_until = self._clock.monotonic() + PATIENCE
        while True:
            if (known := await self._kept(name)) is not None:
                return known
            if await self._hold(name, count=1):
                try:
                    return await self._kept(name) or await self._fetched(target, name)
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._let_go(name)
            if self._clock.monotonic() >= patient_until:
                raise host_pause(PATIENCE * self._clock.random())
            await self._clock.sleep(ASK_AGAIN)

    async def _kept(self, name: str) -> _Known | None:
        kept = await self._files.find(name)
        if kept is None:
            return None
        file = msgspec.json.decode(zlib.decompress(kept.content), type=_File)
        return _Known(file, self._clock.monotonic() + kept.left)

    async def _fetched(self, target: Target, name: str) -> _Known:
        file = await self._fetch(target)
        lasts = HOUR if file.is_closed else DAY
        file, content = _packed(file)
        try:
            await self._files.keep(name, content, lasts)
        except ConveyorError as error:
            log_failure(_log, "a robots.txt was not kept for other workers", error)
        return _Known(file, self._clock.monotonic() + lasts)

    async def _fetch(self, target: Target) -> _File:
        """Fetch a robots.txt. Raises ScrapeFailed if nobody answered, or if the host is to be left
        alone."""
        lasts = min(FETCH_LASTS, usable_part(self._lease))
        place = msgspec.structs.replace(target, path="/robots.txt", credentials=None)
        request = ScrapeRequest(place.url, "", timeout=lasts, max_bytes=ANY_SIZE)
        try:
            async with self._gateway.scrape(request) as success:
                return _File(await _text(success.content))
        except Postponed:
            raise
        except ScrapeFailed as failed:
            status = 0 if failed.headers is None else failed.problem.status
            if status >= 500:
                return _File(is_closed=True)
            if failed.refusal is not None or (failed.retryable and not status):
                raise
            return _File()

    async def _hold(self, name: str, *, count: int) -> bool:
        self._sequence += 1
        request = LeaseRequest(
            job_id=ROBOTS_KEY + name,
            holder=self._holder,
            count=count,
            before=0,
            sequence=self._sequence,
        )
        state = await self._permits.acquire_or_renew(request, limit=1, lease=self._lease)
        return state.granted

    async def _let_go(self, name: str) -> None:
        try:
            await self._hold(name, count=0)
        except ConveyorError as error:
            log_failure(_log, "the right to fetch a robots.txt was not given back", error)


def _host(target: Target) -> str:
    return f"{target.host.removesuffix('.')}:{target.port}"


def _agent(request: ScrapeRequest) -> str:
    """Return the name under which a request goes out."""
    if "custom_headers" in request.params:
        for name, value in custom_headers(request.params).items():
            if name.lower() == "user-agent":
                return value
    return USER_AGENT


async def _text(content: Content) -> str:
    """Read a file, cut at its bound."""
    pieces: list[bytes] = []
    if isinstance(content, bytes):
        pieces.append(content)
    else:
        size = 0
        async for piece in content:
            pieces.append(piece)
            size += len(piece)
            if size >= MOST_BYTES:
                break
    return b"".join(pieces)[:MOST_BYTES].decode("utf-8-sig", "replace")


def _packed(file: _File) -> tuple[_File, bytes]:
    """Pack a file for others; one that does not fit is cut further."""
    while len(content := zlib.compress(msgspec.json.encode(file))) > MOST_KEPT:
        file = _File(file.text[: len(file.text) // 2])
    return file, content


def _read(text: str, agent: str) -> Protego:
    """Read a file for one agent. Groups of others become those of one name: each rule is kept once
    for each name of its group, and a hostile file has thousands of both."""
    lines: list[str] = []
    names: set[str] = set()
    shown = agent.lower()
    for line in text.splitlines():
        rule = line.partition("#")[0].strip()
        found = _AGENT.match(rule)
        if found is None:
            lines.append(rule)
            continue
        name = rule[found.end() :].strip().lower()
        name = name if name == "*" else name.replace("*", "")
        if name and (name == "*" or name in shown) and (name in names or len(names) < MOST_NAMES):
            names.add(name)
            lines.append(f"User-agent: {name}")
        elif not lines or lines[-1] != _OTHER:
            lines.append(_OTHER)
    return Protego.parse("\n".join(lines))
