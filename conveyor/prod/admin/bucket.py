"""The bucket, with its lifecycle rules; and how it is emptied to be removed."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.admin.finding import MADE
from conveyor.prod.aws.calls import Aws
from conveyor.prod.s3.bucket import bucket_exists, bucket_problem, ensure_bucket
from conveyor.prod.s3.ownership import is_of, own, owner_of, take


class BucketResource:
    """One bucket by name, and the environment whose it is to be."""

    def __init__(self, aws: Aws, name: str, *, region: str, environment: str) -> None:
        self.what = f"bucket {name}"
        self._aws = aws
        self._name = name
        self._region = region
        self._environment = environment

    async def ensure(self) -> str:
        """Make it, or its lifecycle rules, where they are missing: MADE, or what was changed of a
        bucket that was there; empty: nothing. Raises ConveyorError(conflict) where it is another
        environment's."""
        was_there = await bucket_exists(self._aws, self._name)
        if was_there:
            await own(self._aws, self._name, self._environment)
        changed = await ensure_bucket(self._aws, self._name, region=self._region)
        if not was_there:
            await own(self._aws, self._name, self._environment)
        if not changed:
            return ""
        return "got its lifecycle rules" if was_there else MADE

    async def problem(self) -> str | None:
        """What is wrong with it."""
        problem = await bucket_problem(self._aws, self._name)
        if problem is not None:
            return problem
        owner = await owner_of(self._aws, self._name)
        return None if owner in (None, self._environment) else is_of(owner)

    async def take(self) -> None:
        """Let it be this environment's, whosever it was."""
        if await bucket_exists(self._aws, self._name):
            await take(self._aws, self._name, self._environment)

    async def remove(self) -> bool:
        """Empty and remove it; whether it was there. Raises ConveyorError(conflict) where it is
        another environment's."""
        if not await bucket_exists(self._aws, self._name):
            return False
        owner = await owner_of(self._aws, self._name)
        if owner not in (None, self._environment):
            raise ConveyorError(ErrorCode.CONFLICT, f"{self.what} is that of environment {owner}")
        await self._empty()
        await self._end_uploads()
        await self._call("delete_bucket")
        return True

    async def _empty(self) -> None:
        while found := (await self._call("list_objects_v2")).get("Contents", []):
            keys = [{"Key": entry["Key"]} for entry in found]
            await self._call("delete_objects", Delete={"Objects": keys, "Quiet": True})

    async def _end_uploads(self) -> None:
        for upload in (await self._call("list_multipart_uploads")).get("Uploads", []):
            await self._call(
                "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
            )

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("s3", operation, {"Bucket": self._name, **parameters})
