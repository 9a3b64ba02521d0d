"""The bucket as `conveyor admin init` makes it and `conveyor admin check` looks at it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.prod.aws.calls import Answer, Aws
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.s3.bucket import (
    bucket_problem,
    early_removals,
    ensure_bucket,
    lifecycle_rules,
)
from conveyor.records.blob_keys import (
    LIFECYCLE_DAYS,
    export_key,
    input_key,
    lifecycle_class,
    result_key,
    staged_key,
    template_key,
)
from tests.conformance.emulators import REGION, address, aws_options

Bucket = tuple[Aws, str]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bucket() -> AsyncIterator[Bucket]:
    """The name of a bucket that does not exist yet."""
    options = aws_options(s3_endpoint=address("CONVEYOR_TEST_S3"), region=REGION)
    aws, name = (
        await open_aws(options, SystemClock(), "s3"),
        f"conveyor-test-{secrets.token_hex(6)}",
    )
    yield aws, name
    await aws.call("s3", "delete_bucket", {"Bucket": name})
    await aws.aclose()


async def test_a_bucket_is_made_once_and_is_then_as_it_should_be(bucket: Bucket) -> None:
    aws, name = bucket
    told = await bucket_problem(aws, name)
    assert told == "does not exist (conveyor admin init makes it)"
    assert await ensure_bucket(aws, name, region=REGION)
    assert await bucket_problem(aws, name) is None
    assert not await ensure_bucket(aws, name, region=REGION)


async def test_a_bucket_without_rules_is_told_in_one_line_and_set_right(bucket: Bucket) -> None:
    aws, name = bucket
    await aws.call("s3", "create_bucket", {"Bucket": name})
    told = await bucket_problem(aws, name)
    assert told == "lacks all of its lifecycle rules (conveyor admin init sees to it)"
    assert await ensure_bucket(aws, name, region=REGION)
    assert await bucket_problem(aws, name) is None


async def test_what_differs_is_named_and_what_is_not_ours_stays(bucket: Bucket) -> None:
    aws, name = bucket
    theirs = {**_rule("logs", "logs/", 5), "ID": "theirs"}
    rules = [theirs, _rule("staged", "staged/", 1)]
    rules += [rule for rule in lifecycle_rules() if rule["ID"] not in ("staged", "inputs")]
    await aws.call("s3", "create_bucket", {"Bucket": name})
    await _put(aws, name, rules)
    assert await bucket_problem(aws, name) == (
        "its lifecycle rule staged is on below staged/ after 1 days, not on below staged/ after "
        "7 days; lacks the lifecycle rule inputs (conveyor admin init sees to it)"
    )
    assert await ensure_bucket(aws, name, region=REGION)
    assert await bucket_problem(aws, name) is None
    answer = await aws.call("s3", "get_bucket_lifecycle_configuration", {"Bucket": name})
    assert sorted(rule["ID"] for rule in answer["Rules"]) == sorted(
        ["theirs", *(rule["ID"] for rule in lifecycle_rules())]
    )


async def test_a_rule_that_is_switched_off_differs(bucket: Bucket) -> None:
    aws, name = bucket
    rules = [
        {**rule, "Status": "Disabled"} if rule["ID"] == "exports" else rule
        for rule in lifecycle_rules()
    ]
    await aws.call("s3", "create_bucket", {"Bucket": name})
    await _put(aws, name, rules)
    told = await bucket_problem(aws, name)
    assert told is not None
    assert told.startswith("its lifecycle rule exports is off below exports/")


@pytest.mark.parametrize(
    ("prefix", "days", "taken"),
    [
        ("templates/", 3_000, "templates/"),
        ("", 3_000, "templates/"),
        ("temp", 3_000, "templates/"),
        ("templates/JOB", 3_000, "templates/"),
        ("environment", 3_000, "environment"),
        ("staged/", 6, "staged/"),
        ("results/", 31, "results/30/"),
    ],
)
async def test_a_rule_of_others_that_removes_too_early_is_told_and_stays(
    bucket: Bucket, prefix: str, days: int, taken: str
) -> None:
    aws, name = bucket
    await aws.call("s3", "create_bucket", {"Bucket": name})
    theirs = _rule("theirs", prefix, days)
    await _put(aws, name, [theirs, *lifecycle_rules()])
    told = f"the lifecycle rule theirs removes {taken} too early: change it"
    assert await bucket_problem(aws, name) == told
    await _put(aws, name, [theirs, *lifecycle_rules()[1:]])
    told += "; lacks the lifecycle rule results-"
    assert (await bucket_problem(aws, name) or "").startswith(told)
    assert await ensure_bucket(aws, name, region=REGION)
    assert (await bucket_problem(aws, name) or "").startswith("the lifecycle rule theirs")


@pytest.mark.parametrize(
    "change",
    [
        {"Status": "Disabled"},
        {"Filter": {"Prefix": "logs/"}},
        {"Filter": {"Tag": {"Key": "team", "Value": "logs"}}},
        {"Filter": {"And": {"Prefix": "", "Tags": [{"Key": "team", "Value": "logs"}]}}},
        {"Expiration": {"ExpiredObjectDeleteMarker": True}},
    ],
    ids=str,
)
def test_rules_of_others_that_take_nothing_of_ours_are_fine(change: dict[str, Any]) -> None:
    assert early_removals([_rule("theirs", "", 1)]) != []
    assert early_removals([{**_rule("theirs", "", 1), **change}]) == []


def test_rules_of_others_remove_by_date_and_in_each_form_of_a_filter() -> None:
    rule = {"ID": "theirs", "Status": "Enabled", "Expiration": {"Days": 1}}
    dated = {**rule, "Expiration": {"Date": "2030-01-01"}}
    sized = {"And": {"Prefix": "templates/", "ObjectSizeGreaterThan": 1}}
    found = [{**dated, "Prefix": ""}, {**rule, "Filter": {}}, {**rule, "Filter": sized}]
    assert len(early_removals(found)) == 3


@pytest.mark.parametrize("ttl_days", [1, 30, 31, 90, 400])
def test_every_body_lies_below_a_rule_that_outlives_it(ttl_days: int) -> None:
    lifecycle = lifecycle_class(ttl_days)
    assert _days(result_key("J", "R", "0000000TASK", 1, lifecycle)) > ttl_days
    assert _days(staged_key("J", "R", 0)) == 7
    assert _days(input_key("I")) == 2
    assert _days(export_key("J", "R", "E")) == 2


def test_no_rule_takes_the_tasks_of_a_schedule() -> None:
    """They are read for as long as the schedule fires, which may be years."""
    assert _rules_for(template_key("J", "L", 0)) == []


def test_unfinished_uploads_go_after_a_day_wherever_they_are() -> None:
    [rule] = [rule for rule in lifecycle_rules() if "AbortIncompleteMultipartUpload" in rule]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert rule["Filter"] == {"Prefix": ""}
    assert len(lifecycle_rules()) == len(LIFECYCLE_DAYS) + 5


def _days(key: str) -> int:
    """After how many days the one rule that a key lies below takes it away."""
    [days] = _rules_for(key)
    return days


def _rules_for(key: str) -> list[int]:
    """After how many days each rule that a key lies below takes it away."""
    return [
        rule["Expiration"]["Days"]
        for rule in lifecycle_rules()
        if "Days" in rule.get("Expiration", {}) and key.startswith(rule["Filter"]["Prefix"])
    ]


def _rule(name: str, prefix: str, days: int) -> dict[str, Any]:
    return {
        "ID": name,
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
    }


async def _put(aws: Aws, name: str, rules: list[dict[str, Any]]) -> Answer:
    configuration = {"Bucket": name, "LifecycleConfiguration": {"Rules": rules}}
    return await aws.call("s3", "put_bucket_lifecycle_configuration", configuration)
