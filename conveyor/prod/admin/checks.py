"""The checks of `conveyor admin check`: the local clock against DynamoDB's, and the permissions of
the caller.

Permissions are tried out by each call that a role makes, on items, objects and queues created for
the purpose. They are those of whoever runs the check: run it with the credentials of a role to
check the role.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.refusals import describe
from conveyor.prod.dynamodb.client import Query, Table, tag_all
from conveyor.prod.dynamodb.schema import BY_DISPATCH, BY_OWNER, FLEET, TIME_TO_LIVE, Key
from conveyor.prod.sqs.registry import prefix
from conveyor.prod.stepfunctions import NOBODY_WAITS, SERVICE

MADE = "made"
"""The outcome of `ensure` if all of a resource was missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `problem` is None if all is well."""

    label: str
    problem: str | None = None

    def __str__(self) -> str:
        return (
            f"ok      {self.label}"
            if self.problem is None
            else f"WRONG   {self.label}: {self.problem}"
        )


async def run_check(label: str, attempt: Callable[[], Awaitable[str | None]]) -> Finding:
    """Run a check; return its problem, or the refusal that it met, as a finding."""
    try:
        return Finding(label, await attempt())
    except AwsRefused as refused:
        return Finding(label, describe(refused))
    except ConveyorError as error:
        return Finding(label, error.detail)


MAX_CLOCK_SKEW = 30.0
"""Seconds. Signatures are refused beyond five minutes; delays, claims and links suffer earlier."""


async def clock_problem(table: Table, clock: Clock) -> str | None:
    """Compare the clock of this machine with DynamoDB's, by the Date of an answer. Raises
    AwsRefused."""
    before = clock.now()
    try:
        answer = await table.call("get_item", Key=tag_all(FLEET._asdict()))
    except AwsRefused as refused:
        if refused.word != "ResourceNotFoundException":
            raise
        return "cannot be compared without a table"
    passed = clock.now() - before
    stated = _date(answer)
    if stated is None:
        return "cannot be compared: the answer of DynamoDB carries no date"
    # A Date has whole seconds: compare the middle of its second with the middle of the call.
    apart = (before + passed / 2 - (stated + 500)) / 1_000
    if abs(apart) <= MAX_CLOCK_SKEW:
        return None
    return f"is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of DynamoDB"


def _date(answer: dict[str, Any]) -> float | None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return parsedate_to_datetime(headers["date"]).timestamp() * 1_000
    except (KeyError, ValueError, TypeError):
        return None


CHECK_ITEM_TTL = 3_600
"""Seconds after which DynamoDB removes the item of an interrupted check."""


async def rows_problem(aws: Aws, table: Table, clock: Clock) -> str | None:
    """Try the calls on items. Raises AwsRefused for the first refused one."""
    key = Key(f"Check#{clock.new_id()}", "Check")
    item: dict[str, Any] = {TIME_TO_LIVE: clock.now() // 1_000 + CHECK_ITEM_TTL}
    await table.put(key, item)
    await table.update(key, "SET checked = :yes", condition="attribute_exists(pk)", yes=True)
    await table.get(key)
    await table.get_many([key])
    for index in (None, BY_OWNER, BY_DISPATCH):
        await table.page(Query(key.pk, index=index, limit=1))
    parts = [
        table.check_part(Key(key.pk, "Other"), condition="attribute_not_exists(pk)"),
        table.delete_part(key),
    ]
    await table.transact(parts, token=clock.new_id())
    problem = await _insert_problem(aws, table, key, item)
    await table.delete(key)
    await table.delete_many([key])
    return problem


async def _insert_problem(aws: Aws, table: Table, key: Key, item: dict[str, Any]) -> str | None:
    """Try an INSERT statement: the response of a batch carries the refusal of a statement."""
    named = tag_all({**key._asdict(), **item})
    fields = ", ".join(f"'{name}': ?" for name in named)
    statement = {
        "Statement": f'INSERT INTO "{table.name}" VALUE {{{fields}}}',
        "Parameters": list(named.values()),
    }
    answer = await aws.call("dynamodb", "batch_execute_statement", {"Statements": [statement]})
    for response in answer["Responses"]:
        if error := response.get("Error"):
            code = str(error.get("Code", ""))
            asked = ("dynamodb", "PartiQLInsert")
            return describe(AwsRefused(code, str(error.get("Message", "")), asked=asked))
    return None


async def blobs_problem(aws: Aws, bucket: str, clock: Clock) -> str | None:
    """Try the calls on objects. Raises AwsRefused for the first refused one."""
    key = f"check/{clock.new_id()}"
    named = {"Bucket": bucket, "Key": key}
    await aws.call("s3", "put_object", {**named, "Body": b"check"})
    await aws.call("s3", "head_object", named)
    await aws.call("s3", "list_objects_v2", {"Bucket": bucket, "Prefix": key, "MaxKeys": 1})
    begun = await aws.call("s3", "create_multipart_upload", named)
    await aws.call("s3", "abort_multipart_upload", {**named, "UploadId": begun["UploadId"]})
    await aws.call(
        "s3", "delete_objects", {"Bucket": bucket, "Delete": {"Objects": [{"Key": key}]}}
    )
    return None


async def queues_problem(aws: Aws, environment: str, clock: Clock) -> str | None:
    """Try the calls on a run's queue: create, use and remove one under a name of its own.

    Raises AwsRefused for the first refused call.
    """
    name = f"{prefix(environment)}run-check-{clock.new_id()}"
    made = await aws.call("sqs", "create_queue", {"QueueName": name, "tags": {"check": "yes"}})
    queue = {"QueueUrl": made["QueueUrl"]}
    try:
        entry = {"Id": "0", "MessageBody": "check"}
        await aws.call("sqs", "send_message_batch", {**queue, "Entries": [entry]})
        received = await aws.call("sqs", "receive_message", {**queue, "WaitTimeSeconds": 1})
        for message in received.get("Messages", []):
            receipt = {"Id": "0", "ReceiptHandle": message["ReceiptHandle"]}
            hidden = {**receipt, "VisibilityTimeout": 60}
            await aws.call("sqs", "change_message_visibility_batch", {**queue, "Entries": [hidden]})
            await aws.call("sqs", "delete_message_batch", {**queue, "Entries": [receipt]})
    finally:
        await aws.call("sqs", "delete_queue", queue)
    return None


async def callbacks_problem(aws: Aws, clock: Clock) -> None:
    """Try the callbacks with a made-up token, for which nobody waits. Raises AwsRefused for the
    first refused one."""
    token = {"taskToken": f"check-{clock.new_id()}"}
    calls: dict[str, dict[str, str]] = {
        "send_task_heartbeat": {},
        "send_task_success": {"output": "{}"},
        "send_task_failure": {"error": "check", "cause": "check"},
    }
    for operation, parameters in calls.items():
        try:
            await aws.call(SERVICE, operation, {**token, **parameters})
        except AwsRefused as refused:
            if refused.word not in NOBODY_WAITS:
                raise
