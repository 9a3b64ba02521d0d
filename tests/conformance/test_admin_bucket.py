"""The bucket of an environment: emptied and removed, and its use tried out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.admin.checks import MADE, blobs_problem
from conveyor.prod.admin.resources import BucketResource
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.s3.bucket import OWNER_KEY, ensure_bucket, own
from conveyor.testing.aws_faults import FaultyAws
from tests.conformance.emulators import REGION, address, aws_options

pytestmark = pytest.mark.extended

CLOCK = SystemClock()


@pytest.fixture
async def aws() -> AsyncIterator[AwsClient]:
    opened = await open_aws(aws_options(s3_endpoint=address("CONVEYOR_TEST_S3")), CLOCK, "s3")
    yield opened
    await opened.aclose()


@pytest.fixture
def name() -> str:
    return f"conveyor-admin-{secrets.token_hex(6)}"


async def test_a_bucket_is_removed_with_all_that_is_in_it(aws: AwsClient, name: str) -> None:
    bucket = BucketResource(aws, name, region=REGION, environment="one")
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


async def test_a_versioned_bucket_is_removed_with_every_version(aws: AwsClient, name: str) -> None:
    bucket = BucketResource(aws, name, region=REGION, environment="one")
    await bucket.ensure()
    await aws.call(
        "s3",
        "put_bucket_versioning",
        {"Bucket": name, "VersioningConfiguration": {"Status": "Enabled"}},
    )
    kept = {"Bucket": name, "Key": "results/30/kept"}
    for body in (b"first", b"second"):
        await aws.call("s3", "put_object", {**kept, "Body": body})
    gone = {"Bucket": name, "Key": "results/30/gone"}
    await aws.call("s3", "put_object", {**gone, "Body": b"x"})
    await aws.call("s3", "delete_object", gone)
    versions = await aws.call("s3", "list_object_versions", {"Bucket": name})
    assert len(versions["Versions"]) == 4
    assert len(versions["DeleteMarkers"]) == 1

    assert await bucket.remove() is True
    assert "does not exist" in str(await bucket.problem())


@pytest.mark.parametrize(
    "operation",
    ["create_bucket", "put_object", "put_bucket_lifecycle_configuration"]
    + ["delete_objects", "abort_multipart_upload", "delete_bucket"],
)
async def test_a_bucket_is_made_and_removed_although_an_answer_is_lost(
    aws: AwsClient, name: str, operation: str
) -> None:
    faulty = FaultyAws(aws)
    faulty.lose_answer("s3", operation)
    bucket = BucketResource(faulty, name, region=REGION, environment="one")
    await bucket.ensure()
    assert await bucket.problem() is None
    await aws.call("s3", "create_multipart_upload", {"Bucket": name, "Key": "exports/begun"})

    assert await bucket.remove() is True
    assert faulty.fired == 1
    assert "does not exist" in str(await bucket.problem())


class Denied:
    """An `Aws` that denies the removal of certain objects, as a bucket with a lock does."""

    def __init__(self, aws: AwsClient, key: str, *, times: int) -> None:
        self._aws = aws
        self._key = key
        self._times = times

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if operation != "delete_objects":
            return await self._aws.call(service, operation, parameters)
        objects = parameters["Delete"]["Objects"]
        kept = [one for one in objects if one["Key"] == self._key and self._times > 0]
        self._times -= bool(kept)
        if others := [one for one in objects if one not in kept]:
            await self._aws.call(
                service, operation, {**parameters, "Delete": {"Objects": others, "Quiet": True}}
            )
        return {"Errors": [{**one, "Code": "AccessDenied"} for one in kept]}

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)


@pytest.mark.timeout(30)
async def test_an_object_that_cannot_be_removed_ends_the_removal(aws: AwsClient, name: str) -> None:
    await BucketResource(aws, name, region=REGION, environment="one").ensure()
    for key in ("results/30/locked", "results/30/other"):
        await aws.call("s3", "put_object", {"Bucket": name, "Key": key, "Body": b"x"})

    denied = Denied(aws, "results/30/locked", times=1_000)
    with pytest.raises(AwsRefused, match="AccessDenied"):
        await BucketResource(denied, name, region=REGION, environment="one").remove()
    late = Denied(aws, "results/30/locked", times=1)
    await aws.call("s3", "put_object", {"Bucket": name, "Key": "results/30/other", "Body": b"x"})
    assert await BucketResource(late, name, region=REGION, environment="one").remove()


async def test_versions_of_what_was_deleted_expire(aws: AwsClient, name: str) -> None:
    """Else a delete that a caller asked for would keep every body."""
    bucket = BucketResource(aws, name, region=REGION, environment="one")
    await bucket.ensure()
    answer = await aws.call("s3", "get_bucket_lifecycle_configuration", {"Bucket": name})
    expiring = [rule for rule in answer["Rules"] if "NoncurrentVersionExpiration" in rule]

    assert [rule["NoncurrentVersionExpiration"]["NoncurrentDays"] for rule in expiring] == [1]
    assert [rule.get("Filter", {}).get("Prefix", rule.get("Prefix")) for rule in expiring] == [""]
    await bucket.remove()


async def test_every_call_of_a_role_is_tried_and_nothing_is_left(aws: AwsClient, name: str) -> None:
    bucket = BucketResource(aws, name, region=REGION, environment="one")
    await bucket.ensure()
    assert await blobs_problem(aws, name, CLOCK) is None
    left = await aws.call("s3", "list_objects_v2", {"Bucket": name})
    uploads = await aws.call("s3", "list_multipart_uploads", {"Bucket": name})

    assert [entry["Key"] for entry in left["Contents"]] == [OWNER_KEY]
    assert not uploads.get("Uploads")
    await bucket.remove()


async def test_a_bucket_of_another_environment_is_neither_used_nor_removed(
    aws: AwsClient, name: str
) -> None:
    one = BucketResource(aws, name, region=REGION, environment="one")
    other = BucketResource(aws, name, region=REGION, environment="other")
    await one.ensure()
    assert "environment one" in str(await other.problem())
    for act in (other.ensure, other.remove):
        with pytest.raises(ConveyorError, match="environment one") as caught:
            await act()
        assert caught.value.code is ErrorCode.CONFLICT
    assert await one.problem() is None

    await other.take()
    assert await other.problem() is None
    assert "environment other" in str(await one.problem())
    assert await other.remove()


async def test_a_bucket_that_was_there_is_owned_by_the_first_who_comes(
    aws: AwsClient, name: str
) -> None:
    await ensure_bucket(aws, name, region=REGION)
    one = BucketResource(aws, name, region=REGION, environment="one")
    assert await one.problem() is None
    assert await one.ensure() == ""
    with pytest.raises(ConveyorError, match="environment one"):
        await own(aws, name, "other")
    await one.remove()
