"""Target URLs as a direct fetch needs them: read as a browser reads them, sent as they were
given."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import lru_cache
from urllib.parse import quote, unquote, urljoin

import msgspec
from pydantic_core import Url

from conveyor.gateway.problems import impossible_name, malformed_url, unsupported_scheme

_DEFAULT_PORTS = {"http": 80, "https": 443}
_DROPPED = re.compile(r"[\t\n\r]")
_PARTS = re.compile(r"([^:]*:[/\\]*[^/\\?#]*)([^?#]*)([^#]*)")
_UNSENDABLE = re.compile(r"[^\x21-\x7e]+")
_RAW_BYTES = "surrogateescape"  # how the bytes of a header that are not UTF-8 are held in text
_CONTROLS_AND_SPACE = "".join(map(chr, range(0x21)))


class Target(msgspec.Struct, frozen=True):
    """Where to connect and what to ask for.

    `host` is ASCII, an IPv6 literal in brackets; `path` has the query and is what the request line
    gets; `credentials` is the Authorization value of a user and password in the URL.
    """

    scheme: str
    host: str
    port: int
    path: str
    credentials: str | None = None

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: what credentials belong to."""
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """The URL to send, without credentials and fragment."""
        if self.port == _DEFAULT_PORTS[self.scheme]:
            return f"{self.scheme}://{self.host}{self.path}"
        return f"{self.scheme}://{self.host}:{self.port}{self.path}"


def parse_target(url: str) -> Target:
    """Read a URL of any spelling. Raises ScrapeFailed (bad_target) where it cannot be fetched.

    Path and query stay as given, but for what HTTP cannot carry: controls, spaces and what is not
    ASCII are percent-encoded. No path segment is resolved, no escape normalised.
    """
    is_odd = _UNSENDABLE.search(url) is not None
    if is_odd:
        url = _DROPPED.sub("", url).strip(_CONTROLS_AND_SPACE)
    parts = _PARTS.match(url)
    if parts is None:
        raise malformed_url()
    authority, path, query = parts.groups()
    scheme, host, port, credentials = _read_authority(authority)
    path = (path.replace("\\", "/") or "/") + query
    return Target(scheme, host, port, _sendable(path) if is_odd else path, credentials)


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
    """Where a Location field, seen at a target, leads. Raises ScrapeFailed."""
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
