"""Whose a bucket is: an empty object in it carries the name of the environment.

Another environment that was given the same bucket by mistake would keep its bodies there, and take
all of them along when it is removed.
"""

from __future__ import annotations

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.s3.bucket import ABSENT

OWNER_KEY = "environment"
"""The object; its metadata has the name, under this key too."""
_NO_OBJECT = ABSENT | {"NoSuchKey"}


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
