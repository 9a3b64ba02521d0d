"""A gateway that heeds robots.txt, for the tasks that ask for it, over the direct gateway.

A file is fetched through that gateway by one worker of the fleet, and kept for a day. What is not
allowed is not requested, nor is what a redirect leads to. Files are read as Scrapy reads them.
"""

from __future__ import annotations

import logging
import re
import sys
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

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.aio.resilience import log_failure
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Problem, TaskFailure
from conveyor.gateway.headers import custom_headers
from conveyor.gateway.http_client import USER_AGENT
from conveyor.gateway.problems import bad_target, host_delay, host_pause
from conveyor.gateway.targets import Target, parse_target
from conveyor.ports.blobs import Content
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    Absence,
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
MOST_RULES = 3_000
"""Rules of a file that are heeded for one agent; the rest is as if it were not there."""
RULE_SIZE = 600
"""Bytes of memory that a rule takes, beside its text."""
MOST_AT_HAND = 32_000_000
"""Bytes of all files that a worker keeps at hand, with their rules."""
MOST_READ = 8_000_000
"""Bytes of the rules of one file at hand, for all agents."""
MOST_NAMES = 50
"""Names in a file that may be those of one agent, and agents whose rules are at hand."""
MOST_DELAY = 60.0
"""Longest Crawl-delay that is heeded, in seconds."""
FETCH_LASTS = 30.0
"""Most seconds that a file may take."""
ASK_AGAIN = 0.25
"""Seconds between two looks whether another worker has fetched a file."""
PATIENCE = 1.0
"""Most seconds that a call waits here for a file; after it, it comes again later."""
AWAY = 60.0
"""Seconds for which a file that hung, or broke off, is not asked for again by any worker."""
UNREACHED = 10.0
"""Seconds for which a worker asks no host again that it could not reach."""
MOST_MET = 10_000
"""Hosts and callers whose delays a worker remembers."""
SLOW_TO_READ = 65_536
"""Characters of a file from which on it is read in a thread."""
SLOW_TO_MATCH = 100_000
"""Rules times characters of a URL from which on it is matched in a thread."""
ROBOTS_KEY = "robots:"
"""Begins the names of the permits to fetch a file."""
_UNREACHED = frozenset({"host_not_found", "connection_failed", "tls_failed"})
_SITE_WIDE = re.compile(r"(?:sitemaps?|site-map|host)(?:\s*:|\s|$)", re.IGNORECASE)
_DELAYS = {"crawl-delay", "crawl delay"}
_AGENT = re.compile(r"user[\s-]*agent(?:\s*:|\s|$)", re.IGNORECASE)
_OTHER = "User-agent: \x01"
"""The line for an agent of no interest; no name has this character."""

_log = logging.getLogger("conveyor.hosts")


