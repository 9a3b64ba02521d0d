"""What the bindings' wirings have in common: readiness, a gateway, options of the service."""

from __future__ import annotations

from conveyor.domain.sealing import secret_bytes
from conveyor.gateway import open_gateway
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeFailed
from conveyor.service.options import ServiceOptions
from conveyor.settings import InvalidSetting, Settings


class Readiness:
    """Whether `/readyz` says yes: from the start of listening to the beginning of the end."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self) -> bool:
        return self.yes


def gateway_of(settings: Settings, clock: Clock) -> Gateway:
    """The gateway that the settings name. Raises InvalidSetting for a URL that it cannot call."""
    try:
        return open_gateway(
            settings.gateway,
            clock,
            allow_private=settings.allow_private,
            connections=settings.workers,
            retry_after_cap=settings.retry_after_cap,
        )
    except ScrapeFailed:
        raise InvalidSetting("CONVEYOR_GATEWAY", "must be a URL that can be called") from None


def allowed_hosts(settings: Settings) -> list[str]:
    """The names that requests may have in Host, beside loopback and the public origin."""
    return [settings.host, *filter(None, settings.allowed_hosts.split(","))]


def root_secrets(settings: Settings) -> tuple[str, tuple[bytes, ...]]:
    """The root secret as it was given, and the older ones."""
    first, *older = settings.secret.split(",")
    return first, tuple(map(secret_bytes, older))


def service_options(
    settings: Settings, origin: str, older_secrets: tuple[bytes, ...]
) -> ServiceOptions:
    """What the service is told; `origin` is where it is found, where the settings say nothing."""
    return ServiceOptions(
        public_origin=settings.public_url.rstrip("/") or origin,
        max_inline_tasks=settings.max_inline_tasks,
        async_threshold=settings.async_threshold,
        max_add_tasks=settings.max_add_tasks,
        max_open_job_tasks=settings.max_open_job_tasks,
        max_active_jobs=settings.max_active_jobs,
        idempotency_claim=settings.idempotency_claim,
        idempotency_ttl=settings.idempotency_ttl,
        result_url_ttl=settings.result_url_ttl,
        partial_rerun_window_days=settings.partial_rerun_window_days,
        task_shard_count=settings.task_shard_count,
        shard_scheme=settings.shard_scheme,
        max_input_rows=settings.max_input_rows,
        max_input_bytes=settings.max_input_bytes,
        max_validation_seconds=settings.max_validation_seconds,
        input_upload_ttl=settings.input_upload_ttl,
        input_ttl=settings.input_ttl,
        export_ttl=settings.export_ttl,
        max_export_bytes=settings.max_export_bytes,
        older_secrets=older_secrets,
    )
