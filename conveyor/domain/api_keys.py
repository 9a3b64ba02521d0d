"""Derives keys, seals callers' API keys and hashes them. Pure: nonces are passed in.

The API seals a key when a job is submitted and a worker opens it when it calls the gateway; both
derive their keys from the same root secrets. A hash stands for an API key where the key itself must
not be stored. API keys are long and random, so a fast hash is safe and cheap enough for every
request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from conveyor.domain.model import Job

NONCE_LENGTH = 12
KEY_LENGTH = 32

_HEX_SECRET = re.compile(r"[0-9a-fA-F]{64}")


def derive_key(root_secret: bytes, label: str) -> bytes:
    """Derive the 32-byte key for one purpose: HKDF-SHA256 of the root secret under `label`."""
    info = b"conveyor:" + label.encode()
    return HKDF(algorithm=SHA256(), length=KEY_LENGTH, salt=None, info=info).derive(root_secret)


FINGERPRINT_DIGITS = 16


def fingerprint(root_secret: bytes) -> str:
    """Return a digest that tells root secrets apart and reveals nothing else."""
    return derive_key(root_secret, "fingerprint").hex()[:FINGERPRINT_DIGITS]


def secret_bytes(text: str) -> bytes:
    """Convert a root secret from text: 64 hexadecimal digits are decoded, other text is encoded."""
    return bytes.fromhex(text) if _HEX_SECRET.fullmatch(text) else text.encode()


def caller_id(naming_key: bytes, api_key: str) -> str:
    """Return the id of a caller: a hash of its API key under a key that names callers."""
    return hmac.digest(naming_key, api_key.encode(), "sha256").hex()


class UnsealError(Exception):
    """No secret opens a sealed key, or the key belongs to another caller."""


class Sealer:
    """Seals secrets of one purpose with AES-256-GCM under the first root secret; opens them under
    any.

    A sealed secret is bound to its owner: copied to another owner's record, it does not open.
    """

    def __init__(self, root_secrets: Sequence[bytes], label: str) -> None:
        if not root_secrets:
            raise ValueError("at least one root secret is needed")
        self._ciphers = [AESGCM(derive_key(secret, label)) for secret in root_secrets]

    def seal(self, secret: bytes, *, owner: str, nonce: bytes) -> bytes:
        """Encrypt a secret. `nonce` is NONCE_LENGTH unpredictable bytes, never used twice."""
        if len(nonce) != NONCE_LENGTH:
            raise ValueError(f"a nonce has {NONCE_LENGTH} bytes")
        return nonce + self._ciphers[0].encrypt(nonce, secret, owner.encode())

    def open(self, sealed: bytes, *, owner: str) -> bytes | None:
        """Decrypt a secret; return None if it is another owner's, or no root secret opens it."""
        nonce, box = sealed[:NONCE_LENGTH], sealed[NONCE_LENGTH:]
        if len(nonce) == NONCE_LENGTH:
            for cipher in self._ciphers:
                try:
                    return cipher.decrypt(nonce, box, owner.encode())
                except InvalidTag:
                    continue
        return None


class KeySealer:
    """Seals callers' API keys, each bound to its caller."""

    def __init__(self, root_secrets: Sequence[bytes]) -> None:
        self._sealer = Sealer(root_secrets, "sealing")

    def seal(self, api_key: str, *, caller: str, nonce: bytes) -> bytes:
        """Encrypt a key. `nonce` is NONCE_LENGTH unpredictable bytes, never used twice."""
        return self._sealer.seal(api_key.encode(), owner=caller, nonce=nonce)

    def unseal(self, job: Job) -> str:
        """Decrypt the API key that a job was submitted with. Raises UnsealError."""
        api_key = self._sealer.open(job.sealed_key, owner=job.caller)
        if api_key is None:
            raise UnsealError(
                f"the key of job {job.job_id} cannot be opened with the present secrets"
            )
        return api_key.decode()


MAX_API_KEY_LENGTH = 512

_CARRIED = re.compile(rf"[\x21-\x7e]{{1,{MAX_API_KEY_LENGTH}}}")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


def key_hash(api_key: str) -> str:
    """Return `sha256:` and the SHA-256 of a key in hexadecimal."""
    return f"sha256:{hashlib.sha256(api_key.encode()).hexdigest()}"


def is_valid_key(api_key: str) -> bool:
    """Return whether a request may carry a key: printable ASCII without spaces, not too long."""
    return _CARRIED.fullmatch(api_key) is not None


def is_key_hash(text: str) -> bool:
    """Return whether a text has the form of `key_hash`, in lower or upper case."""
    return _HASH.fullmatch(text) is not None
