"""Signing keys over the API: the slots of a rotation, and where a secret must not be."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest
from zenrows.batch.models import HMACKeyCreated, HMACKeyFinalized, HMACKeyList

from conveyor.domain.api_keys import derive_key
from conveyor.domain.signatures import SECRET_LENGTH, SigningKeySealer
from tests.disk import files_below
from tests.unit.http_api import Api, open_api

ROTATE = "/v1/hmac/keys/rotate"
FINALIZE = "/v1/hmac/keys/rotate/finalize"
KEYS = "/v1/hmac/keys"


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


async def rotated(api: Api) -> HMACKeyCreated:
    response = await api.client.post(ROTATE)
    assert response.status_code == 201, response.text
    assert response.headers["Cache-Control"] == "no-store"
    return HMACKeyCreated.model_validate(response.json())


async def listed(api: Api) -> tuple[str | None, str | None]:
    response = await api.client.get(KEYS)
    assert response.status_code == 200, response.text
    keys = HMACKeyList.model_validate(response.json())
    return (
        None if keys.active is None else keys.active.kid,
        None if keys.candidate is None else keys.candidate.kid,
    )


async def refused(api: Api, path: str) -> str:
    response = await api.client.post(path)
    assert response.status_code == 409, response.text
    code: str = response.json()["code"]
    return code


async def test_a_rotation_goes_from_the_first_key_to_the_second(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        assert await listed(api) == (None, None)
        assert await refused(api, FINALIZE) == "no_candidate"
        first = await rotated(api)
        assert await listed(api) == (first.kid, None)
        assert await refused(api, FINALIZE) == "no_candidate"
        second = await rotated(api)
        assert await listed(api) == (first.kid, second.kid)
        assert await refused(api, ROTATE) == "candidate_pending"

        response = await api.client.post(FINALIZE)
        finalized = HMACKeyFinalized.model_validate(response.json())

        assert (response.status_code, finalized.active_kid) == (200, second.kid)
        assert finalized.created_at == second.created_at
        assert await listed(api) == (second.kid, None)


async def test_a_cancelled_rotation_keeps_the_first_key(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        first, _ = await rotated(api), await rotated(api)
        for _ in range(2):
            response = await api.client.delete(ROTATE)
            assert (response.status_code, response.content) == (204, b"")
            assert await listed(api) == (first.kid, None)
        assert await refused(api, FINALIZE) == "no_candidate"


async def test_keys_belong_to_their_caller(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        await rotated(api)

        assert (await api.foreign.get(KEYS)).json() == {}
        assert (await api.foreign.post(FINALIZE)).status_code == 409
        for method, path in (("GET", KEYS), ("POST", ROTATE), ("DELETE", ROTATE)):
            assert (await api.bare.request(method, path)).status_code == 401


async def test_a_secret_is_shown_once_and_lies_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_api(tmp_path) as api:
        made = [await rotated(api) for _ in range(2)]
        later = [
            (await api.client.get(KEYS)).content,
            (await api.client.post(ROTATE)).content,
            (await api.client.post(FINALIZE)).content,
        ]
        caller = api.service.identify("key-of-alice").caller_id
        slots = await api.binding.signing_keys.get_signing_keys(caller)
    raw = [base64.b64decode(one.secret) for one in made]
    assert [len(secret) for secret in raw] == [SECRET_LENGTH] * 2
    stored = [path.read_bytes() for path in files_below(tmp_path)]
    everywhere = [*later, *stored, caplog.text.encode(), repr(slots).encode()]
    assert len(stored) > 1

    for one, secret in zip(made, raw, strict=True):
        for form in (one.secret.encode(), secret, secret.hex().encode(), repr(secret).encode()):
            assert not [place for place in everywhere if form in place]


async def test_a_key_opens_for_its_caller_and_its_kid_alone(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        made = await rotated(api)
        caller = api.service.identify("key-of-alice").caller_id
        key = (await api.binding.signing_keys.get_signing_keys(caller)).active
        root = api.binding.root_secret
    assert key is not None
    opened = SigningKeySealer([b"newer" * 7, root]).open(key.kid, key.sealed, caller=caller)

    assert opened is not None
    assert base64.b64encode(opened.secret).decode() == made.secret
    assert SigningKeySealer([root]).open(key.kid, key.sealed, caller="bob") is None
    other = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    assert SigningKeySealer([root]).open(other, key.sealed, caller=caller) is None
    derived = derive_key(root, "sealing")
    assert SigningKeySealer([derived]).open(key.kid, key.sealed, caller=caller) is None
