"""The signing keys port: two slots a caller, for the keys that sign its events."""

from __future__ import annotations

from typing import Protocol

import msgspec


class SigningKey(msgspec.Struct, frozen=True):
    """A key in a slot. `kid` is a ULID, `sealed` its secret, encrypted; `created_at` is in
    milliseconds since the epoch."""

    kid: str
    created_at: int
    sealed: bytes


class SigningSlots(msgspec.Struct, frozen=True):
    """The keys of a caller. A candidate exists only beside an active key."""

    active: SigningKey | None = None
    candidate: SigningKey | None = None


class SigningKeys(Protocol):
    """Slots, for the API, which changes them, and for whoever signs.

    Each change is one step: changes at once are as if one came after the other. A change that is
    repeated because its answer was lost changes nothing more.
    """

    async def get_signing_keys(self, caller: str) -> SigningSlots:
        """Return the keys of a caller as they stand."""
        ...

    async def add_signing_key(self, caller: str, key: SigningKey) -> None:
        """Put a new key into the active slot, or beside an active key into the candidate's.

        Raises ConveyorError(candidate_pending) if both are taken.
        """
        ...

    async def promote_signing_key(self, caller: str, kid: str) -> SigningKey:
        """Let the candidate take the place of the active key, which is gone; return it.

        Raises ConveyorError(no_candidate) if the key is neither the candidate nor active.
        """
        ...

    async def drop_signing_key(self, caller: str, kid: str) -> None:
        """Remove the candidate; do nothing if it is another key, or none."""
        ...
