"""Handing events on where the server's answers are odd: what is gone, dropped, or refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from conveyor.client.commands import Printing, ServerTarget, Terminal
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.listen import EVENT_SECONDS, TRIES, Listener, listen
from conveyor.client.receiver import Receiver
from conveyor.client.webhooks import PAGE
from tests.unit.scripted_server import KEY, Answer, Pace, Script, asked, ok, problem, scripted

MARKS = (1, 2, PAGE, PAGE + 1, 2 * PAGE)
PAST = "1970-01-01T00:00:00.000Z"
IDS = [f"01M8MEDFTGV7KEBCT8GZ4B{number:04}" for number in range(2 * PAGE + 1)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def delivery(number: int, **fields: Any) -> dict[str, Any]:
    usual = {
        "delivery_id": IDS[number],
        "job_id": "J",
        "run_id": "R",
        "event_type": "run.completed",
        "status": "delivered",
        "created_at": f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000Z",
    }
    return usual | fields


def page(*deliveries: dict[str, Any], cursor: str | None = None) -> Any:
    return ok({"deliveries": list(deliveries), "next_cursor": cursor})


def told_in_order(receiver: Script) -> list[bytes]:
    return [told.body for told in receiver.told]


class Listening(msgspec.Struct):
    """A listener with its server, its receiver, its clock and its terminal."""

    listener: Listener
    server: Script
    receiver: Script
    pace: Pace
    terminal: Terminal


@asynccontextmanager
async def listening(
    *answers: Answer,
    since: str | None = PAST,
    job: str | None = None,
    takes: Answer | None = None,
    named: str | None = None,
) -> AsyncIterator[Listening]:
    """A listener over a server with these answers, and a receiver that takes all."""
    with scripted(takes or ok({})) as receiver:
        async with (
            asked(*answers) as (api, server, pace),
            aclosing(Receiver(receiver.origin)) as to,
        ):
            terminal = Terminal(Printing.JSON)
            target = ServerTarget(server.origin, KEY, pace, named=named)
            listener = Listener(target, api, terminal, to, job=job, since=since)
            yield Listening(listener, server, receiver, pace, terminal)


def mostly_dropped(*numbers: int) -> list[dict[str, Any]]:
    """Events of which those alone are posted whose order is looked at."""
    return [
        delivery(number, status="delivered" if number in MARKS else "dropped") for number in numbers
    ]


def event(number: int, body: str = "") -> list[Answer]:
    """The answers that an event is made of."""
    return [ok(delivery(number, body=body or str(number))), ok({"headers": {}})]


async def test_dropped_events_are_passed_over_and_one_that_is_gone_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = page(delivery(1), delivery(0, status="dropped"))
    async with listening(log, log, problem(404, "not_found")) as one:
        await one.listener.begin()
        await one.listener.look(whole=True)
        one.server.answers[:] = [log]
        await one.listener.look(whole=True)

    assert one.receiver.told == []
    assert capsys.readouterr().err.splitlines() == [
        f"run.completed  {IDS[1]}  gone before it was handed on"
    ]


@pytest.mark.slow
async def test_an_event_that_the_server_does_not_sign_holds_up_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = ok(delivery(0, body="{}"))
    refused = problem(400, "webhook_signing_requires_active_key")
    tries = [answer for _ in range(TRIES) for answer in (whole, refused)]
    fine = [ok(delivery(1, body='{"é":1}')), ok({"headers": {"X-ZenRows-Event-Id": IDS[1]}})]
    log = page(delivery(1), delivery(0))
    async with listening(log, log, *tries, *fine) as one:
        await one.listener.begin()
        await one.listener.look(whole=True)

    [told] = one.receiver.told
    assert (told.method, told.body.decode()) == ("POST", '{"é":1}')
    assert told.headers["Content-Type"] == "application/json"
    assert told.headers["X-ZenRows-Event-Id"] == IDS[1]
    assert "X-API-Key" not in told.headers
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["delivery_id"] for one in lines] == [IDS[0]] * TRIES + [IDS[1]]
    assert "webhook_signing_requires_active_key" in lines[0]["error"]
    assert (lines[-1]["status_code"], lines[-1]["error"]) == (200, None)
    assert len(one.pace.slept) == TRIES - 1


async def test_replays_come_after_what_is_sent_for_the_first_time() -> None:
    old = delivery(0, ladder=2, replayed_at="2026-01-01T00:01:00.000Z")
    log = page(delivery(1), old)
    answers = [log, log, *event(1), *event(0)]
    async with listening(*answers, since="2026-01-01T00:00:01.000Z") as one:
        await one.listener.begin()
        await one.listener.look(whole=True)
        one.server.answers[:] = [log]
        await one.listener.look(whole=True)

    assert told_in_order(one.receiver) == [b"1", b"0"]
    assert one.listener.handed_on == 2


async def test_what_was_sent_before_is_passed_over() -> None:
    log = page(delivery(1), delivery(0))
    async with listening(log, since="2026-01-01T00:00:02.000Z") as one:
        await one.listener.begin()
        await one.listener.look(whole=False)

    assert one.receiver.told == []
    assert {told.path.partition("?")[0] for told in one.server.told} == {"/v1/webhook/deliveries"}


@pytest.mark.slow
async def test_more_events_than_a_page_between_two_looks_come_oldest_first() -> None:
    pages = [
        page(*mostly_dropped(*range(2 * PAGE, PAGE, -1)), cursor="2"),
        page(*mostly_dropped(*range(PAGE, 0, -1)), cursor="3"),
    ]
    answers = [answer for number in MARKS for answer in event(number)]
    async with listening(page(delivery(0)), since=None) as one:
        await one.listener.begin()
        one.server.told.clear()
        one.server.answers[:] = [*pages, page(delivery(0)), *answers]
        await one.listener.look(whole=False)

    assert told_in_order(one.receiver) == [b"%d" % number for number in MARKS]
    assert len([told for told in one.server.told if "limit=" in told.path]) == 3


async def test_a_page_that_holds_a_known_event_is_the_last_one_read() -> None:
    newer = page(*mostly_dropped(*range(PAGE, 0, -1)), cursor="2")
    async with listening(page(delivery(1)), since=None) as one:
        await one.listener.begin()
        one.server.told.clear()
        one.server.answers[:] = [newer, *event(2), *event(PAGE)]
        await one.listener.look(whole=False)

    assert len([told for told in one.server.told if "limit=" in told.path]) == 1
    assert told_in_order(one.receiver) == [b"2", b"%d" % PAGE]


@pytest.mark.slow
async def test_a_server_that_goes_away_in_the_backlog_repeats_no_event() -> None:
    log = page(delivery(1), delivery(0))
    async with listening(log, log, *event(0), (0, {}, b"")) as one:
        await one.listener.begin()
        with pytest.raises(ServerUnreachable):
            await one.listener.look(whole=True)
        one.server.answers[:] = [problem(503, "unavailable")]
        with pytest.raises(ServerRefused):
            await one.listener.look(whole=True)
        one.server.answers[:] = [log, *event(1)]
        await one.listener.look(whole=True)

    assert told_in_order(one.receiver) == [b"0", b"1"]


async def test_what_comes_while_the_server_is_away_at_the_start_is_new() -> None:
    async with listening(problem(503, "unavailable"), since=None) as one:
        with pytest.raises(ServerRefused):
            await one.listener.begin()
        log = page(delivery(1), delivery(0, created_at="1969-01-01T00:00:00.000Z"))
        one.server.answers[:] = [log, log, *event(1)]
        await one.listener.begin()
        await one.listener.look(whole=True)

    assert told_in_order(one.receiver) == [b"1"]


class Interrupted(Exception):
    pass


class ShortPace(Pace):
    """A clock that is interrupted at a pause."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self.pauses = pauses

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if len(self.slept) > self.pauses:
            raise Interrupted


