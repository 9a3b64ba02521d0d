"""Authentication: identify the caller by the X-API-Key header, check the key, apply the rate limit.

The key is read from the header only, since a key in a query ends up in logs. A file of accepted
keys holds the hash of one key at the start of each line, and is read again when it changes;
anything after a space, and lines that begin with #, are comments. The rate limit is checked as soon
as the caller is known, before any work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
API_KEYS = "CONVEYOR_API_KEYS"
OPERATOR_KEYS = "CONVEYOR_OPERATOR_KEYS"
ACTS = "acts"
"""The word behind the hash of an operator who may change jobs."""

_TAKES = {API_KEYS: "any, hashes of keys", OPERATOR_KEYS: "hashes of keys"}

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
    """Accepts the keys of these lines: by hash, what stands behind it."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self._lines = lines

    def knows(self, api_key: str) -> bool:
        """Tell whether the hash of the key is one of them."""
        return self.knows_hash(key_hash(api_key))

    def knows_hash(self, hashed: str) -> bool:
        """Tell whether the hash is one of them."""
        return self.words(hashed) is not None

    def words(self, hashed: str) -> str | None:
        """Return what stands behind a hash in its line; None if it is not there."""
        return self._lines.get(hashed)


class KeyFile(HashedKeys):
    """Accepts the keys whose hashes a file holds; a change of the file counts from the next
    request.

    If the file later disappears or is damaged, the keys read before stay accepted. Raises
    ConveyorError(invalid_argument) if it cannot be read at first, naming the setting.
    """

    def __init__(self, path: Path, variable: str) -> None:
        super().__init__(_read(path, variable))
        self._path = path
        self._variable = variable
        self._seen = self._state()

    def words(self, hashed: str) -> str | None:
        """Return what stands behind a hash in its line; None if it is not in the file."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._lines = _read(self._path, self._variable)
            except ConveyorError as error:
                _log.error("keeping the earlier keys: %s", error.detail)
        return super().words(hashed)

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
    return AnyKey() if text == ANY else _open_keys(text, API_KEYS)


def _open_keys(text: str, variable: str) -> HashedKeys:
    first = text.partition(",")[0].strip().partition(" ")[0]
    if "\n" in text or is_key_hash(first):
        return HashedKeys(_lines(text.replace(",", "\n"), variable, "holds a text"))
    return KeyFile(Path(text), variable)


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody who sees all callers on pages, and changes their jobs if `acts`; known by the hash
    of a key."""

    hashed: str
    acts: bool


class Operators:
    """The operators that CONVEYOR_OPERATOR_KEYS names; nobody without keys."""

    def __init__(self, keys: HashedKeys | None = None) -> None:
        self._keys = keys

    def find(self, api_key: str) -> Operator | None:
        """Return the operator with a key, None if there is none."""
        hashed = key_hash(api_key)
        words = None if self._keys is None else self._keys.words(hashed)
        return None if words is None else Operator(hashed, words.partition(" ")[0] == ACTS)


def open_operator_keys(text: str) -> Operators:
    """Parse CONVEYOR_OPERATOR_KEYS, which is empty or as CONVEYOR_API_KEYS without `any`; a line
    may say `acts` behind its hash.

    Raises ConveyorError(invalid_argument).
    """
    return Operators(_open_keys(text, OPERATOR_KEYS) if text else None)


def _read(path: Path, variable: str) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST).decode()
    except (OSError, ValueError):
        raise _unfit(variable, f"must be {_TAKES[variable]}, or a readable file of them") from None
    return _lines(text, variable, "names a file")


def _lines(text: str, variable: str, source: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, words = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        # Do not repeat the line: it may hold a key by mistake.
        if not is_key_hash(word):
            raise _unfit(variable, f"{source} whose line {number} does not begin with a key hash")
        found[word.lower()] = words.strip()
    if not found:
        raise _unfit(variable, f"{source} without a key hash")
    return found


def _unfit(variable: str, problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{variable} {problem}")


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
