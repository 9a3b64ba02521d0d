"""`conveyor listen`: each event of the log is handed on once, also those that came while it was
off, and those that are replayed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from zenrows.batch import verify_webhook_signature

from conveyor.client.api import Api, connect
from conveyor.client.commands import Printing, ServerTarget, Terminal
from conveyor.client.errors import ClientError
from conveyor.client.listen import TRIES, Listener
from conveyor.client.receiver import Receiver as Local
from conveyor.clock import SystemClock
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import CLIENT, conveyor, environment
from tests.acceptance.support_receiver import Receiver
from tests.acceptance.support_wire import eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]
HOOK = "https://hooks.example.com/x"
PAST = "1970-01-01T00:00:00.000Z"
WHILE_OFF = 50


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio."""
    return "asyncio"


@contextmanager
def listening(
    server: ConveyorServer, tmp_path: Path, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """`conveyor listen` as a process, once it has read the log."""
    command = [*CLIENT, "listen", *words]
    with (tmp_path / "listened").open("w") as out:
        child = subprocess.Popen(
            command, env=environment(server), stdout=out, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        try:
            first = child.stderr.readline()
            assert first.startswith("listening to ")
            assert ": events of jobs that have a webhook" in first
            yield child
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            child.stderr.close()


async def submit(api: Api, server: ConveyorServer, name: str, *, signed: bool = False) -> str:
    """Make a job whose run has an event."""
    webhook = {"url": HOOK, "signature": signed}
    body = {"tasks": [{"url": server.url(name)}], "webhook": webhook}
    reply, _ = await api.submit(body, idempotency_key=name)
    return reply.job_id


async def logged(api: Api, count: int) -> list[str]:
    """Return the ids of the events, oldest first, once there are so many."""
    while True:
        page = await api.deliveries(None, limit=100)
        if len(page.deliveries) >= count:
            return [one.delivery_id for one in reversed(page.deliveries)]
        await anyio.sleep(0.05)


def submitted(server: ConveyorServer, count: int) -> list[str]:
    """Make so many events, and return their ids."""

    async def work() -> list[str]:
        async with connect(server.base_url, server.api_key, SystemClock()) as api:
            for number in range(count):
                await submit(api, server, f"page/{number}", signed=True)
            return await logged(api, count)

    return anyio.run(work)


def told(receiver: Receiver) -> list[str]:
    return [headers["X-ZenRows-Event-Id"] for headers, _ in receiver.got]


def shown_lines(directory: Path, count: int) -> list[str]:
    """The lines of the listener once there are so many: it writes one after the receiver's answer,
    with which the receiver has counted the event already."""

    def lines() -> list[str] | None:
        found = (directory / "listened").read_text().splitlines()
        return found if len(found) == count else None

    return eventually(lines, f"{count} lines")


@pytest.mark.extended
def test_events_that_came_while_it_was_off_are_handed_on_once_and_in_order(
    server: ConveyorServer, tmp_path: Path
) -> None:
    key = json.loads(conveyor(server, "keys", "rotate", "--json").out[0])
    events = submitted(server, WHILE_OFF)
    with (
        Receiver(200) as receiver,
        listening(server, tmp_path, "--forward-to", receiver.url, "--since", "1h") as child,
    ):
        receiver.gets(WHILE_OFF)
        conveyor(server, "webhook", "replay", events[3])
        receiver.gets(WHILE_OFF + 1)
        shown = shown_lines(tmp_path, WHILE_OFF + 1)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr is not None
        said = child.stderr.read()

    assert told(receiver) == [*events, events[3]]
    assert "Traceback" not in said
    assert said.count("\n") == 1
    for headers, body in receiver.got:
        secrets = {key["kid"]: key["secret"]}
        assert verify_webhook_signature(body, headers["X-Signature"], secrets)
        assert json.loads(body)["event_id"] == headers["X-ZenRows-Event-Id"]
    assert receiver.got[3][1] == receiver.got[-1][1]
    assert receiver.got[-1][0]["X-Conveyor-Replay"] == "true"
    assert (tmp_path / "listened").read_text().splitlines() == shown
    assert all(len(line) <= 80 for line in shown)


class HastyClock(SystemClock):
    """A clock whose sleeps end at once, and are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def listener_of(
    api: Api, url: str, *, job: str | None = None, since: str | None = PAST
) -> AsyncIterator[Listener]:
    """A listener that has begun."""
    target = ServerTarget(api.address, "local", api.pace)
    async with aclosing(Local(url)) as receiver:
        terminal = Terminal(Printing.JSON)
        listener = Listener(target, api, terminal, receiver, job=job, since=since)
        await listener.begin()
        yield listener


@pytest.mark.extended
async def test_a_receiver_that_takes_nothing_is_tried_a_few_times_and_then_left(
    server: ConveyorServer, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = HastyClock()
    async with connect(server.base_url, server.api_key, clock) as api:
        await submit(api, server, "page")
        await logged(api, 1)
        with Receiver(500) as broken:
            async with listener_of(api, broken.url) as listener:
                await listener.look(whole=True)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["try"], one["status_code"]) for one in lines] == [
        (number, 500) for number in range(1, TRIES + 1)
    ]
    assert len(broken.got) == TRIES
    assert len({body for _, body in broken.got}) == 1
    assert (listener.handed_on, clock.slept) == (0, [0.5, 1.0, 2.0, 4.0])


@pytest.mark.extended
async def test_without_since_only_what_comes_later_is_handed_on(server: ConveyorServer) -> None:
    async with connect(server.base_url, server.api_key, HastyClock()) as api:
        await submit(api, server, "before")
        [before] = await logged(api, 1)
        with Receiver(200) as receiver:
            async with listener_of(api, receiver.url, since=None) as listener:
                await listener.look(whole=True)
                assert told(receiver) == []

                await submit(api, server, "after")
                [_, after] = await logged(api, 2)
                await api.replay_delivery(before)
                for whole in (False, True):
                    await listener.look(whole=whole)

    assert told(receiver) == [after, before]
    assert "X-Signature" not in receiver.got[0][0]
    assert listener.handed_on == 2


@pytest.mark.extended
async def test_events_of_other_jobs_are_passed_over(
    server: ConveyorServer,
) -> None:
    async with connect(server.base_url, server.api_key, HastyClock()) as api:
        jobs = [await submit(api, server, name) for name in ("mine", "other")]
        await logged(api, 2)
        with Receiver(200) as receiver:
            async with listener_of(api, receiver.url, job=jobs[0]) as listener:
                await listener.look(whole=True)

    [(_, body)] = receiver.got
    assert json.loads(body)["job_id"] == jobs[0]


async def test_a_receiver_that_is_not_there_is_told(
    server: ConveyorServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with Receiver(200) as gone:
        url = gone.url
    async with connect(server.base_url, server.api_key, HastyClock()) as api:
        await submit(api, server, "page")
        [event] = await logged(api, 1)
        async with listener_of(api, url) as listener:
            await listener.look(whole=True)

    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [one["status_code"] for one in lines] == [None] * TRIES
    assert all(one["error"] for one in lines)
    assert f"conveyor webhook replay {event}" in captured.err


@pytest.mark.parametrize("url", ["", "nope", "ftp://127.0.0.1/", "http://127.0.0.1:99999/"])
def test_an_address_that_is_none_is_a_mistake_of_use(server: ConveyorServer, url: str) -> None:
    ran = conveyor(server, "listen", "--forward-to", url)
    assert (ran.code, ran.out, len(ran.err)) == (2, [], 1)
    assert (url or "''") in ran.err[0]


def test_a_job_that_is_not_there_is_told(server: ConveyorServer) -> None:
    ran = conveyor(server, "listen", "--forward-to", "http://127.0.0.1/", "--job", "nojob")
    assert (ran.code, ran.out, ran.err) == (1, [], ["conveyor: no such job: nojob"])


async def test_a_job_that_is_deleted_meanwhile_ends_the_listening(server: ConveyorServer) -> None:
    async with connect(server.base_url, server.api_key, HastyClock()) as api:
        job = await submit(api, server, "page")
        await logged(api, 1)
        with Receiver(200) as receiver:
            async with listener_of(api, receiver.url, job=job) as listener:
                await api.delete_job(job)
                with pytest.raises(ClientError, match=f"^job {job} was deleted: "):
                    await listener.look(whole=False)


def test_a_moment_that_is_none_is_a_mistake_of_use(server: ConveyorServer) -> None:
    ran = conveyor(server, "listen", "--forward-to", "http://127.0.0.1/", "--since", "soon")
    assert (ran.code, ran.out, len(ran.err)) == (2, [], 1)
