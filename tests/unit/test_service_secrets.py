"""Sealed keys, caller ids, signed links, and what a new secret does to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer, UnsealError, derive_key
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, JobStatus
from conveyor.service import Service, ServiceOptions
from conveyor.service.callers import derive_keyring, identify
from conveyor.service.links import LinkSigner, LinkTarget
from conveyor.service.results import Cursors
from tests.unit.http_api import KEY, ORIGIN, open_api
from tests.webhooks import loopback_webhooks

OLD, NEW, OTHER = b"old" * 11, b"new" * 11, b"other" * 7
NONCE = bytes(range(NONCE_LENGTH))
TARGET = LinkTarget("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW", "0" * 26)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sealed_job(sealed: bytes, *, caller: str = "alice") -> Job:
    """A job with a sealed key."""
    return Job(
        job_id=TARGET.job_id,
        caller=caller,
        status=JobStatus.CLOSED,
        created_at=0,
        updated_at=0,
        sealed_key=sealed,
    )


@given(st.text(min_size=1, max_size=100), st.binary(min_size=NONCE_LENGTH, max_size=NONCE_LENGTH))
def test_what_is_sealed_opens_again(api_key: str, nonce: bytes) -> None:
    sealer = KeySealer([NEW])

    sealed = sealer.seal(api_key, caller="alice", nonce=nonce)

    assert sealer.unseal(sealed_job(sealed)) == api_key
    assert api_key.encode() not in sealed or len(api_key.encode()) < 4


def test_a_key_sealed_under_an_older_secret_still_opens() -> None:
    sealed = KeySealer([OLD]).seal(KEY, caller="alice", nonce=NONCE)

    assert KeySealer([NEW, OLD]).unseal(sealed_job(sealed)) == KEY
    assert KeySealer([NEW, OLD]).seal(KEY, caller="alice", nonce=NONCE) == KeySealer([NEW]).seal(
        KEY, caller="alice", nonce=NONCE
    )


@pytest.mark.parametrize("sealed", [b"", b"short", NONCE, NONCE + b"x" * 40])
def test_what_was_never_sealed_does_not_open(sealed: bytes) -> None:
    with pytest.raises(UnsealError, match=TARGET.job_id):
        KeySealer([NEW]).unseal(sealed_job(sealed))


def test_a_sealed_key_opens_for_its_caller_and_its_secret_only() -> None:
    sealed = KeySealer([NEW]).seal(KEY, caller="alice", nonce=NONCE)

    with pytest.raises(UnsealError):
        KeySealer([NEW]).unseal(sealed_job(sealed, caller="bob"))
    with pytest.raises(UnsealError):
        KeySealer([OTHER]).unseal(sealed_job(sealed))
    with pytest.raises(UnsealError):
        KeySealer([NEW]).unseal(sealed_job(sealed[:-1] + bytes([sealed[-1] ^ 1])))


def test_a_sealer_needs_a_secret_and_a_whole_nonce() -> None:
    with pytest.raises(ValueError, match="secret"):
        KeySealer([])
    with pytest.raises(ValueError, match="nonce"):
        KeySealer([NEW]).seal(KEY, caller="alice", nonce=b"short")


def test_keys_for_different_purposes_differ() -> None:
    keyring = derive_keyring([NEW])

    keys = {keyring.callers, *keyring.cursors, *keyring.links, *keyring.uploads}
    keys.add(derive_key(NEW, "sealing"))
    assert len(keys) == 5
    assert {len(key) for key in keys} == {32}


@pytest.mark.guarantee("G16")
def test_no_repr_shows_a_secret() -> None:
    options = ServiceOptions(public_origin=ORIGIN, older_secrets=(OLD,))
    keyring = derive_keyring([NEW])
    caller = identify(KEY, keyring)

    for shown in (repr(options), repr(keyring), repr(caller), str(dataclasses.replace(caller))):
        assert OLD.decode() not in shown
        assert KEY not in shown
        assert keyring.callers.hex() not in shown


def test_a_caller_keeps_its_name_under_a_new_secret() -> None:
    before = identify(KEY, derive_keyring([OLD])).caller_id

    assert identify(KEY, derive_keyring([NEW, OLD])).caller_id == before
    assert identify(KEY, derive_keyring([NEW])).caller_id != before
    assert identify(KEY + "x", derive_keyring([OLD])).caller_id != before


def test_cursors_and_links_of_an_older_secret_are_honoured() -> None:
    old, both = derive_keyring([OLD]), derive_keyring([NEW, OLD])
    cursor = Cursors(old.cursors).encode("p", scope="s")
    link = LinkSigner(old.links, origin=ORIGIN).link(TARGET, expires_at=5_000)
    signature = link.partition("signature=")[2]

    assert Cursors(both.cursors).decode(cursor, scope="s") == "p"
    checker = LinkSigner(both.links, origin=ORIGIN)
    checker.check(TARGET, expires="5", signature=signature, now=4_999)
    with pytest.raises(ConveyorError) as refused:
        LinkSigner(derive_keyring([NEW]).links, origin=ORIGIN).check(
            TARGET, expires="5", signature=signature, now=4_999
        )
    assert refused.value.code is ErrorCode.PERMISSION_DENIED
    fresh = Cursors(both.cursors).encode("p", scope="s")
    assert Cursors(both.cursors).decode(fresh, scope="s") == "p"
    with pytest.raises(ConveyorError):
        Cursors(old.cursors).decode(fresh, scope="s")


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_passes_for_a_link(expires: str, signature: str) -> None:
    signer = LinkSigner([derive_key(NEW, "links")], origin=ORIGIN)

    with pytest.raises(ConveyorError):
        signer.check(TARGET, expires=expires, signature=signature, now=0)


async def test_a_server_with_a_new_secret_in_front_serves_what_an_older_one_made(
    tmp_path: Path,
) -> None:
    async with open_api(tmp_path / "data") as api:
        job = await api.submit(1)
        binding = dataclasses.replace(api.binding, root_secret=NEW)
        options = ServiceOptions(public_origin=ORIGIN, older_secrets=(api.binding.root_secret,))

        renewed = Service(
            binding,
            options,
            api.clock,
            webhooks=loopback_webhooks(api.clock),
        )

        caller = renewed.identify(KEY)
        body = await renewed.listing.get_job(caller.caller_id, job["job_id"])
        assert msgspec.to_builtins(body)["job_id"] == job["job_id"]
