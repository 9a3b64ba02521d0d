"""Origins, and the bytes of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from conveyor.wire.errors import TransportError, TransportTrouble

PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://([!-.0->@-~]+)(/[!-\"$-~]*|\?[!-\"$-~]*|)(?:#[!-~]*)?")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^@:\[\]]+)(?::([0-9]{0,5}))?")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Origin(NamedTuple):
    """A server to connect to. `host` is a name or an address without brackets; `authority` goes
    into the Host field."""

    scheme: str
    host: str
    port: int
    authority: str


def split_url(url: str) -> tuple[Origin, str]:
    """Return the origin of a URL, and the path and query to ask it for.

    Raises TransportError(UNSENDABLE) unless the URL is of http or https, all printable ASCII, and
    holds no user.
    """
    matched = _URL.fullmatch(url)
    if matched is None:
        raise TransportError(TransportTrouble.UNSENDABLE)
    scheme, authority, target = matched.groups()
    return read_origin(scheme, authority), target if target[:1] == "/" else "/" + target


@lru_cache(maxsize=4_096)
def read_origin(scheme: str, authority: str) -> Origin:
    """Read host and port of a URL. Raises TransportError(UNSENDABLE)."""
    matched = _AUTHORITY.fullmatch(authority)
    if matched is None:
        raise TransportError(TransportTrouble.UNSENDABLE)
    host, port = matched[1].lower(), int(matched[2] or PORTS[scheme])
    if not 0 < port < 65_536:
        raise TransportError(TransportTrouble.UNSENDABLE)
    shown = host if port == PORTS[scheme] else f"{host}:{port}"
    return Origin(scheme, host.strip("[]"), port, shown)


def write_request(
    method: str,
    target: str,
    authority: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    head_only: bool = False,
) -> bytes:
    """Write a request, or its head only. Raises TransportError(UNSENDABLE) for a name or value that
    HTTP cannot carry."""
    if not is_token(method):
        raise TransportError(TransportTrouble.UNSENDABLE)
    start = f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n"
    if start.count("\n") != 2 or start.count("\r") != 2 or "\0" in start:
        raise TransportError(TransportTrouble.UNSENDABLE)
    fields = _written_fields(tuple(headers.items()))
    if body is not None:
        fields += f"Content-Length: {len(body)}\r\n"
    elif method in ("POST", "PUT", "PATCH"):
        fields += "Content-Length: 0\r\n"
    try:
        head = f"{start}{fields}\r\n".encode()
    except UnicodeEncodeError:
        raise TransportError(TransportTrouble.UNSENDABLE) from None
    return head if body is None or head_only else head + body


@lru_cache(maxsize=1_024)
def is_token(name: str) -> bool:
    """Tell whether a text is a token, as methods and the names of fields are."""
    return _TOKEN.fullmatch(name) is not None


@lru_cache(maxsize=64)  # most requests of a client have the fields of the one before
def _written_fields(fields: tuple[tuple[str, str], ...]) -> str:
    """Write fields, each with the end of its line. Raises TransportError(UNSENDABLE)."""
    text = "".join([f"{name}: {value}\r\n" for name, value in fields])
    ends = len(fields)
    if text.count("\n") != ends or text.count("\r") != ends or "\0" in text:
        raise TransportError(TransportTrouble.UNSENDABLE)
    if not all(is_token(name) for name, _ in fields):
        raise TransportError(TransportTrouble.UNSENDABLE)
    return text
