"""The test of a receiver over the API: what it gets, and what the caller learns."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from zenrows.batch import models, verify_webhook_signature

from conveyor.domain.signatures import verify
from conveyor.gateway.headers import MAX_CONTENT_TYPE
from tests.unit.http_api import KEY, Api, open_api
from tests.unit.wire_server import Peer, raw_server

TEST = "/v1/webhook/test"


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


class Receiver:
    """A receiver that keeps what it gets, and answers with a status once it may."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._come = asyncio.Semaphore(0)

    async def gets(self, count: int) -> None:
        """Wait until so many events came since the last wait."""
        for _ in range(count):
            await self._come.acquire()

    async def serve(self, peer: Peer) -> None:
        head = await peer.request()
        lines = [line.partition(": ") for line in head.split("\r\n")[1:] if line]
        headers = {name: value for name, _, value in lines}
        body = await peer.body(int(headers["Content-Length"]))
        self.got.append((headers, body))
        self._come.release()
        await self.may_answer.wait()
        await peer.send(f"HTTP/1.1 {self.status} x\r\nContent-Length: 0\r\n\r\n".encode())


async def outcome_of(api: Api, **fields: Any) -> models.TestWebhookResponse:
    response = await api.client.post(TEST, json=fields)
    assert response.status_code == 200, response.text
    return models.TestWebhookResponse.model_validate_json(response.content)


def code(response: httpx.Response) -> str:
    problem: dict[str, Any] = response.json()
    return f"{response.status_code} {problem['code']}"


async def test_an_event_of_no_job_is_delivered(tmp_path: Path) -> None:
    receiver = Receiver()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        outcomes = [await outcome_of(api, url=server.url("/hook")) for _ in range(2)]
        now = api.clock.now()

    assert [(one.delivered, one.status_code, one.error) for one in outcomes] == [
        (True, 200, None)
    ] * 2
    assert len({one.event_id for one in outcomes}) == 2
    headers, body = receiver.got[0]
    event = json.loads(body)
    assert event.pop("occurred_at").endswith("Z")
    assert event == {
        "schema": "1",
        "event_id": outcomes[0].event_id,
        "event_type": "webhook.test",
        "job_id": "test",
        "run_id": "test",
        "run_sequence": 1,
    }
    assert headers["X-ZenRows-Event-Id"] == outcomes[0].event_id
    assert headers["X-Conveyor-Attempt"] == "1"
    assert not {name.lower() for name in headers} & {"x-signature", "webhook-signature"}
    assert not verify(body, headers, bytes(32), now=now // 1_000)


@pytest.mark.parametrize(("status", "error"), [(302, "http_3xx:302"), (500, "http_5xx:500")])
async def test_what_the_receiver_did_is_in_the_answer(
    tmp_path: Path, status: int, error: str
) -> None:
    receiver = Receiver(status)
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        outcome = await outcome_of(api, url=server.url())
        nobody = await outcome_of(api, url="http://127.0.0.1:1/")

    assert (outcome.delivered, outcome.status_code, outcome.error) == (False, status, error)
    assert (nobody.delivered, nobody.status_code) == (False, None)
    assert nobody.error == "transport_error:unreachable"


async def test_an_answer_with_an_unreadable_content_type_is_logged(tmp_path: Path) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        head = b"HTTP/1.1 200 x\r\nContent-Type: text/\xff" + b"x" * 60_000
        await peer.send(head + b"\r\nContent-Length: 0\r\n\r\n")

    async with open_api(tmp_path) as api, raw_server(serve) as server:
        outcome = await outcome_of(api, url=server.url())
        shown = (await api.client.get(f"/v1/webhook/deliveries/{outcome.event_id}")).json()

    assert outcome.delivered
    [attempt] = shown["attempts"]
    assert attempt["outcome"] == "delivered"
    assert attempt["content_type"] == "text/?" + "x" * (MAX_CONTENT_TYPE - 6)


async def test_a_signed_event_is_signed_by_both_schemes(tmp_path: Path) -> None:
    receiver = Receiver()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        refused = await api.client.post(TEST, json={"url": server.url(), "signature": True})
        assert code(refused) == "400 webhook_signing_requires_active_key"
        assert receiver.got == []
        first, second = [(await api.client.post("/v1/hmac/keys/rotate")).json() for _ in range(2)]
        await outcome_of(api, url=server.url(), signature=True)
        now = api.clock.now() / 1_000

    headers, body = receiver.got[0]
    assert f"kid={first['kid']}" in headers["X-Signature"]
    assert verify_webhook_signature(
        body, headers["X-Signature"], {first["kid"]: first["secret"]}, now=now
    )
    for key in (first, second):
        assert verify(body, headers, key["secret"], now=int(now))


async def test_no_event_goes_out_unsigned_where_the_key_cannot_be_opened(tmp_path: Path) -> None:
    receiver = Receiver()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        made = (await api.client.post("/v1/hmac/keys/rotate")).json()
        caller = api.service.identify(KEY).caller_id
        active = (await api.binding.signing_keys.get_signing_keys(caller)).active
        assert active is not None
        forged = msgspec.structs.replace(
            active, kid=api.clock.new_id(), sealed=base64.b64decode(made["secret"])
        )
        await api.binding.signing_keys.add_signing_key(caller, forged)
        outcome = await outcome_of(api, url=server.url(), signature=True)

    assert (outcome.delivered, outcome.error) == (False, "transport_error:signing key unreadable")
    assert receiver.got == []


async def test_one_test_at_a_time_for_a_caller(tmp_path: Path) -> None:
    receiver = Receiver()
    receiver.may_answer.clear()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        url = server.url()
        first = asyncio.ensure_future(outcome_of(api, url=url))
        await receiver.gets(1)
        again = await api.client.post(TEST, json={"url": url})
        other = asyncio.ensure_future(api.foreign.post(TEST, json={"url": url}))
        await receiver.gets(1)
        receiver.may_answer.set()

        assert code(again) == "429 rate_limited"
        assert "your other test" in again.json()["detail"]
        assert again.headers["Retry-After"] == "1"
        assert (await first).delivered
        assert (await other).status_code == 200
        assert (await outcome_of(api, url=url)).delivered


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "400 invalid_argument"),
        ([], "400 invalid_argument"),
        ({"url": 5}, "400 invalid_argument"),
        ({"url": ""}, "400 invalid_argument"),
        ({"url": "https://a.test/" + "x" * 2_048}, "400 invalid_argument"),
        ({"url": "http://127.0.0.1/", "signature": "yes"}, "400 invalid_argument"),
        ({"url": "https://user:word@127.0.0.1/"}, "400 invalid_argument"),
        ({"url": "ftp://127.0.0.1/"}, "400 callback_url_must_be_https"),
        ({"url": "https://10.0.0.1/"}, "400 callback_url_unresolvable"),
        ({"url": "https://a.test/", "x": [1] * 40_000}, "413 payload_too_large"),
    ],
)
async def test_what_is_refused(tmp_path: Path, document: object, expected: str) -> None:
    async with open_api(tmp_path) as api:
        assert code(await api.client.post(TEST, json=document)) == expected
        assert (await api.bare.post(TEST, json={"url": "https://a.test/"})).status_code == 401
