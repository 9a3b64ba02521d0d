"""Write the headers of an event, and sign it by the keys of its caller as they stand."""

from __future__ import annotations

from conveyor.domain.api_keys import UnsealError
from conveyor.domain.signatures import SigningKeySealer, SigningSecret, sign
from conveyor.ports.clock import Clock
from conveyor.ports.signing_keys import SigningKey, SigningKeys

EVENT_ID = "X-ZenRows-Event-Id"
ATTEMPT = "X-Conveyor-Attempt"


class EventSigner:
    """Writes headers with a fresh signature each time."""

    def __init__(self, keys: SigningKeys, sealer: SigningKeySealer, clock: Clock) -> None:
        self._keys = keys
        self._sealer = sealer
        self._clock = clock

    async def has_active_key(self, caller: str) -> bool:
        """Return whether a caller's events can be signed."""
        return (await self._keys.get_signing_keys(caller)).active is not None

    async def headers(
        self, caller: str, body: bytes, *, event_id: str, attempt: int, signed: bool
    ) -> dict[str, str]:
        """Return the headers of one attempt, numbered from 1.

        Raises UnsealError if the event is to be signed and a key is missing or cannot be opened:
        such an event must not go out unsigned.
        """
        headers = {EVENT_ID: event_id, ATTEMPT: str(attempt)}
        if not signed:
            return headers
        slots = await self._keys.get_signing_keys(caller)
        if slots.active is None:
            raise UnsealError("the caller has no active signing key")
        active = self._open(caller, slots.active)
        candidate = None if slots.candidate is None else self._open(caller, slots.candidate)
        return headers | sign(
            body,
            event_id=event_id,
            timestamp=self._clock.now() // 1_000,
            active=active,
            candidate=candidate,
        )

    def _open(self, caller: str, key: SigningKey) -> SigningSecret:
        opened = self._sealer.open(key.kid, key.sealed, caller=caller)
        if opened is None:
            raise UnsealError(f"the signing key {key.kid} cannot be opened")
        return opened
