"""TLS over bytes in memory.

The transports of asyncio and uvloop hide whether a peer ended TLS by close_notify or only the
connection by FIN. Here both are seen, because the records pass through `ssl.MemoryBIO`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from conveyor.wire.errors import TransportError, TransportTrouble

_RECORD = 65_536
_NO_PROTOCOL = "no application protocol"


def client_context(authority: Path | None, *, alone: bool = False) -> ssl.SSLContext:
    """Make the settings of TLS clients: the system's authorities, and those in a PEM file, or the
    latter alone.

    Raises OSError or ssl.SSLError if the file cannot be used.
    """
    context = ssl.create_default_context(cafile=authority if alone else None)
    if authority is not None and not alone:
        context.load_verify_locations(cafile=authority)
    context.set_alpn_protocols(["http/1.1"])
    # A handshake in the middle would keep a request from being written.
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


class TlsSession:
    """The TLS of one connection, as its client.

    `is_closed` turns True when the peer's close_notify arrives, `is_damaged` when a record cannot
    be read, or tells of an error.
    """

    __slots__ = ("_incoming", "_object", "_outgoing", "is_closed", "is_damaged")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.is_closed = False
        self.is_damaged = False

    def shake_hands(self, received: bytes) -> bool:
        """Go on with the handshake; return whether it is done.

        Raises TransportError: TLS, or NO_COMMON_PROTOCOL.
        """
        self._incoming.write(received)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLError, ValueError) as error:
            # Not every Python has a name for this alert; the text is OpenSSL's own then.
            is_alpn = _NO_PROTOCOL in str(error).lower().replace("_", " ")
            trouble = TransportTrouble.NO_COMMON_PROTOCOL if is_alpn else TransportTrouble.TLS
            raise TransportError(trouble) from None
        return True

    def decrypt(self, received: bytes) -> bytes:
        """Return the plain bytes in what was received, up to a record that is damaged."""
        incoming, tls = self._incoming, self._object
        incoming.write(received)
        pieces: list[bytes] = []
        try:
            while True:
                piece = tls.read(_RECORD)
                if not piece:
                    self.is_closed = True
                    break
                pieces.append(piece)
                if not incoming.pending and not tls.pending():
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_closed = True
        except ssl.SSLError:
            self.is_damaged = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def encrypt(self, plain: bytes) -> bytes:
        """Return the records that carry plain bytes."""
        self._object.write(plain)
        return self._outgoing.read()

    def outgoing(self) -> bytes:
        """Return what TLS itself has to send."""
        return self._outgoing.read() if self._outgoing.pending else b""
