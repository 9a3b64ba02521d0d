"""The failures of an exchange."""

from __future__ import annotations

from enum import StrEnum


class TransportTrouble(StrEnum):
    """Why an exchange brought no whole answer."""

    UNSENDABLE = "unsendable"
    """The request cannot be written as HTTP."""
    REFUSED = "refused"
    """The address may not be touched."""
    UNRESOLVED = "unresolved"
    """The host name has no address."""
    UNREACHABLE = "unreachable"
    """Nobody accepts a connection at the address: refused, no route, no reply."""
    TLS = "tls"
    """The TLS handshake failed, or the certificate is not valid."""
    NO_COMMON_PROTOCOL = "no_common_protocol"
    """The server speaks no HTTP/1.1 over TLS."""
    INTERRUPTED = "interrupted"
    """The connection ended before the head of an answer was whole."""
    TRUNCATED = "truncated"
    """The connection ended before the body was whole."""
    RAGGED = "ragged"
    """A TLS connection ended without close_notify, where only its end shows the end of the body."""
    MALFORMED = "malformed"
    """The answer is not HTTP."""
    TIMEOUT = "timeout"
    """The answer was not whole within the time."""


class TransportError(Exception):
    """No whole answer came. The error holds no URL, header or key, so it may be logged.

    `sent` is the number of requests that went out for it, wholly or in part.
    """

    def __init__(self, trouble: TransportTrouble, *, sent: int = 0) -> None:
        super().__init__(trouble.value)
        self.trouble = trouble
        self.sent = sent
