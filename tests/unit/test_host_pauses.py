"""A host that asks for a pause is left alone by every task, and each says why it waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from email.utils import formatdate
from pathlib import Path

import anyio
import pytest

from conveyor.domain.model import TaskStatus, WaitReason
from conveyor.domain.task_rules import LEAST_HOLD, Deferred, Settlement
from conveyor.domain.text_rules import rfc3339
from conveyor.gateway.direct import MOST_PAUSED_HOSTS, SPREAD, DirectGateway, HostPauses
from conveyor.gateway.targets import parse_target
from conveyor.ports.gateway import Postponed, ScrapeFailed, ScrapeRequest
from conveyor.ports.tasks import Settled
from conveyor.testing.clock import FakeClock
from tests.unit.host_tasks import DEADLINE, asking, scripted, work_on
from tests.unit.http_api import Api, open_api
from tests.unit.wire_server import RawServer, raw_server

CAP = 100.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[RawServer]:
    async with raw_server(scripted) as running:
        yield running


@pytest.fixture
async def other(anyio_backend: str) -> AsyncIterator[RawServer]:
    async with raw_server(scripted) as running:
        yield running


@pytest.fixture
def clock(anyio_backend: str) -> FakeClock:
    return FakeClock()


@pytest.fixture
async def gateway(clock: FakeClock) -> AsyncIterator[DirectGateway]:
    made = DirectGateway(clock, allow_private=True, retry_after_cap=CAP)
    yield made
    await made.aclose()


async def fetch(gateway: DirectGateway, url: str, **params: str) -> ScrapeFailed | None:
    try:
        async with gateway.scrape(ScrapeRequest(url, "key", params=params)):
            return None
    except ScrapeFailed as failed:
        return failed


@asynccontextmanager
async def _refused(gateway: DirectGateway, request: ScrapeRequest) -> AsyncIterator[ScrapeFailed]:
    with pytest.raises(ScrapeFailed) as raised:
        async with gateway.scrape(request):
            pass
    yield raised.value


# -- the gateway --


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["3", "date"])
async def test_a_host_is_left_alone_as_long_as_it_asks(
    gateway: DirectGateway,
    server: RawServer,
    other: RawServer,
    clock: FakeClock,
    *,
    status: int,
    form: str,
) -> None:
    after = formatdate(clock.now() / 1_000 + 3, usegmt=True) if form == "date" else form
    refused = await fetch(gateway, asking(server, status, after))
    assert refused is not None
    assert not isinstance(refused, Postponed)
    assert (refused.problem.status, refused.sent, refused.burns_attempt) == (status, 1, True)
    assert 3.0 <= refused.retry_after < 3.0 + SPREAD

    waits = []
    for _ in range(60):
        postponed = await fetch(gateway, server.url("/another"))
        assert isinstance(postponed, Postponed)
        assert (postponed.waiting, postponed.sent) == (WaitReason.HOST_RETRY_AFTER, 0)
        waits.append(postponed.retry_after)
        assert await fetch(gateway, other.url()) is None
    assert len(server.all_requests) == 1
    assert all(3.0 <= wait < 3.0 + SPREAD for wait in waits)
    assert min(waits) < 3.0 + SPREAD / 4 < 3.0 + 3 * SPREAD / 4 < max(waits)

    await clock.advance(2.999)
    assert isinstance(await fetch(gateway, server.url("/another")), Postponed)
    clock.shift(-7_200)  # the clock of the wall has no say
    await clock.advance(0.001)
    assert await fetch(gateway, server.url("/another")) is None


async def test_a_call_that_waits_for_a_connection_learns_of_a_pause_before_it_is_sent(
    clock: FakeClock, server: RawServer
) -> None:
    gateway = DirectGateway(clock, allow_private=True, connections=1)
    found: list[ScrapeFailed | None] = []

    async def take(url: str) -> None:
        found.append(await fetch(gateway, url))

    async with aclosing(gateway), anyio.create_task_group() as group:
        group.start_soon(take, asking(server, 429, "3"))
        for number in range(5):
            group.start_soon(take, server.url(f"/{number}"))
    assert len(server.all_requests) == 1
    assert sum(isinstance(one, Postponed) for one in found) == 5


async def test_a_connection_that_a_pause_left_unused_is_kept(
    clock: FakeClock, server: RawServer
) -> None:
    is_looking, may_answer = anyio.Event(), anyio.Event()

    async def lookup(_host: str, _port: int) -> list[str]:
        is_looking.set()
        await may_answer.wait()
        return ["127.0.0.1"]

    gateway = DirectGateway(clock, allow_private=True, lookup=lookup)
    found: list[ScrapeFailed | None] = []

    async def take(url: str) -> None:
        found.append(await fetch(gateway, url))

    async with aclosing(gateway):
        async with anyio.create_task_group() as group:
            group.start_soon(take, server.url("/slow", host="site.test"))
            await is_looking.wait()
            gateway._pauses.begin(parse_target(server.url(host="site.test")), 3.0)
            may_answer.set()
        assert isinstance(found[0], Postponed)
        assert (found[0].sent, server.all_requests) == (0, [])
        await clock.advance(4.0)
        assert await fetch(gateway, server.url(host="site.test")) is None
        assert len(server.requests) == 1


async def test_no_connection_is_made_to_a_host_in_its_pause(
    clock: FakeClock, server: RawServer
) -> None:
    lookups: list[str] = []

    async def lookup(host: str, _port: int) -> list[str]:
        lookups.append(host)
        return ["127.0.0.1"]

    async with aclosing(DirectGateway(clock, allow_private=True, lookup=lookup)) as gateway:
        gateway._pauses.begin(parse_target(server.url(host="site.test")), 3.0)
        assert isinstance(await fetch(gateway, server.url(host="site.test")), Postponed)
        assert (lookups, server.requests) == ([], [])


@pytest.mark.parametrize(
    ("status", "after"),
    [(429, None), (503, "soon"), (503, "0"), (500, "3"), (408, "3"), (404, "3"), (200, "3")],
)
async def test_what_asks_for_no_pause_of_the_host(
    gateway: DirectGateway, server: RawServer, status: int, after: str | None
) -> None:
    await fetch(gateway, asking(server, status, after))
    assert await fetch(gateway, server.url("/another")) is None


async def test_a_pause_ends_no_later_than_the_cap_and_no_sooner_than_asked_last(
    gateway: DirectGateway, server: RawServer, clock: FakeClock
) -> None:
    listed = {"allowed_status_codes": "429"}  # a body for the caller, and still a signal
    assert await fetch(gateway, asking(server, 429, "86400"), **listed) is None
    postponed = await fetch(gateway, server.url())
    assert isinstance(postponed, Postponed)
    assert CAP <= postponed.retry_after < CAP + SPREAD
    await clock.advance(CAP)
    assert await fetch(gateway, server.url()) is None


async def test_a_redirect_does_not_lead_to_a_host_in_its_pause(
    gateway: DirectGateway, server: RawServer, other: RawServer
) -> None:
    led = asking(other, 302, fields=f"Location: {asking(server, 429, '3')}\r\n")
    assert not isinstance(await fetch(gateway, led), Postponed)
    assert await fetch(gateway, other.url()) is None

    postponed = await fetch(gateway, led)

    assert isinstance(postponed, Postponed)
    assert postponed.sent == 1
    assert len(server.all_requests) == 1


@pytest.mark.parametrize("private", ["custom_headers", "credentials"])
async def test_a_refusal_of_what_a_caller_sent_pauses_no_other_caller(
    gateway: DirectGateway, server: RawServer, private: str
) -> None:
    url, params = asking(server, 429, "3"), {}
    if private == "credentials":
        url = url.replace("http://", "http://eve:wrong@")
    else:
        params = {"custom_headers": '{"X-Token": "eve"}'}
    async with _refused(gateway, ScrapeRequest(url, "eve", params=params)) as failed:
        assert failed.retry_after >= 3.0

    async with gateway.scrape(ScrapeRequest(server.url("/another"), "frank")):
        pass
    async with _refused(gateway, ScrapeRequest(server.url("/another"), "eve")) as failed:
        assert isinstance(failed, Postponed)

    async with _refused(gateway, ScrapeRequest(asking(server, 429, "2"), "frank")):
        pass  # what anybody may send closes the host to all
    async with _refused(gateway, ScrapeRequest(server.url("/another"), "grace")) as failed:
        assert isinstance(failed, Postponed)
        assert failed.retry_after < 3.0
    assert len(server.all_requests) == 3


def test_a_host_is_a_name_and_a_port(clock: FakeClock) -> None:
    pauses = HostPauses(clock)
    pauses.begin(parse_target("https://BÜCHER.test:8080/a"), 5.0)

    for same in ("http://xn--bcher-kva.test:8080/b?c", "http://u:p@bücher.TEST.:8080/"):
        assert pauses.left(parse_target(same)) >= 5.0
    for another in ("https://bücher.test/", "http://www.bücher.test:8080/", "http://test:8080/"):
        assert pauses.left(parse_target(another)) == 0.0


async def test_a_shorter_pause_does_not_end_a_longer_one(clock: FakeClock) -> None:
    pauses, target = HostPauses(clock), parse_target("http://a.test/")
    pauses.begin(target, 5.0)
    pauses.begin(target, 1.0)
    await clock.advance(4.0)
    assert 1.0 <= pauses.left(target) < 1.0 + SPREAD
    await clock.advance(1.0)
    assert pauses.left(target) == 0.0


async def test_no_more_hosts_are_remembered_than_there_is_room_for(clock: FakeClock) -> None:
    pauses = HostPauses(clock)
    hosts = [parse_target(f"http://h{number}.test/") for number in range(MOST_PAUSED_HOSTS + 1)]
    for number, host in enumerate(hosts):
        pauses.begin(host, 100.0 + (number - 7) ** 2)
    assert [number for number, host in enumerate(hosts) if not pauses.left(host)] == [7]
    pauses.begin(hosts[0], 1_000_000.0)  # known already: nothing is forgotten for it
    assert all(pauses.left(host) for host in hosts[:7] + hosts[8:])

    await clock.advance(101.0)  # some have ended: they make room, and none that goes on
    pauses.begin(hosts[7], 5.0)
    assert [pauses.left(hosts[number]) > 0 for number in (0, 5, 6, 7, 8, 9)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


# -- tasks --


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened


@pytest.fixture
async def over(api: Api) -> AsyncIterator[DirectGateway]:
    made = DirectGateway(api.clock, allow_private=True, retry_after_cap=CAP)
    yield made
    await made.aclose()


async def test_no_other_url_of_the_host_is_asked_for_and_each_says_why(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(
        api, over, asking(server, 429, "3"), *(server.url(f"/{number}") for number in range(60))
    )
    refused = await work.handle(0)
    before = await api.run_of(work.job_id)

    outcomes = [await work.handle(number) for number in range(1, 61)]

    assert len(server.all_requests) == 1
    assert await api.run_of(work.job_id) == before  # only the rows were written
    rows = await work.rows()
    until = [row["waiting"]["until"] for row in rows]
    for outcome, end in zip([refused, *outcomes], until, strict=True):
        assert outcome.hide_for is not None
        assert 3.0 <= outcome.hide_for <= 3.0 + SPREAD
        assert end == rfc3339(api.clock.now() + round(outcome.hide_for * 1_000))
    reasons = [row["waiting"]["reason"] for row in rows]
    assert reasons == ["retry_after"] + ["host_retry_after"] * 60
    assert {row["status"] for row in rows} == {"pending"}
    assert len(set(until)) > 30
    assert await work.history(1) == {"events": [], "waiting": rows[1]["waiting"]}
    refused_history = await work.history(0)
    assert len(refused_history["events"]) == 1
    assert refused_history["waiting"] == rows[0]["waiting"]
    assert work.telemetry.gateway_calls == {"retry": 1}

    await api.clock.advance(3.0 + SPREAD)
    assert all("waiting" not in row for row in await work.rows())  # due, and not begun yet
    for number in range(1, 6):
        assert (await work.handle(number)).hide_for is None
    assert len(server.all_requests) == 6
    assert [row["status"] for row in (await work.rows())[1:6]] == ["successful"] * 5
    assert before is not None
    tasks = await api.tasks_of(before.run_id)
    assert [task.attempts for task in tasks] == [0 if task.index > 5 else 1 for task in tasks]


async def test_a_claim_whose_host_must_wait_is_one_write(
    api: Api, over: DirectGateway, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await work_on(api, over, asking(server, 429, "3"), server.url("/another"))
    await work.handle(0)
    settled: list[object] = []
    settle_task = api.binding.tasks.settle_task

    async def counting(
        run_id: str, task_id: str, number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        settled.append(settlement)
        return await settle_task(run_id, task_id, number, settlement, now=now)

    monkeypatch.setattr(work.handler._tasks, "settle_task", counting)
    outcome = await work.handle(1)

    assert outcome.hide_for is not None
    until = api.clock.now() + round(outcome.hide_for * 1_000)
    assert settled == [Deferred(until, WaitReason.HOST_RETRY_AFTER, api.clock.now())]


async def test_a_task_does_not_wait_for_its_host_past_its_deadline(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(api, over, asking(server, 429, "60"), server.url("/another"))
    for _ in range(int(DEADLINE / 60) - 1):
        await fetch(over, asking(server, 429, "60"))
        outcome = await work.handle(1)
        assert outcome.hide_for is not None
        await api.clock.advance(60.0 + SPREAD)
    api.clock.shift(DEADLINE)
    await fetch(over, asking(server, 429, "60"))
    asked = len(server.all_requests)

    assert (await work.handle(1)).hide_for is None

    assert len(server.all_requests) == asked
    row = (await work.rows())[1]
    assert (row["status"], row["error"]["code"]) == ("failed", "rate_limited")
    [event] = (await work.history(1))["events"]
    assert event["sent"] == 0


async def test_a_pause_fails_no_task_for_the_age_of_its_job(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(api, over, asking(server, 429, "2"), server.url("/another"))
    await api.clock.advance(2 * DEADLINE)
    await work.handle(0)

    assert (await work.handle(1)).hide_for is not None

    row = (await work.rows())[1]
    assert (row["status"], row["waiting"]["reason"]) == ("pending", "host_retry_after")
    await api.clock.advance(2.0 + SPREAD)
    assert (await work.handle(1)).hide_for is None
    assert (await work.rows())[1]["status"] == "successful"


async def test_redirects_that_led_to_a_pause_are_in_the_history(
    api: Api, over: DirectGateway, server: RawServer, other: RawServer
) -> None:
    led = asking(other, 302, fields=f"Location: {server.url('/end')}\r\n")
    work = await work_on(api, over, led)
    await fetch(over, asking(server, 429, "3"))

    outcome = await work.handle(0)

    assert outcome.hide_for is not None
    [event] = (await work.history(0))["events"]
    assert (event.get("sent", 1), event["error"]["code"]) == (1, "rate_limited")
    [row] = await work.rows()
    assert row["waiting"]["reason"] == "host_retry_after"
    [task] = await api.tasks_of(work.run_id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    await api.clock.advance(3.0 + SPREAD)
    assert (await work.handle(0)).hide_for is None
    assert len(other.all_requests) + len(server.all_requests) == 4


async def test_a_stopped_run_waits_for_nothing(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(api, over, asking(server, 503, "3"))
    await work.handle(0)
    assert "waiting" in (await work.rows())[0]
    await api.client.post(f"/v1/jobs/{work.job_id}/stop")
    assert "waiting" not in (await work.rows())[0]
    assert "waiting" not in await work.history(0)


async def test_other_failures_say_that_they_back_off(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(api, over, asking(server, 500), asking(server, 500, "9"))
    for number, reason in enumerate(("backoff", "retry_after")):
        await work.handle(number)
        row = (await work.rows())[number]
        assert row["waiting"]["reason"] == reason


async def test_a_clock_that_was_set_back_and_right_again_hides_no_task_for_hours(
    api: Api, over: DirectGateway, server: RawServer
) -> None:
    work = await work_on(api, over, asking(server, 500))
    first = await work.handle(0)
    assert first.hide_for is not None
    await api.clock.advance(first.hide_for)
    api.clock.shift(-7_200)

    again = await work.handle(0)

    assert again.hide_for is not None
    assert again.hide_for <= LEAST_HOLD / 1_000
    assert len(server.all_requests) == 1
    api.clock.shift(7_200)
    await api.clock.advance(again.hide_for)
    await work.handle(0)
    assert len(server.all_requests) == 2


async def test_a_call_that_was_refused_before_it_was_sent_counts_all_the_same(
    api: Api,
) -> None:
    gateway = DirectGateway(api.clock, retry_after_cap=CAP)
    work = await work_on(api, gateway, "http://127.0.0.1/private")
    await work.handle(0)

    assert work.telemetry.gateway_calls == {"failed": 1}
    [event] = (await work.history(0))["events"]
    assert event["sent"] == 0
    await gateway.aclose()
