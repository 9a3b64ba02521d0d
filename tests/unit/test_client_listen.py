"""Handing events on where the server's answers are odd: what is gone, dropped, or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from conveyor.client.commands import Printing, Terminal
from conveyor.client.listen import TRIES, Listener, Receiver
from tests.unit.scripted_server import Answer, Pace, Script, asked, ok, problem, scripted

PAST = "1970-01-01T00:00:00.000Z"
IDS = ("01M8MEDFTGV7KEBCT8GZ4BZHEA", "01M8MEDFTGV7KEBCT8GZ4BZHEB")


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
        "created_at": f"2026-01-01T00:00:0{number}.000Z",
    }
    return usual | fields


def page(*deliveries: dict[str, Any]) -> Any:
    return ok({"deliveries": list(deliveries)})


@asynccontextmanager
async def listening(*answers: Answer) -> AsyncIterator[tuple[Listener, Script, Script, Pace]]:
    """A listener over a server with these answers, that server, and a receiver that takes all."""
    with scripted(ok({})) as receiver:
        async with (
            asked(*answers) as (api, server, pace),
            aclosing(Receiver(receiver.origin)) as to,
        ):
            listener = Listener(api, Terminal(Printing.JSON), to, job_id=None)
            yield listener, server, receiver, pace


async def test_dropped_events_are_passed_over_and_one_that_is_gone_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = page(delivery(1), delivery(0, status="dropped"))
    async with listening(log, problem(404, "not_found")) as (listener, server, receiver, _):
        await listener.begin(PAST)
        server.answers[:] = [log]
        await listener.look(whole=True)

    assert receiver.told == []
    assert capsys.readouterr().err.splitlines() == [
        f"run.completed  {IDS[1]}  gone before it was handed on"
    ]


async def test_an_event_that_the_server_does_not_sign_holds_up_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = ok(delivery(0, body="{}"))
    refused = problem(400, "webhook_signing_requires_active_key")
    tries = [answer for _ in range(TRIES) for answer in (whole, refused)]
    fine = [ok(delivery(1, body='{"é":1}')), ok({"headers": {"X-ZenRows-Event-Id": IDS[1]}})]
    log = page(delivery(1), delivery(0))
    async with listening(log, *tries, *fine) as (listener, _, receiver, pace):
        await listener.begin(PAST)

    [told] = receiver.told
    assert (told.method, told.body.decode()) == ("POST", '{"é":1}')
    assert told.headers["Content-Type"] == "application/json"
    assert told.headers["X-ZenRows-Event-Id"] == IDS[1]
    assert "X-API-Key" not in told.headers
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["delivery_id"] for one in lines] == [IDS[0]] * TRIES + [IDS[1]]
    assert "webhook_signing_requires_active_key" in lines[0]["error"]
    assert (lines[-1]["status_code"], lines[-1]["error"]) == (200, None)
    assert len(pace.slept) == TRIES - 1


async def test_replays_come_after_what_is_sent_for_the_first_time() -> None:
    old = delivery(0, ladder=2, replayed_at="2026-01-01T00:01:00.000Z")
    signed = ok({"headers": {}})
    log = page(delivery(1), old)
    bodies = [ok(delivery(1, body="1")), signed, ok(delivery(0, body="0")), signed]
    async with listening(log, *bodies) as (listener, server, receiver, _):
        await listener.begin("2026-01-01T00:00:01.000Z")
        server.answers[:] = [log]
        await listener.look(whole=True)

    assert [told.body for told in receiver.told] == [b"1", b"0"]
    assert listener.handed_on == 2


async def test_what_was_sent_before_is_passed_over() -> None:
    async with listening(page(delivery(1), delivery(0))) as (listener, server, receiver, _):
        await listener.begin("2026-01-01T00:00:02.000Z")
        await listener.look(whole=False)

    assert receiver.told == []
    assert {told.path.partition("?")[0] for told in server.told} == {"/v1/webhook/deliveries"}
