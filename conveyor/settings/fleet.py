"""Settings of the production roles: their fleet, its services of AWS and its Redis."""

from __future__ import annotations

from conveyor.settings.row import FLEET, PRODUCTION, ROLES, Setting
from conveyor.settings.validators import agent, between, endpoint, name, one_of, redis_url, region

FLEET_SETTINGS: tuple[Setting, ...] = (
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
        "pack_bodies",
        "switch",
        "write the bodies of a run that end within 0.3 s into one object",
        used_by="conveyor worker",
    ),
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
        "aws_carrier",
        "word",
        "of the frequent calls to AWS: `http`, Conveyor's own client, or `boto`, boto3 in threads",
        one_of("http", "boto"),
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
        "of the agent of ECS, which protects a worker's task while calls that may outlast the "
        "grace are in flight or not settled; `ECS_AGENT_URI` counts where it is not set",
        agent,
        used_by="conveyor worker",
        instead="ECS_AGENT_URI",
    ),
)
