"""Rotate the keys that sign a caller's events."""

from __future__ import annotations

import base64

from conveyor.domain.api_keys import NONCE_LENGTH
from conveyor.domain.errors import no_candidate
from conveyor.domain.signatures import SECRET_LENGTH, SigningKeySealer, SigningSecret
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.clock import Clock
from conveyor.ports.signing_keys import SigningKey, SigningKeys
from conveyor.service.schemas import (
    FinalizedKeyBody,
    NewSigningKeyBody,
    SigningKeyBody,
    SigningKeysBody,
    present,
)


class KeyRotations:
    """Makes keys, and moves them through the two slots of their caller.

    A secret leaves the server once, in the answer to `rotate`.
    """

    def __init__(self, keys: SigningKeys, sealer: SigningKeySealer, clock: Clock) -> None:
        self._keys = keys
        self._sealer = sealer
        self._clock = clock

    async def list_keys(self, caller: str) -> SigningKeysBody:
        """Show the keys of a caller, without their secrets."""
        slots = await self._keys.get_signing_keys(caller)
        return SigningKeysBody(
            active=present(_shown(slots.active)), candidate=present(_shown(slots.candidate))
        )

    async def rotate(self, caller: str) -> NewSigningKeyBody:
        """Make the first key, or a candidate beside the active one.

        Raises ConveyorError(candidate_pending) if there is a candidate.
        """
        now = self._clock.now()
        secret = SigningSecret(self._clock.new_id(), self._clock.token(SECRET_LENGTH))
        sealed = self._sealer.seal(secret, caller=caller, nonce=self._clock.token(NONCE_LENGTH))
        await self._keys.add_signing_key(caller, SigningKey(secret.kid, now, sealed))
        return NewSigningKeyBody(
            kid=secret.kid,
            secret=base64.b64encode(secret.secret).decode(),
            created_at=rfc3339(now),
        )

    async def finalize(self, caller: str) -> FinalizedKeyBody:
        """Let the candidate take the place of the active key. Raises
        ConveyorError(no_candidate)."""
        slots = await self._keys.get_signing_keys(caller)
        if slots.candidate is None:
            raise no_candidate()
        active = await self._keys.promote_signing_key(caller, slots.candidate.kid)
        return FinalizedKeyBody(active_kid=active.kid, created_at=rfc3339(active.created_at))

    async def cancel(self, caller: str) -> None:
        """Remove the candidate, if there is one."""
        slots = await self._keys.get_signing_keys(caller)
        if slots.candidate is not None:
            await self._keys.drop_signing_key(caller, slots.candidate.kid)


def _shown(key: SigningKey | None) -> SigningKeyBody | None:
    return None if key is None else SigningKeyBody(kid=key.kid, created_at=rfc3339(key.created_at))
