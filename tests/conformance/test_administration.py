"""`conveyor admin` as a whole: an environment from nothing to nothing, and what it says of it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.bootstrap.production import open_administration
from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE, run_queue
from conveyor.prod.admin import administration
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.schema import table_parameters
from conveyor.prod.s3.bucket import bucket_exists, ensure_bucket
from conveyor.prod.sqs.registry import prefix
from conveyor.prod.startup_checks import agree, start
from conveyor.roles import admin
from conveyor.settings import Settings, load
from tests.conformance.emulators import REGION, address, aws_options, on_aws
from tests.conformance.redis_process import RedisProcess

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

CLOCK = SystemClock()
RESOURCES = 3


class Environment:
    """One environment, and all that was said of it."""

    def __init__(self, **changed: Any) -> None:
        name = f"test-{secrets.token_hex(6)}"
        self.settings: Settings = load(
            {},
            production=True,
            **{
                "environment": name,
                "region": REGION,
                "bucket": f"conveyor-{name}",
                "dynamodb_endpoint": address("CONVEYOR_TEST_DYNAMODB"),
                "sqs_endpoint": address("CONVEYOR_TEST_SQS"),
                "s3_endpoint": address("CONVEYOR_TEST_S3"),
                "stepfunctions_endpoint": address("CONVEYOR_TEST_STEPFUNCTIONS"),
                "redis_url": address("CONVEYOR_TEST_REDIS"),
                **changed,
            },
        )
        self.aws = aws_options(
            dynamodb_endpoint=self.settings.dynamodb_endpoint,
            sqs_endpoint=self.settings.sqs_endpoint,
            s3_endpoint=self.settings.s3_endpoint,
        )
        self.said: list[str] = []

    def take(self) -> list[str]:
        """Return the output since the last call."""
        said, self.said = self.said, []
        return said

    async def init(self) -> list[str]:
        assert await admin.init(self.settings, self.said.append) == 0
        return self.take()

    async def check(self, code: int) -> list[str]:
        assert await admin.check(self.settings, self.said.append) == code
        return self.take()

    async def destroy(self) -> list[str]:
        code = await admin.destroy(self.settings, self.said.append, even_if_alive=True)
        assert code == 0
        return self.take()


@pytest.fixture
async def environment() -> AsyncIterator[Environment]:
    made = Environment()
    yield made
    await made.destroy()


@pytest.fixture
async def aws(environment: Environment) -> AsyncIterator[AwsClient]:
    opened = await open_aws(environment.aws, CLOCK, "dynamodb", "sqs", "s3")
    yield opened
    await opened.aclose()


def wrong(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("ok ")]


async def test_an_environment_is_made_checked_and_removed(environment: Environment) -> None:
    nothing = await environment.check(1)
    made = await environment.init()
    again = await environment.init()
    checked = await environment.check(0)
    gone = await environment.destroy()
    absent = await environment.destroy()

    assert [line.split()[0] for line in wrong(nothing)] == ["WRONG"] * (RESOURCES + 1)
    assert "conveyor admin init" in nothing[0]
    assert [line.split()[0] for line in made] == ["made"] * (RESOURCES + 1)
    assert [line.split()[0] for line in again] == ["there"] * (RESOURCES + 1)
    assert wrong(checked) == []
    assert [line.removeprefix("ok").strip() for line in checked[RESOURCES:]] == [
        "clock",
        f"terms of the fleet: permits in redis, bodies in {environment.settings.bucket}",
        "use of the table",
        "use of queues",
        "use of the bucket",
        "callbacks",
        "redis",
    ]
    assert [line.split()[0] for line in gone] == ["removed"] * RESOURCES
    assert [line.split()[0] for line in absent] == ["absent"] * RESOURCES
    assert wrong(await environment.check(1))


async def test_every_step_is_told_as_json_too(environment: Environment, aws: AwsClient) -> None:
    settings = environment.settings

    def say(line: str) -> None:
        environment.said.append(line)

    def given() -> list[dict[str, object]]:
        return [json.loads(line) for line in environment.take()]

    assert await admin.init(settings, say, as_json=True) == 0
    made = given()
    assert [one["outcome"] for one in made] == ["made"] * (RESOURCES + 1)
    assert made[-1]["label"] == f"terms of the fleet: permits in redis, bodies in {settings.bucket}"

    assert await admin.resume(settings, say, as_json=True) == 0
    assert await admin.pause(settings, say, as_json=True) == 0
    assert await admin.pause(settings, say, as_json=True) == 0
    assert await admin.resume(settings, say, as_json=True) == 0
    steps = given()
    assert [(one["paused"], one["changed"]) for one in steps] == [
        (False, False),
        (True, True),
        (True, False),
        (False, True),
    ]
    assert [one["was_paused_since"] is None for one in steps] == [True, True, False, False]

    name = f"{prefix(settings.environment)}{DEAD_LETTER_QUEUE}"
    url = (await aws.call("sqs", "get_queue_url", {"QueueName": name}))["QueueUrl"]
    await aws.call("sqs", "send_message", {"QueueUrl": url, "MessageBody": "garbage"})
    assert await admin.drop_letters(settings, say, frozenset({"none"}), as_json=True) == 1
    (missing,) = given()
    assert (missing["letter_id"], missing["outcome"]) == ("none", None)
    assert "does not exist" in str(missing["problem"])
    assert await admin.redrive_letters(settings, say, None, as_json=True) == 1
    (stays,) = given()
    assert (stays["outcome"], bool(stays["problem"])) == (None, True)

    assert await admin.destroy(settings, say, even_if_alive=True, as_json=True) == 0
    assert [one["outcome"] for one in given()] == ["removed"] * RESOURCES


async def test_what_was_taken_away_is_named(environment: Environment, aws: AwsClient) -> None:
    await environment.init()
    name = f"{prefix(environment.settings.environment)}{CONTROL_QUEUE}"
    url = (await aws.call("sqs", "get_queue_url", {"QueueName": name}))["QueueUrl"]
    await aws.call("sqs", "delete_queue", {"QueueUrl": url})
    [told] = wrong(await environment.check(1))

    assert f"{name} does not exist" in told


async def test_a_run_is_looked_at_by_the_terms_of_its_fleet_alone(environment: Environment) -> None:
    """In another ledger nobody holds a permit, and no worker has said a word."""
    await environment.init()
    other = replace(environment.settings, ledger="dynamodb")
    with pytest.raises(ConveyorError, match="keeps its permits in redis") as caught:
        await admin.show_run(other, environment.said.append, CLOCK.new_id(), as_json=True)
    assert caught.value.code is ErrorCode.CONFLICT
    with pytest.raises(ConveyorError, match="no such run"):
        await admin.show_run(
            environment.settings, environment.said.append, CLOCK.new_id(), as_json=True
        )


async def test_another_ledger_than_the_fleets_is_refused_and_told(
    environment: Environment,
) -> None:
    await environment.init()
    environment.settings = Environment(
        environment=environment.settings.environment,
        bucket=environment.settings.bucket,
        ledger="dynamodb",
    ).settings
    [told] = wrong(await environment.check(1))

    assert "this fleet keeps its permits in redis" in told
    with pytest.raises(ConveyorError) as caught:
        await environment.init()
    assert caught.value.code is ErrorCode.CONFLICT
    environment.take()


async def test_a_redis_that_is_away_is_told_without_its_password(
    environment: Environment,
) -> None:
    await environment.init()
    environment.settings = Environment(
        environment=environment.settings.environment,
        bucket=environment.settings.bucket,
        redis_url="redis://:hunter2@127.0.0.1:1/0",
    ).settings
    lines = await environment.check(1)

    assert [line.split(":")[0] for line in wrong(lines)] == ["WRONG   redis"]
    assert "hunter2" not in str(lines)


async def test_a_redis_at_a_socket_of_this_machine_is_found_in_order(
    environment: Environment, tmp_path: Path
) -> None:
    place = tmp_path / "redis.sock"
    server = RedisProcess(tmp_path, password="hunter2", socket_path=place)
    try:
        environment.settings = replace(
            environment.settings, redis_url=f"unix://:hunter2@{place}?db=3"
        )
        await environment.init()
        assert wrong(await environment.check(0)) == []
    finally:
        server.close()


@pytest.mark.skipif(on_aws(), reason="the endpoints of AWS are found by themselves")
@pytest.mark.parametrize(
    ("endpoint", "told", "refusal"),
    [
        ("s3_endpoint", "bucket ", "s3 refuses head_bucket: 400 Bad Request"),
        ("dynamodb_endpoint", "table ", "dynamodb refuses describe_table: "),
    ],
)
async def test_an_endpoint_of_another_service_is_told_by_service_and_operation(
    environment: Environment, endpoint: str, told: str, refusal: str
) -> None:
    await environment.init()
    right = environment.settings
    others: dict[str, Any] = {
        "s3_endpoint": right.dynamodb_endpoint,
        "dynamodb_endpoint": right.sqs_endpoint,
    }
    environment.settings = replace(right, **{endpoint: others[endpoint]})
    first, *_ = wrong(await environment.check(1))
    async with await open_administration(environment.settings, CLOCK) as opened:
        with pytest.raises(ConveyorError) as caught:
            await start(opened._aws, opened._table, opened._options, works=True)
    environment.settings = right

    assert first.startswith(f"WRONG   {told}")
    assert refusal in first
    service = endpoint.partition("_")[0]
    assert re.fullmatch(rf"{service} refuses [a-z_]+: .+", caught.value.detail)


async def test_a_removed_environment_leaves_no_queue_of_a_run(
    environment: Environment, aws: AwsClient
) -> None:
    await environment.init()
    start = prefix(environment.settings.environment)
    name = f"{start}{run_queue(CLOCK.new_id())}-1"
    await aws.call("sqs", "create_queue", {"QueueName": name})
    await environment.destroy()
    left = await aws.call("sqs", "list_queues", {"QueueNamePrefix": start})

    assert not left.get("QueueUrls")


async def test_a_kms_key_is_tried_where_one_is_set(environment: Environment) -> None:
    await environment.init()
    environment.settings = Environment(
        environment=environment.settings.environment,
        bucket=environment.settings.bucket,
        kms_endpoint=address("CONVEYOR_TEST_KMS"),
        kms_key="00000000-0000-0000-0000-000000000000",
    ).settings
    [told] = wrong(await environment.check(1))

    assert told.startswith("WRONG   data key under KMS: ")


async def test_another_bucket_than_the_fleets_is_told_and_not_made(
    environment: Environment, aws: AwsClient
) -> None:
    await environment.init()
    bucket = environment.settings.bucket
    environment.settings = Environment(
        environment=environment.settings.environment, bucket=f"{bucket}-other"
    ).settings
    with pytest.raises(ConveyorError, match="in the bucket"):
        await environment.init()
    made = await bucket_exists(aws, environment.settings.bucket)
    environment.settings = replace(environment.settings, bucket=bucket)
    environment.take()

    assert not made


async def test_nothing_is_removed_while_a_worker_is_alive(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await environment.init()
    monkeypatch.setattr(administration, "WORKER_WATCH", 0.5)
    spoken = anyio.Event()

    class Looking(SystemClock):
        """Looks for as long as the worker needs to speak."""

        async def sleep(self, seconds: float) -> None:
            await (
                spoken.wait() if seconds == administration.WORKER_WATCH else super().sleep(seconds)
            )

    async with await open_administration(environment.settings, Looking()) as opened:
        table, terms = opened._table, opened._terms
        await agree(table, terms, works=True)

        async def speak() -> None:
            await agree(table, terms, works=True)
            spoken.set()

        def speaks(line: str) -> None:
            environment.said.append(line)
            group.start_soon(speak)

        async with anyio.create_task_group() as group:
            with pytest.raises(ConveyorError) as caught:
                await opened.check_no_worker(speaks)
    assert caught.value.code is ErrorCode.CONFLICT
    assert environment.take() == ["watching for 0.5 s that no worker is alive"]
    assert wrong(await environment.check(0)) == []

    assert await admin.destroy(environment.settings, environment.said.append) == 0


async def test_nothing_is_removed_where_the_bucket_is_another_fleets(
    environment: Environment, aws: AwsClient
) -> None:
    await environment.init()
    own, others = environment.settings, f"{environment.settings.bucket}-others"
    await ensure_bucket(aws, others, region=own.region)
    environment.settings = replace(own, bucket=others)
    async with await open_administration(environment.settings, CLOCK) as opened:
        with pytest.raises(ConveyorError, match="are in bucket") as caught:
            [line async for line in opened.destroy()]
    assert caught.value.code is ErrorCode.CONFLICT
    assert await bucket_exists(aws, others)
    environment.settings = own
    environment.take()
    assert wrong(await environment.check(0)) == []
    await aws.call("s3", "delete_bucket", {"Bucket": others})


async def test_nothing_is_removed_while_the_table_is_protected(
    environment: Environment, aws: AwsClient
) -> None:
    await environment.init()
    table = {"TableName": environment.settings.table_name}
    await aws.call("dynamodb", "update_table", {**table, "DeletionProtectionEnabled": True})
    async with await open_administration(environment.settings, CLOCK) as opened:
        with pytest.raises(ConveyorError, match="is protected: switch") as caught:
            [line async for line in opened.destroy()]
    await aws.call("dynamodb", "update_table", {**table, "DeletionProtectionEnabled": False})

    assert caught.value.code is ErrorCode.CONFLICT
    assert wrong(await environment.check(0)) == []


async def test_what_is_absent_is_removed_without_a_look(environment: Environment) -> None:
    assert await admin.destroy(environment.settings, environment.said.append) == 0
    assert [line.split()[0] for line in environment.take()] == ["absent"] * RESOURCES


async def test_a_ledger_that_is_the_fleets_is_said_at_once(environment: Environment) -> None:
    await environment.init()
    assert await admin.move_ledger(environment.settings, "redis", environment.said.append) == 0
    assert environment.take() == ["permits were kept in redis already"]


async def test_a_table_that_lacks_its_expiry_is_completed_and_said_so(
    environment: Environment, aws: AwsClient
) -> None:
    name = environment.settings.table_name
    await aws.call("dynamodb", "create_table", table_parameters(name))
    lines = await environment.init()

    assert lines[0] == f"changed table {name}: lets items expire by ttl"


async def test_a_process_does_not_start_without_its_bucket(
    environment: Environment, aws: AwsClient
) -> None:
    await environment.init()
    async with await open_administration(environment.settings, CLOCK) as opened:
        await opened._blobs.remove()
        with pytest.raises(ConveyorError) as caught:
            await start(aws, opened._table, opened._options, works=False)

    assert caught.value.detail == (
        f"there is no bucket {environment.settings.bucket} (conveyor admin init makes it)"
    )


class OneFirst:
    """Lets calls of other services through once a call of the one came back."""

    def __init__(self, behind: Aws, first: str) -> None:
        self._behind = behind
        self._first = first
        self._came = anyio.Event()

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if service != self._first:
            await self._came.wait()
        try:
            return await self._behind.call(service, operation, parameters)
        finally:
            if service == self._first:
                self._came.set()

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._behind.presign(operation, parameters, seconds=seconds)


@pytest.mark.parametrize("first", ["s3", "sqs"])
async def test_all_that_is_missing_is_told_whichever_answers_first(
    environment: Environment, aws: AwsClient, first: str
) -> None:
    await environment.init()
    settings = environment.settings
    async with await open_administration(settings, CLOCK) as opened:
        await opened._blobs.remove()
        await opened._queues.remove()
        with pytest.raises(ConveyorError) as caught:
            await start(OneFirst(aws, first), opened._table, opened._options, works=False)

    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.detail == (
        f"there is no bucket {settings.bucket} (conveyor admin init makes it); there is no queue"
        f" {prefix(settings.environment)}{CONTROL_QUEUE} (conveyor admin init makes it)"
    )


async def test_dead_letters_stand_under_a_header(environment: Environment, aws: AwsClient) -> None:
    await environment.init()
    name = f"{prefix(environment.settings.environment)}{DEAD_LETTER_QUEUE}"
    url = (await aws.call("sqs", "get_queue_url", {"QueueName": name}))["QueueUrl"]
    await aws.call("sqs", "send_message", {"QueueUrl": url, "MessageBody": "garbage"})
    assert await admin.list_letters(environment.settings, environment.said.append, limit=10) == 0
    header, letter = environment.take()

    assert header.split() == ["ID", "AGE", "LEFT", "WHAT,", "AND", "WHY"]
    # Of 14 days, some seconds are over.
    assert letter.split()[2] == "13d"
    assert "received too often" not in letter
