"""Sign-ins to pages: an API key, sealed with the instant, which a browser brings back with each
request. It is no session of a server: each process of a fleet opens it.

A form carries a token that only pages for the same sign-in have.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from conveyor.domain.api_keys import NONCE_LENGTH
from conveyor.ports.clock import Clock
from conveyor.service.callers import Keyring

LONGEST_SIGN_IN = 43_200
"""Seconds after which a person signs in again."""
SKEW = 300
"""Seconds by which the clocks of two processes may differ."""

_OWNER = "dashboard"
_INSTANT = 8


class SignIns:
    """Seals sign-ins and opens them again, and makes the tokens of forms."""

    def __init__(self, keyring: Keyring, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock

    def seal(self, api_key: str) -> str:
        """Seal a key with the present instant, as text for a cookie."""
        instant = self._clock.now().to_bytes(_INSTANT, "big")
        sealed = self._keyring.sign_ins.seal(
            instant + api_key.encode(), owner=_OWNER, nonce=self._clock.token(NONCE_LENGTH)
        )
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, text: str) -> str | None:
        """Return the key of a sign-in; None if it is forged, too old, or of another secret."""
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            return None
        opened = self._keyring.sign_ins.open(sealed, owner=_OWNER)
        if opened is None:
            return None
        age = self._clock.now() - int.from_bytes(opened[:_INSTANT], "big")
        if not -SKEW * 1_000 <= age < LONGEST_SIGN_IN * 1_000:
            return None
        return opened[_INSTANT:].decode()

    def token(self, sign_in: str) -> str:
        """Return the token of forms for a sign-in; the empty text stands for none."""
        return _token(self._keyring.forms[0], sign_in)

    def has_token(self, sign_in: str, token: str) -> bool:
        """Tell whether a form was on a page for this sign-in."""
        given = token.encode()
        keys = self._keyring.forms
        return any(hmac.compare_digest(_token(key, sign_in).encode(), given) for key in keys)


def _token(key: bytes, sign_in: str) -> str:
    return hmac.digest(key, sign_in.encode(), "sha256").hex()
