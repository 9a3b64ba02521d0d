"""A bucket on a real S3 server, one for all tests of a process; each test finds it empty."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial

import anyio

from conveyor.clock import SystemClock
from conveyor.prod.aws.calls import Aws, AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from tests.conformance.emulators import REGION, address


@asynccontextmanager
async def empty_bucket() -> AsyncIterator[tuple[AwsClient, str]]:
    """Return the transport, and the name of an empty bucket.

    SeaweedFS keeps the directories of removed keys for a while, and completes no upload in parts
    under the name of one: a test's keys must not be the directories of another's.
    """
    aws, bucket = await anyio.to_thread.run_sync(_bucket)
    await remove_everything(aws, bucket)
    yield aws, bucket


async def remove_everything(aws: Aws, bucket: str) -> None:
    """Leave a bucket empty, of unfinished uploads too."""
    named = {"Bucket": bucket}
    while found := (await aws.call("s3", "list_objects_v2", named)).get("Contents"):
        objects = {"Objects": [{"Key": item["Key"]} for item in found], "Quiet": True}
        await aws.call("s3", "delete_objects", {**named, "Delete": objects})
    for upload in (await aws.call("s3", "list_multipart_uploads", named)).get("Uploads", []):
        upload_id = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
        await aws.call("s3", "abort_multipart_upload", {**named, **upload_id})


async def unfinished_uploads(aws: Aws, bucket: str) -> list[str]:
    """The keys of uploads in parts that were neither completed nor aborted."""
    answer = await aws.call("s3", "list_multipart_uploads", {"Bucket": bucket})
    return [upload["Key"] for upload in answer.get("Uploads", [])]


async def open_s3() -> AwsClient:
    """Open the transport to the server."""
    options = AwsOptions(s3_endpoint=address("CONVEYOR_TEST_S3"), region=REGION)
    return await open_aws(options, SystemClock(), "s3")


@cache
def _bucket() -> tuple[AwsClient, str]:
    """Made in a loop of its own, and outliving it: making a client takes a while."""
    aws, bucket = anyio.run(_make_bucket)

    async def remove() -> None:
        await remove_everything(aws, bucket)
        await aws.call("s3", "delete_bucket", {"Bucket": bucket})
        await aws.aclose()

    atexit.register(partial(anyio.run, remove))
    return aws, bucket


async def _make_bucket() -> tuple[AwsClient, str]:
    aws, bucket = await open_s3(), f"conveyor-test-{secrets.token_hex(6)}"
    await aws.call("s3", "create_bucket", {"Bucket": bucket})
    return aws, bucket
