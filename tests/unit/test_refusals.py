"""Refusals that concern the deployment: callers see an unavailable service, the operator of the
fleet one plain line, and the process reports that it is of no use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from starlette.types import Receive, Scope, Send

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.telemetry import Telemetry
from conveyor.http.middleware import ProblemResponses, RequestId
from conveyor.prod.aws.calls import (
    AWAY_FOR,
    REFUSED_FOR,
    Answer,
    AwsOptions,
    AwsRefused,
    CallStats,
    Parameters,
)
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.aws.refusals import DeployedAws, NotDeployed, describe
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.options import ProdOptions
from conveyor.prod.startup_checks import start
from conveyor.testing.clock import FakeClock

THINGS = {"dynamodb": "table ours", "s3": "bucket bodies", "sqs": "queues conveyor-x-…"}


class Refusing:
    """An `Aws` that refuses everything by one code, or answers."""

    def __init__(self, stats: CallStats) -> None:
        self.code = ""
        self.answer: Answer = {}
        self._stats = stats

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        self._stats.answered(service)
        if self.code:
            arn = "User: arn:aws:iam::123456789012:role/r may not"
            raise AwsRefused(self.code, arn, asked=(service, operation))
        return self.answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return f"{operation} {seconds} {dict(parameters)}"


class Bench:
    def __init__(self) -> None:
        self.stats, self.clock = CallStats(), FakeClock()
        self.behind = Refusing(self.stats)
        self.aws = DeployedAws(self.behind, self.stats, self.clock, resources=THINGS)

    async def refused(self, service: str, code: str) -> Exception:
        self.behind.code = code
        with pytest.raises((ConveyorError, AwsRefused)) as caught:
            await self.aws.call(service, "do_it", {})
        return caught.value

    @property
    def usable(self) -> bool:
        """Return whether the process reports that it is usable."""
        return self.stats.usable(self.clock.monotonic())


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("service", "code", "told", "usable"),
    [
        ("dynamodb", "ResourceNotFoundException", "there is no table ours", False),
        ("s3", "NoSuchBucket", "there is no bucket bodies", False),
        ("s3", "ExpiredToken", "bucket bodies: do_it: the credentials are not accepted", False),
        ("s3", "RequestTimeTooSkewed", "bucket bodies: do_it: the credentials are not", False),
        (
            "s3",
            "KMS.DisabledException",
            "bucket bodies: do_it: its KMS key cannot be used",
            True,
        ),
        ("dynamodb", "AccessDeniedException", "table ours: do_it: not permitted: User", True),
        ("sqs", "AccessDenied", "queues conveyor-x-…: do_it: not permitted: User", True),
    ],
)
async def test_what_is_to_be_mended_is_told_to_who_can_and_to_nobody_else(
    bench: Bench, caplog: pytest.LogCaptureFixture, service: str, code: str, told: str, usable: bool
) -> None:
    with caplog.at_level(logging.ERROR, "conveyor.aws"):
        error = await bench.refused(service, code)

    assert isinstance(error, NotDeployed)
    assert error.code is ErrorCode.UNAVAILABLE
    assert told in error.problem
    assert error.problem == str(error) == caplog.messages[0]
    assert not any(word in error.detail for word in ("ours", "bodies", "arn", service))
    assert bench.usable is usable


@pytest.mark.parametrize(
    ("service", "code"),
    [
        ("dynamodb", "ConditionalCheckFailedException"),
        ("s3", "NoSuchKey"),
        ("sqs", "AWS.SimpleQueueService.NonExistentQueue"),
        ("stepfunctions", "AccessDeniedException"),
    ],
)
async def test_other_refusals_stay_what_they_are(bench: Bench, service: str, code: str) -> None:
    assert isinstance(await bench.refused(service, code), AwsRefused)
    assert bench.usable


async def test_what_nobody_dealt_with_is_unavailable_to_callers_and_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arn = "arn:aws:iam::123456789012:role/r"
    refused = AwsRefused("LimitExceededException", f"{arn} may not", asked=("kms", "decrypt"))

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise refused

    transport = httpx.ASGITransport(app=RequestId(ProblemResponses(app), clock=FakeClock()))
    async with httpx.AsyncClient(transport=transport, base_url="http://a.test") as client:
        answer = await client.get("/v1/jobs")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == str(REFUSED_FOR)
    assert answer.json()["code"] == "unavailable"
    assert answer.json()["detail"] == "kms refuses decrypt: LimitExceededException"
    assert arn not in answer.text
    [record] = caplog.records
    assert record.getMessage() == "a request could not be served"
    assert vars(record)["error"] == str(refused) == f"LimitExceededException: {arn} may not"


@pytest.mark.parametrize(
    ("word", "message", "why"),
    [
        ("400", "Bad Request", "400 Bad Request"),
        ("InvalidAction", "Unknown action: X", "InvalidAction: Unknown action: X"),
        ("Strange", "", "Strange"),
        ("AccessDenied", "Access Denied", "not permitted: Access Denied"),
        ("ExpiredToken", "old", "the credentials are not accepted: ExpiredToken"),
        ("KMS.DisabledException", "off", "its KMS key cannot be used: off"),
    ],
)
def test_who_runs_the_fleet_is_told_which_service_refuses_which_operation(
    word: str, message: str, why: str
) -> None:
    refused = AwsRefused(word, message, asked=("s3", "head_bucket"))

    assert describe(refused) == f"s3 refuses head_bucket: {why}"


@pytest.mark.parametrize("code", ["InvalidAction", "400"])
async def test_a_role_that_is_refused_at_its_start_says_by_whom_and_what(
    bench: Bench, code: str
) -> None:
    bench.behind.code = code
    options = ProdOptions(
        aws=AwsOptions(),
        environment="e",
        table="t",
        bucket="b",
        ledger="dynamodb",
        root_secret=b"x",
    )
    table = Table(bench.aws, "t", bench.clock)
    with pytest.raises(ConveyorError) as caught:
        await start(bench.aws, table, options, works=True)

    assert caught.value.detail.startswith(f"dynamodb refuses update_item: {code}")


async def test_an_answer_makes_it_usable_again_and_so_does_time(bench: Bench) -> None:
    await bench.refused("dynamodb", "ResourceNotFoundException")
    bench.behind.code = ""
    usable = []
    for service in ("s3", "dynamodb"):
        assert await bench.aws.call(service, "do_it", {}) == {}
        usable.append(bench.usable)
    assert usable == [False, True]

    await bench.refused("s3", "NoSuchBucket")
    await bench.clock.advance(AWAY_FOR)
    before = bench.usable
    await bench.clock.advance(1)
    assert (before, bench.usable) == (False, True)


async def test_links_are_those_of_the_service(bench: Bench) -> None:
    assert bench.aws.presign("get_object", {"Key": "k"}, seconds=9) == "get_object 9 {'Key': 'k'}"


@pytest.mark.slow
async def test_missing_credentials_are_told_at_once_and_as_what_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = {"dynamodb_endpoint": "http://127.0.0.1:1"}
    aws = await open_aws(AwsOptions(**options), FakeClock(), "dynamodb")
    try:
        with pytest.raises(ConveyorError) as caught:
            await aws.call("dynamodb", "describe_table", {"TableName": "ours"})
    finally:
        await aws.aclose()

    assert caught.value.detail.startswith("no AWS credentials found")
    assert aws.stats.calls == {("dynamodb", "describe_table", "failed"): 1}


@pytest.mark.parametrize(
    ("service", "operation", "answer", "undone", "throttled"),
    [
        ("dynamodb", "batch_write_item", {"UnprocessedItems": {"t": [{}, {}]}}, 2, 2),
        ("dynamodb", "batch_get_item", {"UnprocessedKeys": {"t": {"Keys": [{}]}}}, 1, 1),
        (
            "dynamodb",
            "batch_execute_statement",
            {
                "Responses": [
                    {},
                    {"Error": {"Code": "ThrottlingError"}},
                    {"Error": {"Code": "ProvisionedThroughputExceeded"}},
                    {"Error": {"Code": "TransactionConflict"}},
                    {"Error": {"Code": "DuplicateItem"}},
                ]
            },
            3,
            2,
        ),
        ("dynamodb", "batch_get_item", {"Responses": {"t": [{}]}, "UnprocessedKeys": {}}, 0, 0),
        (
            "sqs",
            "delete_message_batch",
            {"Successful": [{}], "Failed": [{"Code": "RequestThrottled"}, {"Code": "Other"}]},
            2,
            1,
        ),
        ("s3", "delete_objects", {"Errors": [{"Code": "SlowDown"}, {"Code": "Other"}]}, 2, 1),
    ],
)
async def test_parts_that_a_service_left_undone_are_counted(
    bench: Bench, service: str, operation: str, answer: Answer, undone: int, throttled: int
) -> None:
    bench.behind.answer = answer
    for _ in range(2):
        assert await bench.aws.call(service, operation, {}) == answer

    assert bench.stats.undone[service, operation] == 2 * undone
    assert bench.stats.throttles[service, operation] == 2 * throttled
    page = Telemetry()
    page.family("aws_throttles", lambda: bench.stats.throttles.items())
    shown = generate_latest(page.registry()).decode()
    line = f'conveyor_aws_throttles_total{{operation="{operation}",service="{service}"}}'
    assert (f"{line} {2.0 * throttled}" in shown) is (throttled > 0)
