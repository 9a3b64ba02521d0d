"""Write the headers of an event, and sign it by the keys of its caller as they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping

from conveyor.domain.api_keys import UnsealError
from conveyor.domain.signatures import SigningKeySealer, SigningSecret, sign
from conveyor.ports.clock import Clock
from conveyor.ports.signing_keys import SigningKey, SigningKeys

EVENT_ID = "X-ZenRows-Event-Id"
ATTEMPT = "X-Conveyor-Attempt"
REPLAY = "X-Conveyor-Replay"
KEY_UNREADABLE = "transport_error:signing key unreadable"
"""The failure of an attempt whose event should have been signed, and could not be."""
SHOWN = 8
"""Letters of a signature that are kept."""
_SIGNATURES = re.compile(rf"(?<=v1[=,])([A-Za-z0-9+/]{{{SHOWN}}})[A-Za-z0-9+/=]+")


def cut_signatures(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as they are kept: of each signature its first SHOWN letters."""
    return {name: _SIGNATURES.sub(r"\1…", value) for name, value in headers.items()}


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
        self,
        caller: str,
        body: bytes,
        *,
        event_id: str,
        attempt: int,
        signed: bool,
        replay: bool = False,
    ) -> dict[str, str]:
        """Return the headers of one attempt, numbered from 1; `replay` says that somebody asked for
        it.

        Raises UnsealError if the event is to be signed and a key is missing or cannot be opened:
        such an event must not go out unsigned.
        """
        headers = {EVENT_ID: event_id, ATTEMPT: str(attempt)}
        if replay:
            headers[REPLAY] = "true"
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
