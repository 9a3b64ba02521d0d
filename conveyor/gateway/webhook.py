"""Post events to the receivers that callers name.

The URL comes from a stranger, as those of tasks do, and the rules are stricter: https alone, every
address of the host must be admitted, a request has a connection of its own, and no redirect is
followed. `CONVEYOR_ALLOW_PRIVATE` has no say here.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import msgspec

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.headers import content_type, retry_after
from conveyor.gateway.http_client import USER_AGENT
from conveyor.gateway.targets import Target, carried_address, is_public, names_user, parse_target
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import ScrapeFailed
from conveyor.ports.webhooks import WebhookAnswer, Webhooks
from conveyor.wire.client import Answer, HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import ClientOptions
from conveyor.wire.resolver import Lookup, is_address, system_lookup

LOOKUP_SECONDS = 1.0
CONNECT_SECONDS = 5.0
WHOLE_SECONDS = 15.0
MOST_ANSWER = 65_536
"""Bytes of an answer that are read, and thrown away: half of them may wait in the connection."""

Network = IPv4Network | IPv6Network
METADATA = tuple(
    map(
        ip_address,
        (
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200"),
            *("192.0.0.192", "168.63.129.16", "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254"),
        ),
    )
)
"""Addresses at which clouds hand out credentials."""
RESERVED_NAMES = (
    *("example.com", "example.net", "example.org"),
    *("example", "test", "invalid"),
)
"""Names for documentation and tests, which no receiver has (RFC 2606, RFC 6761)."""
_ANY_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRules:
    """The receivers beside those on the public internet that events may go to.

    `names` are hosts inside one's own network, `networks` its addresses. `loopback` admits this
    machine and plain http, for development; without it loopback, link-local addresses, those of
    METADATA and this machine's own are refused whatever the names and networks. With an `inbox`,
    also for development, events for hosts under RESERVED_NAMES go to that URL and the host's name,
    and such hosts are not resolved; one of `names` is.
    """

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    loopback: bool = False
    inbox: str = ""

    def place_in_inbox(self, target: Target) -> str | None:
        """Return the URL that takes the events for a target under a reserved name; None for any
        other target."""
        host = _host(target).rstrip(".")
        is_reserved = any(host == name or host.endswith(f".{name}") for name in RESERVED_NAMES)
        if not self.inbox or not is_reserved or host in self.names:
            return None
        return f"{self.inbox}/{host}{target.path}"

    def leads_home(self, target: Target, address: str) -> bool:
        """Return whether events for a target would come to the server that sends them, other than
        to its inbox."""
        if not self.inbox:
            return False
        inbox = urlsplit(self.inbox)
        try:
            is_near = carried_address(address).is_loopback
        except ValueError:
            is_near = False
        is_ours = is_near and target.port == inbox.port
        return is_ours and not target.path.startswith(f"{inbox.path}/")

    def admits(self, host: str, address: str) -> bool:
        """Return whether an address of a host may be touched."""
        if is_public(address):
            return self.loopback or not _is_own(address)
        try:
            found = carried_address(address)
        except ValueError:
            return False
        if self.loopback and found.is_loopback:
            return True
        if found in METADATA or _is_special(found):
            return False
        listed = host in self.names or any(found in network for network in self.networks)
        if self.loopback or not listed:
            return listed
        return not found.is_loopback and not _is_own(address)


class WebhookSender(Webhooks):
    """The webhooks port over HTTP. `authority` is a PEM file of authorities that receivers inside
    one's own network have; `lookup` replaces the system's resolver."""

    def __init__(
        self,
        clock: Clock,
        rules: WebhookRules,
        *,
        authority: Path | None = None,
        lookup: Lookup = system_lookup,
    ) -> None:
        self._clock = clock
        self._rules = rules
        self._lookup = lookup
        self._options = ClientOptions(
            authority=authority, connect=CONNECT_SECONDS, held=MOST_ANSWER // 2
        )
        self._clients: set[HttpClient] = set()

    async def check_url(self, url: str) -> None:
        target = self._read(url)
        if self._rules.place_in_inbox(target) is not None:
            return
        try:
            await self._resolve(target)
        except TransportError as error:
            problem = (
                "has an address that events may not be sent to"
                if error.trouble is TransportTrouble.REFUSED
                else "has no address that was found within a second"
            )
            raise ConveyorError(
                ErrorCode.CALLBACK_URL_UNRESOLVABLE, f"url: its host {problem}"
            ) from None

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        began = self._clock.monotonic()
        host = ""
        try:
            target = self._read(url)
            place = self._rules.place_in_inbox(target)
            target = target if place is None else parse_target(place)
            host = _host(target)
            answer = await self._post(target, await self._resolve(target), headers, body)
        except TransportError as error:
            answer = WebhookAnswer(error=_words(error.trouble))
        except ConveyorError as error:
            answer = WebhookAnswer(error=f"transport_error:{error.code.value}")
        milliseconds = round((self._clock.monotonic() - began) * 1_000)
        return msgspec.structs.replace(answer, milliseconds=milliseconds, host=host)

    async def aclose(self) -> None:
        for client in list(self._clients):
            await client.aclose()

    def _read(self, url: str) -> Target:
        """Read a URL. Raises ConveyorError if events may not go to any such URL."""
        try:
            target = parse_target(url)
        except ScrapeFailed:
            target = None
        if target is None or (target.scheme != "https" and not self._rules.loopback):
            raise ConveyorError(
                ErrorCode.CALLBACK_URL_MUST_BE_HTTPS, "url: must be an https URL with a host"
            )
        if names_user(url):
            raise _invalid("must hold no user and no password")
        if "#" in url:
            raise _invalid("must have no fragment")
        return target

    async def _resolve(self, target: Target) -> list[str]:
        """Return the addresses of a host. Raises TransportError: UNRESOLVED if none was found in
        time, REFUSED if one of them may not be touched."""
        host = _host(target)
        addresses = [host] if is_address(host) else await self._look_up(host, target.port)
        if not addresses:
            raise TransportError(TransportTrouble.UNRESOLVED)
        if any(self._rules.leads_home(target, address) for address in addresses) or not all(
            self._rules.admits(host, address) for address in addresses
        ):
            raise TransportError(TransportTrouble.REFUSED)
        return addresses

    async def _look_up(self, host: str, port: int) -> list[str]:
        found = anyio.Event()
        looking = asyncio.ensure_future(self._lookup(host, port))
        looking.add_done_callback(lambda _: found.set())
        try:
            await wait_or_timeout(found, self._clock, LOOKUP_SECONDS)
        finally:
            is_late = not looking.done()
            looking.cancel()
        try:
            return [] if is_late else looking.result()
        except (OSError, UnicodeError):
            return []

    async def _post(
        self, target: Target, addresses: list[str], headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        """Post to one of the addresses. Raises TransportError."""

        async def known(_host: str, _port: int) -> list[str]:
            return addresses

        # A client of its own: no connection and no look-up of another event serves this one.
        client = HttpClient(
            connections=1,
            admits=partial(self._rules.admits, _host(target)),
            lookup=known,
            options=self._options,
        )
        self._clients.add(client)
        try:
            answer = await client.send(
                "POST",
                target.url,
                headers={**_HEADERS, **headers},
                body=body,
                timeout=WHOLE_SECONDS,
            )
            await _read_some(answer)
        finally:
            self._clients.discard(client)
            await client.aclose()
        return WebhookAnswer(
            status=answer.status,
            error=_verdict(answer.status),
            content_type=content_type(answer.headers, default=""),
            length=answer.length,
            retry_after=self._retry_after(answer),
        )

    def _retry_after(self, answer: Answer) -> float | None:
        """Return the seconds that an answer asks for; None unless it does so once and readably."""
        fields = answer.headers.getall("Retry-After", [])
        if len(fields) != 1:
            return None
        # 0 asks for no longer wait than no field does, and is what cannot be read.
        return retry_after(fields[0], now=self._clock.now(), cap=math.inf) or None


_HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": USER_AGENT,
    "Accept": "*/*",
    "Accept-Encoding": "identity",
}


def _invalid(problem: str) -> ConveyorError:
    """Make the error for a URL that breaks a rule of its own."""
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"url: {problem}")


def _host(target: Target) -> str:
    return target.host.strip("[]").lower()


async def _read_some(answer: Answer) -> None:
    """Read an answer's body up to MOST_ANSWER bytes, so that a receiver that sends one is not cut
    off; its status counts, however the body ends."""
    size = 0
    with suppress(TransportError):
        async for piece in answer.pieces():
            size += len(piece)
            if size >= MOST_ANSWER // 2:
                break


def _verdict(status: int) -> str:
    return "" if 200 <= status < 300 else f"http_{min(status // 100, 5)}xx:{status}"


def _words(trouble: TransportTrouble) -> str:
    if trouble is TransportTrouble.TIMEOUT:
        return "timeout"
    return f"transport_error:{trouble.value}"


def _is_special(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is nobody's own: that of a link, a group, none, or of no use. One
    that hides another (Teredo) counts, too."""
    is_hidden = isinstance(address, IPv6Address) and address.teredo is not None
    return (
        is_hidden
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (isinstance(address, IPv4Address) and address.is_reserved)
    )


def _is_own(address: str) -> bool:
    """Return whether an address is this machine's: then it is also where a way to it begins."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))  # sends nothing
            return bool(probe.getsockname()[0] == address)
        except OSError:
            return False
