"""The options of the production binding: names, addresses and bounds, taken from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from conveyor.prod.aws.calls import AwsOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProdOptions:
    """Plain values, named like their settings.

    `ledger`: "redis" or "dynamodb". `permit_lease` is in seconds. `rate_limit` needs Redis, which
    counts the requests; 0 for no limit. `has_operators`: somebody is shown the dead letters.
    `host_limits`: the server has some for hosts.
    """

    aws: AwsOptions
    environment: str
    table: str
    bucket: str
    ledger: str
    redis_url: str = field(default="", repr=False)
    root_secret: bytes = field(repr=False)
    older_secrets: tuple[bytes, ...] = field(default=(), repr=False)
    kms_key: str = ""
    max_receives: int = 1_000
    permit_lease: float = 30.0
    rate_limit: float = 0.0
    rate_limit_burst: int = 20
    fire_retention_days: int = 30
    row_retention_days: int = 30
    caller_daily_tasks: int = 0
    has_operators: bool = False
    host_limits: bool = False

    @property
    def services(self) -> tuple[str, ...]:
        """Return the services of AWS that this fleet uses."""
        return ("dynamodb", "sqs", "s3", "stepfunctions", *(["kms"] if self.kms_key else []))
