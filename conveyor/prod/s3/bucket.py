"""The bucket: made where it is missing, given its lifecycle rules, held against them."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.s3.lifecycle import Rule, differences, lifecycle_rules, with_ours

ABSENT = frozenset({"404", "NoSuchBucket", "NotFound"})
FIRST_REGION = "us-east-1"
"""The one region whose name CreateBucket does not take."""


async def ensure_bucket(aws: Aws, bucket: str, *, region: str) -> bool:
    """Make the bucket and its lifecycle rules where they are missing or others; whether any were.

    Rules that are not ours stay. Raises AwsRefused; ConveyorError(conflict) where the name belongs
    to another account.
    """
    made = False
    if not await bucket_exists(aws, bucket):
        parameters: dict[str, Any] = {"Bucket": bucket}
        if region != FIRST_REGION:
            parameters["CreateBucketConfiguration"] = {"LocationConstraint": region}
        try:
            await aws.call("s3", "create_bucket", parameters)
            made = True
        except AwsRefused as refused:
            if refused.word == "BucketAlreadyExists":
                raise ConveyorError(
                    ErrorCode.CONFLICT, f"the bucket {bucket} belongs to another account"
                ) from None
            if refused.word != "BucketAlreadyOwnedByYou":
                raise
    rules = await _rules(aws, bucket)
    if not differences(rules):
        return made
    await aws.call(
        "s3",
        "put_bucket_lifecycle_configuration",
        {"Bucket": bucket, "LifecycleConfiguration": {"Rules": with_ours(rules)}},
    )
    return True


async def bucket_problem(aws: Aws, bucket: str) -> str | None:
    """What is wrong with the bucket, in one line; None: nothing. Raises AwsRefused."""
    if not await bucket_exists(aws, bucket):
        return "does not exist (conveyor admin init makes it)"
    told = differences(await _rules(aws, bucket))
    if not told:
        return None
    if len(told) == len(lifecycle_rules()):
        told = ["has none of its lifecycle rules"]
    return f"{'; '.join(told)} (conveyor admin init sees to it)"


async def bucket_exists(aws: Aws, bucket: str) -> bool:
    """Whether there is such a bucket that is ours. Raises AwsRefused, as where it is not ours."""
    try:
        await aws.call("s3", "head_bucket", {"Bucket": bucket})
    except AwsRefused as refused:
        if refused.word in ABSENT:
            return False
        raise
    return True


async def _rules(aws: Aws, bucket: str) -> list[Rule]:
    try:
        answer = await aws.call("s3", "get_bucket_lifecycle_configuration", {"Bucket": bucket})
    except AwsRefused as refused:
        if refused.word == "NoSuchLifecycleConfiguration":
            return []
        raise
    rules: list[Rule] = answer.get("Rules", [])
    return rules