async def test_listening_goes_on_when_the_server_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away, back = problem(500, "internal"), page(delivery(0))
    with scripted(ok({})) as receiver, scripted(away, away, back, away, back, *event(0)) as server:
        target = ServerTarget(server.origin, KEY, ShortPace(3))
        with pytest.raises(Interrupted):
            await listen(target, Terminal(), receiver.origin, job=None, since=PAST)

    assert told_in_order(receiver) == [b"0"]
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said] == ["internal", "listening", "internal"]


@pytest.mark.parametrize(
    "answer", [problem(404, "not_found"), ok({"job_id": "J", "status": "deleted"})]
)
async def test_a_job_that_is_not_there_is_told_before_anything_is_heard(
    answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(answer) as server:
        target = ServerTarget(server.origin, KEY, Pace())
        with pytest.raises(ClientError, match="^no such job: nojob$"):
            await listen(target, Terminal(), "http://127.0.0.1:9/", job="nojob", since=None)
    assert capsys.readouterr().err == ""


async def test_a_job_that_is_deleted_meanwhile_is_told() -> None:
    async with listening(ok({"job_id": "j", "status": "open"}), page(), job="j") as one:
        await one.listener.begin()
        one.server.answers[:] = [problem(404, "not_found")]
        with pytest.raises(ClientError, match="^job j was deleted: it has no more events$"):
            await one.listener.look(whole=False)


@pytest.mark.parametrize(
    ("webhook", "told"),
    [(None, "job j has no webhook, so it has no events: conveyor webhook set j URL\n"),
     ({"url": "https://hooks.example.com/", "signature": False, "events": []}, "")],
)  # fmt: skip
async def test_a_job_without_a_webhook_is_told_to_have_no_events(
    webhook: object, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"job_id": "j", "status": "open", "webhook": webhook}
    async with listening(ok(job), page(), job="j") as one:
        await one.listener.begin()
    assert capsys.readouterr().err == told


async def test_an_interrupt_names_the_way_back() -> None:
    job, log = ok({"job_id": "j", "status": "open"}), page(delivery(1), delivery(0))
    answers = [job, log, log, *event(0), (0, {}, b"")]
    async with listening(*answers, job="j", named="http://h:1") as one:
        back = f"conveyor listen --forward-to {one.receiver.origin} --job j --since"
        assert one.terminal.farewell == (
            f"interrupted; come back with: {back} {PAST} --server http://h:1"
        )
        await one.listener.begin()
        with pytest.raises(ServerUnreachable):
            await one.listener.look(whole=True)
        assert f"{back} 2026-01-01T00:00:00.000Z " in one.terminal.farewell
        one.server.answers[:] = [log, *event(1)]
        await one.listener.look(whole=True)
    assert f"{back} 2026-01-01T00:00:01.000Z " in one.terminal.farewell


async def test_the_way_back_leaves_out_no_event_of_an_earlier_moment() -> None:
    late = delivery(1, created_at="2026-01-01T00:00:00.000Z")
    early = delivery(0, created_at="2026-01-01T00:00:05.000Z")
    log = page(late, early)
    async with listening(log, log, *event(0), (0, {}, b"")) as one:
        await one.listener.begin()
        with pytest.raises(ServerUnreachable):
            await one.listener.look(whole=True)
    assert "--since 2026-01-01T00:00:00.000Z" in one.terminal.farewell


@pytest.mark.slow
async def test_the_replay_to_paste_is_for_the_same_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = page(delivery(0))
    answers = [log, log, *(answer for _ in range(TRIES) for answer in event(0))]
    async with listening(*answers, takes=(500, {}, b""), named="http://h:1") as one:
        await one.listener.begin()
        await one.listener.look(whole=True)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gave up after {TRIES} tries; to have it again: conveyor webhook replay {IDS[0]} "
        "--server http://h:1"
    )


