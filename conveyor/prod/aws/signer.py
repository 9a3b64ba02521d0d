"""Sign requests to AWS: Signature Version 4, as botocore signs them, in a tenth of its time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

from botocore.credentials import ReadOnlyCredentials
from botocore.utils import normalize_url_path

_ALGORITHM = "AWS4-HMAC-SHA256"
_DATE = "x-amz-date"
_TOKEN = "x-amz-security-token"


class SignedPart(NamedTuple):
    """The parts of a request that a signature binds.

    `path` is canonical: as sent for S3, made by `canonical_path` for others. `headers` are by names
    in lowercase, and hold `host`; values have no space at an end, nor two in a row. `digest` is
    that of the body, as `body_digest` makes it.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    digest: str
    query: str = ""


class RequestSigner:
    """Signs requests to one service of one region. The key of a day and an access key is kept."""

    def __init__(self, region: str, service: str) -> None:
        self._region = region
        self._service = service
        self._derived_of = ("", "")
        self._derived = b""

    def sign(self, part: SignedPart, keys: ReadOnlyCredentials, now: int) -> dict[str, str]:
        """Return the headers of a signed request, `host` left out. `now` is in milliseconds since
        1970."""
        instant = _instant(now // 1_000)
        day = instant[:8]
        headers = {**part.headers, _DATE: instant}
        if keys.token is not None:
            headers[_TOKEN] = keys.token
        names = sorted(headers)
        signed = ";".join(names)
        fields = "".join([f"{name}:{headers[name]}\n" for name in names])
        canonical = f"{part.method}\n{part.path}\n{part.query}\n{fields}\n{signed}\n{part.digest}"
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        hashed = sha256(canonical.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{instant}\n{scope}\n{hashed}"
        signature = hmac.digest(self._key(keys.secret_key, day), text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={signed},"
            f" Signature={signature}"
        )
        del headers["host"]
        return headers

    def _key(self, secret: str, day: str) -> bytes:
        if self._derived_of != (secret, day):
            key = f"AWS4{secret}".encode()
            for step in (day, self._region, self._service, "aws4_request"):
                key = hmac.digest(key, step.encode(), "sha256")
            self._derived, self._derived_of = key, (secret, day)
        return self._derived


@lru_cache(maxsize=2)
def _instant(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")


def canonical_path(path: str) -> str:
    """Return the path that a signature binds, of a path as it is sent to any service but S3."""
    return quote(normalize_url_path(path), safe="/~")


def body_digest(body: bytes) -> str:
    """Return the digest of a body that a signature binds."""
    return sha256(body).hexdigest()
