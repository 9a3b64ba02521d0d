"""A certificate for servers on loopback, and the authority that has signed it."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAMES = ("localhost", "origin.test")
_DAY = timedelta(days=1)


class Certificate:
    """Files in a directory: `authority` is what a client must trust."""

    def __init__(self, directory: Path) -> None:
        self.authority = directory / "authority.pem"
        self._chain = directory / "server.pem"
        signer = ec.generate_private_key(ec.SECP256R1())
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = _name("an authority of tests")
        is_authority = x509.BasicConstraints(ca=True, path_length=0)
        root = _builder(issuer, issuer, signer).add_extension(is_authority, critical=True)
        self.authority.write_bytes(_pem(root.sign(signer, hashes.SHA256())))
        leaf = _builder(_name("localhost"), issuer, key).add_extension(_places(), critical=False)
        self._chain.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + _pem(leaf.sign(signer, hashes.SHA256()))
        )

    def server_context(self, protocols: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """Return the settings of a server that offers these protocols by ALPN."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._chain)
        context.set_alpn_protocols(list(protocols))
        return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 30 * _DAY)
    )


def _places() -> x509.SubjectAlternativeName:
    names = [x509.DNSName(name) for name in NAMES]
    addresses = [x509.IPAddress(ip_address(f"127.0.0.{last}")) for last in range(1, 5)]
    return x509.SubjectAlternativeName([*names, *addresses])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
