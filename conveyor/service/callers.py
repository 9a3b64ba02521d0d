"""Identifies callers by their API keys, and derives the service's own keys from the root secrets.

An API key stands for a caller, and never leaves `Caller` in the clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conveyor.domain.api_keys import KeySealer, Sealer, caller_id, derive_key, is_valid_key
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.signatures import SigningKeySealer


@dataclass(frozen=True, slots=True, repr=False)
class Keyring:
    """The keys of the service, one for each purpose. Where there are several, the first signs and
    all verify.

    The oldest secret names callers, so that jobs stay with their owner when a newer one is put in
    front of it.
    """

    callers: bytes
    cursors: tuple[bytes, ...]
    links: tuple[bytes, ...]
    uploads: tuple[bytes, ...]
    exports: tuple[bytes, ...]
    forms: tuple[bytes, ...]
    sealer: KeySealer
    signing: SigningKeySealer
    sign_ins: Sealer


def derive_keyring(root_secrets: Sequence[bytes], sealing: Sequence[bytes] = ()) -> Keyring:
    """Derive the keyring of these secrets, newest first; `sealing` secrets come before them, for
    sealing alone."""
    return Keyring(
        callers=derive_key(root_secrets[-1], "callers"),
        cursors=tuple(derive_key(secret, "cursors") for secret in root_secrets),
        links=tuple(derive_key(secret, "links") for secret in root_secrets),
        uploads=tuple(derive_key(secret, "uploads") for secret in root_secrets),
        exports=tuple(derive_key(secret, "exports") for secret in root_secrets),
        forms=tuple(derive_key(secret, "forms") for secret in root_secrets),
        sealer=KeySealer([*sealing, *root_secrets]),
        signing=SigningKeySealer([*sealing, *root_secrets]),
        sign_ins=Sealer([*sealing, *root_secrets], "signin"),
    )


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller's id (a keyed hash of the API key, in hexadecimal) and the key itself."""

    caller_id: str
    api_key: str = field(repr=False)


def identify(api_key: str | None, keyring: Keyring) -> Caller:
    """Return the caller that an API key stands for.

    Raises ConveyorError(unauthenticated) if the key is missing or cannot stand in a header.
    """
    if api_key is None or not is_valid_key(api_key):
        raise ConveyorError(ErrorCode.UNAUTHENTICATED, "send your API key in the X-API-Key header")
    return Caller(caller_id(keyring.callers, api_key), api_key)
