"""The receiver that is built into a development server: what it keeps, and what it says of it."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from conveyor.bootstrap import open_dev
from conveyor.domain.histogram import ANSWER, Histogram
from conveyor.domain.signatures import SigningSecret, sign
from conveyor.http import inbox as module
from conveyor.http.inbox import MOST_BODY, MOST_REQUESTS, Inbox
from conveyor.http.middleware import AccessLog, ProblemResponses, RequestId, routing_problem
from conveyor.settings import load
from conveyor.testing.clock import FakeClock

OURS = SigningSecret("01KEYOURS", bytes(range(32)))
NEXT = SigningSecret("01KEYNEXT", bytes(range(32, 64)))
FOREIGN = SigningSecret("01KEYFOREIGN", bytes(reversed(range(32))))
BODY = b'{"event_type":"run.completed"}'
ALL_VALID = {"x_signature": True, "webhook_signature": True, "client": True}


@asynccontextmanager
async def opened(clock: FakeClock, *, peer: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    async def secrets() -> list[SigningSecret]:
        return [OURS, NEXT]

    app = Starlette(
        routes=Inbox(clock, secrets).routes(),
        middleware=[
            Middleware(RequestId, clock=clock),
            Middleware(AccessLog, clock=clock, took=Histogram(ANSWER)),
            Middleware(ProblemResponses),
        ],
        exception_handlers={405: routing_problem},
    )
    transport = httpx.ASGITransport(app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def signed(clock: FakeClock, key: SigningSecret, body: bytes = BODY) -> dict[str, str]:
    return sign(body, event_id="01EVENT", timestamp=clock.now() // 1_000, active=key)


async def test_the_path_of_a_receiver_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "conveyor.http"):
        async with opened(FakeClock()) as client:
            for path in ("shop/hush/x", "shop%2Fhush", "shop//hush", "shop/"):
                await client.post(f"/_dev/inbox/{path}", content=BODY)
            await client.delete("/_dev/inbox/shop/hush")
            await client.get("/_dev/inbox/shop")
            await client.get("/_dev/inbox")

    paths = [getattr(record, "path", "") for record in caplog.records if record.msg == "request"]
    assert paths == ["/_dev/inbox/shop"] * 6 + ["/_dev/inbox"]
    assert "hush" not in caplog.text


async def test_a_request_is_kept_as_it_came() -> None:
    clock = FakeClock()
    raw = bytes(range(256))
    async with opened(clock) as client:
        sent = await client.put("/_dev/inbox/shop/a/b?c=d", content=raw, headers={"X-Twice": "a"})
        await client.post("/_dev/inbox/shop", content=BODY)
        await client.post("/_dev/inbox/other", content=BODY)
        odd, plain = (await client.get("/_dev/inbox/shop")).json()["requests"]
        names = (await client.get("/_dev/inbox")).json()

    assert sent.status_code == 204
    assert base64.b64decode(odd["body_base64"]) == raw
    assert (odd["text"], plain["text"].encode()) == (None, BODY)
    assert (odd["method"], odd["path"], odd["number"]) == ("PUT", "/a/b?c=d", 1)
    assert (plain["method"], plain["path"], plain["number"]) == ("POST", "/", 2)
    assert odd["headers"]["content-length"] == "256"
    assert odd["received_at"].endswith("Z")
    assert odd["verified"] == dict.fromkeys(ALL_VALID)
    assert names == {"inboxes": [{"name": "other", "requests": 1}, {"name": "shop", "requests": 2}]}


@pytest.mark.parametrize("key", [OURS, NEXT])
async def test_both_schemes_and_the_client_verify_the_keys_of_this_server(
    key: SigningSecret,
) -> None:
    clock = FakeClock()
    async with opened(clock) as client:
        await client.post("/_dev/inbox/n", content=BODY, headers=signed(clock, key))
        listed = await client.get("/_dev/inbox/n")

    assert listed.json()["requests"][0]["verified"] == ALL_VALID
    for secret in (OURS.secret, NEXT.secret):
        for form in (base64.b64encode(secret).decode(), secret.hex()):
            assert form not in listed.text


async def test_a_foreign_key_another_body_and_an_old_instant_do_not_verify() -> None:
    clock = FakeClock()
    fresh = signed(clock, OURS)
    async with opened(clock) as client:
        await client.post("/_dev/inbox/n", content=BODY, headers=signed(clock, FOREIGN))
        await client.post("/_dev/inbox/n", content=BODY + b" ", headers=fresh)
        clock.shift(301)
        await client.post("/_dev/inbox/n", content=BODY, headers=fresh)
        one_scheme = {"X-Signature": signed(clock, OURS)["X-Signature"]}
        await client.post("/_dev/inbox/n", content=BODY, headers=one_scheme)
        listed = (await client.get("/_dev/inbox/n")).json()["requests"]

    assert [one["verified"] for one in listed] == [
        *[dict.fromkeys(ALL_VALID, False)] * 3,
        {"x_signature": True, "webhook_signature": None, "client": True},
    ]


async def test_without_the_client_its_verdict_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zenrows.batch", None)
    module._client_verifier.cache_clear()
    clock = FakeClock()
    try:
        async with opened(clock) as client:
            await client.post("/_dev/inbox/n", content=BODY, headers=signed(clock, OURS))
            [kept] = (await client.get("/_dev/inbox/n")).json()["requests"]
    finally:
        module._client_verifier.cache_clear()

    assert kept["verified"] == {**ALL_VALID, "client": None}


@pytest.mark.slow
async def test_the_newest_are_kept_and_one_name_is_emptied() -> None:
    async with opened(FakeClock()) as client:
        for number in range(MOST_REQUESTS + 5):
            await client.post(f"/_dev/inbox/{'ab'[number % 2]}", content=json.dumps(number))
        before = [
            len((await client.get(f"/_dev/inbox/{name}")).json()["requests"]) for name in "ab"
        ]
        oldest = (await client.get("/_dev/inbox/b")).json()["requests"][0]["text"]
        emptied = await client.delete("/_dev/inbox/a")
        after = [len((await client.get(f"/_dev/inbox/{name}")).json()["requests"]) for name in "ab"]

    assert (sum(before), oldest, emptied.status_code) == (MOST_REQUESTS, "5", 204)
    assert after == [0, before[1]]


async def test_bodies_are_bounded_one_by_one_and_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 3 * MOST_BODY)
    async with opened(FakeClock()) as client:
        for _ in range(5):
            fits = await client.post("/_dev/inbox/n", content=bytes(MOST_BODY))
        large = await client.post("/_dev/inbox/n", content=bytes(MOST_BODY + 1))
        kept = (await client.get("/_dev/inbox/n")).json()["requests"]

    assert (fits.status_code, large.status_code) == (204, 413)
    assert large.json()["code"] == "payload_too_large"
    assert [one["number"] for one in kept] == [3, 4, 5]


@pytest.mark.parametrize("peer", ["192.0.2.7", "2001:db8::1"])
async def test_other_machines_are_refused(peer: str) -> None:
    async with opened(FakeClock(), peer=peer) as client:
        answers = [
            await client.request(method, f"/_dev/inbox{path}", content=BODY)
            for method, path in [("POST", "/n"), ("GET", "/n"), ("DELETE", "/n"), ("GET", "")]
        ]

    assert {answer.status_code for answer in answers} == {403}
    async with opened(FakeClock(), peer="::1") as client:
        assert (await client.get("/_dev/inbox/n")).json() == {"requests": []}


@pytest.mark.parametrize(
    ("origin", "inbox"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000/_dev/inbox"),
        ("http://[::1]:9000", "http://[::1]:9000/_dev/inbox"),
        ("http://localhost:9000", "http://localhost:9000/_dev/inbox"),
        ("http://192.0.2.7:9000", ""),
        ("http://[2001:db8::1]:9000", ""),
    ],
)
def test_a_server_beyond_loopback_has_no_inbox(tmp_path: Path, origin: str, inbox: str) -> None:
    async def opened_at() -> tuple[str, bool]:
        settings = load({}, data_dir=str(tmp_path), gateway="fake")
        runtime = await open_dev(settings, FakeClock(), origin=origin)
        await runtime.aclose()
        return runtime.inbox, any(route.path.startswith("/_dev/") for route in runtime.app.routes)

    assert anyio.run(opened_at) == (inbox, bool(inbox))
