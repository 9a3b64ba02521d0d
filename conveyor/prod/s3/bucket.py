"""The bucket: creating it, its lifecycle rules, and its owner.

The sweeper removes bodies when they expire. The lifecycle rules remove those that it missed, so
each rule leaves a margin: S3 counts whole days, from midnight.

An empty object in the bucket carries the name of the environment that owns it. Otherwise another
environment that was given the same bucket by mistake would keep its bodies there, and its removal
would take all bodies along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.records.blob_keys import LIFECYCLE_DAYS, PASSING_DAYS, TEMPLATES

MARGIN_DAYS = 2
"""Days by which a body may outlive its lifecycle class."""
STAGED_DAYS = 7
UPLOAD_DAYS = 1
"""Days after which S3 removes the parts of an unfinished upload."""
NONCURRENT_DAYS = 1
"""Days for which a versioned bucket keeps what was deleted or replaced."""

Rule = dict[str, Any]


def lifecycle_rules() -> list[Rule]:
    """Return Conveyor's rules in the form of PutBucketLifecycleConfiguration, with `ID`s."""
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
    rules.append(
        {
            "ID": "noncurrent-versions",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "Expiration": {"ExpiredObjectDeleteMarker": True},
            "NoncurrentVersionExpiration": {"NoncurrentDays": NONCURRENT_DAYS},
        }
    )
    return rules


def with_own_rules(rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Add Conveyor's rules to those of others."""
    ours = {rule["ID"] for rule in lifecycle_rules()}
    return [
        *(dict(rule) for rule in rules if rule.get("ID") not in ours),
        *lifecycle_rules(),
    ]


def differences(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare a bucket's rules with Conveyor's, and describe those missing or different. Ignore
    rules of others."""
    found = {rule.get("ID"): _in_words(rule) for rule in rules}
    texts = []
    for rule in lifecycle_rules():
        name, wanted = rule["ID"], _in_words(rule)
        if name not in found:
            texts.append(f"lacks the lifecycle rule {name}")
        elif found[name] != wanted:
            texts.append(f"its lifecycle rule {name} is {found[name]}, not {wanted}")
    return texts


def early_removals(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the rules of others that remove objects of Conveyor sooner than its own would: a
    template, for one, is read for as long as its schedule fires."""
    ours = lifecycle_rules()
    kept: dict[str, float] = {TEMPLATES: inf, OWNER_KEY: inf}
    kept |= {
        rule["Filter"]["Prefix"]: rule["Expiration"]["Days"]
        for rule in ours
        if "Days" in rule.get("Expiration", {})
    }
    names = {rule["ID"] for rule in ours}
    texts = []
    for rule in rules:
        days = _removes_after(rule)
        if rule.get("ID") in names or days is None:
            continue
        early = [key for key, least in kept.items() if days < least and _covers(rule, key)]
        if early:
            name = rule.get("ID", "without a name")
            texts.append(f"the lifecycle rule {name} removes {early[0]} too early: change it")
    return texts


def _removes_after(rule: Mapping[str, Any]) -> float | None:
    """Return after how many days a rule removes objects, 0 for a date; None if it removes none."""
    expiration = rule.get("Expiration", {})
    if rule.get("Status") != "Enabled" or not {"Days", "Date"} & expiration.keys():
        return None
    return float(expiration.get("Days", 0))


def _covers(rule: Mapping[str, Any], key: str) -> bool:
    """Return whether a rule takes an object, or any below a prefix. No object of Conveyor has
    tags."""
    within = rule.get("Filter", {})
    within = within.get("And", within)
    if "Tag" in within or within.get("Tags"):
        return False
    prefix: str = within.get("Prefix", rule.get("Prefix", ""))
    below = key.endswith("/") and prefix.startswith(key)
    return below or key.startswith(prefix)


def _in_words(rule: Mapping[str, Any]) -> str:
    """Describe the effect of a rule."""
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
    noncurrent = rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays")
    if noncurrent is not None:
        parts.append(f"noncurrent versions after {noncurrent} days")
    if rule.get("Expiration", {}).get("ExpiredObjectDeleteMarker"):
        parts.append("markers of deleted objects")
    return " ".join(parts)


NO_BUCKET = frozenset({"404", "NoSuchBucket", "NotFound"})
FIRST_REGION = "us-east-1"
"""The only region whose name CreateBucket refuses."""


async def ensure_bucket(aws: Aws, bucket: str, *, region: str) -> bool:
    """Make the bucket and its lifecycle rules if they are missing or different.

    Keeps the rules of others. Returns whether it changed anything. Raises AwsRefused;
    ConveyorError(conflict) if the name belongs to another account.
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
        {"Bucket": bucket, "LifecycleConfiguration": {"Rules": with_own_rules(rules)}},
    )
    return True


async def bucket_problem(aws: Aws, bucket: str) -> str | None:
    """Describe in one line what is wrong with the bucket; None if nothing is. Raises AwsRefused."""
    if not await bucket_exists(aws, bucket):
        return "does not exist (conveyor admin init makes it)"
    rules = await _rules(aws, bucket)
    early = early_removals(rules)
    texts = differences(rules)
    if len(texts) == len(lifecycle_rules()):
        texts = ["lacks all of its lifecycle rules"]
    if texts:
        texts[-1] += " (conveyor admin init sees to it)"
    return "; ".join(early + texts) or None


async def bucket_exists(aws: Aws, bucket: str) -> bool:
    """Return True if the bucket exists. Raises AwsRefused, also if it belongs to another
    account."""
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
"""The key of the owner's object, and of the environment's name in its metadata."""
_NO_OBJECT = NO_BUCKET | {"NoSuchKey"}


async def owner_of(aws: Aws, bucket: str) -> str | None:
    """Return the environment that owns the bucket; None if nobody does yet. Raises AwsRefused."""
    try:
        answer = await aws.call("s3", "head_object", {"Bucket": bucket, "Key": OWNER_KEY})
    except AwsRefused as refused:
        if refused.word in _NO_OBJECT:
            return None
        raise
    owner: str | None = answer.get("Metadata", {}).get(OWNER_KEY)
    return owner


async def own(aws: Aws, bucket: str, environment: str) -> None:
    """Claim an existing bucket for an environment.

    Raises ConveyorError(conflict) if another environment owns it; AwsRefused.
    """
    owner = await owner_of(aws, bucket)
    if owner is None:
        await take(aws, bucket, environment)
    elif owner != environment:
        raise ConveyorError(ErrorCode.CONFLICT, f"bucket {bucket} {is_of(owner)}")


async def take(aws: Aws, bucket: str, environment: str) -> None:
    """Make an environment the owner of a bucket, whoever owned it before. Raises AwsRefused."""
    about = {"Bucket": bucket, "Key": OWNER_KEY, "Metadata": {OWNER_KEY: environment}}
    await aws.call("s3", "put_object", {**about, "Body": b""})


def is_of(owner: str) -> str:
    """Return the second half of the sentence about a bucket of another environment."""
    return (
        f"belongs to environment {owner} (if it is a copy, conveyor admin rebind makes it this"
        " environment's)"
    )
