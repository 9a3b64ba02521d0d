"""Who calls: the X-API-Key header, and nothing else (a key in a query ends up in logs).

Which API keys may call: hashes of them, in a file that is read again when it changes.

A line begins with the hash of one key; what follows a space is for people, as are lines that begin
with #.

How often a caller may ask: looked at once it is known who asks, before anything is done.
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
"""Said in the place of a file: every key is taken."""
LONGEST = 4_194_304
"""Bytes of the file that are read at most."""

_log = logging.getLogger("conveyor.http")


class ApiKeys(Protocol):
    """Tells known keys from others."""

    def knows(self, api_key: str) -> bool:
        """Whether requests with this key are served."""
        ...


class AnyKey:
    """Every key is known."""

    def knows(self, api_key: str) -> bool:
        """Whether there is one."""
        return bool(api_key)


class HashedKeys:
    """The keys with these hashes."""

    def __init__(self, hashes: frozenset[str]) -> None:
        self._hashes = hashes

    def knows(self, api_key: str) -> bool:
        """Whether its hash is among them."""
        return key_hash(api_key) in self._hashes


class KeyFile:
    """The keys whose hashes a file holds. A change of the file counts from the next request on.

    A file that is gone or damaged later leaves what it said before in force.
    Raises ConveyorError(invalid_argument) where it cannot be read at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._state()
        self._hashes = _read(path)

    def knows(self, api_key: str) -> bool:
        """Whether its hash is in the file."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._hashes = _read(self._path)
            except ConveyorError as error:
                _log.error("the API keys stay as they were: %s", error.detail)
        return key_hash(api_key) in self._hashes

    def _state(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def open_api_keys(text: str) -> ApiKeys:
    """What CONVEYOR_API_KEYS says: `any`, hashes with commas between, what a file of them would
    hold, or the path of one. Raises ConveyorError(invalid_argument)."""
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
        raise _unfit("must be any, hashes of keys, or a file of them that can be read") from None
    return _hashes(text, "names a file")


def _hashes(text: str, source: str) -> frozenset[str]:
    hashes = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip().partition(" ")[0]
        if not word or word.startswith("#"):
            continue
        # The line is not repeated: somebody may have put a key there.
        if not is_key_hash(word):
            raise _unfit(f"{source} whose line {number} begins with no hash of a key")
        hashes.add(word.lower())
    if not hashes:
        raise _unfit(f"{source} without a hash of a key")
    return frozenset(hashes)


def _unfit(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"CONVEYOR_API_KEYS {problem}")


async def check_rate_limit(limit: RateLimit | None, caller_id: str) -> None:
    """Let a request of a caller pass. Raises ConveyorError(rate_limited), with the whole seconds
    after which the next one passes; without a limit every request does."""
    wait = 0.0 if limit is None else await limit.take(caller_id)
    if wait > 0.0:
        raise ConveyorError(
            ErrorCode.RATE_LIMITED,
            "you have made too many requests: try again later",
            retry_after=math.ceil(wait),
        )


HEADER = "X-API-Key"


def authenticate(request: Request, service: Service, api_keys: ApiKeys) -> Caller:
    """The caller of a request. Raises ConveyorError(unauthenticated), for an unknown key too."""
    keys = request.headers.getlist(HEADER)
    caller = service.identify(keys[0] if len(keys) == 1 else None)
    if not api_keys.knows(caller.api_key):
        raise ConveyorError(ErrorCode.UNAUTHENTICATED, "this API key is not known here")
    return caller