class _File(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request for a robots.txt. An empty text allows everything."""

    text: str = ""
    is_closed: bool = False
    away: Problem | None = None
    """The trouble, where nobody answered."""

    @property
    def lasts(self) -> float:
        """The seconds for which it is kept."""
        if self.away is not None:
            return AWAY
        return HOUR if self.is_closed else DAY


@dataclass(slots=True, frozen=True)
class Rules:
    """The rules of a file for one agent: how many, and the bytes that they take."""

    parsed: Protego
    count: int
    size: int


@dataclass(slots=True)
class _Known:
    """A file at hand until a monotonic second, and its rules for the agents that asked: one reads
    them for all who wait. `unreached`: the failure to reach its host."""

    file: _File
    until: float
    unreached: ScrapeFailed | None = None
    rules: dict[str, Rules] = field(default_factory=dict)
    reading: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def read_size(self) -> int:
        return sum(rules.size for rules in self.rules.values())

    @property
    def size(self) -> int:
        return sys.getsizeof(self.file.text) + self.read_size + 1_000


@dataclass(slots=True)
class _Asking:
    """A file that is being asked for since a monotonic second."""

    since: float
    done: anyio.Event = field(default_factory=anyio.Event)


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
        self._asking: dict[str, _Asking] = {}
        self._threads = anyio.CapacityLimiter(1)
        self._met: LRUCache[tuple[str, str], float] = LRUCache(MOST_MET)

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        if not request.heeds_robots:
            return self._gateway.scrape(request)
        return self._allowed(request)

    async def aclose(self) -> None:
        await self._gateway.aclose()

    async def admit(self, request: ScrapeRequest) -> HostDelay | None:
        seconds = await self._admit(_agent(request), request.url)
        if not seconds:
            return None
        delay = HostDelay(_host(parse_target(request.url)), seconds, DAY)
        if self._is_new(delay, request.api_key) and not request.has_waited:
            # Its start was booked before anybody knew of the delay.
            postponed = host_delay(seconds * (0.5 + self._clock.random()))
            postponed.delay = delay
            raise postponed
        return delay

    @asynccontextmanager
    async def _allowed(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        agent = _agent(request)
        await self._admit(agent, request.url)
        guarded = msgspec.structs.replace(request, guard=partial(self._guard, request, agent))
        async with self._gateway.scrape(guarded) as success:
            yield success

    async def _guard(self, request: ScrapeRequest, agent: str, url: str) -> None:
        """Look at a redirect of a request, as its own guard does."""
        if request.guard is not None:
            await request.guard(url)
        await self._admit(agent, url)

    def _is_new(self, delay: HostDelay, api_key: str) -> bool:
        """Tell whether a delay was not met here before, for the same caller."""
        met = self._met.get((delay.host, api_key))
        self._met[delay.host, api_key] = delay.interval
        return met != delay.interval

    async def _admit(self, agent: str, url: str) -> float:
        """Return the seconds that a host wants between two calls. Raises ScrapeFailed for a URL
        that is not allowed, and for one whose file cannot be had now."""
        target = parse_target(url)
        name, known = await self._find(target)
        if known.unreached is not None:
            raise _again(known.unreached)
        if known.file.is_closed:
            raise self._closed(target, known)
        if not known.file.text:
            return 0.0
        rules = await self._rules(name, known, agent)
        if rules.count * len(target.url) > SLOW_TO_MATCH:
            match = partial(rules.parsed.can_fetch, target.url, agent)
            is_allowed = await run_sync(match, limiter=self._threads)
        else:
            is_allowed = rules.parsed.can_fetch(target.url, agent)
        if not is_allowed:
            disallowed = bad_target("robots_disallowed", "robots.txt does not allow this URL")
            disallowed.sent = 0
            raise disallowed
        return min(rules.parsed.crawl_delay(agent) or 0.0, MOST_DELAY)

    def _closed(self, target: Target, known: _Known) -> Postponed:
        """Return the verdict on a call to a host that is closed for its file."""
        seconds = max(0.0, known.until - self._clock.monotonic())
        closed = host_pause(seconds + self._clock.random())
        if known.file.away is not None:
            closed.problem = known.file.away
        closed.refusal = HostRefusal(_host(target), seconds, is_private=True)
        return closed

    async def _rules(self, name: str, known: _Known, agent: str) -> Rules:
        async with known.reading:
            rules = known.rules.get(agent)
            if rules is not None:
                return rules
            if len(known.file.text) > SLOW_TO_READ:
                rules = await run_sync(_read, known.file.text, agent, limiter=self._threads)
            else:
                rules = _read(known.file.text, agent)
            if len(known.rules) >= MOST_NAMES or known.read_size + rules.size > MOST_READ:
                known.rules.clear()
            known.rules[agent] = rules
            if self._known.get(name) is known:
                self._known[name] = known  # with its new size
            return rules

    # -- files --

    async def _find(self, target: Target) -> tuple[str, _Known]:
        """Return the file of an origin, with its name: at hand, kept by the fleet, or fetched now,
        by one call for all. Raises Postponed for another call that waited long enough."""
        name = f"{target.scheme}://{_host(target)}"
        if (known := self._at_hand(name)) is not None:
            return name, known
        asking = self._asking.get(name)
        if asking is None:
            return name, await self._ask(target, name)
        age = self._clock.monotonic() - asking.since
        if age < PATIENCE:
            await wait_or_timeout(asking.done, self._clock, PATIENCE)
            if (known := self._at_hand(name)) is not None:
                return name, known
        raise self._later(age)

    async def _ask(self, target: Target, name: str) -> _Known:
        asking = self._asking[name] = _Asking(self._clock.monotonic())
        try:
            known = self._known[name] = await self._kept_or_fetched(target, name)
        except ScrapeFailed as failed:
            if not _is_unreached(failed):
                raise
            until = self._clock.monotonic() + UNREACHED
            self._known[name] = _Known(_File(), until, unreached=_again(failed))
            raise
        finally:
            del self._asking[name]
            asking.done.set()
        return known

    def _later(self, age: float) -> Postponed:
        """Return the verdict on a call whose file is asked for since `age` seconds."""
        return host_pause(max(PATIENCE, age) * (0.5 + self._clock.random()))

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
                raise self._later(PATIENCE)
            await self._clock.sleep(ASK_AGAIN)

    async def _kept(self, name: str) -> _Known | None:
        kept = await self._files.find(name)
        if kept is None:
            return None
        file = msgspec.json.decode(zlib.decompress(kept.content), type=_File)
        return _Known(file, self._clock.monotonic() + kept.left)

    async def _fetched(self, target: Target, name: str) -> _Known:
        file = await self._fetch(target)
        lasts = file.lasts
        file, content = _packed(file)
        try:
            await self._files.keep(name, content, lasts)
        except ConveyorError as error:
            log_failure(_log, "a robots.txt was not kept for other workers", error)
        return _Known(file, self._clock.monotonic() + lasts)

    async def _fetch(self, target: Target) -> _File:
        """Fetch a robots.txt. Raises ScrapeFailed if the host is not reached, or is to be left
        alone, or if something shared is away."""
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
            if failed.refusal is not None or _is_unreached(failed) or _is_shared(failed):
                raise
            if failed.retryable and not status:
                return _File(is_closed=True, away=failed.problem)
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


def _is_unreached(failed: ScrapeFailed) -> bool:
    """Tell whether there was no connection to a host, and nothing shared was away. Where the time
    went by before anything was sent, the host did not take it."""
    code = failed.problem.code
    is_deaf = failed.failure is TaskFailure.TIMEOUT and not failed.sent
    return (code in _UNREACHED or is_deaf) and not _is_shared(failed)


def _is_shared(failed: ScrapeFailed) -> bool:
    return failed.absence is not None and failed.absence.shared is not None


def _again(failed: ScrapeFailed) -> ScrapeFailed:
    """Return a failure to reach a host once more, for another call, which sent nothing."""
    again = ScrapeFailed(failed.problem, failed.failure, retryable=True)
    again.absence, again.sent = Absence(), 0
    return again


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


def _read(text: str, agent: str) -> Rules:
    """Read a file for one agent. Groups of others become those of one name, without rules: each
    rule is kept once for each name of its group, and a hostile file has thousands of both."""
    lines: list[str] = []
    names: set[str] = set()
    shown = agent.lower()
    begins, concerns, count = True, False, 0
    for line in text.splitlines():
        rule = line.partition("#")[0].strip()
        found = _AGENT.match(rule)
        if found is None:
            if not rule or _SITE_WIDE.match(rule):
                continue
            begins = begins or ":" in rule
            if concerns and (count < MOST_RULES or rule[:11].lower() in _DELAYS):
                count += 1
                lines.append(rule)
            continue
        if begins:
            begins, concerns = False, False
        name = rule[found.end() :].strip().lower()
        name = name if name == "*" else name.replace("*", "")
        if name and (name == "*" or name in shown) and (name in names or len(names) < MOST_NAMES):
            names.add(name)
            lines.append(f"User-agent: {name}")
            concerns = True
        elif not lines or lines[-1] != _OTHER:
            lines.append(_OTHER)
    kept = "\n".join(lines)
    return Rules(Protego.parse(kept), count, RULE_SIZE * count + 4 * len(kept))
