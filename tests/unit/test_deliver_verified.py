"""Events as receivers verify them: any text in them, three verifiers that know nothing of each
other, and every attempt with the same bytes."""

from __future__ import annotations

import base64
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks
from standardwebhooks.webhooks import WebhookVerificationError
from zenrows.batch import verify_webhook_signature
from zenrows.batch.models import WebhookEvent

from conveyor.clock import SystemClock
from conveyor.domain.deliveries import DeliveryStatus
from conveyor.signatures import verify
from tests.unit.delivery_world import DeliveryWorld, Received, delivery_world, receiving

AT_ONCE = 50
PIECES = [
    *("😀", "👩‍👩‍👧", "\u2028", "\u2029", "</script>", "1e21", '"', "\\", "\\u0000", "é", "\u0301"),
    *("<!--", "&amp;", "null", "{}", "[", "\x7f", "\t", "\n", "\r\n", "𝟘", "\ufeff", "NaN"),
]
NAMES = ["z", "a", "1e21", "10", "9", "__proto__", "constructor", "A", "_", "x-y", "é", "😀"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        # The other verifiers judge timestamps by the time of this machine.
        world.api.clock.shift((SystemClock().now() - world.api.clock.now()) / 1_000)
        yield world


def text(chance: random.Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.randrange(1, 12)))


def metadata(chance: random.Random) -> dict[str, str]:
    names = chance.sample(NAMES, chance.randrange(1, len(NAMES)))
    return {name: text(chance) for name in names}


def verified(received: Received, key: dict[str, Any]) -> list[bool]:
    """The verdicts of the published client, standardwebhooks and Conveyor on a request."""
    client = verify_webhook_signature(
        received.body, received.headers["X-Signature"], {key["kid"]: key["secret"]}
    )
    try:
        standardwebhooks.Webhook(key["secret"]).verify(
            received.body, dict(received.headers), json_parse=False
        )
        standard = True
    except (WebhookVerificationError, UnicodeDecodeError):
        standard = False
    return [client, standard, verify(received.body, received.headers, key["secret"])]


def flipped(received: Received, chance: random.Random) -> Received:
    """The request with one bit of its body turned."""
    place = chance.randrange(len(received.body))
    changed = bytearray(received.body)
    changed[place] ^= 1 << chance.randrange(8)
    return Received(received.path, received.headers, bytes(changed))


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize(
    "events",
    [AT_ONCE, pytest.param(1_000, marks=[pytest.mark.slow, pytest.mark.extended])],
)
async def test_generated_events_verify_at_each_attempt(world: DeliveryWorld, events: int) -> None:
    chance = random.Random(16)
    key = (await world.api.client.post("/v1/hmac/keys/rotate")).json()
    given = {}

    async def owe(url: str) -> None:
        name, told = text(chance).strip() or "x", metadata(chance)
        job = await world.submit(url, signed=True, name=name, metadata=told)
        given[job["latest_run"]["run_id"]] = told
        await world.fail(job, detail=text(chance))

    answers = [*["500 x"] * AT_ONCE, *["200 OK"] * AT_ONCE] * (events // AT_ONCE)
    async with receiving(*answers) as receiver:
        for _ in range(events // AT_ONCE):
            for _ in range(AT_ONCE):
                await owe(receiver.url)
            await world.notifier().deliver()
            await world.look()
            await world.look(after=5)

    by_event: dict[str, list[Received]] = defaultdict(list)
    for received in receiver.requests:
        by_event[received.headers["X-ZenRows-Event-Id"]].append(received)
        assert verified(received, key) == [True] * 3
        assert verified(flipped(received, chance), key) == [False] * 3
    assert len(by_event) == events
    for event_id, attempts in by_event.items():
        told = json.loads(attempts[0].body)
        assert [one.body for one in attempts] == [attempts[0].body] * 2
        assert len({one.headers["webhook-timestamp"] for one in attempts}) == 2
        assert told["event_id"] == event_id
        assert told["metadata"] == given[told["run_id"]]
        assert WebhookEvent.model_validate_json(attempts[0].body).run_id in given
    assert {one.status for one in await world.deliveries()} == {DeliveryStatus.DELIVERED}


async def test_the_keys_of_a_rotation_verify_events_between_its_steps(
    world: DeliveryWorld,
) -> None:
    async def make() -> dict[str, Any]:
        answer = await world.api.client.post("/v1/hmac/keys/rotate")
        key: dict[str, Any] = answer.json()
        assert len(base64.b64decode(key["secret"])) == 32
        return key

    async def deliver() -> Received:
        await world.owe(receiver.url, signed=True)
        await world.look()
        return receiver.requests[-1]

    def kid(received: Received) -> str:
        return received.headers["X-Signature"].rpartition("kid=")[2]

    def known(received: Received, *keys: dict[str, Any]) -> bool:
        return verify(received.body, received.headers, [key["secret"] for key in keys])

    async with receiving("200 OK") as receiver:
        old = await make()
        assert kid(await deliver()) == old["kid"]
        dismissed = await make()
        between = await deliver()
        assert kid(between) == old["kid"]
        assert [known(between, old), known(between, dismissed)] == [True, True]
        await world.api.client.delete("/v1/hmac/keys/rotate")
        cancelled = await deliver()
        assert kid(cancelled) == old["kid"]
        assert [known(cancelled, old), known(cancelled, dismissed)] == [True, False]
        new = await make()
        between = await deliver()
        assert [known(between, old), known(between, new)] == [True, True]
        assert known(between, old, new)
        await world.api.client.post("/v1/hmac/keys/rotate/finalize")
        after = await deliver()
        assert kid(after) == new["kid"]
        assert [known(after, old), known(after, new)] == [False, True]
