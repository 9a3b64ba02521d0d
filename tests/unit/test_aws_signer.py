"""Signatures equal those of botocore, whatever the request."""

from __future__ import annotations

import random
import string
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

import botocore.auth
import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from conveyor.prod.aws.signer import RequestSigner, SignedPart, body_digest, canonical_path

REQUESTS = 10_000
SERVICES = ("dynamodb", "sqs", "s3")
REGIONS = ("us-east-1", "eu-central-1", "us-gov-west-1", "eusc-de-east-1")
HOSTS = ("127.0.0.1:8000", "dynamodb.us-east-1.amazonaws.com", "[::1]:9", "b.s3.amazonaws.com")
NAMES = (
    "content-type",
    "if-match",
    "range",
    "x-amz-target",
    "x-amz-checksum-crc32",
    "x-amz-meta-a",
)
TEXT = string.ascii_letters + string.digits + "/+=-_.~:;,()*'\"!@é"


def text(chance: random.Random, most: int) -> str:
    return "".join(chance.choices(TEXT, k=chance.randrange(1, most)))


def requests(
    chance: random.Random,
) -> tuple[str, str, str, SignedPart, bytes, ReadOnlyCredentials, int]:
    """Return a service, a region, a URL, what is to be signed, a body, keys and an instant."""
    service, region, host = chance.choice(SERVICES), chance.choice(REGIONS), chance.choice(HOSTS)
    body = chance.randbytes(chance.randrange(200))
    path = "/" + quote(text(chance, 40), safe="/~") if chance.random() < 0.7 else "/"
    headers = {
        name: text(chance, 30) for name in chance.sample(NAMES, chance.randrange(len(NAMES)))
    }
    digest = body_digest(body)
    if service == "s3":
        headers["x-amz-content-sha256"] = digest
    token = text(chance, 500) if chance.random() < 0.5 else None
    keys = ReadOnlyCredentials(text(chance, 20), text(chance, 60), token)
    part = SignedPart(
        chance.choice(("GET", "POST", "PUT", "DELETE")),
        path if service == "s3" else canonical_path(path),
        {**headers, "host": host},
        digest,
    )
    scheme = chance.choice(("http", "https"))
    instant = chance.randrange(946_684_800_000, 4_102_444_800_000)
    return service, region, f"{scheme}://{host}{path}", part, body, keys, instant


def by_botocore(
    service: str, region: str, url: str, part: SignedPart, body: bytes, keys: ReadOnlyCredentials
) -> dict[str, str]:
    """Return the headers that botocore adds to those that it was given."""
    headers = {name: value for name, value in part.headers.items() if name != "host"}
    request = AWSRequest(part.method, url, headers=headers, data=body)
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    kind(keys, service, region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


@pytest.mark.slow
def test_any_request_is_signed_as_botocore_signs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(4)
    with_token = 0
    for _ in range(REQUESTS):
        service, region, url, part, body, keys, instant = requests(chance)
        moment = datetime.fromtimestamp(instant // 1_000, UTC)
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda now=moment: now)
        expected = by_botocore(service, region, url, part, body, keys)
        assert RequestSigner(region, service).sign(part, keys, instant) == expected
        with_token += keys.token is not None
    assert REQUESTS // 3 < with_token < REQUESTS


def test_the_key_of_a_day_ends_with_the_day_and_with_its_secret() -> None:
    part = SignedPart("POST", "/", {"host": "h"}, sha256(b"").hexdigest())
    kept = RequestSigner("us-east-1", "sqs")
    day = 86_400_000
    for secret in ("one", "other", "one"):
        for now in (0, day - 1, day, 0):
            keys = ReadOnlyCredentials("id", secret, None)
            assert kept.sign(part, keys, now) == RequestSigner("us-east-1", "sqs").sign(
                part, keys, now
            )
