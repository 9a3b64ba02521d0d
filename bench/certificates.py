"""Certificates for a server on loopback: an authority made on the spot, and one that it signed."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ADDRESS = "127.0.0.1"
_VALID = datetime.timedelta(days=2)
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the authority that clients trust, the server's certificate and its key."""

    authority: Path
    certificate: Path
    key: Path


def write_certificates(
    directory: Path, hosts: Sequence[str] = ("localhost", ADDRESS)
) -> Certificates:
    """Make an authority and a certificate for some names and addresses, and write them as files."""
    files = Certificates(
        directory / "authority.pem", directory / "server.pem", directory / "server.key"
    )
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _name("Authority of a loopback server")
    authority = _authority(issuer, authority_key)
    server = _server(issuer, authority_key, server_key.public_key(), hosts)
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def _authority(issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = key.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _begun(issuer, issuer, public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _server(
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    names = [_place(host) for host in hosts]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        _begun(_name(hosts[0]), issuer, public)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(signer, hashes.SHA256())
    )


def _begun(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _place(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
