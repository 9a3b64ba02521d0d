"""Who is calling: an API key stands for a caller, and never leaves this record in the clear."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.key_hashes import is_carried
from conveyor.service.keys import Keyring


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller's id (a keyed hash of the API key, in hexadecimal) and the key itself."""

    caller_id: str
    api_key: str = field(repr=False)


def identify(api_key: str | None, keyring: Keyring) -> Caller:
    """The caller that an API key stands for.

    Raises ConveyorError(unauthenticated) where there is no key, or none that a header can hold.
    """
    if api_key is None or not is_carried(api_key):
        raise ConveyorError(ErrorCode.UNAUTHENTICATED, "send your API key in the X-API-Key header")
    return Caller(hmac.digest(keyring.callers, api_key.encode(), "sha256").hex(), api_key)
