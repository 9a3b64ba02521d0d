"""A certificate for servers on loopback, and the authority that has signed it."""

from __future__ import annotations

import ssl
from pathlib import Path

from bench.certificates import write_certificates

HOSTS = ("localhost", "origin.test", *(f"127.0.0.{last}" for last in range(1, 5)))


class Certificate:
    """Files in a directory: `authority` is what a client must trust."""

    def __init__(self, directory: Path) -> None:
        self._files = write_certificates(directory, HOSTS)
        self.authority = self._files.authority

    def server_context(self, protocols: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """Return the settings of a server that offers these protocols by ALPN."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.set_alpn_protocols(list(protocols))
        return context
