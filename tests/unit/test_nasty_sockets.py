"""The answers of the nasty origin over sockets: one by one through the client, and through the
gateways with two callers who share connections. Nobody ever gets a byte that is not theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest
import uvloop

from conveyor.domain.model import TaskBody
from conveyor.gateway import open_gateway
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.http import HttpGateway
from conveyor.gateway.problems import transport_failure
from conveyor.gateway.refusals import refusal
from conveyor.ports.gateway import Gateway, ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import ClientOptions
from tests.nasty.answer import BODY, End, Family, Kind, Nasty
from tests.nasty.certificate import Certificate
from tests.nasty.codings import LIMIT
from tests.nasty.corpus import ANSWERS, FAMILIES, KINDS
from tests.nasty.origin import NastyOrigin, page_body
from tests.patient import SECONDS

# Some hundred exchanges over sockets on two event loops: `test_nasty_protocol` is for each change.
pytestmark = pytest.mark.slow

LATE_SECONDS = 0.1
"""The patience of a caller whose answer comes too late."""
WHOLLY = 10_000
"""Answers of up to that many bytes are cut at every byte: over sockets it is hundred thousand cuts,
and would be ten million with those of the few that are longer."""
EDGE = 200
"""Bytes at an end of a longer answer, and before and after a bound, that are all cut."""
CALLERS = 8
"""Callers who cut answers side by side: the origin rests between packets."""
LARGE_BODY = b"x" * 8_388_608
"""More than the buffers of a connection hold."""
LARGE_TASK_BODY = TaskBody(LARGE_BODY.decode(), "text/plain")
Made = Callable[[NastyOrigin, FakeClock], tuple[Gateway, str]]
_NUMBERS = count(1)
_INDEX = {id(answer): index for index, answer in enumerate(ANSWERS.values())}


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


class Origins(msgspec.Struct, frozen=True):
    """The origin without TLS, and with it."""

    plain: NastyOrigin
    tls: NastyOrigin
    authority: Path

    def of(self, answer: Nasty) -> NastyOrigin:
        return self.tls if answer.is_tls else self.plain

    @property
    def requests(self) -> int:
        return len(self.plain.served) + len(self.tls.served)


@pytest.fixture(scope="module")
def origins(certificate: Certificate) -> Iterator[Origins]:
    answers = list(ANSWERS.values())
    with (
        NastyOrigin(answers) as plain,
        NastyOrigin(answers, context=certificate.server_context()) as tls,
    ):
        yield Origins(plain, tls, certificate.authority)


@pytest.fixture
async def client(anyio_backend: object, origins: Origins) -> AsyncIterator[HttpClient]:
    made = HttpClient(connections=1, options=ClientOptions(authority=origins.authority))
    yield made
    await made.aclose()


EACH_KIND = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            id=kind.name,
            marks=[pytest.mark.slow] if any(answer.late for answer in kind.answers) else [],
        )
        for kind in KINDS
    ],
)


class Outcome(msgspec.Struct, frozen=True):
    """The end of a request that went out `sent` times."""

    trouble: TransportTrouble | None
    status: int
    body: bytes
    sent: int


async def ask(client: HttpClient, url: str, answer: Nasty | None = None) -> Outcome:
    """Send a request and read the answer whole. Only a GET may be repeated."""
    method = "GET" if answer is None else answer.method
    is_late = answer is not None and answer.late
    try:
        reply = await client.send(
            method,
            url,
            headers={"Accept": "*/*"},
            body=LARGE_BODY if method == "POST" else None,
            timeout=LATE_SECONDS if is_late else SECONDS,
            repeatable=method == "GET",
        )
        return Outcome(None, reply.status, await reply.read(), reply.sent)
    except TransportError as error:
        return Outcome(error.trouble, 0, b"", error.sent)


def check(answer: Nasty, outcome: Outcome) -> None:
    assert outcome.trouble == answer.trouble, answer.name
    if answer.trouble is None:
        assert outcome.status == answer.status, answer.name
        assert is_same(outcome.body, answer.body), answer.name


def may_be_followed(answer: Nasty) -> bool:
    """Return whether the next request is to go over the same connection."""
    is_disturbed = answer.surplus or answer.pushed or answer.late
    return answer.kept and answer.end is End.STAYS and not is_disturbed


async def exchange(client: HttpClient, origins: Origins, answer: Nasty, cut: str = "") -> int:
    """Ask for an answer and then for a page; check both; return how many requests went out."""
    origin, number, following = origins.of(answer), next(_NUMBERS), next(_NUMBERS)
    nasty, page = f"nasty-{_INDEX[id(answer)]}-{number}{cut}", f"page-{following}"
    outcome = await ask(client, f"{origin.url}/{nasty}", answer)
    check(answer, outcome)
    # Meanwhile the loop does not run: what was pushed is in the socket, and nobody has seen it.
    origin.go_on(number)
    outcome_of_page = await ask(client, f"{origin.url}/{page}")
    assert outcome_of_page.body == page_body(following), (answer.name, cut)
    if not answer.is_early:
        is_same = origin.connection_of(page) == origin.connection_of(nasty)
        assert is_same == may_be_followed(answer), (answer.name, cut)
    return outcome.sent + outcome_of_page.sent


@EACH_KIND
async def test_each_answer_by_itself(client: HttpClient, origins: Origins, kind: Kind) -> None:
    before, sent = origins.requests, 0
    for answer in kind.answers:
        sent += await exchange(client, origins, answer)
    assert origins.requests - before == sent


def cuts(answer: Nasty) -> Sequence[int]:
    """Return every byte of an answer of up to WHOLLY bytes, and those of a longer one where
    something happens: its two ends, around each bound, and some by chance. 0 cuts it into bytes."""
    length = len(answer.wire + answer.surplus)
    if length <= WHOLLY:
        return range(length or 1)
    by_chance = random.Random(answer.name)
    places = {by_chance.randrange(1, length) for _ in range(EDGE)}
    for bound in (0, 65_536, 262_144, LIMIT, length):
        places.update(range(bound - EDGE, bound + EDGE))
    return sorted(place for place in places if 0 < place < length)


@pytest.mark.full
@pytest.mark.timeout(3_600)
@EACH_KIND
async def test_each_answer_cut_everywhere(
    anyio_backend: object, origins: Origins, kind: Kind
) -> None:
    """In two packets, cut at every byte, and in packets of a byte; of an answer of more than WHOLLY
    bytes at some. A number of callers do so side by side, each over connections of its own."""
    waiting = iter([(answer, place) for answer in kind.answers for place in cuts(answer)])

    async def work() -> None:
        options = ClientOptions(authority=origins.authority)
        async with aclosing(HttpClient(connections=1, options=options)) as client:
            for answer, place in waiting:
                await exchange(client, origins, answer, cut=f"-{place}")

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(work())


async def test_an_end_without_close_notify_can_be_accepted(
    anyio_backend: object, origins: Origins
) -> None:
    """It alone changes: what is cut off by a length, by chunks, by a reset, stays so."""
    options = ClientOptions(authority=origins.authority, ragged_end=True)
    accepted = 0
    async with aclosing(HttpClient(connections=1, options=options)) as client:
        for answer in ANSWERS.values():
            if not answer.is_tls:
                continue
            url = f"{origins.tls.url}/nasty-{_INDEX[id(answer)]}-{next(_NUMBERS)}"
            outcome = await ask(client, url, answer)
            if answer.trouble is TransportTrouble.RAGGED:
                accepted += 1
                answer = msgspec.structs.replace(answer, trouble=None)
            check(answer, outcome)
    assert accepted > 10


# Through the gateways


async def test_a_coded_body_that_is_cut_off_is_never_accepted(
    anyio_backend: object, origins: Origins
) -> None:
    options = ClientOptions(authority=origins.authority, ragged_end=True)
    gateway = open_gateway(
        "direct",
        FakeClock(),
        allow_private=True,
        connections=1,
        retry_after_cap=1.0,
        options=options,
    )
    given = {}
    async with aclosing(gateway):
        for name, answer in ANSWERS.items():
            if answer.trouble is TransportTrouble.RAGGED and answer.body:
                url = f"{origins.tls.url}/nasty-{_INDEX[id(answer)]}-{next(_NUMBERS)}"
                given[name.partition(": ")[2]], _ = await content(gateway, url, "key", answer)
    cut_off = {name for name in given if name.endswith("cut off")}
    assert len(cut_off) == 3
    assert {given[name] for name in cut_off} == {"corrupt_body"}
    assert given["plain"] == BODY
    assert {given[name] for name in ("gzip", "deflate", "br", "zstd")} == {BODY}


def direct(origin: NastyOrigin, clock: FakeClock) -> tuple[Gateway, str]:
    return DirectGateway(clock, allow_private=True, connections=1), origin.url


def http(origin: NastyOrigin, clock: FakeClock) -> tuple[Gateway, str]:
    return HttpGateway(f"{origin.url}/v1/", clock, connections=1), "http://any.test"


async def content(
    gateway: Gateway, url: str, key: str, answer: Nasty | None = None
) -> tuple[bytes | str, int]:
    """Return the content at a URL, or the code of the problem; and how many requests went out."""
    is_late = answer is not None and answer.late
    request = ScrapeRequest(
        url,
        key,
        timeout=LATE_SECONDS if is_late else SECONDS,
        max_bytes=LIMIT,
        params={} if answer is None else {"allowed_status_codes": str(answer.status)},
    )
    if answer is not None and answer.method == "POST":
        request = msgspec.structs.replace(request, method="POST", body=LARGE_TASK_BODY)
    try:
        async with gateway.scrape(request) as success:
            body = success.content
            if not isinstance(body, bytes):
                body = b"".join([piece async for piece in body])
            return body, success.sent
    except ScrapeFailed as failed:
        return failed.problem.code, failed.sent


def right_content(gateway: Gateway, answer: Nasty) -> bytes | str:
    if isinstance(gateway, HttpGateway) and not 200 <= answer.status < 300:
        return refusal(answer.status, answer.body, redact=str).problem.code
    if answer.content is not None:
        return answer.content
    if answer.trouble is not None:
        return transport_failure(answer.trouble).problem.code
    return answer.body


class Turns:
    """Two callers side by side, except that one can be alone: what is pushed has to arrive on a
    connection that is idle, not under a request of the other."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(2)
        self._both = asyncio.Lock()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        async with self._free:
            yield

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._both, self._free, self._free:
            yield


