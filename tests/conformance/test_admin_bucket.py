"""The bucket of an environment: emptied and removed, and its use tried out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from conveyor.clock import SystemClock
from conveyor.prod.admin.bucket import BucketResource
from conveyor.prod.admin.finding import MADE
from conveyor.prod.admin.permissions import blobs_problem
from conveyor.prod.aws.boto import BotoAws, open_aws
from conveyor.prod.aws.options import AwsOptions
from tests.conformance.emulators import REGION, address

CLOCK = SystemClock()


@pytest.fixture
async def aws() -> AsyncIterator[BotoAws]:
    opened = await open_aws(AwsOptions(s3_endpoint=address("CONVEYOR_TEST_S3")), CLOCK, "s3")
    yield opened
    await opened.aclose()


@pytest.fixture
def name() -> str:
    return f"conveyor-admin-{secrets.token_hex(6)}"


async def test_a_bucket_is_removed_with_all_that_is_in_it(aws: BotoAws, name: str) -> None:
    bucket = BucketResource(aws, name, region=REGION)
    assert await bucket.ensure() == MADE
    assert await bucket.problem() is None
    for number in range(3):
        await aws.call(
            "s3", "put_object", {"Bucket": name, "Key": f"results/30/{number}", "Body": b"x"}
        )
    await aws.call("s3", "create_multipart_upload", {"Bucket": name, "Key": "exports/begun"})

    assert await bucket.remove() is True
    assert "does not exist" in str(await bucket.problem())
    assert await bucket.remove() is False


async def test_every_call_of_a_role_is_tried_and_nothing_is_left(aws: BotoAws, name: str) -> None:
    bucket = BucketResource(aws, name, region=REGION)
    await bucket.ensure()
    assert await blobs_problem(aws, name, CLOCK) is None
    left = await aws.call("s3", "list_objects_v2", {"Bucket": name})
    uploads = await aws.call("s3", "list_multipart_uploads", {"Bucket": name})

    assert "Contents" not in left
    assert not uploads.get("Uploads")
    await bucket.remove()
