"""robots.txt: what it does not allow is never requested, and one worker fetches it for all."""

from __future__ import annotations

import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from threading import get_ident
from typing import Any

import anyio
import msgspec
import pytest
from protego import Protego

from conveyor.bootstrap.loop import can_heed_robots
from conveyor.dev.pacing import MemoryRobots
from conveyor.dev.permits import MemoryPermits
from conveyor.domain.backoff import Backoff
from conveyor.domain.hosts import HostPolicies, HostRules, host_key
from conveyor.domain.model import TaskFailure, WaitReason
from conveyor.gateway import robots
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.http_client import USER_AGENT
from conveyor.gateway.problems import host_pause
from conveyor.gateway.robots import (
    AWAY,
    DAY,
    HOUR,
    MOST_BYTES,
    MOST_RULES,
    RULE_SIZE,
    UNREACHED,
    RobotsGateway,
    Rules,
    _read,
)
from conveyor.gateway.targets import parse_target
from conveyor.handlers.refusals import HostAnswers
from conveyor.ports.gateway import Postponed, ScrapeFailed, ScrapeRequest, Success
from conveyor.ports.robots import MOST_KEPT
from conveyor.service.submit import READ_HERE
from conveyor.settings import Settings
from conveyor.testing.clock import FakeClock
from tests.unit.host_tasks import work_on
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.wire_server import Peer, RawServer, answer, raw_server

FILE = "/robots.txt"
POLITE: dict[str, Any] = {"politeness": {"robots": True}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Site:
    """A host whose robots.txt is `file`, with a status of its own; any other path answers, or leads
    elsewhere if it is in `led`."""

    def __init__(self, file: str = "", *, status: int = 200, fields: str = "") -> None:
        self.file = file.encode()
        self.status = status
        self.fields = fields
        self.led: dict[str, str] = {}
        self.server = RawServer()

    @property
    def asked(self) -> list[str]:
        """The paths of all requests."""
        return [head.split(" ")[1] for head in self.server.all_requests]

    def url(self, path: str) -> str:
        return self.server.url(path)

    async def serve(self, peer: Peer) -> None:
        while head := await peer.request():
            path = head.split(" ")[1]
            if path == FILE:
                await self.answer_file(peer)
            elif path in self.led:
                where = f"Location: {self.led[path]}\r\n"
                await peer.send(answer(fields=where).replace(b"200 OK", b"302 Found"))
            else:
                await peer.send(answer())

    async def answer_file(self, peer: Peer) -> None:
        found = answer(self.file, fields=self.fields)
        await peer.send(found.replace(b"200 OK", b"%d Scripted" % self.status))


class EndlessSite(Site):
    """A host whose robots.txt does not end."""

    async def answer_file(self, peer: Peer) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        await peer.send(head + b"%x\r\n%b\r\n" % (len(self.file), self.file))
        while True:
            await peer.send(b"2000\r\n" + b"# and so on\n" * 682 + b"12345678\r\n")


class HangingSite(Site):
    """A host whose robots.txt does not come: its connection breaks once that is `due`."""

    due: anyio.Event

    async def answer_file(self, peer: Peer) -> None:
        await self.due.wait()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        raise ConnectionAbortedError


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Site]:
    async with raw_server(site.serve) as site.server:
        yield site


