"""Every setting, in one table.

`SETTINGS` feeds parsing, the command line's help and the test that holds SPEC.md against the code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conveyor.settings.validators import (
    HOUR,
    MOST_DAYS,
    MOST_LINK,
    MOST_VISIBILITY,
    Check,
    at_least,
    between,
    endpoint,
    gateway,
    lasting,
    name,
    not_empty,
    one_of,
    origin,
    redis_url,
    region,
)

PREFIX = "CONVEYOR_"
ROLES = ("api", "worker")


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
    secret: str = field(default="", repr=False)
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
    row_retention_days: int = 30
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

    @property
    def table_name(self) -> str:
        """The name of the DynamoDB table."""
        return self.table or f"conveyor-{self.environment}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the field, its variable, what it means.

    `production`: the default of the production roles, where it is another. `secret`: may be given
    as a file as well, and is shown nowhere. `instead`: a variable of others that counts where this
    one is not set.
    """

    name: str
    help: str
    check: Check = lambda _value: None
    production: Any = None
    secret: bool = False
    instead: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str:
        """The variable that names a file which holds it, of a secret alone."""
        return f"{self.variable}_FILE"


SETTINGS: tuple[Setting, ...] = (
    Setting("host", "address to listen on", production="0.0.0.0"),
    Setting("port", "port to listen on; 0 picks a free one", between(0, 65_535)),
    Setting(
        "data_dir",
        "directory that holds the database, the result bodies and the secret",
        not_empty,
    ),
    Setting("gateway", "direct, fake, or the URL of a scraping API", gateway),
    Setting("allow_private", "let the direct gateway fetch addresses that are not public"),
    Setting(
        "public_url", "origin put into signed links, where it is not the bound address", origin
    ),
    Setting("allowed_hosts", "further host names, comma separated, that requests may name"),
    Setting(
        "secret",
        "root secret, older ones after commas; made in the data directory if empty",
        secret=True,
    ),
    Setting("log_level", "least severe level logged", one_of("debug", "info", "warning", "error")),
    Setting("log_format", "text or json", one_of("text", "json"), production="json"),
    Setting("workers", "gateway calls at a time in this process", between(1, 10_000)),
    Setting(
        "permit_policy",
        "how permits and receives are brought together",
        one_of("reserve", "reserve-strict", "local-exact", "local", "off"),
    ),
    Setting(
        "throttle_cooldown",
        "seconds that a queue rests after a refused permit, where messages come first",
        lasting(0),
    ),
    Setting(
        "bounce_visibility",
        "seconds that a message without a permit is hidden; doubles with each receive",
        lasting(0),
    ),
    Setting("bounce_visibility_cap", "most seconds that such a message is hidden", lasting(0)),
    Setting(
        "permit_lease",
        "seconds after which the permits of a silent worker fall free",
        lasting(5, HOUR),
    ),
    Setting(
        "visibility_timeout",
        "seconds that a received message and a claim stay reserved",
        lasting(1, MOST_VISIBILITY),
    ),
    Setting(
        "heartbeat", "seconds between renewals of claims, messages and permits", lasting(0.1, HOUR)
    ),
    Setting("discovery_interval", "seconds between looks for changed runs", lasting(0.1, HOUR)),
    Setting("resync_interval", "seconds between looks at every run with work", lasting(0.1)),
    Setting("evict_after", "seconds after which an empty queue is left alone", lasting(1)),
    Setting(
        "max_receives",
        "receives after which a message goes to the dead-letter queue",
        between(3, 1_000),
    ),
    Setting("queue_window", "references a run's queue holds in memory", at_least(10)),
    Setting("gateway_timeout", "seconds that one gateway call may take", lasting(0.1)),
    Setting(
        "shutdown_grace",
        "seconds that running calls get to end at shutdown",
        lasting(0),
        production=25.0,
    ),
    Setting("retry_base", "seconds before the first retry; doubles from there", lasting(0)),
    Setting("retry_cap", "most seconds of backoff between two attempts", lasting(0)),
    Setting("retry_after_cap", "most seconds that a Retry-After header is believed", lasting(0)),
    Setting("rate_limit_deadline", "seconds after which a rate-limited task fails", lasting(0)),
    Setting("max_interruptions", "lapsed claims after which a task fails", at_least(1)),
    Setting("max_result_bytes", "largest decoded result body", at_least(1)),
    Setting("max_request_bytes", "largest request body", at_least(1_024)),
    Setting("max_inline_tasks", "most tasks in one submit", at_least(1)),
    Setting("async_threshold", "number of inline tasks from which a submit is large", at_least(1)),
    Setting("max_add_tasks", "most tasks in one add", at_least(1)),
    Setting("max_open_job_tasks", "most tasks in an open job", at_least(1)),
    Setting("max_active_jobs", "most unfinished jobs a caller; 0 means no limit", at_least(0)),
    Setting("rate_limit", "requests a second a caller; 0 means no limit", at_least(0)),
    Setting(
        "rate_limit_burst", "requests that a caller may make at once, where limited", at_least(1)
    ),
    Setting("idempotency_claim", "seconds until an unanswered idempotency key lapses", lasting(1)),
    Setting("idempotency_ttl", "seconds that an idempotent answer is kept", lasting(1)),
    Setting("result_url_ttl", "seconds that a signed result link works", lasting(1, MOST_LINK)),
    Setting(
        "partial_rerun_window_days",
        "days within which a run can be partially rerun",
        lasting(1, MOST_DAYS),
    ),
    Setting(
        "task_shard_count",
        "partitions of the rows of large, open and heavy jobs; 1 keeps every job in one",
        between(1, 64),
    ),
    Setting("shard_scheme", "how rows go into partitions", one_of("stripe", "fnv32a")),
    Setting("max_input_rows", "most tasks in an uploaded file", at_least(1)),
    Setting("max_input_bytes", "most bytes of an uploaded file, also unpacked", at_least(1)),
    Setting(
        "max_validation_seconds",
        "a list of tasks that would take longer to check is refused",
        lasting(1),
    ),
    Setting("input_upload_ttl", "seconds that an upload link works", lasting(1, MOST_LINK)),
    Setting("input_ttl", "seconds that a slot for a file lives", lasting(1)),
    Setting("export_ttl", "seconds that an export is kept", lasting(1)),
    Setting("max_export_bytes", "most bytes of result bodies in an export", at_least(1)),
    Setting("sweep_interval", "seconds between looks for what was left behind", lasting(0.1, HOUR)),
    Setting(
        "quiet_after",
        "seconds without progress after which a run is looked after",
        lasting(1),
    ),
    Setting(
        "outbox_interval", "seconds between looks for callbacks that are due", lasting(0.1, HOUR)
    ),
    Setting(
        "callback_heartbeat",
        "seconds between signs of life to whoever waits for a run",
        lasting(1, HOUR),
    ),
    Setting(
        "row_retention_days",
        "days that an ended run is kept beyond its last result; 0 keeps it",
        lasting(0, MOST_DAYS),
    ),
    Setting("role", "what conveyor is without a command: api or worker", one_of("", *ROLES)),
    Setting("environment", "name of the fleet, in the name of each of its resources", name),
    Setting("region", "region of AWS", region, instead="AWS_REGION"),
    Setting("dynamodb_endpoint", "where DynamoDB is, if not in the region", endpoint),
    Setting("sqs_endpoint", "where SQS is, if not in the region", endpoint),
    Setting("s3_endpoint", "where S3 is, if not in the region", endpoint),
    Setting("stepfunctions_endpoint", "where Step Functions is, if not in the region", endpoint),
    Setting("kms_endpoint", "where KMS is, if not in the region", endpoint),
    Setting("table", "name of the DynamoDB table; conveyor-ENVIRONMENT if empty"),
    Setting("bucket", "name of the S3 bucket"),
    Setting("ledger", "where the fleet's permits are kept", one_of("redis", "dynamodb")),
    Setting("redis_url", "URL of the fleet's Redis, a password in it", redis_url, secret=True),
    Setting("aws_attempts", "tries of a call to AWS, the first included", between(1, 50)),
    Setting("aws_threads", "calls at a time to one service of AWS", between(1, 512)),
    Setting("aws_receive_threads", "receives at a time from SQS", between(1, 512)),
    Setting("metrics_host", "address that the roles answer /metrics and /readyz on"),
    Setting("metrics_port", "port of these; 0 picks a free one", between(0, 65_535)),
    Setting("api_keys", "who may call: any, a file of key hashes, or the hashes themselves"),
    Setting("kms_key", "KMS key under which callers' keys are sealed; empty: the secret alone"),
)
