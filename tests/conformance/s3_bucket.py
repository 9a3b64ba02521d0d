"""A bucket on a real S3 server, one for all tests of a process; each test finds it empty."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import anyio
from botocore.credentials import Credentials

from conveyor.clock import SystemClock
from conveyor.prod.aws.boto import make_clients
from conveyor.prod.aws.calls import Aws, AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import over_clients
from tests.conformance.emulators import REGION, address, aws_options

_Clients = tuple[dict[str, Any], Credentials | None]


@asynccontextmanager
async def empty_bucket() -> AsyncIterator[tuple[AwsClient, str]]:
    """Return the transport, and the name of an empty bucket.

    SeaweedFS keeps the directories of removed keys for a while, and completes no upload in parts
    under the name of one: a test's keys must not be the directories of another's.
    """
    clients, options, bucket = await anyio.to_thread.run_sync(_bucket)
    aws = _over(clients, options)
    await remove_everything(aws, bucket)
    yield aws, bucket
    await aws.aclose()


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


def _over(clients: _Clients, options: AwsOptions) -> AwsClient:
    """Belongs to the running loop, unlike the clients, which take a while to make."""
    return over_clients(clients[0], options, SystemClock(), credentials=clients[1])


@cache
def _bucket() -> tuple[_Clients, AwsOptions, str]:
    """Made once; the bucket goes at the end."""
    options = aws_options(s3_endpoint=address("CONVEYOR_TEST_S3"), region=REGION)
    clients = make_clients(options, ("s3",))
    bucket = f"conveyor-test-{secrets.token_hex(6)}"
    clients[0]["s3"].create_bucket(Bucket=bucket)

    async def remove() -> None:
        aws = _over(clients, options)
        await remove_everything(aws, bucket)
        await aws.call("s3", "delete_bucket", {"Bucket": bucket})
        await aws.aclose()

    atexit.register(partial(anyio.run, remove))
    return clients, options, bucket
