"""The commands about signing keys, and about tests of receivers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from conveyor.signatures import verify
from conveyor.testing.server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import Ran, conveyor
from tests.acceptance.support_receiver import Receiver

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def test_a_secret_is_alone_on_standard_output(server: ConveyorServer) -> None:
    none = conveyor(server, "keys", "list")
    assert (none.code, none.out) == (0, [])
    assert none.err == ["no signing key yet: conveyor keys rotate"]

    first, second = conveyor(server, "keys", "rotate"), conveyor(server, "keys", "rotate", "--json")
    third = conveyor(server, "keys", "rotate")

    assert (first.code, len(base64.b64decode(first.out[0])), len(first.out)) == (0, 32, 1)
    assert set(json.loads(second.out[0])) == {"kid", "secret", "created_at"}
    assert (third.code, third.out, len(third.err)) == (1, [], 1)
    listed = conveyor(server, "keys", "list")
    assert [line.split()[0] for line in listed.out] == ["active", "candidate"]
    assert first.out[0] not in str(listed)


def test_a_rotation_is_cancelled_and_finalized(server: ConveyorServer) -> None:
    for _ in range(2):
        conveyor(server, "keys", "rotate")
    assert conveyor(server, "keys", "cancel").code == 0
    nothing = conveyor(server, "keys", "finalize")
    assert (nothing.code, len(nothing.err)) == (1, 1)

    made = json.loads(conveyor(server, "keys", "rotate", "--json").out[0])
    finalized = json.loads(conveyor(server, "keys", "finalize", "--json").out[0])

    assert finalized["active_kid"] == made["kid"]
    keys = json.loads(conveyor(server, "keys", "list", "--json").out[0])
    assert (keys["active"]["kid"], keys["candidate"]) == (made["kid"], None)


def test_a_receiver_is_tested(server: ConveyorServer) -> None:
    secret = conveyor(server, "keys", "rotate").out[0]
    with Receiver(204) as receiver:
        ran: Ran = conveyor(server, "webhook", "test", receiver.url, "--sign")
    headers, body = receiver.got[0]

    assert (ran.code, ran.out[0].split(" (")[0]) == (0, "delivered")
    assert verify(body, headers, secret)

    with Receiver(500) as broken:
        failed = conveyor(server, "webhook", "test", broken.url)
        told = conveyor(server, "webhook", "test", broken.url, "--json")
    assert (failed.code, failed.out[0].split(" (")[0]) == (1, "not delivered: http_5xx:500")
    assert json.loads(told.out[0])["status_code"] == 500
    refused = conveyor(server, "webhook", "test", "https://10.0.0.1/")
    assert (refused.code, refused.out, len(refused.err)) == (1, [], 1)