class Caller(msgspec.Struct):
    """A caller with a key, who asks for answers, and for a page after each. `sent` counts the
    requests that went out, as the gateway reports them."""

    gateway: Gateway
    origin: NastyOrigin
    start: str
    key: str
    turns: Turns
    sent: int = 0

    async def scrape_all(self, answers: list[Nasty]) -> None:
        for answer in answers:
            async with self.turns.alone() if answer.pushed or answer.late else self.turns.beside():
                await self._scrape(answer)
            async with self.turns.beside():
                await self._scrape_page(answer.name)

    async def _scrape(self, answer: Nasty) -> None:
        number = next(_NUMBERS)
        url = f"{self.start}/nasty-{_INDEX[id(answer)]}-{number}"
        given, sent = await content(self.gateway, url, self.key, answer)
        self.sent += sent
        assert is_same(given, right_content(self.gateway, answer)), answer.name
        if answer.pushed or answer.late:
            self.origin.go_on(number)

    async def _scrape_page(self, after: str) -> None:
        number = next(_NUMBERS)
        given, sent = await content(self.gateway, f"{self.start}/page-{number}", self.key)
        self.sent += sent
        assert given == page_body(number), after


def is_same(given: bytes | str, right: bytes | str) -> bool:
    """Compare bodies. pytest would take minutes to describe how two large ones differ."""
    return given == right


@pytest.mark.slow
@pytest.mark.parametrize("made", [direct, http])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_two_callers_get_what_is_theirs(
    origins: Origins, made: Made, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(origins.authority))
    # After each call that breaks, the gateway is looked for: it is there, and resets nothing.
    monkeypatch.setattr("conveyor.wire.client.RESET_SECONDS", 0.001)
    answers = [
        answer for kind in family.kinds for answer in kind.answers if answer.method != "HEAD"
    ]
    for origin in (origins.plain, origins.tls):
        served = [answer for answer in answers if origins.of(answer) is origin]
        gateway, start = made(origin, FakeClock())
        turns, before = Turns(), len(origin.served)
        callers = [
            Caller(gateway, origin, start, key, turns) for key in ("one caller's key", "another's")
        ]
        async with aclosing(gateway), asyncio.TaskGroup() as group:
            for caller in callers:
                shuffled = random.Random(caller.key + family.name).sample(served, len(served))
                group.create_task(caller.scrape_all(shuffled))
        assert len(origin.served) - before == sum(caller.sent for caller in callers)
