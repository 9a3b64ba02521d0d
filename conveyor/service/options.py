"""What a service needs to be told: limits, lifetimes, its own address."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Plain values, named as the settings they come from. Durations are seconds.

    `public_origin` is scheme, host and port (and a path prefix, if any) put into signed links, with
    no slash at the end. `older_secrets` are root secrets in use before the binding's own, newest
    first: what they sealed and signed is still honoured, and the last of all keeps naming callers.
    """

    public_origin: str
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
    older_secrets: tuple[bytes, ...] = field(default=(), repr=False)
