"""Authentication: identify the caller by the X-API-Key header, check the key, apply the rate limit.

The key is read from the header only, since a key in a query ends up in logs. A file of accepted
keys holds the hash of one key at the start of each line, and is read again when it changes;
anything after a space, and lines that begin with #, are comments. The rate limit is checked as soon
as the caller is known, before any work.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Protocol

from starlette.requests import Request

from conveyor.domain.api_keys import is_key_hash, key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.rate_limit import RateLimit
from conveyor.service.callers import Caller
from conveyor.service.service import Service

ANY = "any"
"""Value of the setting that accepts any key."""
LONGEST = 4_194_304
"""Bytes of the file to read at most."""

_log = logging.getLogger("conveyor.http")


class ApiKeys(Protocol):
    """Decides which keys are accepted."""

    def knows(self, api_key: str) -> bool:
        """Tell whether requests with this key are served."""
        ...

    def knows_hash(self, hashed: str) -> bool:
        """Tell whether requests with the key of this hash are served."""
        ...


class AnyKey:
    """Accepts any key."""

    def knows(self, api_key: str) -> bool:
        """Tell whether there is a key."""
        return bool(api_key)

    def knows_hash(self, hashed: str) -> bool:
        """Tell whether there is a hash."""
        return bool(hashed)


class HashedKeys:
    """Accepts the keys with these hashes."""

    def __init__(self, hashes: frozenset[str]) -> None:
        self._hashes = hashes

    def knows(self, api_key: str) -> bool:
        """Tell whether the hash of the key is one of them."""
        return self.knows_hash(key_hash(api_key))

    def knows_hash(self, hashed: str) -> bool:
        """Tell whether the hash is one of them."""
        return hashed in self._hashes


class KeyFile:
    """Accepts the keys whose hashes a file holds; a change of the file counts from the next
    request.

    If the file later disappears or is damaged, the keys read before stay accepted. Raises
    ConveyorError(invalid_argument) if it cannot be read at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._state()
        self._hashes = _read(path)

    def knows(self, api_key: str) -> bool:
        """Tell whether the hash of the key is in the file."""
        return self.knows_hash(key_hash(api_key))

    def knows_hash(self, hashed: str) -> bool:
        """Tell whether the hash is in the file."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._hashes = _read(self._path)
            except ConveyorError as error:
                _log.error("keeping the earlier API keys: %s", error.detail)
        return hashed in self._hashes

    def _state(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def open_api_keys(text: str) -> ApiKeys:
    """Parse CONVEYOR_API_KEYS: `any`, hashes separated by commas, the content of a file of hashes,
    or the path of such a file.

    Raises ConveyorError(invalid_argument).
    """
    if text == ANY:
        return AnyKey()
    if "\n" in text or is_key_hash(text.partition(",")[0].strip()):
        return HashedKeys(_hashes(text.replace(",", "\n"), "holds a text"))
    return KeyFile(Path(text))


def _read(path: Path) -> frozenset[str]:
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST).decode()
    except (OSError, ValueError):
        raise _unfit("must be any, hashes of keys, or a readable file of them") from None
    return _hashes(text, "names a file")


def _hashes(text: str, source: str) -> frozenset[str]:
    hashes = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip().partition(" ")[0]
        if not word or word.startswith("#"):
            continue
        # Do not repeat the line: it may hold a key by mistake.
        if not is_key_hash(word):
            raise _unfit(f"{source} whose line {number} does not begin with a key hash")
        hashes.add(word.lower())
    if not hashes:
        raise _unfit(f"{source} without a key hash")
    return frozenset(hashes)


def _unfit(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"CONVEYOR_API_KEYS {problem}")


async def check_rate_limit(limit: RateLimit | None, caller_id: str) -> None:
    """Count a request of a caller.

    Raises ConveyorError(rate_limited) with the whole seconds until the next one is allowed. Without
    a limit every request is.
    """
    wait = 0.0 if limit is None else await limit.take(caller_id)
    if wait > 0.0:
        raise ConveyorError(
            ErrorCode.RATE_LIMITED,
            "too many requests: try again later",
            retry_after=math.ceil(wait),
        )


HEADER = "X-API-Key"


def authenticate(request: Request, service: Service, api_keys: ApiKeys) -> Caller:
    """Identify the caller of a request. Raises ConveyorError(unauthenticated) for a missing or
    unknown key."""
    keys = request.headers.getlist(HEADER)
    caller = service.identify(keys[0] if len(keys) == 1 else None)
    if not api_keys.knows(caller.api_key):
        raise ConveyorError(ErrorCode.UNAUTHENTICATED, "unknown API key")
    return caller
