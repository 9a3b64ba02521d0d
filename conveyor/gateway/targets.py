"""Read target URLs for a direct fetch, and decide which IP addresses it may touch.

A URL is read as a browser reads it, and sent as it was given.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import quote, unquote, urljoin

import msgspec
from pydantic_core import Url

from conveyor.gateway.problems import impossible_name, malformed_url, unsupported_scheme

_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_RELAYS = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_NOT_ROUTED = (IPv6Network("2001::/23"), IPv6Network("3fff::/20"))
_ISATAP = 0x0000_5EFE


@lru_cache(maxsize=4096)
def is_public(address: str) -> bool:
    """Return whether an IP address, in any textual form, belongs to the public internet.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, NAT64, ISATAP) is judged by that one.
    Teredo is never public, nor is text that is no address.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        return _is_public_v4(parsed)
    if parsed.ipv4_mapped is not None:
        return _is_public_v4(parsed.ipv4_mapped)
    if parsed in _NAT64:
        return _is_public_v4(_low_bits(parsed))
    return _is_public_v6(parsed)


def carried_address(address: str) -> IPv4Address | IPv6Address:
    """Return an IP address of any textual form; of an IPv6 address that carries an IPv4 one
    (mapped, compatible, 6to4, NAT64, ISATAP), that one. Raises ValueError for other text."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv4Address):
        return parsed
    if parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    if parsed.sixtofour is not None:
        return parsed.sixtofour
    is_compatible = parsed in _COMPATIBLE and int(parsed) > 0xFFFF
    if is_compatible or parsed in _NAT64 or (int(parsed) >> 32) & 0xFDFF_FFFF == _ISATAP:
        return _low_bits(parsed)
    return parsed


def _is_public_v4(address: IPv4Address) -> bool:
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address in network for network in _RELAYS)


def _is_public_v6(address: IPv6Address) -> bool:
    if address not in _UNICAST or any(address in network for network in _NOT_ROUTED):
        return False
    if address.sixtofour is not None:
        return _is_public_v4(address.sixtofour)
    # The interface half of an ISATAP address is 0000:5efe or 0200:5efe, then the IPv4 address.
    if (int(address) >> 32) & 0xFDFF_FFFF == _ISATAP and not _is_public_v4(_low_bits(address)):
        return False
    return address.is_global


def _low_bits(address: IPv6Address) -> IPv4Address:
    return IPv4Address(int(address) & 0xFFFF_FFFF)


_DEFAULT_PORTS = {"http": 80, "https": 443}
_DROPPED = re.compile(r"[\t\n\r]")
_PARTS = re.compile(r"([^:]*:[/\\]*[^/\\?#]*)([^?#]*)([^#]*)")
_UNSENDABLE = re.compile(r"[^\x21-\x7e]+")
_RAW_BYTES = "surrogateescape"  # keeps bytes of a header that are not UTF-8 in text
_CONTROLS_AND_SPACE = "".join(map(chr, range(0x21)))


class Target(msgspec.Struct, frozen=True):
    """A parsed target URL: the host to connect to, and the path to ask for.

    `host` is ASCII, with an IPv6 literal in brackets. `path` includes the query and goes into the
    request line. `credentials` is the Authorization value of a user and password in the URL.
    """

    scheme: str
    host: str
    port: int
    path: str
    credentials: str | None = None

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port, to which credentials belong."""
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """The URL to send, without credentials and fragment."""
        if self.port == _DEFAULT_PORTS[self.scheme]:
            return f"{self.scheme}://{self.host}{self.path}"
        return f"{self.scheme}://{self.host}:{self.port}{self.path}"


def parse_target(url: str) -> Target:
    """Read a URL of any spelling. Raises ScrapeFailed (bad_target) if it cannot be fetched.

    Path and query stay as given, except that controls, spaces and characters beyond ASCII are
    percent-encoded, because HTTP cannot carry them. No path segment is resolved, no escape
    normalised.
    """
    is_odd = _is_odd(url)
    parts = _parts(url, is_odd)
    if parts is None:
        raise malformed_url()
    authority, path, query = parts
    scheme, host, port, credentials = _read_authority(authority)
    path = (path.replace("\\", "/") or "/") + query
    return Target(scheme, host, port, _sendable(path) if is_odd else path, credentials)


def names_user(url: str) -> bool:
    """Return whether a URL has a place for a user or password, even an empty one."""
    parts = _parts(url, _is_odd(url))
    return parts is not None and "@" in parts[0]


def _is_odd(url: str) -> bool:
    """Tell whether a URL has characters that HTTP cannot carry."""
    return not (url.isascii() and url.isprintable()) or " " in url


def _parts(url: str, is_odd: bool) -> tuple[str, str, str] | None:
    """Split a URL as a browser does: scheme with authority, path, query. None for other text."""
    if is_odd:
        url = _DROPPED.sub("", url).strip(_CONTROLS_AND_SPACE)
    parts = _PARTS.match(url)
    return None if parts is None else (parts[1], parts[2], parts[3])


@lru_cache(maxsize=1024)
def _read_authority(text: str) -> tuple[str, str, int, str | None]:
    try:
        parsed = Url(text + "/")
    except ValueError:
        raise malformed_url() from None
    scheme, host, port = parsed.scheme, parsed.host, parsed.port
    if scheme not in _DEFAULT_PORTS:
        raise unsupported_scheme()
    if not host or port is None:
        raise malformed_url()
    if not host.startswith("["):
        check_name(host)
    credentials = None
    if parsed.username or parsed.password:
        credentials = _basic(parsed.username or "", parsed.password or "")
    return scheme, host, port, credentials


def redirected(target: Target, location: str) -> Target:
    """Return the target of a Location field, seen at a target. Raises ScrapeFailed."""
    try:
        return parse_target(urljoin(target.url, _sendable(location.strip())))
    except ValueError:
        raise malformed_url() from None


def check_name(host: str) -> None:
    """Raise ScrapeFailed for a name with an empty label, one over 63 or over 253 characters."""
    name = host[:-1] if host.endswith(".") else host
    if len(name) > 253 or not all(0 < len(label) < 64 for label in name.split(".")):
        raise impossible_name()


def _sendable(text: str) -> str:
    try:
        return _UNSENDABLE.sub(lambda found: quote(found[0].encode("utf-8", _RAW_BYTES)), text)
    except UnicodeError:
        raise malformed_url() from None


def _basic(username: str, password: str) -> str:
    pair = f"{unquote(username)}:{unquote(password)}"
    return "Basic " + b64encode(pair.encode("utf-8", "replace")).decode()
