"""What the production binding is given by the settings: names, addresses and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from conveyor.prod.aws.calls import AwsOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProdOptions:
    """Plain values, named as the settings they come from.

    `ledger`: "redis" or "dynamodb". `permit_lease` in seconds. `rate_limit` counts in Redis and
    needs one; 0: none.
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

    @property
    def services(self) -> tuple[str, ...]:
        """The services of AWS that are called."""
        return ("dynamodb", "sqs", "s3", "stepfunctions", *(["kms"] if self.kms_key else []))
