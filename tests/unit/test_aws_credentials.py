"""Credentials of calls that sign for themselves: one renewal for all, before they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.credentials import (
    Credentials,
    DeferredRefreshableCredentials,
    RefreshableCredentials,
)
from botocore.exceptions import CredentialRetrievalError

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws import credentials as module
from conveyor.prod.aws.carriers import Unanswered
from conveyor.prod.aws.credentials import KeyHolder
from tests.unit.aws_stub import Stub, calling, give_keys, serving

HOUR, MINUTE = 3_600, 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks whether credentials are about to end."""
    monkeypatch.setattr(module, "LOOK_EVERY", 0.0)
    give_keys(monkeypatch)


class Role:
    """Hands out keys that end in the next of so many seconds, or then in the last; None fails."""

    def __init__(self, *lasts: int | None) -> None:
        self.asked = 0
        self.hands_out = threading.Event()
        self.hands_out.set()
        self._lasts = list(lasts)

    def __call__(self) -> dict[str, Any]:
        self.hands_out.wait()
        self.asked += 1
        lasts = self._lasts.pop(0) if len(self._lasts) > 1 else self._lasts[0]
        if lasts is None:
            raise CredentialRetrievalError(provider="test", error_msg="none")
        end = datetime.now(UTC) + timedelta(seconds=lasts)
        return {
            "access_key": f"AKID{self.asked}",
            "secret_key": "secret",
            "token": f"token {self.asked}",
            "expiry_time": end.isoformat(),
        }


def lasting(role: Role) -> RefreshableCredentials:
    return RefreshableCredentials.create_from_metadata(role(), role, "test")


def deferred(role: Role) -> DeferredRefreshableCredentials:
    return DeferredRefreshableCredentials(role, "test")


async def test_keys_without_an_end_are_those_that_there_are() -> None:
    holder = KeyHolder(Credentials("id", "secret"))
    assert (await holder.current()).access_key == "id"


async def test_keys_that_last_are_not_renewed() -> None:
    role = Role(HOUR)
    holder = KeyHolder(lasting(role))
    assert {(await holder.current()).token for _ in range(9)} == {"token 1"}
    assert role.asked == 1


@pytest.mark.parametrize("make", [lasting, deferred])
async def test_all_who_wait_for_keys_wait_for_one_renewal(
    make: Callable[[Role], Credentials],
) -> None:
    role = Role(MINUTE, HOUR) if make is lasting else Role(HOUR)
    holder = KeyHolder(make(role))
    before = role.asked
    role.hands_out.clear()
    waiting = [asyncio.create_task(holder.current()) for _ in range(9)]
    for _ in range(9):
        await asyncio.sleep(0)
    waiting.pop().cancel()
    role.hands_out.set()
    tokens = {keys.token for keys in await asyncio.gather(*waiting)}
    assert tokens == {f"token {before + 1}"}
    assert role.asked == before + 1
    await holder.aclose()


async def test_keys_that_cannot_be_renewed_are_used_while_they_last() -> None:
    role = Role(12 * MINUTE, None)
    holder = KeyHolder(lasting(role))
    assert (await holder.current()).token == "token 1"
    assert role.asked == 2


async def test_keys_that_ended_and_cannot_be_renewed_are_told() -> None:
    holder = KeyHolder(lasting(Role(1, None)))
    with pytest.raises(Unanswered, match="CredentialRetrievalError"):
        await holder.current()


async def test_there_may_be_none() -> None:
    with pytest.raises(Unanswered, match="NoCredentialsError"):
        await KeyHolder(None).current()


async def test_keys_are_renewed_in_the_middle_of_a_run() -> None:
    role = Role(MINUTE, MINUTE, HOUR)
    async with (
        serving(Stub()) as stub,
        calling(stub.url, services=["dynamodb"], keys=lasting(role)) as aws,
    ):
        for _ in range(4):
            await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
        tokens = [seen.fields["x-amz-security-token"] for seen in stub.seen]
        assert tokens == ["token 2", "token 3", "token 3", "token 3"]
        named = [seen.fields["authorization"].partition("/")[0][-5:] for seen in stub.seen]
        assert named == ["AKID2", "AKID3", "AKID3", "AKID3"]


async def test_a_service_whose_keys_are_gone_is_not_called() -> None:
    async with (
        serving(Stub()) as stub,
        calling(stub.url, services=["dynamodb"], keys=lasting(Role(1, None))) as aws,
    ):
        with pytest.raises(ConveyorError, match="credentials could not be renewed"):
            await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
    assert not stub.seen
