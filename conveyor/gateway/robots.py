"""A gateway that heeds robots.txt, for the tasks that ask for it, over the direct gateway.

A file is fetched through that gateway by one worker of the fleet, and kept for a day. What is not
allowed is not requested, nor is what a redirect leads to. Files are read as Scrapy reads them.
"""

from __future__ import annotations

import logging
import struct
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
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
"""Agents whose rules of one file are at hand."""
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
_SITE_WIDE = {"sitemap", "sitemaps", "site-map", "host"}
_AGENTS = {"user-agent", "useragent", "user agent"}
_DELAYS = ("crawl-delay", "crawl delay")
_RULES = {
    "allow",
    "disallow",
    "dissallow",
    "dissalow",
    "disalow",
    "diasllow",
    "disallaw",
    *_DELAYS,
}
_FIELDS = (
    {"request-rate", "request rate", "visit-time", "visit time"} | _SITE_WIDE | _AGENTS | _RULES
)
"""All that Protego takes for a field."""
_PIECE = struct.Struct(">BI")

Guard = Callable[[str], Awaitable[object]]

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
    them for all who wait. `unreached`: the failure to reach its host, or a redirect from it to a
    closed one."""

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
        seconds = await self._admit(_agent(request), request.url, request.guard)
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
        await self._admit(agent, request.url, request.guard)
        guarded = msgspec.structs.replace(request, guard=partial(self._guard, request, agent))
        async with self._gateway.scrape(guarded) as success:
            yield success

    async def _guard(self, request: ScrapeRequest, agent: str, url: str) -> None:
        """Look at a redirect of a request, as its own guard does."""
        if request.guard is not None:
            await request.guard(url)
        await self._admit(agent, url, request.guard)

    def _is_new(self, delay: HostDelay, api_key: str) -> bool:
        """Tell whether a delay was not met here before, for the same caller."""
        met = self._met.get((delay.host, api_key))
        self._met[delay.host, api_key] = delay.interval
        return met != delay.interval

    async def _admit(self, agent: str, url: str, guard: Guard | None) -> float:
        """Return the seconds that a host wants between two calls. Raises ScrapeFailed for a URL
        that is not allowed, and for one whose file cannot be had now."""
        target = parse_target(url)
        name, known = await self._find(target, guard)
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

    async def _find(self, target: Target, guard: Guard | None = None) -> tuple[str, _Known]:
        """Return the file of an origin, with its name: at hand, kept by the fleet, or fetched now,
        by one call for all. Raises Postponed for another call that waited long enough."""
        name = f"{target.scheme}://{_host(target)}"
        if (known := self._at_hand(name)) is not None:
            return name, known
        asking = self._asking.get(name)
        if asking is None:
            return name, await self._ask(target, name, guard)
        age = self._clock.monotonic() - asking.since
        if age < PATIENCE:
            await wait_or_timeout(asking.done, self._clock, PATIENCE)
            if (known := self._at_hand(name)) is not None:
                return name, known
        raise self._later(age)

    async def _ask(self, target: Target, name: str, guard: Guard | None) -> _Known:
        asking = self._asking[name] = _Asking(self._clock.monotonic())
        try:
            known = self._known[name] = await self._kept_or_fetched(target, name, guard)
        except ScrapeFailed as failed:
            is_led_away = isinstance(failed, Postponed) and failed.sent
            if not (is_led_away or _is_unreached(failed)):
                raise
            lasts = min(failed.retry_after, UNREACHED) if is_led_away else UNREACHED
            until = self._clock.monotonic() + lasts
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

    async def _kept_or_fetched(self, target: Target, name: str, guard: Guard | None) -> _Known:
        patient_until = self._clock.monotonic() + PATIENCE
        while True:
            if (known := await self._kept(name)) is not None:
                return known
            if await self._hold(name, count=1):
                try:
                    return await self._kept(name) or await self._fetched(target, name, guard)
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
        head, content = kept.content[: _PIECE.size], kept.content[_PIECE.size :]
        for number in range(1, head[0]):
            piece = await self._files.find(_piece(name, number))
            if piece is None or piece.content[: _PIECE.size] != head:
                return None
            content += piece.content[_PIECE.size :]
        file = msgspec.json.decode(zlib.decompress(content), type=_File)
        return _Known(file, self._clock.monotonic() + kept.left)

    async def _fetched(self, target: Target, name: str, guard: Guard | None) -> _Known:
        file = await self._fetch(target, guard)
        lasts = file.lasts
        pieces = _packed(file)
        try:
            # The first comes last: whoever finds it finds the others.
            for number in reversed(range(len(pieces))):
                await self._files.keep(_piece(name, number), pieces[number], lasts)
        except ConveyorError as error:
            log_failure(_log, "a robots.txt was not kept for other workers", error)
        return _Known(file, self._clock.monotonic() + lasts)

    async def _fetch(self, target: Target, guard: Guard | None) -> _File:
        """Fetch a robots.txt, by redirects that a guard lets pass. Raises ScrapeFailed if the host
        is not reached, or is to be left alone, or if something shared is away."""
        lasts = min(FETCH_LASTS, usable_part(self._lease))
        place = msgspec.structs.replace(target, path="/robots.txt", credentials=None)
        request = ScrapeRequest(place.url, "", timeout=lasts, max_bytes=ANY_SIZE, guard=guard)
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
    if isinstance(failed, Postponed):
        after, waiting = failed.retry_after, failed.waiting
        return Postponed(failed.problem, failed.failure, retry_after=after, waiting=waiting)
    again = ScrapeFailed(failed.problem, failed.failure, retryable=True)
    again.absence, again.sent = Absence(), 0
    return again


def _piece(name: str, number: int) -> str:
    """Return the name under which a piece of a file is kept."""
    return f"{name} {number}" if number else name


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
    """Read a file, cut at the end of the last line within its bound."""
    pieces: list[bytes] = []
    if isinstance(content, bytes):
        pieces.append(content)
    else:
        size = 0
        async for piece in content:
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                break
    text = b"".join(pieces)
    if len(text) > MOST_BYTES:
        # What is left of a line that was cut may say the contrary.
        end = max(text.rfind(b"\n", 0, MOST_BYTES + 1), text.rfind(b"\r", 0, MOST_BYTES + 1))
        text = text[: max(end, 0)]
    return text.decode("utf-8-sig", "replace")


def _packed(file: _File) -> list[bytes]:
    """Pack a file for others, in as many pieces as it needs. The first begins with their number,
    and each with the sum of all."""
    content = zlib.compress(msgspec.json.encode(file))
    size = MOST_KEPT - _PIECE.size
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    head = _PIECE.pack(len(pieces), zlib.crc32(content))
    return [head + piece for piece in pieces]


def _read(text: str, agent: str) -> Rules:
    """Read a file for one agent: the rules of the group that holds for it alone. A hostile file has
    thousands of names before thousands of rules."""
    shown = agent.strip().lower()
    scores: dict[str, int] = {}
    groups: list[tuple[set[str], list[str]]] = [(set(), [])]
    is_named = True
    for line in text.splitlines():
        found = _directive(line.partition("#")[0].strip())
        if found is None or found[0] in _SITE_WIDE:
            continue
        field, value = found
        if field in _AGENTS:
            if not is_named:
                groups.append((set(), []))
            for name in _names(value):
                if name not in scores:
                    scores[name] = _score(name, shown)
                if scores[name]:
                    groups[-1][0].add(name)
        elif value and field in _RULES and groups[-1][0]:
            groups[-1][1].append(f"{field}: {value}")
        is_named = field in _AGENTS
    best = max(scores, key=lambda name: scores[name], default="")
    lines: list[str] = []
    for names, rules in groups:
        if best in names:
            lines += [
                rule
                for place, rule in enumerate(rules, len(lines))
                if place < MOST_RULES or rule.startswith(_DELAYS)
            ]
    kept = "\n".join([f"User-agent: {best}", *lines]) if lines else ""
    return Rules(Protego.parse(kept), len(lines), RULE_SIZE * len(lines) + 4 * len(kept))


def _directive(line: str) -> tuple[str, str] | None:
    """Split a line into its field and its value, as Protego does."""
    field, colon, value = line.partition(":")
    field = field.strip().lower()
    if colon and (field in _FIELDS or not value or value[0].isspace()):
        return field, value.strip()
    words = line.split()
    for count in (1, 2):
        if (named := " ".join(words[:count]).lower()) in _FIELDS:
            return named, " ".join(words[count:])
    return (field, value.strip()) if colon else None


def _names(value: str) -> list[str]:
    """Return the names of agents for which a line begins a group, as Protego does."""
    name = value.lower()
    names = [name] if name == "*" else dict.fromkeys((name, name.replace("*", "")))
    return [one for one in names if one]


def _score(name: str, agent: str) -> int:
    """Return how close a name in a file is to an agent, as Protego does; 0 for that of another."""
    if name == "*":
        return 1
    place = agent.find(name)
    while place > 0 and (agent[place - 1].isalnum() or agent[place - 1] in "-_"):
        place = agent.find(name, place + 1)
    return 0 if place < 0 else len(name)
