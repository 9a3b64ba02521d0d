"""Checks of single values: each returns what a value must be, or None if it is valid.

No check repeats the value, for it may hold a password: an unescaped character in one, such as /,
moves parts of it to the host, the path or a parameter.

URLs have no spaces or control characters, a valid host (an IP address, or labels of letters,
digits, hyphens and underscores) and a port from 1 to 65,535. `CONVEYOR_PUBLIC_URL` and the
endpoints are http(s), without user, query and fragment; endpoints also without an underscore in the
host, which boto3 refuses. `CONVEYOR_GATEWAY` may have a user and a query, and a host beyond ASCII.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from conveyor.domain.hosts import LEAST_RATE, MOST_RATE, is_rate

Check = Callable[[Any], str | None]

HOUR = 3_600
"""In seconds: the longest time that work may wait for a look at it, or before it is given up."""
MOST_VISIBILITY = 43_200
"""In seconds: SQS hides a message for at most this long."""
MOST_LINK = 604_800
"""In seconds: S3 accepts a signed link for at most this long."""
LONG = 31_536_000
"""In seconds, a year: longer is a mistake, and far later times cannot be written down."""
MOST_DAYS = 36_500
"""In days, a hundred years: the same bound for days."""
MOST_SHARDS = 64
"""Shards of a job: every page of its tasks asks all of them."""


def at_least(low: float) -> Check:
    """Check for a number from `low` on."""
    return lambda value: None if value >= low else f"must be at least {low:g}"


def between(low: float, high: float) -> Check:
    """Check for a number from `low` to `high`, both included."""
    return lambda value: None if low <= value <= high else f"must be from {low:g} to {high:g}"


def lasting(low: float, high: float = LONG) -> Check:
    """Check for a time from `low` to `high`, both included; `high` is a year by default."""

    def check(value: float) -> str | None:
        if not value >= low:
            return f"must be at least {low:g}"
        return None if value <= high else f"must be at most {high:.10g}"

    return check


def host_rate(value: float) -> str | None:
    """Check for starts of calls a second, or 0."""
    return None if is_rate(value) else f"must be 0, or from {LEAST_RATE} to {MOST_RATE:g}"


def one_of(*words: str) -> Check:
    """Check for one of `words`; "" among them stands for no value."""
    return lambda value: (
        None if value in words else f"must be one of {', '.join(filter(None, words))}"
    )


def not_empty(value: str) -> str | None:
    """Check that a path is given."""
    return None if value else "must be the path of a directory"


def name(value: str) -> str | None:
    """Check for a text that may be part of the names of a table, a queue and a bucket, or ""."""
    if not value:
        return None
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", value):
        return "must be a lower-case letter and up to 31 more, digits or hyphens"
    if "-run-" in f"{value}-":
        # Rights to the queues of runs of production would cover the environment production-run.
        return "must have no part -run, which names the queues of runs"
    return None


def networks(value: str) -> str | None:
    """Check for host names, addresses and networks with commas between, or ""."""
    for entry in filter(None, map(str.strip, value.split(","))):
        try:
            ipaddress.ip_network(entry)
        except ValueError:
            if "/" in entry or _ENDS_IN_NUMBER.fullmatch(entry) or not _NAME.fullmatch(entry):
                return "must be host names and networks such as 10.0.0.0/8, with commas between"
    return None


LONGEST_NAME = 253
"""Maximum characters of a host name."""

_UNFIT = re.compile(r"[\x00-\x20\x7f]")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}\.?")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?[0-9]+\.?")
_REGION = re.compile(r"(?=.{1,63}\Z)[a-z][a-z0-9]*(?:-[a-z0-9]+)*")

_ESCAPED = " (in a password /, ?, # and @ are written %2F, %3F, %23 and %40)"
_ORIGIN = "must be an http(s) URL of a host, without user, query and fragment"

_WHOLE = re.compile(r"[0-9]{1,9}"), "a whole number"
_FILE = re.compile(r".+"), "the path of a file"
_PARAMETERS = {
    "db": _WHOLE,
    "protocol": (re.compile(r"[23]"), "2 or 3"),
    "health_check_interval": _WHOLE,
}
_PROXY_END = re.compile(r"[^:]+://[^/?#]+/?")
_TLS_PARAMETERS = {
    "ssl_cert_reqs": (re.compile(r"none|optional|required"), "none, optional or required"),
    "ssl_check_hostname": (re.compile(r"true|false"), "true or false"),
    "ssl_ca_certs": _FILE,
    "ssl_certfile": _FILE,
    "ssl_keyfile": _FILE,
}


def gateway(value: str) -> str | None:
    """Check a value of CONVEYOR_GATEWAY; user and query belong to the URL of some APIs."""
    parts = _split(value)
    if value in ("direct", "fake") or (parts is not None and _is_web(parts, beyond_ascii=True)):
        return None
    return "must be direct, fake, or the http(s) URL of a scraping API"


def origin(value: str) -> str | None:
    """Check for an http(s) URL to put paths behind, or ""."""
    parts = _split(value)
    fits = parts is not None and _is_web(parts) and _is_plain_origin(parts)
    return None if not value or fits else _ORIGIN


def proxy(value: str) -> str | None:
    """Check for the URL of a proxy, or ""."""
    parts = _split(value)
    is_web = parts is not None and parts.scheme == "http" and _is_web(parts)
    if not value or (is_web and _PROXY_END.fullmatch(value)):
        return None
    return "must be http://HOST:PORT, with the user and the password in front where it wants them"


def endpoint(value: str) -> str | None:
    """Check for the address of an AWS service, or "". Its clients refuse underscores in the
    host."""
    problem = origin(value)
    if problem is None and "_" in urlsplit(value).netloc:
        return f"{_ORIGIN}, in whose name is no underscore"
    return problem


def agent(value: str) -> str | None:
    """Check for the http URL of the agent of ECS, or ""."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    return None if usable or not value else "must be a URL, http://HOST and a path"


