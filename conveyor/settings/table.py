"""The table of all settings. `SETTINGS` feeds parsing and docs/reference/settings.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conveyor.settings.validators import (
    HOUR,
    MOST_DAYS,
    MOST_LINK,
    MOST_SHARDS,
    MOST_VISIBILITY,
    Check,
    agent,
    at_least,
    between,
    endpoint,
    gateway,
    lasting,
    name,
    networks,
    not_empty,
    one_of,
    origin,
    proxy,
    redis_url,
    region,
)

PREFIX = "CONVEYOR_"
ROLES = ("api", "worker")

# The programs that use a setting. `conveyor run` is conveyor-dev in one process.
EVERY_SERVER = "conveyor-dev, conveyor api, conveyor worker"
SERVERS = "conveyor-dev, conveyor api"
WORKERS = "conveyor-dev, conveyor worker"
DEVELOPMENT = "conveyor-dev"
PRODUCTION = "conveyor api, conveyor worker"
FLEET = "conveyor api, conveyor worker, conveyor admin"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings with their defaults. Durations are seconds, sizes bytes, unless noted."""

    host: str = "127.0.0.1"
    port: int = 9000
    data_dir: str = ".conveyor"
    gateway: str = "direct"
    gateway_proxy: str = field(default="", repr=False)
    http_engine: str = "wire"
    ragged_end: str = "fail"
    ca_file: str = ""
    allow_private: bool = False
    public_url: str = ""
    webhook_private: str = ""
    webhook_ca_file: str = ""
    allowed_hosts: str = ""
    dashboard: bool = True
    operator_keys: str = ""
    secret: str = field(default="", repr=False)
    log_level: str = "info"
    log_format: str = "text"
    workers: int = 50
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
    max_body_memory: int = 268_435_456
    max_caller_body_memory: int = 134_217_728
    head_timeout: float = 30.0
    body_timeout: float = 30.0
    max_inline_tasks: int = 100_000
    async_threshold: int = 10_000
    max_add_tasks: int = 10_000
    max_open_job_tasks: int = 100_000
    max_active_jobs: int = 0
    max_scheduled_jobs: int = 0
    max_streams: int = 1_000
    max_caller_streams: int = 20
    rate_limit: float = 0.0
    rate_limit_burst: int = 20
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
    outbox_interval: float = 5.0
    callback_heartbeat: float = 30.0
    schedule_interval: float = 5.0
    schedule_catch_up: float = 604_800.0
    row_retention_days: int = 30
    delivery_retention_days: int = 30
    fire_retention_days: int = 30
    otlp_endpoint: str = ""
    trace_ratio: float = 0.01
    role: str = ""
    environment: str = ""
    region: str = ""
    dynamodb_endpoint: str = ""
    sqs_endpoint: str = ""
    s3_endpoint: str = ""
    stepfunctions_endpoint: str = ""
    kms_endpoint: str = ""
    table: str = ""
    bucket: str = ""
    ledger: str = "redis"
    redis_url: str = field(default="", repr=False)
    aws_attempts: int = 8
    aws_threads: int = 16
    aws_receive_threads: int = 32
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 9001
    api_keys: str = ""
    kms_key: str = ""
    ecs_agent: str = ""

    @property
    def table_name(self) -> str:
        """Return the name of the DynamoDB table."""
        return self.table or f"conveyor-{self.environment}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the field, its unit, its meaning, its values.

    `help` continues after the unit: "seconds", "between looks for changed runs". `used_by` lists
    the programs that use the setting. `production` is the default of the production roles, if it
    differs. A `secret` may also be given as a file, and is shown nowhere. `instead` names another
    product's variable that applies where this one is not set.
    """

    name: str
    unit: str
    help: str
    check: Check = lambda _value: None
    used_by: str = EVERY_SERVER
    production: Any = None
    secret: bool = False
    instead: str = ""

    @property
    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str:
        """Return the variable that names a file holding it; for secrets only."""
        return f"{self.variable}_FILE"


SETTINGS: tuple[Setting, ...] = (
    Setting("host", "address", "where to listen", used_by=SERVERS, production="0.0.0.0"),
    Setting("port", "port", "where to listen; 0: a free one", between(0, 65_535), used_by=SERVERS),
    Setting(
        "data_dir",
        "path",
        "directory of the database, the result bodies and the secret",
        not_empty,
        used_by=DEVELOPMENT,
    ),
    Setting(
        "gateway",
        "word or URL",
        "the scraper: `direct`, `fake`, or the http(s) URL of a scraping API",
        gateway,
        used_by=WORKERS,
    ),
    Setting(
        "gateway_proxy",
        "URL",
        "the proxy on the way to a scraping API, `http://[USER:PASSWORD@]HOST:PORT`; no proxy is "
        "ever taken from the environment's other variables, and `direct` uses none",
        proxy,
        used_by=WORKERS,
        secret=True,
    ),
    Setting(
        "http_engine",
        "word",
        "the HTTP client of the gateways: `wire`, or `aiohttp` (the extra of that name) until the "
        "next release",
        one_of("wire", "aiohttp"),
        used_by=WORKERS,
    ),
    Setting(
        "ragged_end",
        "word",
        "a body over TLS without length, chunks or coding whose connection ends without "
        "close_notify: `fail` the attempt, or `accept` it as whole",
        one_of("fail", "accept"),
        used_by=WORKERS,
    ),
    Setting(
        "ca_file",
        "path",
        "a PEM file of certificate authorities that the gateways trust beside the system's",
        used_by=WORKERS,
    ),
    Setting(
        "allow_private",
        "switch",
        "let the direct gateway fetch addresses that are not public",
        used_by=WORKERS,
    ),
    Setting(
        "public_url",
        "URL",
        "origin of signed links and of those in events, if not the bound address",
        origin,
    ),
    Setting(
        "webhook_private",
        "comma list",
        "receivers of events inside one's own network: host names, and networks such as "
        "`10.0.0.0/8`; in production never loopback, link-local addresses or those of metadata",
        networks,
    ),
    Setting(
        "webhook_ca_file",
        "path",
        "a PEM file of certificate authorities that receivers of events have, beside the system's",
    ),
    Setting(
        "allowed_hosts",
        "comma list",
        "further host names that requests may use",
        used_by=SERVERS,
    ),
    Setting(
        "dashboard",
        "switch",
        "serve pages to look at, under /dashboard",
        used_by=SERVERS,
        production=False,
    ),
    Setting(
        "operator_keys",
        "hashes or path",
        "who may see all callers on pages: as `CONVEYOR_API_KEYS`, without `any`; who has `acts` "
        "behind the hash may also change their jobs",
        used_by=SERVERS,
    ),
    Setting(
        "secret",
        "comma list",
        "root secret, then older ones; if empty, conveyor-dev makes one in the data directory",
        used_by=f"{EVERY_SERVER}, conveyor admin",
        secret=True,
    ),
    Setting(
        "log_level",
        "word",
        "least severe level to log: `debug`, `info`, `warning`, `error`",
        one_of("debug", "info", "warning", "error"),
    ),
    Setting(
        "log_format",
        "word",
        "form of a log line: `text` or `json`",
        one_of("text", "json"),
        production="json",
    ),
    Setting(
        "workers",
        "calls",
        "gateway calls at a time in this process, 1 to 10,000",
        between(1, 10_000),
        used_by=WORKERS,
    ),
    Setting(
        "permit_lease",
        "seconds",
        "after which the permits of a silent worker expire, 5 to 3,600",
        lasting(5, HOUR),
    ),
    Setting(
        "visibility_timeout",
        "seconds",
        "how long a received message and a claim stay reserved, 43,200 at most",
        lasting(1, MOST_VISIBILITY),
        used_by=WORKERS,
    ),
    Setting(
        "heartbeat",
        "seconds",
        "between renewals of claims, messages and permits",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "discovery_interval",
        "seconds",
        "between looks for changed runs",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "resync_interval",
        "seconds",
        "between looks at every run with work",
        lasting(0.1),
        used_by=WORKERS,
    ),
    Setting(
        "evict_after",
        "seconds",
        "after which an empty queue is no longer polled",
        lasting(1),
        used_by=WORKERS,
    ),
    Setting(
        "max_receives",
        "receives",
        "after which a message goes to the dead-letter queue, 3 to 1,000",
        between(3, 1_000),
    ),
    Setting(
        "queue_window",
        "references",
        "that the queue of a run holds in memory",
        at_least(10),
        used_by=DEVELOPMENT,
    ),
    Setting(
        "gateway_timeout",
        "seconds",
        "how long one gateway call may take, its body included",
        lasting(0.1),
        used_by=WORKERS,
    ),
    Setting(
        "shutdown_grace",
        "seconds",
        "how long running calls may take to end at shutdown",
        lasting(0),
        production=25.0,
    ),
    Setting(
        "retry_base",
        "seconds",
        "before the first retry; doubles from there",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "retry_cap",
        "seconds",
        "longest backoff between two attempts, before jitter",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "retry_after_cap", "seconds", "longest Retry-After to obey", lasting(0), used_by=WORKERS
    ),
    Setting(
        "rate_limit_deadline",
        "seconds",
        "after a task's first wait without an attempt, from which on a rate limit fails it",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "max_interruptions",
        "claims",
        "that may lapse before a task fails",
        at_least(1),
        used_by=WORKERS,
    ),
    Setting("max_result_bytes", "bytes", "largest decoded body", at_least(1), used_by=WORKERS),
    Setting("max_request_bytes", "bytes", "largest request body", at_least(1_024), used_by=SERVERS),
    Setting(
        "max_body_memory",
        "bytes",
        "memory for the request bodies of all callers at a time",
        at_least(1_024),
        used_by=SERVERS,
    ),
    Setting(
        "max_caller_body_memory",
        "bytes",
        "memory for the request bodies of one caller at a time",
        at_least(1_024),
        used_by=SERVERS,
    ),
    Setting(
        "head_timeout",
        "seconds",
        "within which the head of a request must be there, and the first one of a connection begin",
        lasting(0.001),
        used_by=SERVERS,
    ),
    Setting(
        "body_timeout",
        "seconds",
        "without a byte of a request body, after which it is refused",
        lasting(0.001),
        used_by=SERVERS,
    ),
    Setting("max_inline_tasks", "tasks", "maximum in one submit", at_least(1), used_by=SERVERS),
    Setting(
        "async_threshold",
        "tasks",
        "from which a submit or a rerun is large: its rows are written after the answer",
        at_least(1),
        used_by=SERVERS,
    ),
    Setting("max_add_tasks", "tasks", "maximum in one add", at_least(1), used_by=SERVERS),
    Setting("max_open_job_tasks", "tasks", "maximum in an open job", at_least(1), used_by=SERVERS),
    Setting(
        "max_active_jobs",
        "jobs",
        "maximum unfinished for one caller; 0 means no limit",
        at_least(0),
    ),
    Setting(
        "max_scheduled_jobs",
        "jobs",
        "maximum with a schedule for one caller; 0 means no limit",
        at_least(0),
        used_by=SERVERS,
    ),
    Setting("max_streams", "streams", "maximum open in one process", at_least(1), used_by=SERVERS),
    Setting("max_caller_streams", "streams", "maximum for a caller", at_least(1), used_by=SERVERS),
    Setting(
        "rate_limit",
        "requests a second",
        "that a caller may make; 0 means no limit",
        at_least(0),
        used_by=SERVERS,
    ),
    Setting(
        "rate_limit_burst",
        "requests",
        "that a caller may make at once, if there is a limit",
        at_least(1),
        used_by=SERVERS,
    ),
    Setting(
        "idempotency_claim",
        "seconds",
        "until an unanswered idempotency key lapses",
        lasting(1),
        used_by=SERVERS,
    ),
    Setting(
        "idempotency_ttl",
        "seconds",
        "how long an idempotent answer is kept",
        lasting(1),
        used_by=SERVERS,
    ),
    Setting(
        "result_url_ttl",
        "seconds",
        "how long a signed result link works, 604,800 at most, as S3 has it",
        lasting(1, MOST_LINK),
        used_by=SERVERS,
    ),
    Setting(
        "partial_rerun_window_days",
        "days",
        "within which a run can be partially rerun",
        lasting(1, MOST_DAYS),
        used_by=SERVERS,
    ),
    Setting(
        "task_shard_count",
        "shards",
        "for the rows of a large, open or heavy job, 1 to 64; 1 keeps every job in one",
        between(1, MOST_SHARDS),
        used_by=SERVERS,
    ),
    Setting(
        "shard_scheme",
        "word",
        "how rows are assigned to shards: `stripe`, `fnv32a`",
        one_of("stripe", "fnv32a"),
        used_by=SERVERS,
    ),
    Setting("max_input_rows", "tasks", "maximum in an uploaded file", at_least(1), used_by=SERVERS),
    Setting(
        "max_input_bytes",
        "bytes",
        "largest uploaded file, also unpacked",
        at_least(1),
        used_by=SERVERS,
    ),
    Setting(
        "max_validation_seconds",
        "seconds",
        "how long the check of a list may take; one that would take longer is refused",
        lasting(1),
        used_by=SERVERS,
    ),
    Setting(
        "input_upload_ttl",
        "seconds",
        "how long an upload link works, 604,800 at most, as S3 has it",
        lasting(1, MOST_LINK),
        used_by=SERVERS,
    ),
    Setting(
        "input_ttl",
        "seconds",
        "how long a file input lives; in production two days at most",
        lasting(1),
        used_by=SERVERS,
    ),
    Setting(
        "export_ttl",
        "seconds",
        "how long an export is kept; in production two days at most",
        lasting(1),
        used_by=SERVERS,
    ),
    Setting("max_export_bytes", "bytes", "maximum of the result bodies in an export", at_least(1)),
    Setting(
        "sweep_interval",
        "seconds",
        "between sweeps for leftovers",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "quiet_after",
        "seconds",
        "without progress, after which the sweeper revives a run, an export or a deletion",
        lasting(1),
        used_by=WORKERS,
    ),
    Setting(
        "outbox_interval",
        "seconds",
        "between looks for due callbacks, and for due deliveries",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "callback_heartbeat",
        "seconds",
        "between heartbeats to the state machine waiting for a run",
        lasting(1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "schedule_interval",
        "seconds",
        "between looks for schedules that are due to fire",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "schedule_catch_up",
        "seconds",
        "that the newest of the fires missed while no worker ran may be late and still run",
        lasting(0),
    ),
    Setting(
        "row_retention_days",
        "days",
        "that an ended run is kept beyond its last result; 0 keeps it",
        lasting(0, MOST_DAYS),
        used_by=WORKERS,
    ),
    Setting(
        "delivery_retention_days",
        "days",
        "that the delivery of an event is kept after its last change, unless it is pending",
        lasting(1, MOST_DAYS),
        used_by=WORKERS,
    ),
    Setting(
        "fire_retention_days",
        "days",
        "that the record of a schedule's fire is kept after its last change",
        lasting(1, MOST_DAYS),
    ),
    Setting(
        "otlp_endpoint",
        "URL",
        "of a collector of traces (OTLP over HTTP); without one nothing is traced",
        origin,
    ),
    Setting(
        "trace_ratio",
        "share",
        "of tasks, messages and reading requests that are traced, 0 to 1",
        between(0, 1),
    ),
    Setting(
        "role",
        "word",
        "what `conveyor` runs without a command: `api`, `worker`",
        one_of("", *ROLES),
        used_by=PRODUCTION,
    ),
    Setting(
        "environment",
        "name",
        "of the fleet, part of the name of each of its resources: a lower-case letter, then up to "
        "31 letters, digits or hyphens, and no part `-run`",
        name,
        used_by=FLEET,
    ),
    Setting(
        "region",
        "region",
        "of AWS: lower-case letters, digits and single hyphens between, 63 at most; `AWS_REGION` "
        "counts where it is not set",
        region,
        used_by=FLEET,
        instead="AWS_REGION",
    ),
    *(
        Setting(
            f"{word}_endpoint", "URL", f"where {service} is, if not in the region", endpoint, FLEET
        )
        for word, service in (
            ("dynamodb", "DynamoDB"),
            ("sqs", "SQS"),
            ("s3", "S3"),
            ("stepfunctions", "Step Functions"),
            ("kms", "KMS"),
        )
    ),
    Setting(
        "table", "name", "of the table; `conveyor-` and the environment if empty", used_by=FLEET
    ),
    Setting("bucket", "name", "of the S3 bucket", used_by=FLEET),
    Setting(
        "ledger",
        "word",
        "where permits are kept: `redis`, `dynamodb`; one for the whole fleet",
        one_of("redis", "dynamodb"),
        used_by=FLEET,
    ),
    Setting(
        "redis_url",
        "URL",
        "of the fleet's Redis, a password in it: `redis://`, `rediss://`, `unix://`",
        redis_url,
        used_by=FLEET,
        secret=True,
    ),
    Setting(
        "aws_attempts",
        "tries",
        "of one call to AWS, the first included, 1 to 50",
        between(1, 50),
        used_by=FLEET,
    ),
    Setting(
        "aws_threads",
        "calls",
        "at a time to one service of AWS, 1 to 512",
        between(1, 512),
        used_by=FLEET,
    ),
    Setting(
        "aws_receive_threads",
        "calls",
        "receives at a time from SQS, 1 to 512",
        between(1, 512),
        used_by=FLEET,
    ),
    Setting(
        "metrics_host",
        "address",
        "where the roles answer /metrics, /healthz and /readyz",
        used_by=PRODUCTION,
    ),
    Setting(
        "metrics_port",
        "port",
        "where the roles answer these; 0 picks a free one",
        between(0, 65_535),
        used_by=PRODUCTION,
    ),
    Setting(
        "api_keys",
        "hashes, path or word",
        "who may call: `any`, a file of key hashes, or the hashes themselves",
        used_by="conveyor api, conveyor admin",
    ),
    Setting(
        "kms_key",
        "key",
        "of KMS, which encrypts callers' keys; if empty, the root secret encrypts them",
        used_by=FLEET,
    ),
    Setting(
        "ecs_agent",
        "URL",
        "of the agent of ECS, which protects a worker's task while calls are in flight that may "
        "outlast the grace; `ECS_AGENT_URI` counts where it is not set",
        agent,
        used_by="conveyor worker",
        instead="ECS_AGENT_URI",
    ),
)