class Fleet:
    """Workers that heed robots.txt, and share a store and a ledger."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.files = MemoryRobots(self.clock)
        self.permits = MemoryPermits(self.clock)
        self.workers: list[RobotsGateway] = []

    def worker(self, *, lease: float = 30.0) -> RobotsGateway:
        gateway = DirectGateway(self.clock, allow_private=True)
        made = RobotsGateway(gateway, self.files, self.permits, self.clock, lease=lease)
        self.workers.append(made)
        return made

    async def get(
        self, worker: RobotsGateway, url: str, *, heeds: bool = True, **fields: Any
    ) -> Success | ScrapeFailed:
        request = ScrapeRequest(url, "key", heeds_robots=heeds, **fields)
        try:
            async with worker.scrape(request) as success:
                return success
        except ScrapeFailed as failed:
            return failed

    async def get_at_last(self, worker: RobotsGateway, url: str) -> None:
        """Make a call again as long as it is put off: here time flies while a socket is slow."""
        while isinstance(found := await self.get(worker, url), Postponed):
            await self.clock.sleep(found.retry_after)
        assert isinstance(found, Success)

    async def all(self, *calls: Callable[[], Awaitable[object]]) -> None:
        """Make calls at once; time passes until all are done."""
        left = len(calls)

        async def make(call: Callable[[], Awaitable[object]]) -> None:
            nonlocal left
            await call()
            left -= 1

        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(make, call)
            while left:
                await self.clock.advance(0.1)
                await anyio.lowlevel.checkpoint()


@pytest.fixture
async def fleet(anyio_backend: str) -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    for worker in made.workers:
        await worker.aclose()


RULES = "User-agent: *\nDisallow: /private\nAllow: /private/but\nDisallow: /*.pdf$\n"


async def test_what_is_not_allowed_is_not_requested(fleet: Fleet) -> None:
    async with running(Site(RULES)) as site:
        worker = fleet.worker()
        for path in ("/private", "/private/x", "/a.pdf"):
            failed = await fleet.get(worker, site.url(path))
            assert isinstance(failed, ScrapeFailed)
            assert (failed.problem.code, failed.failure) == (
                "robots_disallowed",
                TaskFailure.BAD_TARGET,
            )
            assert (failed.retryable, failed.sent) == (False, 0)
        for path in ("/", "/private/but", "/a.pdf?x"):
            assert isinstance(await fleet.get(worker, site.url(path)), Success)
        assert isinstance(await fleet.get(worker, site.url("/private"), heeds=False), Success)
        assert site.asked == [FILE, "/", "/private/but", "/a.pdf?x", "/private"]


async def test_a_redirect_does_not_lead_to_what_is_not_allowed(fleet: Fleet) -> None:
    async with running(Site(RULES)) as site, running(Site()) as other:
        other.led = {"/a": site.url("/private"), "/b": site.url("/open")}
        worker = fleet.worker()
        failed = await fleet.get(worker, other.url("/a"))
        assert isinstance(failed, ScrapeFailed)
        assert (failed.problem.code, failed.sent) == ("robots_disallowed", 1)
        assert isinstance(await fleet.get(worker, other.url("/b")), Success)
        assert (site.asked, other.asked) == ([FILE, "/open"], [FILE, "/a", "/b"])


async def test_rules_are_those_of_the_name_that_goes_out(fleet: Fleet) -> None:
    file = "User-agent: Other\nDisallow: /\n\nuser agent: conveyor\nDisallow: /no\n"
    async with running(Site(file)) as site:
        worker = fleet.worker()
        assert isinstance(await fleet.get(worker, site.url("/no")), ScrapeFailed)
        assert isinstance(await fleet.get(worker, site.url("/yes")), Success)
        other = {"custom_headers": '{"user-AGENT": "Mozilla/5.0 (compatible; Other/1.0)"}'}
        assert isinstance(await fleet.get(worker, site.url("/yes"), params=other), ScrapeFailed)


async def test_one_of_four_workers_fetches_a_file_once_a_day(fleet: Fleet) -> None:
    async with running(Site(RULES)) as site:
        workers = [fleet.worker() for _ in range(4)]
        calls = [
            lambda worker=worker: fleet.get_at_last(worker, site.url("/a"))
            for worker in workers
            for _ in range(5)
        ]
        await fleet.all(*calls)
        assert sorted(site.asked) == ["/a"] * 20 + [FILE]
        await fleet.clock.advance(DAY - 60)
        await fleet.get(fleet.worker(), site.url("/a"))
        assert site.asked.count(FILE) == 1
        await fleet.clock.advance(60)
        await fleet.all(*calls)
        assert site.asked.count(FILE) == 2


@pytest.mark.parametrize("status", [404, 401, 403, 410])
async def test_without_a_file_everything_is_allowed(fleet: Fleet, status: int) -> None:
    async with running(Site("User-agent: *\nDisallow: /", status=status)) as site:
        worker = fleet.worker()
        for path in ("/a", "/b"):
            assert isinstance(await fleet.get(worker, site.url(path)), Success)
        assert site.asked == [FILE, "/a", "/b"]


async def test_a_host_whose_file_fails_is_closed_for_an_hour(fleet: Fleet) -> None:
    async with running(Site(status=500)) as site:
        one, two = fleet.worker(), fleet.worker()
        for worker in (one, two):
            postponed = await fleet.get(worker, site.url("/a"))
            assert isinstance(postponed, Postponed)
            assert HOUR <= postponed.retry_after <= HOUR + 1
            assert postponed.waiting is WaitReason.HOST_RETRY_AFTER
        await fleet.clock.advance(HOUR - 1)
        assert isinstance(await fleet.get(one, site.url("/a")), Postponed)
        assert site.asked == [FILE]
        site.status = 200
        await fleet.clock.advance(1)
        assert isinstance(await fleet.get(one, site.url("/a")), Success)
        assert site.asked == [FILE, FILE, "/a"]


async def test_a_host_that_refuses_its_file_is_asked_again_when_it_said(fleet: Fleet) -> None:
    async with running(Site(status=429, fields="Retry-After: 9\r\n")) as site:
        worker = fleet.worker()
        failed = await fleet.get(worker, site.url("/a"))
        assert isinstance(failed, ScrapeFailed)
        assert failed.refusal is not None
        assert failed.refusal.seconds == 9
        assert isinstance(await fleet.get(worker, site.url("/a")), Postponed)
        site.status = 200
        await fleet.clock.advance(9.1)
        assert isinstance(await fleet.get(worker, site.url("/a")), Success)
        assert site.asked == [FILE, FILE, "/a"]


async def test_a_host_that_cannot_be_reached_is_a_failure_of_the_call(fleet: Fleet) -> None:
    async with running(Site()) as site:
        url = site.url("/a")
    worker = fleet.worker()
    for sent in (1, 0, 1):  # the second call hears of the first one's
        failed = await fleet.get(worker, url)
        assert isinstance(failed, ScrapeFailed)
        assert (failed.problem.code, failed.retryable) == ("connection_failed", True)
        assert sent or failed.absence is not None
        assert failed.burns_attempt
        if not sent:
            await fleet.clock.advance(UNREACHED)


@contextmanager
def deaf() -> Iterator[str]:
    """The URL of a host that does not take connections: nothing refuses them, nothing answers."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):  # what waits to be accepted fills the queue
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a"


