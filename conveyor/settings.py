"""Every setting, in one table; the only module that reads the environment.

`SETTINGS` feeds parsing, the command line's help and the test that holds SPEC.md against the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from conveyor.domain.errors import ConveyorError, ErrorCode

PREFIX = "CONVEYOR_"
MOST = 1_000_000_000_000
"""No setting goes beyond this, whatever its unit."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings with their defaults. Durations are seconds, sizes bytes, unless said
    otherwise."""

    host: str = "127.0.0.1"
    port: int = 9000
    data_dir: str = ".conveyor"
    gateway: str = "direct"
    allow_private: bool = False
    public_url: str = ""
    allowed_hosts: str = ""
    secret: str = ""
    log_level: str = "info"
    log_format: str = "text"
    workers: int = 50
    permit_policy: str = "reserve"
    throttle_cooldown: float = 1.0
    bounce_visibility: float = 5.0
    bounce_visibility_cap: float = 300.0
    permit_lease: float = 30.0
    visibility_timeout: float = 60.0
    heartbeat: float = 10.0
    discovery_interval: float = 10.0
    resync_interval: float = 600.0
    evict_after: float = 600.0
    max_receives: int = 1_000
    queue_window: int = 10_000
    gateway_timeout: float = 180.0
    shutdown_grace: float = 2.0
    retry_base: float = 1.0
    retry_cap: float = 300.0
    retry_after_cap: float = 3_600.0
    rate_limit_deadline: float = 86_400.0
    max_interruptions: int = 10
    max_result_bytes: int = 52_428_800
    max_request_bytes: int = 50_331_648
    max_inline_tasks: int = 100_000
    async_threshold: int = 10_000
    max_add_tasks: int = 10_000
    max_open_job_tasks: int = 100_000
    max_active_jobs: int = 0
    idempotency_claim: float = 60.0
    idempotency_ttl: float = 86_400.0
    result_url_ttl: float = 7_200.0
    partial_rerun_window_days: int = 10
    task_shard_count: int = 8
    shard_scheme: str = "stripe"
    max_input_rows: int = 100_000
    max_input_bytes: int = 52_428_800
    max_validation_seconds: float = 20.0
    input_upload_ttl: float = 1_800.0
    input_ttl: float = 86_400.0
    export_ttl: float = 43_200.0
    max_export_bytes: int = 107_374_182_400
    sweep_interval: float = 60.0
    quiet_after: float = 300.0
    row_retention_days: int = 30


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the field, its variable, what it means."""

    name: str
    help: str
    check: Callable[[Any], str | None] = lambda _value: None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()


def _at_least(low: float) -> Callable[[Any], str | None]:
    return lambda value: None if value >= low else f"must be at least {low:g}"


def _between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be from {low:g} to {high:g}"