class SlowPace(Pace):
    """A clock that goes on by some seconds whenever it is read."""

    def monotonic(self) -> float:
        self.slept.append(EVENT_SECONDS / 4)
        return super().monotonic()


async def test_an_event_holds_up_others_for_a_bounded_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = page(delivery(0))
    with scripted((500, {}, b"")) as receiver:
        async with asked(log, log, *event(0), *event(0), log) as (api, _, _):
            pace = SlowPace()
            api.pace = pace
            target = ServerTarget("", KEY, pace)
            async with aclosing(Receiver(receiver.origin)) as to:
                listener = Listener(target, api, Terminal(), to, job=None, since=PAST)
                await listener.begin()
                await listener.look(whole=True)

    assert len(receiver.told) == 2
    assert capsys.readouterr().err.startswith("gave up after 2 tries; ")


@contextmanager
def raw_receiver(answer: bytes) -> Iterator[str]:
    """A receiver that says this and no more, and keeps the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


async def test_a_receiver_whose_answer_never_ends_is_heard() -> None:
    with raw_receiver(b"HTTP/1.1 202 OK\r\nContent-Length: 99\r\n\r\nx") as url:
        async with aclosing(Receiver(url)) as receiver:
            outcome = await receiver.post({}, b"{}", seconds=60.0)
    assert (outcome.taken, outcome.words) == (True, "202")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nX-A: "], ids=["silent", "half"])
async def test_a_receiver_without_an_answer_is_left(answer: bytes) -> None:
    with raw_receiver(answer) as url:
        async with aclosing(Receiver(url)) as receiver:
            outcome = await receiver.post({}, b"{}", seconds=0.05)
    assert (outcome.taken, outcome.words) == (False, "no answer for 0.05 s")


@pytest.mark.parametrize(
    "url",
    [
        *("", "nope", "ftp://x/", "http://", "http://[::1", "http://a b/", "http://a..b/"),
        *("http://127.0.0.1:99999/", "http://127.0.0.1:0/", f"http://{'a' * 70}/", "http://a/\0"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="^not an http or https address: ."):
        Receiver(url)
