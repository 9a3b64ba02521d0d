"""The options of a client."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.origin import Origin, read_origin

CONNECT_SECONDS = 30.0
MOST_HELD = 262_144
"""Bytes that a connection holds until its reader takes them."""


@dataclass(frozen=True, slots=True, repr=False)
class Proxy:
    """A proxy that is asked by CONNECT for a way to each origin, and resolves its name.
    `authorization` is the value of Proxy-Authorization."""

    origin: Origin
    authorization: str | None = None


def read_proxy(url: str) -> Proxy:
    """Read `http://[user:password@]host:port`. Raises TransportError(UNSENDABLE)."""
    try:
        parts = urlsplit(url)
        user, password, authority = parts.username, parts.password, parts.netloc
        pair = f"{unquote(user or '')}:{unquote(password or '')}".encode()
    except ValueError:
        raise TransportError(TransportTrouble.UNSENDABLE) from None
    if parts.scheme != "http" or parts.path.strip("/") or parts.query:
        raise TransportError(TransportTrouble.UNSENDABLE)
    origin = read_origin("http", authority.rpartition("@")[2])
    if user is None:
        return Proxy(origin)
    return Proxy(origin, "Basic " + b64encode(pair).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a client. Times are in seconds.

    `authority` is a PEM file of authorities beside the system's, or in their place if it stands
    `alone`. `connect` bounds the making of a
    connection, `first_byte` the wait for the head of an answer. `ragged_end` accepts a body over
    TLS that ends with the connection, without close_notify. Connections go through `proxy`, if
    there is one. A connection holds at most `held` bytes until they are taken. `own_port` of this
    machine's loopback is never connected to; 0 for none.
    """

    authority: Path | None = None
    alone: bool = False
    connect: float = CONNECT_SECONDS
    first_byte: float | None = None
    ragged_end: bool = False
    proxy: Proxy | None = None
    held: int = MOST_HELD
    own_port: int = 0


USUAL = ClientOptions()
