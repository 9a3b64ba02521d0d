"""Interpret error answers of an API compatible with ZenRows, and mask secrets in their text."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import unquote_plus

import msgspec

from conveyor.domain.model import Problem, RunFailure, Spend, TaskFailure
from conveyor.domain.text_rules import MASK
from conveyor.gateway.problems import is_transient, status_title, transient_failure
from conveyor.ports.gateway import ScrapeFailed

MIN_VALUE = 4
_CREDENTIALS = re.compile(r"//[^/?#\s]*@")


def redactor(key: str, values: Iterable[str] = ()) -> Callable[[str], str]:
    """Return a function that masks the key in a text, plain, percent-encoded in part or whole, in
    base 64 or in hexadecimal.

    It also masks values of at least MIN_VALUE characters (shorter ones would mask half of any
    sentence), and all text between `//` and `@`.
    """
    pattern = _pattern(key, tuple(values))

    def redact(text: str) -> str:
        if pattern is not None:
            text = pattern.sub(MASK, text)
        return _CREDENTIALS.sub(f"//{MASK}@", text)

    return redact


_LEAST_PACKED = 6


@lru_cache(64)
def _pattern(key: str, values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Write the pattern of secrets once for the failed calls of a job."""
    secrets = [key] if key else []
    secrets += [value for value in values if len(value) >= MIN_VALUE]
    secrets.sort(key=len, reverse=True)
    spellings = [_spellings(secret) for secret in secrets]
    if len(key) >= MIN_VALUE:
        spellings += _packed(key)
    return re.compile("|".join(spellings)) if spellings else None


@lru_cache(64)
def places_of(secrets: tuple[str, ...], kept: str) -> re.Pattern[str]:
    """Write the pattern of what is `kept`, a pattern without groups, and of secrets, plain,
    percent-encoded, escaped for JSON, in base 64 or in hexadecimal, each in a group of its own."""
    each = ["|".join([_spellings(secret), *_packed(secret)]) for secret in secrets]
    return re.compile("|".join([kept, *(f"({spelt})" for spelt in each)]))


def may_hold(secret: str, text: str) -> bool:
    """Tell quickly whether a text may hold a secret in one of the forms of `places_of`."""
    plain = text.replace("\\", "") if "\\" in text else text
    if secret in text or secret.replace("\\", "") in plain:
        return True
    if "%" in text and secret in unquote_plus(text):
        return True
    return any(spelt in text for spelt in _spelt(secret))


@lru_cache(1_024)
def _spelt(secret: str) -> tuple[str, ...]:
    data = secret.encode("utf-8", "replace")
    packed = [spelt.decode() for spelt in in_base64(data)]
    url_safe = [spelt.replace("+", "-").replace("/", "_") for spelt in packed]
    digits = data.hex()
    escaped = [] if secret.isascii() else [json.dumps(secret)[1:-1]]
    return (*packed, *url_safe, digits, digits.upper(), secret.replace(" ", "+"), *escaped)


def in_base64(data: bytes) -> Iterable[bytes]:
    """Yield what base 64 makes of bytes, alone and in the middle of others at each alignment."""
    yield b64encode(data)
    for shift, skipped in ((0, 0), (1, 2), (2, 3)):
        packed = b64encode(b"\0" * shift + data)
        core = packed[skipped : (shift + len(data)) * 8 // 6]
        if len(core) >= _LEAST_PACKED:
            yield core


def _packed(secret: str) -> Iterable[str]:
    """Yield patterns of a secret in base 64, of either alphabet, and in hexadecimal."""
    data = secret.encode("utf-8", "replace")
    for spelt in in_base64(data):
        pattern = re.escape(spelt.decode())
        yield pattern.replace(r"\+", "[-+]").replace("/", "[_/]")
    yield f"(?i:{data.hex()})"


def _spellings(secret: str) -> str:
    return "".join(_character(character) for character in secret)


@lru_cache(1_024)
def _character(character: str) -> str:
    encoded = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "replace"))
    digits = "".join(f"[{d}{d.upper()}]" if d in "abcdef" else re.escape(d) for d in encoded)
    others = [r"\+"] if character == " " else []
    if character in '"/\\':
        others.append(re.escape(f"\\{character}"))
    if not character.isascii():
        others.append(re.escape(json.dumps(character)[1:-1]))
    return f"(?:{'|'.join([re.escape(character), digits, *others])})"


