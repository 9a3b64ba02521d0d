"""What must be said before anything of production starts: one clear line for what is not.

A default that suits one machine is no default for a fleet: a secret that a process makes for
itself, an API that takes any key, links to an address that only it knows.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from conveyor.ports.blobs import PASSING_DAYS
from conveyor.roles.banner import LOOPBACK
from conveyor.settings import ROLES, InvalidSetting, Settings

DAY = 86_400
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})
SHORTEST_SECRET = 32
"""Characters of a root secret."""


def check_place(settings: Settings) -> None:
    """Which fleet it is, and where. Raises InvalidSetting."""
    if not settings.environment:
        raise InvalidSetting(
            "CONVEYOR_ENVIRONMENT",
            "must name the fleet, such as production: its resources carry the name",
        )
    if not settings.region:
        raise InvalidSetting("CONVEYOR_REGION", "must name a region of AWS, as AWS_REGION may too")
    if not settings.bucket:
        raise InvalidSetting("CONVEYOR_BUCKET", "must name the S3 bucket of the fleet")
    if not BUCKET.fullmatch(settings.bucket):
        raise InvalidSetting(
            "CONVEYOR_BUCKET",
            "must be 3 to 63 lower-case letters, digits, hyphens and dots, as S3 names a bucket",
        )
    if not TABLE.fullmatch(settings.table_name):
        raise InvalidSetting(
            "CONVEYOR_TABLE",
            "must be 3 to 255 letters, digits, underscores, hyphens and dots, as DynamoDB has it",
        )
    if settings.ledger == "redis" and not settings.redis_url:
        raise InvalidSetting(
            "CONVEYOR_REDIS_URL",
            "must be the URL of the fleet's Redis, unless CONVEYOR_LEDGER is dynamodb",
        )
    if settings.rate_limit and not settings.redis_url:
        raise InvalidSetting("CONVEYOR_RATE_LIMIT", "must be 0 where CONVEYOR_REDIS_URL is not set")


def check_role(settings: Settings) -> None:
    """All that a role needs. Raises InvalidSetting."""
    if not settings.role:
        raise InvalidSetting("CONVEYOR_ROLE", f"must be one of {', '.join(ROLES)}")
    check_place(settings)
    _check_secret(settings.secret)
    _check_lifetimes(settings)
    if settings.role == "api":
        _check_ports(settings)
        _check_api(settings)


def looseness(settings: Settings) -> list[str]:
    """Rules that are looser than a fleet's should be, each in one line."""
    loose = {
        "any API key is accepted": settings.role == "api" and settings.api_keys == "any",
        "the gateway makes its answers up": settings.gateway == "fake",
        "pages are fetched directly, none is rendered: CONVEYOR_GATEWAY names no scraping API": (
            settings.role == "worker" and settings.gateway == "direct"
        ),
        "addresses that are not public are fetched": settings.allow_private,
    }
    return [line for line, holds in loose.items() if holds]


def _check_lifetimes(settings: Settings) -> None:
    """The bucket forgets by itself what is older than its rules allow."""
    longest = PASSING_DAYS * DAY
    for variable, seconds in (
        ("CONVEYOR_INPUT_TTL", settings.input_ttl),
        ("CONVEYOR_EXPORT_TTL", settings.export_ttl),
    ):
        if seconds > longest:
            raise InvalidSetting(
                variable, f"must be at most {longest}: the bucket keeps it {PASSING_DAYS} days"
            )


def _check_secret(secret: str) -> None:
    if not secret:
        raise InvalidSetting(
            "CONVEYOR_SECRET",
            "must be set, the same for every process of the fleet: openssl rand -hex 32 makes one",
        )
    if any(len(part) < SHORTEST_SECRET for part in secret.split(",")):
        raise InvalidSetting(
            "CONVEYOR_SECRET", f"must have {SHORTEST_SECRET} characters at least in each part"
        )


def _check_ports(settings: Settings) -> None:
    """An API has two."""
    hosts = {settings.host, settings.metrics_host}
    same = len(hosts) == 1 or not hosts.isdisjoint(EVERY_ADDRESS)
    if same and settings.port == settings.metrics_port != 0:
        raise InvalidSetting(
            "CONVEYOR_METRICS_PORT",
            f"must be another port than CONVEYOR_PORT, which is {settings.port} too",
        )


def _check_api(settings: Settings) -> None:
    if not settings.api_keys:
        raise InvalidSetting(
            "CONVEYOR_API_KEYS",
            "must name a file of key hashes, or hold them (conveyor admin key-hash makes one);"
            " `any` takes every key",
        )
    if not settings.public_url:
        if not LOOPBACK.fullmatch(settings.host):
            raise InvalidSetting(
                "CONVEYOR_PUBLIC_URL", "must be the URL that callers know: signed links carry it"
            )
        return
    parts = urlsplit(settings.public_url)
    if parts.scheme != "https" and not LOOPBACK.fullmatch(parts.hostname or ""):
        raise InvalidSetting(
            "CONVEYOR_PUBLIC_URL", "must be https: keys and signed links would be read on their way"
        )
