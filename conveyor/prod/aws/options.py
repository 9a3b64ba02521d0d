"""Where AWS is, and how hard it is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOptions:
    """One region, and endpoints that are not the region's own ("" means it is).

    `attempts`: tries of one call, the first included. `threads`: calls at a time of one service.
    Times in seconds.
    """

    region: str = "us-east-1"
    dynamodb_endpoint: str = ""
    sqs_endpoint: str = ""
    s3_endpoint: str = ""
    stepfunctions_endpoint: str = ""
    kms_endpoint: str = ""
    attempts: int = 8
    threads: int = 16
    receive_threads: int = 32
    connect_timeout: float = 3.0
    read_timeout: float = 20.0
    retry_base: float = 0.05
    retry_cap: float = 5.0

    def endpoint(self, service: str) -> str | None:
        """The endpoint of a service, None for the region's own."""
        return {
            "dynamodb": self.dynamodb_endpoint,
            "sqs": self.sqs_endpoint,
            "s3": self.s3_endpoint,
            "stepfunctions": self.stepfunctions_endpoint,
            "kms": self.kms_endpoint,
        }.get(service) or None
