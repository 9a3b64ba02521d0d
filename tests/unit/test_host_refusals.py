"""A host that refuses calls is left alone by every worker, where a policy holds, and uses up no
attempt of its tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conveyor.domain.backoff import Backoff
from conveyor.domain.hosts import HostPattern, HostPolicies, HostRules, host_key, paces
from conveyor.domain.model import TaskStatus, WaitReason
from conveyor.gateway.direct import DirectGateway
from conveyor.handlers.refusals import HostAnswers
from conveyor.ports.pacing import HostState
from tests.unit.host_tasks import DEADLINE, Work, asking, scripted, work_on
from tests.unit.http_api import KEY, OTHER_KEY, Api, open_api
from tests.unit.wire_server import RawServer, raw_server

CAP = 100.0
BASE = 1.0
POLITE: dict[str, Any] = {"politeness": {"per_host": 8}}
PRIVATE: dict[str, Any] = {"zenrows_params": {"custom_headers": '{"Cookie": "a=b"}'}}


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
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened


class Workers:
    """Workers of one fleet: each has a gateway of its own, and all share the binding."""

    def __init__(self, api: Api, *, limit: int = 0) -> None:
        self._api = api
        self._limit = limit
        self._gateways: list[DirectGateway] = []

    async def work(self, *urls: str, **job_fields: Any) -> Work:
        """One more worker, for a job of its own."""
        gateway = DirectGateway(self._api.clock, allow_private=True, retry_after_cap=CAP)
        self._gateways.append(gateway)
        hosts = HostAnswers(
            HostPolicies(lambda: HostRules(limit=self._limit)),
            self._api.binding.pacing,
            self._api.clock,
            backoff=Backoff(BASE, 2 * BASE),
        )
        return await work_on(self._api, gateway, *urls, hosts=hosts, **job_fields)

    async def aclose(self) -> None:
        for gateway in self._gateways:
            await gateway.aclose()


@pytest.fixture
async def fleet(api: Api) -> AsyncIterator[Workers]:
    workers = Workers(api)
    yield workers
    await workers.aclose()


async def closed_for(api: Api, server: RawServer, key: str = "") -> float:
    """The seconds for which a host is closed to the whole fleet: for everybody, or for the caller
    with a key."""
    caller = api.service.identify(key).caller_id if key else ""
    name = host_key(f"127.0.0.1:{server.port}", caller)
    return (await api.binding.pacing.state([name])).get(name, HostState()).closed_for


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("form", "seconds"), [("7", 7.0), ("date", 7.0), ("86400", CAP), ("0", BASE / 2)]
)
async def test_a_host_is_closed_for_the_fleet_in_the_time_that_it_named(
    api: Api,
    fleet: Workers,
    server: RawServer,
    other: RawServer,
    *,
    status: int,
    form: str,
    seconds: float,
) -> None:
    after = formatdate(api.clock.now() / 1_000 + 7, usegmt=True) if form == "date" else form
    work = await fleet.work(asking(server, status, after), other.url("/d"), **POLITE)

    refused = await work.handle(0)

    assert refused.hide_for is not None
    assert refused.hide_for >= seconds
    assert seconds <= await closed_for(api, server) <= max(seconds, 1.5 * BASE)
    assert (await work.handle(1)).hide_for is None
    assert (await work.rows())[0]["waiting"]["reason"] == "retry_after"
    assert refused.waiting is WaitReason.HOST_RETRY_AFTER
    [task, _] = await api.tasks_of(work.run_id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)


@pytest.mark.parametrize("after", ["soon", "-5", "1.5", "", None])
async def test_a_503_that_names_no_time_is_an_attempt_and_closes_nothing(
    api: Api, fleet: Workers, server: RawServer, after: str | None
) -> None:
    work = await fleet.work(asking(server, 503, after), server.url("/b"), **POLITE)
    await work.handle(0)
    assert (await work.handle(1)).hide_for is None
    [task, _] = await api.tasks_of(work.run_id)
    assert task.attempts == 1


async def test_fifty_refusals_in_a_row_use_up_no_attempt(
    api: Api, fleet: Workers, server: RawServer
) -> None:
    work = await fleet.work(asking(server, 429, "3"), max_attempts=1, **POLITE)
    for receives in range(1, 51):
        outcome = await work.handle(0, receives=receives)
        assert outcome.hide_for is not None
        await api.clock.advance(outcome.hide_for + 0.001)
    assert len(server.all_requests) == 50
    [task] = await api.tasks_of(work.run_id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    assert len((await work.history(0))["events"]) == 32


@pytest.mark.parametrize("after", ["60", None])
async def test_a_task_that_is_refused_past_its_deadline_is_rate_limited(
    api: Api, fleet: Workers, server: RawServer, after: str | None
) -> None:
    work = await fleet.work(asking(server, 429, after), max_attempts=1, **POLITE)
    began = api.clock.monotonic()

    await work.until_done(0)

    assert api.clock.monotonic() - began >= DEADLINE
    [row] = await work.rows()
    assert (row["status"], row["error"]["code"]) == ("failed", "rate_limited")


async def test_without_a_policy_a_refusal_is_an_attempt(
    api: Api, fleet: Workers, server: RawServer
) -> None:
    work = await fleet.work(asking(server, 429, "3"), max_attempts=1)
    assert (await work.handle(0)).hide_for is None
    [row] = await work.rows()
    assert (row["status"], row["error"]["code"]) == ("failed", "rate_limited")
    assert await closed_for(api, server) == 0


async def test_a_policy_of_the_server_holds_for_jobs_that_say_nothing(
    api: Api, server: RawServer
) -> None:
    workers = Workers(api, limit=4)
    work = await workers.work(asking(server, 429, "9"), max_attempts=1)
    assert (await work.handle(0)).hide_for is not None
    assert await closed_for(api, server) == 9
    await workers.aclose()


async def test_what_a_host_says_to_one_caller_closes_it_for_that_caller_alone(
    api: Api, fleet: Workers, server: RawServer
) -> None:
    work = await fleet.work(asking(server, 429, "9"), **POLITE, **PRIVATE)
    await work.handle(0)
    seen = [await closed_for(api, server, key) for key in ("", KEY, OTHER_KEY)]
    assert seen == [0, 9, 0]


async def test_a_host_that_names_no_time_gets_half_as_much(api: Api, server: RawServer) -> None:
    workers = Workers(api, limit=8)
    key = host_key(f"127.0.0.1:{server.port}")

    async def ceiling() -> int:
        return (await api.binding.pacing.state([key])).get(key, HostState()).ceiling

    refusing = await workers.work(*[asking(server, 429)] * 2, max_attempts=1)
    told = [(await refusing.handle(0)).waiting]
    assert await ceiling() == 4
    await api.clock.advance(0.1)
    told.append((await refusing.handle(1)).waiting)
    assert await ceiling() == 2
    # The site refuses, and no gateway under load.
    assert [row["waiting"]["reason"] for row in await refusing.rows()] == ["host_limit"] * 2
    assert told == [WaitReason.HOST_LIMIT] * 2

    await workers.aclose()


@pytest.mark.parametrize(
    ("servers", "own", "expected"),
    [(0, 8, [0, 4]), (100, 8, [0, 4]), (6, 8, [3, 0]), (8, 8, [4, 0])],
)
async def test_what_is_halved_is_the_strictest_limit_of_server_and_job(
    api: Api, server: RawServer, servers: int, own: int, expected: list[int]
) -> None:
    workers = Workers(api, limit=servers)
    caller = api.service.identify(KEY).caller_id
    keys = [host_key(f"127.0.0.1:{server.port}", one) for one in ("", caller)]
    work = await workers.work(asking(server, 429), max_attempts=1, politeness={"per_host": own})
    await work.handle(0)
    states = await api.binding.pacing.state(keys)
    ceilings = [states.get(key, HostState()).ceiling for key in keys]
    assert ceilings == expected
    assert await closed_for(api, server) == await closed_for(api, server, KEY) == 0
    await workers.aclose()


async def test_a_limit_that_is_lowered_already_may_be_the_strictest(
    api: Api, server: RawServer
) -> None:
    workers = Workers(api, limit=100)
    key = host_key(f"127.0.0.1:{server.port}")
    await api.binding.pacing.lower(key, 8)
    await api.clock.advance(1.0)
    work = await workers.work(asking(server, 429), **POLITE)
    await work.handle(0)
    assert (await api.binding.pacing.state([key]))[key].ceiling == 2
    await workers.aclose()


async def test_a_host_with_the_lowest_ceiling_is_closed_for_a_backoff(
    api: Api, server: RawServer
) -> None:
    workers = Workers(api, limit=1)
    work = await workers.work(asking(server, 429))
    await work.handle(0)
    assert BASE / 2 <= await closed_for(api, server) <= 1.5 * BASE
    await workers.aclose()


async def test_a_refusal_that_is_a_result_closes_its_host_all_the_same(
    api: Api, fleet: Workers, server: RawServer
) -> None:
    work = await fleet.work(
        asking(server, 429, "9"),
        **POLITE,
        zenrows_params={"allowed_status_codes": "429"},
    )
    assert (await work.handle(0)).hide_for is None
    assert await closed_for(api, server) == 9
    assert (await work.rows())[0]["status"] == "successful"


@pytest.mark.parametrize("key", ["everybody", "caller"])
async def test_no_redirect_leads_to_a_host_that_is_closed(
    api: Api, fleet: Workers, server: RawServer, other: RawServer, key: str
) -> None:
    led = asking(other, 302, fields=f"Location: {server.url('/')}\r\n")
    work = await fleet.work(led, max_attempts=1, **POLITE)
    job = await api.binding.jobs.find_job(work.job_id)
    assert job is not None
    name = host_key(f"127.0.0.1:{server.port}", job.caller if key == "caller" else "")
    await api.binding.pacing.close(name, 30.0)
    wait = (await work.handle(0)).hide_for
    assert wait is not None
    assert 30 <= wait <= 31.1
    assert server.all_requests == []
    await api.clock.advance(wait)
    assert (await work.handle(0)).hide_for is None
    assert len(server.all_requests) == 1


async def test_a_redirect_closes_the_host_that_refused(
    api: Api, fleet: Workers, server: RawServer, other: RawServer
) -> None:
    led = asking(other, 302, fields=f"Location: {asking(server, 429, '9')}\r\n")
    work = await fleet.work(led, other.url("/a"), server.url("/b"), max_attempts=1, **POLITE)
    waits = [(await work.handle(number)).hide_for for number in range(3)]
    assert [wait is None for wait in waits] == [False, True, False]
    assert [await closed_for(api, place) for place in (server, other)] == [9, 0]
    assert [task.attempts for task in await api.tasks_of(work.run_id)] == [0, 1, 0]


@pytest.mark.parametrize("together", [False, True], ids=["each alone", "together"])
async def test_a_host_has_the_pause_that_it_asked_for_whatever_it_is_counted_with(
    api: Api, server: RawServer, *, together: bool
) -> None:
    """The rules may change meanwhile, also while nothing runs."""
    before, after = (
        HostPolicies(partial(HostRules, patterns={"*": HostPattern(limit=3, together=one)}))
        for one in (together, not together)
    )
    pacing = api.binding.pacing
    gateway = DirectGateway(api.clock, allow_private=True, retry_after_cap=CAP)
    hosts = HostAnswers(before, pacing, api.clock, backoff=Backoff(BASE, 2 * BASE))
    work = await work_on(api, gateway, asking(server, 429, "9"), hosts=hosts)
    assert (await work.handle(0)).hide_for is not None
    await gateway.aclose()

    host, caller = f"127.0.0.1:{server.port}", api.service.identify(KEY).caller_id
    steps = paces(after.rules_of(host, caller, None), host, caller)
    assert (await pacing.book(*next(iter(steps.items())), also=steps)).closed_for == 9
    states = await pacing.state(steps)
    assert max(state.closed_for for state in states.values()) == 9
