"""Find where a call goes, as boto3 would send it.

Region, FIPS, dual stack, endpoints of profiles and accounts, hosts or paths of buckets, proxies and
authorities are for boto3 to know.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from botocore.httpsession import ProxyConfiguration, where
from botocore.utils import get_environ_proxies

from conveyor.prod.aws.calls import Parameters
from conveyor.prod.aws.signer import RequestSigner, canonical_path
from conveyor.wire.errors import TransportError
from conveyor.wire.options import Proxy, read_proxy
from conveyor.wire.origin import split_url

_log = logging.getLogger("conveyor.aws")

_PROBES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "dynamodb": ("get_item", "GetItem", {"TableName": "t", "Key": {}}),
    "sqs": ("receive_message", "ReceiveMessage", {"QueueUrl": "https://queues/1/q"}),
    "s3": ("get_object", "GetObject", {"Key": "k"}),
}
"""A call of each service that tells where the others go: named as a method, named as an operation,
its parameters."""
_SIGNATURES = ("v4", "s3v4")


@dataclass(frozen=True, slots=True)
class CallPlace:
    """The place that calls of one service go to, or those about one bucket.

    `url` is whole, or ends before the slash that begins a key. `host` is written as the request
    has it. `path` is what a signature binds of it.
    """

    url: str
    host: str
    path: str
    signer: RequestSigner
    proxy: Proxy | None
    authority: Path


class Unplaced(Exception):
    """boto3 does not say where a call goes."""


class _Asked(Exception):
    """The place to which boto3 would have sent a call."""

    def __init__(self, url: str, signing: tuple[str, str, str]) -> None:
        super().__init__(url)
        self.url = url
        self.signing = signing


class CallPlaces:
    """The places of calls, asked of the clients of boto3. A call may take a while: it loads
    credentials, where endpoints depend on the account."""

    def __init__(self, clients: Mapping[str, Any]) -> None:
        self._clients = clients
        self._asking = threading.local()
        self._listened: set[str] = set()
        self._lock = threading.Lock()

    def find(self, service: str, parameters: Parameters) -> CallPlace | None:
        """Return the place of a call; None, with a line in the log, if only boto3 can send it.

        Raises Unplaced if it cannot be told at present.
        """
        client = self._clients[service]
        method, _, about = _PROBES[service]
        if service == "s3":
            about = {**about, "Bucket": parameters["Bucket"]}
        with self._stopped(service, client):
            try:
                getattr(client, method)(**about)
            except _Asked as asked:
                place = _read(service, asked, _authority(client))
            except Exception as error:
                # Of whatever type: boto3 will meet it again with the call itself, and tell it.
                # Its text may quote what a program of credentials said.
                _log.warning("boto3 does not say where %s is: %s", service, type(error).__name__)
                raise Unplaced from None
        if isinstance(place, str):
            _log.warning("calls to %s go through boto3: %s", service, place)
            return None
        return place

    @contextmanager
    def _stopped(self, service: str, client: Any) -> Iterator[None]:
        """Let no call of this thread go out: each raises _Asked instead, before it is signed."""
        with self._lock:
            if service not in self._listened:
                event = f"before-sign.{service}.{_PROBES[service][1]}"
                client.meta.events.register_first(event, self._stop)
                self._listened.add(service)
        self._asking.now = True
        try:
            yield
        finally:
            self._asking.now = False

    def _stop(self, request: Any, **given: Any) -> None:
        if getattr(self._asking, "now", False):
            _tell(request, given)


def _tell(request: Any, given: Mapping[str, Any]) -> NoReturn:
    said = request.context.get("signing", {})
    name = "of its own" if "request_credentials" in said else said.get("signing_name")
    region = said.get("region") or given["region_name"]
    raise _Asked(request.url, (given["signature_version"], region, name or given["signing_name"]))


def _read(service: str, asked: _Asked, authority: Path | str) -> CallPlace | str:
    """Return the place, or a reason why only boto3 can send calls there."""
    if isinstance(authority, str):
        return authority
    version, region, name = asked.signing
    if version not in _SIGNATURES or name != service:
        return f"signed by {version} for {name}"
    url = asked.url.partition("?")[0]
    is_bucket = service == "s3"
    if is_bucket and not url.endswith("/k"):
        return "a bucket of another form"
    url = url.removesuffix("/k") if is_bucket else url
    try:
        origin, _ = split_url(url)
        proxy = _proxy(url)
    except TransportError:
        return "its endpoint or proxy"
    if proxy is not None and origin.scheme != "https":
        return "a proxy without TLS"
    path = urlsplit(url).path
    return CallPlace(
        url=url,
        host=origin.authority,
        path=path if is_bucket else canonical_path(path),
        signer=RequestSigner(region, name),
        proxy=proxy,
        authority=authority,
    )


def _proxy(url: str) -> Proxy | None:
    """Return the proxy before a URL, by HTTPS_PROXY and NO_PROXY. Raises TransportError."""
    found = ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url)
    return None if found is None else read_proxy(found)


def _authority(client: Any) -> Path | str:
    """Return the file of the authorities that a client trusts, and no others."""
    trusted = client._endpoint.http_session._verify
    if not trusted:
        return "it trusts anybody"
    return Path(where() if trusted is True else trusted)
