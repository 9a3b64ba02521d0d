"""The failures of an exchange."""

from __future__ import annotations

import errno
import os
import socket
from enum import StrEnum

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Error numbers of a system that has no descriptor, memory or buffer left for this process."""
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class TransportTrouble(StrEnum):
    """The trouble for which an exchange brought no whole answer."""

    UNSENDABLE = "unsendable"
    """The request cannot be written as HTTP."""
    REFUSED = "refused"
    """The address may not be touched."""
    UNRESOLVED = "unresolved"
    """The host name has no address."""
    UNREACHABLE = "unreachable"
    """Nobody accepts a connection at the address: refused, no route, no reply."""
    EXHAUSTED = "exhausted"
    """This process has no descriptor, memory or thread left for the exchange."""
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

    `sent` is the number of requests that went out for it, wholly or in part. `is_connecting` tells
    whether it failed before there was a connection; `is_answer` then, whether somebody said so: the
    host refused, or its name does not exist; `is_queued`, whether its time went by while all
    connections that the client may have were in use.
    """

    def __init__(
        self,
        trouble: TransportTrouble,
        *,
        sent: int = 0,
        is_connecting: bool = False,
        is_answer: bool = False,
        is_queued: bool = False,
    ) -> None:
        super().__init__(trouble.value)
        self.trouble = trouble
        self.sent = sent
        self.is_connecting = is_connecting
        self.is_answer = is_answer
        self.is_queued = is_queued


def is_shortage(error: Exception) -> bool:
    """Return whether an error says that this process has no descriptor, memory or buffer left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and _has(error, *SHORTAGES)
    )


def unreached(error: Exception) -> TransportError:
    """Return the meaning of an error while a connection was made."""
    if is_shortage(error):
        return TransportError(TransportTrouble.EXHAUSTED, is_connecting=True)
    refused = isinstance(error, OSError) and _has(error, errno.ECONNREFUSED)
    return TransportError(TransportTrouble.UNREACHABLE, is_connecting=True, is_answer=refused)


def unresolved(error: Exception | None) -> TransportError:
    """Return the meaning of an error of a look-up, or of one without addresses."""
    if error is not None and _is_short_of(error):
        return TransportError(TransportTrouble.EXHAUSTED, is_connecting=True)
    is_answer = not isinstance(error, OSError) or (
        isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    )
    return TransportError(
        TransportTrouble.UNRESOLVED, is_connecting=True, is_answer=error is None or is_answer
    )


def _has(error: OSError, *numbers: int) -> bool:
    # Of several addresses that failed in several ways, only the text tells.
    return error.errno in numbers or any(f"[Errno {number}]" in str(error) for number in numbers)


def _is_short_of(error: Exception) -> bool:
    if isinstance(error, socket.gaierror):
        # The resolver of the system does not say that it could open no socket.
        return error.errno == socket.EAI_MEMORY or not can_open()
    return is_shortage(error)


def can_open() -> bool:
    """Return whether this process can open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in SHORTAGES
    return True
