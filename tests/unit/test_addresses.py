"""Public addresses, in every form that one address can take."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.gateway.targets import is_public

PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.9",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_ipv4_address_that_is_not_global_is_refused_in_every_dress(address: str) -> None:
    number = int(IPv4Address(address))
    assert not is_public(address)
    assert not is_public(f"::ffff:{address}")
    assert not is_public(str(IPv6Address((0x0064_FF9B << 96) | number))), "NAT64"
    assert not is_public(str(IPv6Address((0x2002 << 112) | (number << 80) | 1))), "6to4"
    isatap = (0x2606_4700 << 96) | (0x0000_5EFE << 32) | number
    assert not is_public(str(IPv6Address(isatap))), "ISATAP"
    assert not is_public(str(IPv6Address(isatap | (0x0200_0000 << 32)))), "ISATAP, global"
    assert not is_public(str(IPv6Address(number))), "IPv4-compatible"


@pytest.mark.parametrize(
    "address",
    [
        "::",
        "::1",
        "::ffff:a9fe:a9fe",
        "64:ff9b:1::808:808",
        "100::1",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_ipv6_address_that_is_not_global_is_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.0",
        "172.32.0.1",
        "223.255.255.255",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
        "2606:4700:4700::1111",
        "2a00:1450:4001:81b::200e",
    ],
)
def test_a_global_address_is_admitted(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "text", ["", "localhost", "0x7f.1", "2130706433", "0177.0.0.1", "127.1", "8.8.8.8.", "[::1]"]
)
def test_what_is_no_address_is_not_public(text: str) -> None:
    assert not is_public(text)


@given(st.ip_addresses(v=4))
def test_mapping_changes_no_verdict(address: object) -> None:
    number = int(IPv4Address(str(address)))
    assert is_public(f"::ffff:{address}") == is_public(str(address))
    assert is_public(str(IPv6Address((0x0064_FF9B << 96) | number))) == is_public(str(address))
