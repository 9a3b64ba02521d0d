"""Scraper params: the known keys, their canonical text form, and the format they imply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, InvalidTaskReason
from conveyor.domain.model import Format
from conveyor.domain.text_rules import Refused, shorten

MAX_BYTES = 32_768
MAX_HEADERS = 32
MAX_HEADERS_BYTES = 8_192
MAX_WAIT = 30_000

_SWITCH = "true or false, in any case, or 1 or 0; stored as `true` or `false`"
_TEXT = "free text"

KNOWN: dict[str, str] = {
    "mode": "`auto`; excludes `js_render` and `premium_proxy` set to true",
    "js_render": _SWITCH,
    "js_instructions": _TEXT,
    "custom_headers": f"an object, or JSON text of one: at most {MAX_HEADERS} headers and "
    f"{MAX_HEADERS_BYTES:,} bytes, names tokens, values without control characters other than "
    "tab; replaces the job's as a whole",
    "premium_proxy": _SWITCH,
    "proxy_country": _TEXT,
    "session_id": _TEXT,
    "original_status": _SWITCH,
    "allowed_status_codes": _TEXT,
    "wait_for": _TEXT,
    "wait": f"milliseconds, a whole number from 0 to {MAX_WAIT:,}",
    "block_resources": _TEXT,
    "json_response": _SWITCH,
    "css_extractor": _TEXT,
    "extract": _TEXT,
    "autoparse": _SWITCH,
    "response_type": "`markdown`, `plaintext`, `pdf`, or `html` (as without it), in any case",
    "outputs": _TEXT,
}
"""Every param and the values it takes. Any JSON scalar is accepted, and stored as its JSON text."""
SWITCHES = frozenset(name for name, takes in KNOWN.items() if takes == _SWITCH)

HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
NOT_IN_HEADER = r"\x00-\x08\x0a-\x1f\x7f"
_TOKEN = re.compile(HEADER_NAME)
_CONTROL = re.compile(f"[{NOT_IN_HEADER}]")
_WHOLE_NUMBER = re.compile(r"([0-9]{1,5})(?:\.0)?")
_ON_OR_OFF = {
    **dict.fromkeys(("true", "1", "1.0"), "true"),
    **dict.fromkeys(("false", "0", "0.0", "-0.0"), "false"),
}
RESPONSE_TYPES = ("html", "markdown", "plaintext", "pdf")
_RESPONSE_FORMATS = {
    "markdown": Format.MARKDOWN,
    "plaintext": Format.PLAINTEXT,
    "pdf": Format.PDF,
}


def normalize(raw: object) -> dict[str, str]:
    """Return params as stored: every value text, `custom_headers` canonical JSON.

    Raises Refused with the offending key as its value: `unknown_param` or `invalid_param_value`.
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        _refuse("zenrows_params", "zenrows_params must be an object")
    params: dict[str, str] = {}
    for key, value in raw.items():
        if key not in KNOWN:
            raise Refused(InvalidTaskReason.UNKNOWN_PARAM, shorten(key))
        if key == "custom_headers":
            params[key] = _headers(value)
        else:
            params[key] = _checked(key, _text(key, value))
    if params and len(msgspec.json.encode(params)) > MAX_BYTES:
        _refuse("zenrows_params")
    return params


def merge(job: Mapping[str, str], task: Mapping[str, str] | None) -> dict[str, str]:
    """Merge the params of one task: its own replace the job's, key by key."""
    return {**job, **task} if task else dict(job)


def check_combination(params: Mapping[str, str]) -> None:
    """Refuse merged params that exclude each other: `mode` chooses rendering and proxy itself.

    Raises Refused(invalid_param_value).
    """
    if "mode" in params:
        for key in ("js_render", "premium_proxy"):
            if is_on(params, key):
                _refuse(key)


def conflict_with_post(params: Mapping[str, str]) -> str | None:
    """Return the first of the merged params that a POST cannot be combined with, or None."""
    for key in ("js_render", "json_response"):
        if is_on(params, key):
            return key
    return "js_instructions" if params.get("js_instructions") else None


def implied_format(params: Mapping[str, str]) -> Format:
    """Return the form of the body that a scrape with these params gives."""
    response_format = _RESPONSE_FORMATS.get(params.get("response_type", "").lower())
    if response_format is not None:
        return response_format
    if is_on(params, "autoparse") or is_on(params, "json_response"):
        return Format.JSON
    if any(
        params.get(key, "").lower() not in ("", "false") for key in ("css_extractor", "extract")
    ):
        return Format.JSON
    return Format.HTML


def is_on(params: Mapping[str, str], key: str) -> bool:
    """Return whether a switch is set: `true` in any case."""
    return params.get(key, "").lower() == "true"


def _text(key: str, value: object) -> str:
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() | float():
            return json.dumps(value)
        case _:
            _refuse(key)


def _checked(key: str, text: str) -> str:
    """Return the text as stored, if the contract allows it; most params are free text."""
    if key in SWITCHES:
        return _ON_OR_OFF.get(text.lower()) or _refuse(key)
    if key == "mode":
        allowed = text == "auto"
    elif key == "response_type":
        allowed = text.isascii() and text.lower() in RESPONSE_TYPES
    elif key == "wait":
        match = _WHOLE_NUMBER.fullmatch(text)
        allowed = match is not None and int(match[1]) <= MAX_WAIT
    else:
        allowed = True
    return text if allowed else _refuse(key)


def _headers(value: object) -> str:
    if isinstance(value, str):
        try:
            value = strict_json.decode(value.encode())
        except (ConveyorError, UnicodeEncodeError):
            _refuse("custom_headers")
    if not isinstance(value, dict) or len(value) > MAX_HEADERS:
        _refuse("custom_headers")
    headers = {name: _text("custom_headers", content) for name, content in value.items()}
    for name, content in headers.items():
        if _TOKEN.fullmatch(name) is None or _CONTROL.search(content) is not None:
            _refuse("custom_headers")
    canonical = _compact(headers)
    if len(canonical.encode()) > MAX_HEADERS_BYTES:
        _refuse("custom_headers")
    return canonical


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse(key: str, detail: str | None = None) -> NoReturn:
    raise Refused(InvalidTaskReason.INVALID_PARAM_VALUE, key, detail) from None
