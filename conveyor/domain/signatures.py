"""Sign events, and verify signed events.

Two schemes stand on every signed request, over the very bytes that are sent: `X-Signature` (as the
batch API of ZenRows has it, with the active key) and `webhook-signature` (Standard Webhooks, with
the active key and, during a rotation, with the candidate too). So a receiver that knows one key of
a rotation verifies every event by one of the two.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from conveyor.domain.api_keys import Sealer

SECRET_LENGTH = 32
"""Bytes of a signing secret."""
TOLERANCE = 300
"""Seconds by which the instant of a signature may differ from the receiver's clock."""

SIGNATURE = "X-Signature"
EVENT_ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
STANDARD_SIGNATURE = "webhook-signature"
SECRET_PREFIX = "whsec_"
"""Standard Webhooks writes it before a secret in base64."""

_VERSION = "v1"
_DIGITS = re.compile(r"[0-9]{1,12}")
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class SigningSecret:
    """A key that signs: its id and its SECRET_LENGTH bytes."""

    kid: str
    secret: bytes = field(repr=False)


class SigningKeySealer:
    """Seals the secrets of signing keys, each bound to its caller and its kid.

    A sealed secret opens under any of the root secrets; new ones are sealed under the first.
    """

    def __init__(self, root_secrets: Sequence[bytes]) -> None:
        self._sealer = Sealer(root_secrets, "signing")

    def seal(self, key: SigningSecret, *, caller: str, nonce: bytes) -> bytes:
        """Encrypt a secret. `nonce` is NONCE_LENGTH unpredictable bytes, never used twice."""
        return self._sealer.seal(key.secret, owner=f"{caller}:{key.kid}", nonce=nonce)

    def open(self, kid: str, sealed: bytes, *, caller: str) -> SigningSecret | None:
        """Decrypt the secret of a caller's key; return None if no root secret opens it."""
        secret = self._sealer.open(sealed, owner=f"{caller}:{kid}")
        return None if secret is None else SigningSecret(kid, secret)


def sign(
    body: bytes,
    *,
    event_id: str,
    timestamp: int,
    active: SigningSecret,
    candidate: SigningSecret | None = None,
) -> dict[str, str]:
    """Return the headers that sign a body; `timestamp` is in seconds since the epoch."""
    digest = _digest(active.secret, f"{timestamp}.", body).hex()
    keys = [active] if candidate is None else [active, candidate]
    return {
        SIGNATURE: f"t={timestamp},{_VERSION}={digest},kid={active.kid}",
        EVENT_ID: event_id,
        TIMESTAMP: str(timestamp),
        STANDARD_SIGNATURE: " ".join(
            f"{_VERSION},{_standard_digest(key.secret, event_id, timestamp, body)}" for key in keys
        ),
    }


def verify(
    body: bytes,
    headers: Mapping[str, object],
    secrets: str | bytes | Sequence[str | bytes],
    *,
    now: int,
    tolerance: int = TOLERANCE,
) -> bool:
    """Return whether a body was signed with one of the secrets, by either scheme.

    `secrets` are one or several, each in base64 as the API gave it out (with or without `whsec_`)
    or as bytes. `now` is in seconds since the epoch; a signature made more than `tolerance` seconds
    before or after it does not count. Names of headers match in any case. Raises ValueError for a
    secret that is not SECRET_LENGTH bytes.
    """
    verdicts = verify_each_scheme(body, headers, secrets, now=now, tolerance=tolerance)
    return any(verdicts.values())


def verify_each_scheme(
    body: bytes,
    headers: Mapping[str, object],
    secrets: str | bytes | Sequence[str | bytes],
    *,
    now: int,
    tolerance: int = TOLERANCE,
) -> dict[str, bool | None]:
    """Verify as `verify` does, and return the verdict on each scheme under the name of its header;
    None where that header is absent."""
    given = [secrets] if isinstance(secrets, str | bytes) else secrets
    keys = [secret_bytes(secret) for secret in given]
    names = {str(name).lower() for name in headers}
    # A value that is no ASCII text, as some servers pass it on, is no signature.
    found = {
        str(name).lower(): value
        for name, value in headers.items()
        if isinstance(value, str) and value.isascii()
    }
    schemes = {SIGNATURE: _verify_signature, STANDARD_SIGNATURE: _verify_standard}
    return {
        name: check(body, found, keys, now, tolerance) if name.lower() in names else None
        for name, check in schemes.items()
    }


def _verify_signature(
    body: bytes, headers: Mapping[str, str], keys: Iterable[bytes], now: int, tolerance: int
) -> bool:
    parts = [part.strip().partition("=") for part in headers.get(SIGNATURE.lower(), "").split(",")]
    fields = {name: value for name, _, value in parts}
    timestamp, digest = fields.get("t", ""), fields.get(_VERSION, "")
    if not _is_recent(timestamp, now, tolerance) or not _HEX_DIGEST.fullmatch(digest):
        return False
    given = bytes.fromhex(digest)
    return any(hmac.compare_digest(given, _digest(key, f"{timestamp}.", body)) for key in keys)


def _verify_standard(
    body: bytes, headers: Mapping[str, str], keys: Iterable[bytes], now: int, tolerance: int
) -> bool:
    event_id, timestamp = headers.get(EVENT_ID, ""), headers.get(TIMESTAMP, "")
    if not event_id or not _is_recent(timestamp, now, tolerance):
        return False
    given = [
        signature.encode()
        for version, _, signature in (
            part.partition(",") for part in headers.get(STANDARD_SIGNATURE, "").split(" ")
        )
        if version == _VERSION
    ]
    for key in keys:
        expected = _standard_digest(key, event_id, timestamp, body).encode()
        if any(hmac.compare_digest(one, expected) for one in given):
            return True
    return False


def _is_recent(timestamp: str, now: int, tolerance: int) -> bool:
    return _DIGITS.fullmatch(timestamp) is not None and abs(now - int(timestamp)) <= tolerance


def secret_bytes(secret: str | bytes) -> bytes:
    """Return the bytes of a secret. Raises ValueError for what cannot be one."""
    try:
        key = (
            secret
            if isinstance(secret, bytes)
            else base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        )
    except (binascii.Error, ValueError):
        raise ValueError("a signing secret is base64") from None
    if len(key) != SECRET_LENGTH:
        raise ValueError(f"a signing secret has {SECRET_LENGTH} bytes")
    return key


def _standard_digest(secret: bytes, event_id: str, timestamp: int | str, body: bytes) -> str:
    return base64.b64encode(_digest(secret, f"{event_id}.{timestamp}.", body)).decode()


def _digest(secret: bytes, before: str, body: bytes) -> bytes:
    return hmac.digest(secret, before.encode() + body, hashlib.sha256)
