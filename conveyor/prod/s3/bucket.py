"""The bucket: made where it is missing, given its lifecycle rules, held against them.

How long S3 keeps what lies below each prefix: the last broom, behind the sweeper's.

The sweeper removes bodies when their time has come. These rules remove what it missed, so each
leaves a margin: S3 counts whole days, and begins them at midnight.

Whose a bucket is: an empty object in it carries the name of the environment.

Another environment that was given the same bucket by mistake would keep its bodies there, and take
all of them along when it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.records.blob_keys import LIFECYCLE_DAYS, PASSING_DAYS

MARGIN_DAYS = 2
"""Days that a body may outlive its class."""
STAGED_DAYS = 7
UPLOAD_DAYS = 1
"""Days after which the parts of an upload that was never finished go."""

Rule = dict[str, Any]


def lifecycle_rules() -> list[Rule]:
    """The rules, in the shape of PutBucketLifecycleConfiguration; each by its `ID`."""
    expiring = {
        **{f"results-{days}": (f"results/{days}/", days + MARGIN_DAYS) for days in LIFECYCLE_DAYS},
        "staged": ("staged/", STAGED_DAYS),
        "inputs": ("inputs/", PASSING_DAYS),
        "exports": ("exports/", PASSING_DAYS),
    }
    rules: list[Rule] = [
        {
            "ID": name,
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "Expiration": {"Days": days},
        }
        for name, (prefix, days) in expiring.items()
    ]
    rules.append(
        {
            "ID": "unfinished-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UPLOAD_DAYS},
        }
    )
    return rules


def with_ours(rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Ours, and those of the rules that are somebody else's."""
    ours = {rule["ID"] for rule in lifecycle_rules()}
    return [
        *(dict(rule) for rule in rules if rule.get("ID") not in ours),
        *lifecycle_rules(),
    ]


def differences(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a bucket's rules lack of ours, or say otherwise; somebody else's are not looked at."""
    found = {rule.get("ID"): _stated(rule) for rule in rules}
    told = []
    for rule in lifecycle_rules():
        name, wanted = rule["ID"], _stated(rule)
        if name not in found:
            told.append(f"lacks the lifecycle rule {name}")
        elif found[name] != wanted:
            told.append(f"its lifecycle rule {name} is {found[name]}, not {wanted}")
    return told


def _stated(rule: Mapping[str, Any]) -> str:
    """A rule in words: what of it counts."""
    prefix = rule.get("Filter", {}).get("Prefix", rule.get("Prefix", ""))
    days = rule.get("Expiration", {}).get("Days")
    unfinished = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
    parts = [
        "on" if rule.get("Status") == "Enabled" else "off",
        f"below {prefix}" if prefix else "everywhere",
    ]
    if days is not None:
        parts.append(f"after {days} days")
    if unfinished is not None:
        parts.append(f"uploads after {unfinished} days")
    return " ".join(parts)


NO_BUCKET = frozenset({"404", "NoSuchBucket", "NotFound"})
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
        if refused.word in NO_BUCKET:
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


OWNER_KEY = "environment"
"""The object; its metadata has the name, under this key too."""
_NO_OBJECT = NO_BUCKET | {"NoSuchKey"}


async def owner_of(aws: Aws, bucket: str) -> str | None:
    """The environment whose bucket it is; None: nobody's yet. Raises AwsRefused."""
    try:
        answer = await aws.call("s3", "head_object", {"Bucket": bucket, "Key": OWNER_KEY})
    except AwsRefused as refused:
        if refused.word in _NO_OBJECT:
            return None
        raise
    owner: str | None = answer.get("Metadata", {}).get(OWNER_KEY)
    return owner


async def own(aws: Aws, bucket: str, environment: str) -> None:
    """Let a bucket that is there be this environment's. Raises ConveyorError(conflict) where it is
    another's, AwsRefused."""
    owner = await owner_of(aws, bucket)
    if owner is None:
        await take(aws, bucket, environment)
    elif owner != environment:
        raise ConveyorError(ErrorCode.CONFLICT, f"bucket {bucket} {is_of(owner)}")


async def take(aws: Aws, bucket: str, environment: str) -> None:
    """Let a bucket be this environment's, whosever it was. Raises AwsRefused."""
    about = {"Bucket": bucket, "Key": OWNER_KEY, "Metadata": {OWNER_KEY: environment}}
    await aws.call("s3", "put_object", {**about, "Body": b""})


def is_of(owner: str) -> str:
    """What is said of a bucket of another environment."""
    return f"is that of environment {owner} (of a copy, conveyor admin rebind makes one's own)"
