"""The keys of the service, each derived from the root secrets for one purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conveyor.domain.sealing import KeySealer, derive_key


@dataclass(frozen=True, slots=True, repr=False)
class Keyring:
    """One key a purpose. Where there are several, the first makes and all of them verify.

    Callers are named by the oldest secret, so that jobs stay with their owner when a newer one is
    put in front of it.
    """

    callers: bytes
    cursors: tuple[bytes, ...]
    links: tuple[bytes, ...]
    uploads: tuple[bytes, ...]
    exports: tuple[bytes, ...]
    sealer: KeySealer


def derive_keyring(root_secrets: Sequence[bytes], sealing: Sequence[bytes] = ()) -> Keyring:
    """The keyring of these secrets, newest first; `sealing` come before them for sealing alone."""
    return Keyring(
        callers=derive_key(root_secrets[-1], "callers"),
        cursors=tuple(derive_key(secret, "cursors") for secret in root_secrets),
        links=tuple(derive_key(secret, "links") for secret in root_secrets),
        uploads=tuple(derive_key(secret, "uploads") for secret in root_secrets),
        exports=tuple(derive_key(secret, "exports") for secret in root_secrets),
        sealer=KeySealer([*sealing, *root_secrets]),
    )