async def test_a_host_that_takes_no_connection_is_a_failure_of_the_call(fleet: Fleet) -> None:
    worker = fleet.worker(lease=1.2)
    failures: list[Success | ScrapeFailed] = []

    async def call() -> None:
        failures.append(await fleet.get(worker, url))

    with deaf() as url:
        await fleet.all(call)
        await fleet.all(call)  # it hears of the first one's
    for failed in failures:
        assert isinstance(failed, ScrapeFailed)
        assert not isinstance(failed, Postponed)
        assert (failed.problem.code, failed.failure) == ("timeout", TaskFailure.TIMEOUT)
        assert failed.retryable
        assert failed.burns_attempt


async def test_a_file_that_hangs_is_asked_for_once_while_calls_are_put_off(fleet: Fleet) -> None:
    hanging = HangingSite()
    hanging.due = anyio.Event()
    async with running(hanging) as site:
        one, two = fleet.worker(), fleet.worker()
        found: list[Success | ScrapeFailed] = []

        async def call(worker: RobotsGateway) -> None:
            found.append(await fleet.get(worker, site.url("/a")))

        async with anyio.create_task_group() as group:
            for worker in (one, one, one, two, two):
                group.start_soon(call, worker)
            while len(found) < 4:
                await fleet.clock.advance(0.1)
                await anyio.lowlevel.checkpoint()
            assert isinstance(await fleet.get(one, site.url("/b")), Postponed)  # at once
            hanging.due.set()
        assert all(isinstance(one, Postponed) for one in found)
        last = found[-1]
        assert isinstance(last, Postponed)
        assert AWAY <= last.retry_after <= AWAY + 1
        assert last.problem.code == "truncated_body"
        for worker in (one, two):
            assert isinstance(await fleet.get(worker, site.url("/c")), Postponed)
        assert site.asked == [FILE]
        await fleet.clock.advance(AWAY)
        assert isinstance(await fleet.get(two, site.url("/c")), Postponed)
        assert site.asked == [FILE, FILE]