MAX_TITLE = 200
MAX_TEXT = 500
MAX_DOCUMENT = 65_536
_MAX_COST = 1e9
_COST = re.compile(r"[0-9]{1,12}(\.[0-9]{1,18})?")

_ACCOUNT_CODES = {failure.value: failure for failure in RunFailure}
# A 402 about one feature or one domain; the account itself still works.
_FEATURE_CODES = frozenset({"AUTH009", "AUTH010"})
_BLOCKED_CODES = frozenset({"RESP001", "RESP008"})
_TARGET_CODES = frozenset({"RESP002", "RESP003", "RESP007"})


def refusal(
    status: int,
    document: bytes,
    *,
    redact: Callable[[str], str],
    retry_after: float = 0.0,
    spend: Spend | None = None,
) -> ScrapeFailed:
    """Return the verdict on an answer that is not a success.

    `document` is its body, a problem document or not; `redact` masks secrets in every text that is
    kept.
    """
    given = _read(document)
    code = str(given.code)
    account = _account(status, code)
    failure = TaskFailure.OTHER if account is not None else _failure(status, code.upper())
    retryable = account is None and (status == 429 or is_transient(status))
    return ScrapeFailed(
        _problem(given, status, redact, otherwise=(account or failure).value),
        failure,
        retryable=retryable,
        retry_after=retry_after if retryable else 0.0,
        burns_attempt=status != 429,
        account=account,
        spend=spend,
    )


def read_spend(cost: str, credits: str = "") -> Spend:
    """Return the spend in an `X-Request-Cost` and an `X-Request-Credits`.

    Without readable credits they are the cost, rounded up.
    """
    spent = read_amount(cost) or 0.0
    charged = read_amount(credits)
    return Spend(math.ceil(spent if charged is None else charged), spent)


def read_amount(text: str) -> float | None:
    """Return the number of a field; None if it is missing, or not one from 0 to the maximum."""
    if _COST.fullmatch(text) is None:
        return None
    amount = float(text)
    return amount if amount <= _MAX_COST else None


def _account(status: int, code: str) -> RunFailure | None:
    named = _ACCOUNT_CODES.get(code.lower())
    if status == 402:
        if code.upper() in _FEATURE_CODES:
            return None
        return named or RunFailure.INSUFFICIENT_CREDITS
    if status == 401 and named is RunFailure.SUBSCRIPTION_INACTIVE:
        return named
    return None


def _failure(status: int, code: str) -> TaskFailure:
    if status == 429:
        return TaskFailure.RATE_LIMITED
    if is_transient(status):
        return transient_failure(status)
    if status in (404, 410, 413):
        return TaskFailure.BAD_TARGET
    if status in (401, 402) or (status == 403 and _is_about_auth(code)):
        return TaskFailure.AUTH_FAILED
    if status == 403:
        return TaskFailure.OTHER if code.startswith("REQS") else TaskFailure.BLOCKED
    if status == 422:
        return _unprocessable(code)
    return TaskFailure.OTHER


def _is_about_auth(code: str) -> bool:
    return code.startswith("AUTH") or code in ("UNAUTHENTICATED", "PERMISSION_DENIED")


def _unprocessable(code: str) -> TaskFailure:
    if code in _BLOCKED_CODES or code.startswith(("BLK", "BLOCKED")):
        return TaskFailure.BLOCKED
    return TaskFailure.BAD_TARGET if code in _TARGET_CODES else TaskFailure.OTHER


class _Document(msgspec.Struct):
    """A problem document as it may come; no field is reliable."""

    code: str | int = ""
    title: str | None = None
    status: int = 0
    type: str | None = None
    detail: str | None = None
    instance: str | None = None


def _read(document: bytes) -> _Document:
    try:
        return msgspec.json.decode(document, type=_Document, strict=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _Document()


def _problem(
    given: _Document, status: int, redact: Callable[[str], str], *, otherwise: str
) -> Problem:
    """Return the given problem, masked and shortened, with the code `otherwise` if it has no
    code."""

    def clean(text: str | None, limit: int) -> str | None:
        return redact(text)[:limit] if text else None

    code = str(given.code)
    if code not in _ACCOUNT_CODES:
        code = clean(code, MAX_TITLE) or otherwise
    return Problem(
        code=code,
        title=clean(given.title, MAX_TITLE) or status_title(status),
        status=given.status if 100 <= given.status <= 599 else status,
        type=clean(given.type, MAX_TEXT) or "about:blank",
        detail=clean(given.detail, MAX_TEXT),
        instance=clean(given.instance, MAX_TEXT),
    )
