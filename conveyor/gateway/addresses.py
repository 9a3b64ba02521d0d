"""Which IP addresses a fetch on a stranger's behalf may touch."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_RELAYS = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_NOT_ROUTED = (IPv6Network("2001::/23"), IPv6Network("3fff::/20"))
_ISATAP = 0x0000_5EFE


@lru_cache(maxsize=4096)
def is_public(address: str) -> bool:
    """Whether an IP address, in any textual form, is one of the public internet.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, NAT64, ISATAP) is judged by what it
    carries; Teredo is never public. What is no address at all is not public.
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