def _one_of(*words: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in words else f"must be one of {', '.join(words)}"


def _not_empty(value: str) -> str | None:
    return None if value else "must be the path of a directory"


def _is_origin(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _gateway(value: str) -> str | None:
    if value in ("direct", "fake") or _is_origin(value):
        return None
    return "must be direct, fake, or the http(s) URL of a scraping API"


def _public_url(value: str) -> str | None:
    return None if not value or _is_origin(value) else "must be an http(s) URL"


SETTINGS: tuple[Setting, ...] = (
    Setting("host", "address to listen on"),
    Setting("port", "port to listen on; 0 picks a free one", _between(0, 65_535)),
    Setting(
        "data_dir",
        "directory that holds the database, the result bodies and the secret",
        _not_empty,
    ),
    Setting("gateway", "direct, fake, or the URL of a scraping API", _gateway),
    Setting("allow_private", "let the direct gateway fetch addresses that are not public"),
    Setting(
        "public_url", "origin put into signed links, where it is not the bound address", _public_url
    ),
    Setting("allowed_hosts", "further host names, comma separated, that requests may name"),
    Setting("secret", "root secret, older ones after commas; made in the data directory if empty"),
    Setting("log_level", "least severe level logged", _one_of("debug", "info", "warning", "error")),
    Setting("log_format", "text or json", _one_of("text", "json")),
    Setting("workers", "gateway calls at a time in this process", _between(1, 10_000)),
    Setting(
        "permit_policy",
        "how permits and receives are brought together",
        _one_of("reserve", "reserve-strict", "local-exact", "local", "off"),
    ),
    Setting(
        "throttle_cooldown",
        "seconds that a queue rests after a refused permit, where messages come first",
        _at_least(0),
    ),
    Setting(
        "bounce_visibility",
        "seconds that a message without a permit is hidden; doubles with each receive",
        _at_least(0),
    ),
    Setting("bounce_visibility_cap", "most seconds that such a message is hidden", _at_least(0)),
    Setting(
        "permit_lease", "seconds after which the permits of a silent worker fall free", _at_least(5)
    ),
    Setting(
        "visibility_timeout",
        "seconds that a received message and a claim stay reserved",
        _at_least(1),
    ),
    Setting(
        "heartbeat", "seconds between renewals of claims, messages and permits", _at_least(0.1)
    ),
    Setting("discovery_interval", "seconds between looks for changed runs", _at_least(0.1)),
    Setting("resync_interval", "seconds between looks at every run with work", _at_least(0.1)),
    Setting("evict_after", "seconds after which an empty queue is left alone", _at_least(1)),
    Setting(
        "max_receives",
        "receives after which a message goes to the dead-letter queue",
        _between(3, 1_000),
    ),
    Setting("queue_window", "references a run's queue holds in memory", _at_least(10)),
    Setting("gateway_timeout", "seconds that one gateway call may take", _at_least(0.1)),
    Setting("shutdown_grace", "seconds that running calls get to end at shutdown", _at_least(0)),
    Setting("retry_base", "seconds before the first retry; doubles from there", _at_least(0)),
    Setting("retry_cap", "most seconds of backoff between two attempts", _at_least(0)),
    Setting("retry_after_cap", "most seconds that a Retry-After header is believed", _at_least(0)),
    Setting("rate_limit_deadline", "seconds after which a rate-limited task fails", _at_least(0)),
    Setting("max_interruptions", "lapsed claims after which a task fails", _at_least(1)),
    Setting("max_result_bytes", "largest decoded result body", _at_least(1)),
    Setting("max_request_bytes", "largest request body", _at_least(1_024)),
    Setting("max_inline_tasks", "most tasks in one submit", _at_least(1)),
    Setting("async_threshold", "number of inline tasks from which a submit is large", _at_least(1)),
    Setting("max_add_tasks", "most tasks in one add", _at_least(1)),
    Setting("max_open_job_tasks", "most tasks in an open job", _at_least(1)),
    Setting("max_active_jobs", "most unfinished jobs a caller; 0 means no limit", _at_least(0)),
    Setting(
        "idempotency_claim", "seconds until an unanswered idempotency key lapses", _at_least(1)
    ),
    Setting("idempotency_ttl", "seconds that an idempotent answer is kept", _at_least(1)),
    Setting("result_url_ttl", "seconds that a signed result link works", _at_least(1)),
    Setting(
        "partial_rerun_window_days", "days within which a run can be partially rerun", _at_least(1)
    ),
    Setting(
        "task_shard_count",
        "partitions of the rows of large, open and heavy jobs; 1 keeps every job in one",
        _between(1, 64),
    ),
    Setting("shard_scheme", "how rows go into partitions", _one_of("stripe", "fnv32a")),
    Setting("max_input_rows", "most tasks in an uploaded file", _at_least(1)),
    Setting("max_input_bytes", "most bytes of an uploaded file, also unpacked", _at_least(1)),
    Setting(
        "max_validation_seconds",
        "a list of tasks that would take longer to check is refused",
        _at_least(1),
    ),
    Setting("input_upload_ttl", "seconds that an upload link works", _at_least(1)),
    Setting("input_ttl", "seconds that a slot for a file lives", _at_least(1)),
    Setting("export_ttl", "seconds that an export is kept", _at_least(1)),
    Setting("max_export_bytes", "most bytes of result bodies in an export", _at_least(1)),
    Setting("sweep_interval", "seconds between looks for what was left behind", _at_least(0.1)),
    Setting(
        "quiet_after", "seconds without progress after which a run is looked after", _at_least(1)
    ),
    Setting(
        "row_retention_days",
        "days that an ended run is kept beyond its last result; 0 keeps it",
        _at_least(0),
    ),
)


class InvalidSetting(ConveyorError):
    """A setting that cannot be used: which one, and what it takes."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(ErrorCode.INVALID_ARGUMENT, f"{variable} {problem}")


def from_environment(**overrides: Any) -> Settings:
    """Settings from the process environment; an override that is not None wins."""
    return load(os.environ, **overrides)


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """What the command line takes from the environment: a server, and the key to show it."""

    server: str
    api_key: str


def client_environment() -> ClientEnvironment:
    """CONVEYOR_URL, else ZENROWS_BATCH_BASE_URL, else the default address of conveyor-dev;
    ZENROWS_API_KEY, else `local`, which a development server takes as it takes any key."""
    server = os.environ.get("CONVEYOR_URL") or os.environ.get("ZENROWS_BATCH_BASE_URL")
    return ClientEnvironment(
        server=server or f"http://{Settings().host}:{Settings().port}/v1",
        api_key=os.environ.get("ZENROWS_API_KEY") or "local",
    )


def load(environment: Mapping[str, str], **overrides: Any) -> Settings:
    """Settings from a mapping of CONVEYOR_… variables. Raises InvalidSetting for the first bad
    one."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        override = overrides.pop(setting.name, None)
        if override is not None:
            value = override
        elif setting.variable in environment:
            value = _parse(setting.variable, environment[setting.variable], kinds[setting.name])
        else:
            continue
        problem = setting.check(value) or _out_of_reach(value)
        if problem is not None:
            raise InvalidSetting(setting.variable, problem)
        values[setting.name] = value
    if overrides:
        raise TypeError(f"unknown settings: {', '.join(sorted(overrides))}")
    return Settings(**values)


def _out_of_reach(value: object) -> str | None:
    """Numbers that no setting can mean, and that clocks, files and the database cannot hold."""
    if isinstance(value, int | float) and not -MOST <= value <= MOST:
        return f"must be a number up to {MOST:,}"
    return None


def _parse(variable: str, text: str, kind: type) -> object:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise InvalidSetting(variable, "must be true or false")
    try:
        return kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise InvalidSetting(variable, f"must be {noun}") from None
