"""Credentials of calls that sign for themselves: one renewal for all, before they end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import (
    Credentials,
    DeferredRefreshableCredentials,
    RefreshableCredentials,
)
from botocore.exceptions import ClientError, CredentialRetrievalError

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws import credentials as module
from conveyor.prod.aws.boto import BotoCarrier
from conveyor.prod.aws.calls import AwsOptions, AwsRefused
from conveyor.prod.aws.carriers import Unanswered
from conveyor.prod.aws.credentials import KeyHolder
from conveyor.prod.aws.opening import open_aws
from conveyor.roles.logs import configure_logs
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
    """Hands out keys that end in the next of so many seconds, or then in the last; fails with an
    error that stands there, or for None."""

    def __init__(self, *lasts: int | Exception | None) -> None:
        self.asked = 0
        self.hands_out = threading.Event()
        self.hands_out.set()
        self._lasts = list(lasts)

    def __call__(self) -> dict[str, Any]:
        self.hands_out.wait()
        self.asked += 1
        lasts = self._lasts.pop(0) if len(self._lasts) > 1 else self._lasts[0]
        if lasts is None:
            lasts = CredentialRetrievalError(provider="test", error_msg="none")
        if isinstance(lasts, Exception):
            raise lasts
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


def refused() -> ClientError:
    """The refusal of a renewal by STS."""
    said = {"Code": "ExpiredTokenException", "Message": "the web identity token is expired"}
    return ClientError(
        {"Error": said, "ResponseMetadata": {"HTTPStatusCode": 400}},
        "AssumeRoleWithWebIdentity",
    )


@pytest.mark.parametrize("why", [None, refused(), ValueError("no JSON")])
@pytest.mark.parametrize("left", [12 * MINUTE, 9 * MINUTE, MINUTE])
async def test_keys_that_cannot_be_renewed_are_used_while_they_last(
    why: Exception | None, left: int
) -> None:
    role = Role(left, why)
    holder = KeyHolder(lasting(role))
    assert (await holder.current()).token == "token 1"
    assert role.asked == 2


@pytest.mark.parametrize("why", [None, ValueError("no JSON")])
@pytest.mark.parametrize("make", [lasting, deferred])
async def test_keys_that_ended_and_cannot_be_renewed_are_told(
    why: Exception | None, make: Callable[[Role], Credentials]
) -> None:
    holder = KeyHolder(make(Role(0, why) if make is lasting else Role(why)))
    with pytest.raises(Unanswered, match="CredentialRetrievalError"):
        await holder.current()


async def test_a_renewal_that_is_refused_is_told_as_boto3_tells_it() -> None:
    told = []
    for carrier in ("http", "boto"):
        keys = lasting(Role(0, refused()))
        async with calling(
            "http://127.0.0.1:1", services=["dynamodb"], keys=keys, carrier=carrier, fresh=True
        ) as aws:
            if carrier == "boto":
                boto = aws.carrier
                assert isinstance(boto, BotoCarrier)
                boto.clients["dynamodb"]._request_signer._credentials = keys
            with pytest.raises(AwsRefused) as caught:
                await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
        told.append((str(caught.value), caught.value.status, caught.value.asked))
    assert told[0] == told[1]
    assert told[0][0] == "ExpiredTokenException: the web identity token is expired"


@pytest.fixture
def logged() -> Callable[[], str]:
    """Log as a role does, and return a function that ends the log and returns all lines."""
    root = logging.getLogger()
    reading, writing = os.pipe()
    root.handlers[:] = []
    configure_logs(level="info", form="json", descriptor=writing)
    [output] = root.handlers

    def lines() -> str:
        output.close()
        os.close(writing)
        with os.fdopen(reading) as said:
            return said.read()

    return lines


@pytest.mark.parametrize("carrier", ["http", "boto"])
@pytest.mark.parametrize("left", [0, 12 * MINUTE])
async def test_no_log_quotes_a_program_of_credentials(
    logged: Callable[[], str], carrier: str, left: int
) -> None:
    why = CredentialRetrievalError(provider="custom-process", error_msg="s.TOKEN rejected")
    keys = lasting(Role(left, why))
    async with calling(
        "http://127.0.0.1:1", services=["dynamodb"], keys=keys, carrier=carrier, fresh=True
    ) as aws:
        if isinstance(aws.carrier, BotoCarrier):
            aws.carrier.clients["dynamodb"]._request_signer._credentials = keys
        with pytest.raises(ConveyorError) as caught:
            await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
    lines = logged()
    assert "temporary credentials failed" in lines
    assert "CredentialRetrievalError" in lines
    assert "TOKEN" not in lines + str(caught.value)


async def test_a_link_without_keys_is_refused_in_words() -> None:
    keys = lasting(Role(0, refused()))
    async with calling("http://127.0.0.1:1", services=["s3"], keys=keys) as aws:
        with pytest.raises(ConveyorError, match="credentials could not be renewed"):
            aws.presign("get_object", {"Bucket": "b", "Key": "k"}, seconds=60)


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


@pytest.mark.parametrize("carrier", ["http", "boto"])
async def test_keys_that_a_program_cannot_renew_sign_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str
) -> None:
    end = (datetime.now(UTC) + timedelta(seconds=5 * MINUTE)).isoformat()
    said = {"Version": 1, "AccessKeyId": "AKID", "SecretAccessKey": "s", "Expiration": end}
    keys = tmp_path / "keys"
    keys.write_text(json.dumps(said))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with serving(Stub()) as stub:
        options = AwsOptions(dynamodb_endpoint=stub.url, attempts=1, carrier=carrier)
        aws = await open_aws(options, SystemClock(), "dynamodb")
        try:
            for _ in range(2):
                await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
                keys.unlink(missing_ok=True)
        finally:
            await aws.aclose()
    assert len(stub.seen) == 2


async def test_a_service_whose_keys_are_gone_is_not_called() -> None:
    async with (
        serving(Stub()) as stub,
        calling(stub.url, services=["dynamodb"], keys=lasting(Role(0, None))) as aws,
    ):
        with pytest.raises(ConveyorError, match="credentials could not be renewed"):
            await aws.call("dynamodb", "get_item", {"TableName": "t", "Key": {}})
    assert not stub.seen