async def test_one_call_reads_a_large_file_for_all_and_heeds_its_first_rules(fleet: Fleet) -> None:
    rules = "".join(f"Disallow:*q{number}zz\n" for number in range(20_000))
    other = "User-agent: other\n" + "".join(f"Disallow: /{n}\n" for n in range(5_000))
    async with running(Site(f"{other}User-agent: *\n{rules}Crawl-delay: 2\n")) as site:
        worker = fleet.worker()
        read: list[Rules] = []

        async def look() -> None:
            target = parse_target(site.url("/" + "q" * 5_000))
            name, known = await worker._find(target)
            read.append(await worker._rules(name, known, "me"))

        await fleet.all(*[look] * 8)
        assert len({id(rules) for rules in read}) == 1
        assert MOST_RULES <= read[0].count <= MOST_RULES + 1
        assert read[0].parsed.crawl_delay("me") == 2
        assert worker._known.currsize > RULE_SIZE * MOST_RULES
        allowed = await fleet.get(worker, site.url("/" + "q" * 5_000))
        assert isinstance(allowed, Success)
        assert isinstance(await fleet.get(worker, site.url("/q7zz")), ScrapeFailed)


@pytest.mark.parametrize("count", [10, 20_000])
async def test_a_large_file_is_read_and_matched_beside_the_loop(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """No other call waits for that. A small file costs less than to hand it to a thread."""
    read, can_fetch = robots._read, Protego.can_fetch
    here, readers, matchers = get_ident(), set[int](), set[int]()

    def noted_read(text: str, agent: str) -> Rules:
        readers.add(get_ident())
        return read(text, agent)

    def noted_match(parsed: Protego, url: str, agent: str) -> bool:
        matchers.add(get_ident())
        return bool(can_fetch(parsed, url, agent))

    monkeypatch.setattr(robots, "_read", noted_read)
    monkeypatch.setattr(Protego, "can_fetch", noted_match)
    rules = "".join(f"Disallow: /{number}zz\n" for number in range(count))
    async with running(Site(f"User-agent: *\n{rules}")) as site:
        allowed = await fleet.get(fleet.worker(), site.url("/" + "q" * 100))
    assert isinstance(allowed, Success)
    assert len(readers) == len(matchers) == 1
    assert (here in readers, here in matchers) == ((True, True) if count == 10 else (False, False))


async def test_an_endless_file_is_cut(fleet: Fleet) -> None:
    async with running(EndlessSite(RULES)) as site:
        worker = fleet.worker()
        assert isinstance(await fleet.get(worker, site.url("/private")), ScrapeFailed)
        assert isinstance(await fleet.get(worker, site.url("/a")), Success)
        assert site.asked == [FILE, "/a"]
        [(content, _)] = fleet.files._files.values()
        assert len(zlib.decompress(content[5:])) < 1.1 * MOST_BYTES


async def test_rules_of_others_use_up_none_of_the_agents_own(fleet: Fleet) -> None:
    others = "".join(f"Disallow: /p{number}\n" for number in range(MOST_RULES))
    own = "User-agent: conveyor\nDisallow: /x\n"
    for text in (f"User-agent: *\n{others}{own}", f"User-agent: conv\n{others}{own}"):
        async with running(Site(text)) as site:
            worker = fleet.worker()
            assert isinstance(await fleet.get(worker, site.url("/x")), ScrapeFailed)
            assert isinstance(await fleet.get(worker, site.url("/p1")), Success)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


async def test_all_of_a_file_counts_that_cannot_be_packed_small(fleet: Fleet) -> None:
    random = Random(1)
    rules = "".join(f"Disallow: /{''.join(random.choices(LETTERS, k=170))}\n" for _ in range(2_800))
    async with running(Site(f"User-agent: *\n{rules}Disallow: /x\n")) as site:
        assert 500_000 < len(site.file) < MOST_BYTES
        one, two = fleet.worker(), fleet.worker()
        for worker in (one, two):
            assert isinstance(await fleet.get(worker, site.url("/x")), ScrapeFailed)
            assert isinstance(await fleet.get(worker, site.url("/a")), Success)
        assert site.asked == [FILE, "/a", "/a"], "the other worker found all of it"
        kept = fleet.files._files
        assert len(kept) == 2
        assert all(len(content) <= MOST_KEPT for content, _ in kept.values())

        # A file of which a piece is gone, or is that of another, is fetched again.
        del kept[next(name for name in kept if name.endswith(" 1"))]
        three = fleet.worker()
        assert isinstance(await fleet.get(three, site.url("/x")), ScrapeFailed)
        assert site.asked == [FILE, "/a", "/a", FILE]


@pytest.mark.parametrize(
    ("text", "end", "allowed"),
    [
        ("User-agent: *\nDisallow: /\n", "\nAllow: /", False),
        ("User-agent: *\n", "\nDisallow: /", True),
        ("User-agent: *\n", "\nDisallow: /x\n", False),
        ("User-agent: *\r", "\rDisallow: /x\r", False),
    ],
)
async def test_a_line_that_the_bound_cuts_is_dropped(
    fleet: Fleet, text: str, end: str, *, allowed: bool
) -> None:
    """The bound falls behind `end`, and the line goes on, unless it ended there."""
    text += "#" * (MOST_BYTES - len(text) - len(end.rstrip("\r\n"))) + end
    async with running(Site(f"{text}public\n")) as site:
        found = await fleet.get(fleet.worker(), site.url("/x"))
        assert isinstance(found, Success) == allowed


FIELDS = [
    *("User-agent", "user-agent", "useragent", "User agent", "user  agent", "user--agent"),
    *("User-agents", "User-agent foo", "Disallow", "Allow", "disallaw", "Crawl-delay"),
    *("crawl delay", "visit time", "Request-rate", "Sitemap", "Host", "Foo"),
]
VALUES = [
    *("", "*", "conveyor", "Conveyor", "conv*", "con*veyor", "other", "bot", "/", "/a", "/a/b"),
    *("/*.x$", "5", "a:b", "https://x/s.xml"),
]


@pytest.mark.slow
def test_groups_and_rules_are_found_as_protego_finds_them() -> None:
    random = Random(3)
    urls = [f"http://h/{path}" for path in ("", "a", "a/b", "q.x", "z")]
    for _ in range(4_000):
        text = "".join(
            random.choice(FIELDS)
            + random.choice([": ", ":", " ", " : ", "\t"])
            + random.choice(VALUES)
            + random.choice(["", "", " # c", "\x00"])
            + random.choice(["\n", "\r\n", "\n\n", "\r", "\u2028"])
            for _ in range(random.randint(1, 9))
        )
        plain = Protego.parse(text)
        for agent in (USER_AGENT, "conveyor", "Mozilla other", "a conv*", "x", ""):
            read = _read(text, agent).parsed
            asked = [plain.can_fetch(url, agent) for url in urls]
            assert [read.can_fetch(url, agent) for url in urls] == asked, (text, agent)
            assert (read.crawl_delay(agent) or 0) == (plain.crawl_delay(agent) or 0), (text, agent)


async def test_the_redirect_of_a_file_does_not_lead_to_a_closed_host(fleet: Fleet) -> None:
    """It is not followed for the next calls, either, and that of another call is."""

    class Led(Site):
        async def answer_file(self, peer: Peer) -> None:
            where = f"Location: {other.url('/rules')}\r\n"
            await peer.send(answer(fields=where).replace(b"200 OK", b"302 Found"))

    async def guard(url: str) -> None:
        led.append(url)
        if is_closed:
            raise host_pause(8.0)

    led: list[str] = []
    is_closed = True
    async with running(Site()) as other, running(Led()) as site:
        worker = fleet.worker()
        for _ in range(3):
            put_off = await fleet.get(worker, site.url("/a"), guard=guard)
            assert isinstance(put_off, Postponed)
            assert (put_off.retry_after, put_off.waiting) == (8.0, WaitReason.HOST_RETRY_AFTER)
        assert (site.asked, other.asked, led) == ([FILE], [], [other.url("/rules")])
        is_closed = False
        await fleet.clock.advance(8.0)
        assert isinstance(await fleet.get(worker, site.url("/a"), guard=guard), Success)
        assert (site.asked, other.asked) == ([FILE, FILE, "/a"], ["/rules"])


async def test_a_hostile_file_is_read_in_no_time(fleet: Fleet) -> None:
    """Thousands of names before thousands of rules: each rule would be kept for each name."""
    names = "".join(f"User-agent: a{number}\n" for number in range(8_000))
    names += "".join(f"User-agent: {'conveyor'[: 1 + number % 8]}\n" for number in range(2_000))
    rules = "".join(f"Disallow: /{number}*x\n" for number in range(10_000))
    async with running(Site(f"{names}User-agent: *\n{rules}")) as site:
        worker = fleet.worker()
        assert isinstance(await fleet.get(worker, site.url("/77/x")), ScrapeFailed)
        assert isinstance(await fleet.get(worker, site.url("/x")), Success)
        [known] = worker._known.values()
        [own] = known.rules.values()
        assert len(own.parsed._user_agents) < 12


async def test_a_delay_puts_a_call_off_once_and_tells_the_pace(fleet: Fleet) -> None:
    async with running(Site("User-agent: *\nCrawl-delay: 500\n")) as site:
        worker = fleet.worker()
        request = ScrapeRequest(site.url("/a"), "key", heeds_robots=True)
        with pytest.raises(Postponed) as first:
            await worker.admit(request)
        assert first.value.delay is not None
        told = (first.value.delay.host, first.value.delay.interval)
        assert told == (f"127.0.0.1:{site.server.port}", 60.0)
        assert await worker.admit(request) == first.value.delay
        other = msgspec.structs.replace(request, api_key="other", has_waited=True)
        assert await worker.admit(other) == first.value.delay
        assert site.asked == [FILE]


# -- tasks --


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def heeding(api: Api) -> AsyncIterator[tuple[RobotsGateway, HostAnswers]]:
    binding, clock = api.binding, api.clock
    direct = DirectGateway(clock, allow_private=True)
    gateway = RobotsGateway(direct, binding.robots, binding.permits, clock, lease=30.0)
    policies = HostPolicies(HostRules)
    yield (
        gateway,
        HostAnswers(policies, binding.pacing, clock, backoff=Backoff(1.0), robots=gateway),
    )
    await gateway.aclose()


async def test_a_task_that_is_not_allowed_fails_and_says_so(api: Api) -> None:
    async with running(Site(RULES)) as site, heeding(api) as (gateway, hosts):
        work = await work_on(
            api,
            gateway,
            site.url("/private"),
            site.url("/a"),
            hosts=hosts,
            **POLITE,
        )
        rude = await work_on(api, gateway, site.url("/private"), hosts=hosts)
        assert [(await one.handle(0)).hide_for for one in (work, rude)] == [None, None]
        assert (await work.handle(1)).hide_for is None
        rows = await work.rows()
        assert [row["status"] for row in rows] == ["failed", "successful"]
        assert rows[0]["error"]["code"] == "robots_disallowed"
        assert (await rude.rows())[0]["status"] == "successful"
        assert site.asked == [FILE, "/private", "/a"]


async def test_a_delay_lowers_the_rate_of_the_caller_for_the_fleet(api: Api) -> None:
    async with (
        running(Site("User-agent: *\nCrawl-delay: 7\n")) as site,
        heeding(api) as (gateway, hosts),
    ):
        work = await work_on(api, gateway, site.url("/a"), hosts=hosts, **POLITE)
        outcome = await work.handle(0)
        assert outcome.hide_for is not None
        [task] = await api.tasks_of(work.run_id)
        assert task.attempts == 0
        job = await api.binding.jobs.find_job(work.job_id)
        assert job is not None
        key = host_key(f"127.0.0.1:{site.server.port}", job.caller)
        booking = await api.binding.pacing.book(key, 0.0, 2)
        assert booking.starts == (0.0, 7.0)
        await api.clock.advance(outcome.hide_for)
        assert (await work.handle(0)).hide_for is None
        assert site.asked == [FILE, "/a"]


async def test_a_task_that_was_put_off_for_a_delay_is_not_put_off_by_the_next_worker_too(
    api: Api,
) -> None:
    async with (
        running(Site("User-agent: *\nCrawl-delay: 7\n")) as site,
        heeding(api) as (gateway, hosts),
        heeding(api) as (others_gateway, others_hosts),
    ):
        work = await work_on(api, gateway, site.url("/a"), hosts=hosts, **POLITE)
        other = await work_on(api, others_gateway, site.url("/b"), hosts=others_hosts, **POLITE)
        put_off = (await work.handle(0)).hide_for
        assert put_off is not None
        [task] = await api.tasks_of(work.run_id)
        assert task.waiting_since == 0, "nobody has refused it"
        await api.clock.advance(put_off + 0.001)
        other.deliveries = work.deliveries
        assert (await other.handle(0)).hide_for is None


async def test_a_failing_file_closes_the_host_for_the_caller(api: Api) -> None:
    async with running(Site(status=503)) as site, heeding(api) as (gateway, hosts):
        urls = site.url("/a"), site.url("/b")
        work = await work_on(api, gateway, *urls, hosts=hosts, **POLITE)
        rude = await work_on(api, gateway, site.url("/c"), client=api.foreign, hosts=hosts)
        waits = [(await work.handle(number)).hide_for for number in range(2)]
        assert all(wait is not None and wait >= HOUR for wait in waits)
        assert (await rude.handle(0)).hide_for is None
        assert [task.attempts for task in await api.tasks_of(work.run_id)] == [0, 0]
        assert site.asked == [FILE, "/c"]


async def test_a_gateway_that_cannot_heed_it_fails_the_task(api: Api) -> None:
    async with running(Site()) as site, heeding(api) as (gateway, _):
        policies, pacing = HostPolicies(HostRules), api.binding.pacing
        unable = HostAnswers(policies, pacing, api.clock, backoff=Backoff(1.0))
        work = await work_on(api, gateway, site.url("/a"), hosts=unable, **POLITE)
        assert (await work.handle(0)).hide_for is None
        [row] = await work.rows()
        assert (row["status"], row["error"]["code"]) == ("failed", "robots_unsupported")
        assert site.asked == []


@pytest.mark.parametrize(
    "size", [0, pytest.param(READ_HERE, marks=pytest.mark.slow)], ids=["small", "large"]
)
async def test_a_server_that_cannot_heed_it_refuses_the_job(tmp_path: Path, size: int) -> None:
    """Whichever process reads its document."""
    async with open_api(tmp_path, heeds_robots=False) as api:
        tasks = [{"url": "https://a.test/" + "a" * 1_000}] * (1 + size // 1_000)
        refused = await api.client.post("/v1/jobs", json={"tasks": tasks, **POLITE})
        problem = problem_of(refused, status=400, code="invalid_argument")
        assert "politeness.robots" in problem["detail"]
        accepted = await api.client.post(
            "/v1/jobs", json={"tasks": tasks, "politeness": {"per_host": 1, "robots": False}}
        )
        assert accepted.status_code == 201
        assert (
            len(
                await api.binding.jobs.list_jobs(
                    api.service.identify(KEY).caller_id, status=None, before=None, limit=9
                )
            )
            == 1
        )
    assert can_heed_robots(Settings(gateway="direct"))
    assert not can_heed_robots(Settings(gateway="fake"))
