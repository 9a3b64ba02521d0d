"""Events of a development server without a network: the official client, receivers under names of
documentation, and the inbox that gets their events."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from zenrows.batch import verify_webhook_signature

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_client import open_client
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.slow]
HOOK = "https://hooks.example.com/x?y=1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(tmp_path_factory.mktemp("data"), "--gateway", "fake") as booted:
        yield booted


def requests_to(server: Booted, name: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = fetched(f"{server.inbox}/{name}").json()["requests"]
    return listed


def test_the_events_for_a_name_of_documentation_come_to_the_inbox(server: Booted) -> None:
    with open_client(server) as client:
        key = client.rotate_hmac_key()
        tested = client.test_webhook({"url": HOOK, "signature": True})

    assert (tested.delivered, tested.status_code) == (True, 204)
    [kept] = requests_to(server, "hooks.example.com")
    body = base64.b64decode(kept["body_base64"])
    signature = kept["headers"]["x-signature"]
    assert (kept["path"], kept["headers"]["x-zenrows-event-id"]) == ("/x?y=1", tested.event_id)
    assert verify_webhook_signature(body, signature, {key.kid: key.secret})
    assert kept["verified"] == {"x_signature": True, "webhook_signature": True, "client": True}
    assert key.secret not in str(kept)


@pytest.mark.parametrize(
    "host",
    [
        "example.net",
        "a.example.org.",
        "EXAMPLE.com:8443",
        "receiver.test",
        "x.invalid",
        "y.example",
    ],
)
def test_every_reserved_name_has_an_inbox(server: Booted, host: str) -> None:
    with open_client(server) as client:
        assert client.test_webhook({"url": f"http://{host}", "signature": False}).delivered
    name = host.partition(":")[0].rstrip(".").lower()
    assert [kept["path"] for kept in requests_to(server, name)] == ["/"]
