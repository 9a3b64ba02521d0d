"""The table of all settings. `SETTINGS` feeds parsing and docs/reference/settings.md.

The rows of a topic are in its own module; their order is that of the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conveyor.settings.fleet import FLEET_SETTINGS
from conveyor.settings.limits import LIMITS
from conveyor.settings.operation import OPERATION
from conveyor.settings.row import Setting
from conveyor.settings.serving import SERVING
from conveyor.settings.working import WORKING


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
    run_workers: int = 8
    caller_max_inflight: int = 0
    host_limit: int = 0
    host_rate: float = 0.0
    hosts: str = ""
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
    caller_daily_tasks: int = 0
    max_streams: int = 1_000
    max_caller_streams: int = 20
    rate_limit: float = 0.0
    rate_limit_burst: int = 20
    idempotency_claim: float = 60.0
    idempotency_ttl: float = 86_400.0
    result_url_ttl: float = 7_200.0
    partial_rerun_window_days: int = 10
    task_shard_count: int = 1
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
    task_log_ratio: float = 1.0
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
    pack_bodies: bool = False
    ledger: str = "redis"
    redis_url: str = field(default="", repr=False)
    aws_attempts: int = 8
    aws_threads: int = 16
    aws_receive_threads: int = 32
    aws_carrier: str = "http"
    metrics_host: str = "0.0.0.0"
    metrics_port: int = 9001
    api_keys: str = ""
    kms_key: str = ""
    ecs_agent: str = ""

    @property
    def table_name(self) -> str:
        """Return the name of the DynamoDB table."""
        return self.table or f"conveyor-{self.environment}"


SETTINGS: tuple[Setting, ...] = (
    *SERVING,
    *WORKING,
    *LIMITS,
    *OPERATION,
    *FLEET_SETTINGS,
)