def region(value: str) -> str | None:
    """Check for the name of a region, as AWS and emulators have them, or ""."""
    if not value or _REGION.fullmatch(value):
        return None
    return "must be the name of a region, such as eu-west-1"


def redis_url(value: str) -> str | None:
    """Check for a URL of Redis, or "".

    - `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`: a server; the database by its number, 0
      where the URL names none
    - `rediss://…`: the same over TLS
    - `unix://[[USER]:PASSWORD@]/PATH`: a socket of this machine

    In a password `/`, `?`, `#` and `@` are escaped. All take the parameters `db` (the number of the
    database, where no path says it), `protocol` (2 or 3, the version of Redis's protocol) and
    `health_check_interval` (whole seconds, after which an idle connection is tried before it is
    used). `rediss://` also takes `ssl_cert_reqs` (`none`, `optional` or `required`),
    `ssl_check_hostname` (`true` or `false`), and paths of files in `ssl_ca_certs`, `ssl_certfile`
    and, with a certificate alone, `ssl_keyfile`. Any other parameter is refused, and each that is
    given twice.
    """
    if not value:
        return None
    parts = _split(value)
    if parts is None:
        return f"must be a URL without spaces and control characters{_ESCAPED}"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "must be a redis://, rediss:// or unix:// URL"
    if parts.fragment:
        return f"must have no fragment{_ESCAPED}"
    place = _socket_problem(parts) if parts.scheme == "unix" else _server_problem(parts)
    return place or _parameters_problem(parts)


def _split(value: str) -> SplitResult | None:
    # The parser drops characters that are not allowed in a URL; other clients send them.
    if _UNFIT.search(value):
        return None
    try:
        return urlsplit(value)
    except ValueError:
        return None


def _is_web(parts: SplitResult, *, beyond_ascii: bool = False) -> bool:
    return (
        parts.scheme in ("http", "https")
        and _is_host(parts, beyond_ascii=beyond_ascii)
        and _has_possible_port(parts)
    )


def _is_plain_origin(parts: SplitResult) -> bool:
    return "@" not in parts.netloc and not parts.query and not parts.fragment


def _is_host(parts: SplitResult, *, beyond_ascii: bool = False) -> bool:
    """Return whether the URL names a valid host: an address, or labels that a resolver can hold."""
    host = parts.hostname or ""
    try:
        if "[" in parts.netloc or _ENDS_IN_NUMBER.fullmatch(host):
            ipaddress.ip_address(host)
            return "%" not in host  # an interface's zone, which some readers reject
        if beyond_ascii and not host.isascii():
            host = host.encode("idna").decode("ascii")
    except ValueError:
        return False
    return len(host) <= LONGEST_NAME and _NAME.fullmatch(host) is not None


def _has_possible_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _socket_problem(parts: SplitResult) -> str | None:
    if parts.netloc.rpartition("@")[2] or parts.path in ("", "/"):
        return f"must have the whole path of a socket, as unix:///PATH{_ESCAPED}"
    return None


def _server_problem(parts: SplitResult) -> str | None:
    if not _is_host(parts):
        return f"must name a host{_ESCAPED}"
    if not _has_possible_port(parts):
        return f"must have a port from 1 to 65535, or none{_ESCAPED}"
    if not re.fullmatch(r"/?|/[0-9]{1,9}", parts.path):
        return f"must have the number of a database as its path, or none{_ESCAPED}"
    return None


def _parameters_problem(parts: SplitResult) -> str | None:
    known = _PARAMETERS | (_TLS_PARAMETERS if parts.scheme == "rediss" else {})
    given = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in given]
    if not known.keys() >= set(names):
        return f"must have no parameters but {', '.join(known)}{_ESCAPED}"
    for name, value in given:
        pattern, words = known[name]
        if not pattern.fullmatch(value):
            return f"must have {words} as its parameter {name}"
    if parts.scheme != "unix" and parts.path not in ("", "/"):
        names.append("db")
    if len(names) > len(set(names)):
        return "must say each thing once, a database in its path or as db"
    if "ssl_keyfile" in names and "ssl_certfile" not in names:
        return "must have ssl_certfile where it has ssl_keyfile"
    return None
