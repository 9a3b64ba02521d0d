"""The two carriers of calls to AWS: they send the same, and read the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.requests import OWN_CALLS
from tests.unit.aws_stub import Seen, Stub, calling, give_keys, said, serving, summed

TEXT = 'é\u2028 "quoted" \x7f'
ITEM = {"pk": {"S": TEXT}, "raw": {"B": b"\x00\xff"}, "B": {"M": {"BS": {"BS": [b"1", b""]}}}}
QUEUE = {"QueueUrl": "https://sqs.us-east-1.amazonaws.com/1/one-run-x"}
OBJECT = {"Bucket": "bucket", "Key": f"a b/+{TEXT[0]}~(1)=%2F'*"}
ASKED: dict[tuple[str, str], dict[str, Any]] = {
    ("dynamodb", "get_item"): {"TableName": "t", "Key": ITEM, "ConsistentRead": True},
    ("dynamodb", "put_item"): {"TableName": "t", "Item": ITEM},
    ("dynamodb", "update_item"): {
        "TableName": "t",
        "Key": ITEM,
        "UpdateExpression": "SET a = :a",
        "ExpressionAttributeValues": {":a": {"N": "1.50"}},
    },
    ("dynamodb", "delete_item"): {"TableName": "t", "Key": ITEM},
    ("dynamodb", "query"): {"TableName": "t", "Limit": 3, "ExclusiveStartKey": ITEM},
    ("dynamodb", "batch_get_item"): {"RequestItems": {"t": {"Keys": [ITEM]}}},
    ("dynamodb", "batch_write_item"): {"RequestItems": {"t": [{"PutRequest": {"Item": ITEM}}]}},
    ("dynamodb", "transact_write_items"): {
        "TransactItems": [{"Put": {"TableName": "t", "Item": ITEM}}],
        "ClientRequestToken": "one",
    },
    ("dynamodb", "execute_statement"): {"Statement": "SELECT", "Parameters": [{"S": TEXT}]},
    ("dynamodb", "batch_execute_statement"): {"Statements": [{"Statement": "UPDATE"}]},
    ("sqs", "receive_message"): {**QUEUE, "WaitTimeSeconds": 2, "MaxNumberOfMessages": 10},
    ("sqs", "send_message"): {**QUEUE, "MessageBody": TEXT},
    ("sqs", "send_message_batch"): {
        **QUEUE,
        "Entries": [
            {
                "Id": "1",
                "MessageBody": TEXT,
                "MessageAttributes": {"a": {"DataType": "Binary", "BinaryValue": b"\xff"}},
            }
        ],
    },
    ("sqs", "delete_message"): {**QUEUE, "ReceiptHandle": "r"},
    ("sqs", "delete_message_batch"): {**QUEUE, "Entries": [{"Id": "1", "ReceiptHandle": "r"}]},
    ("sqs", "change_message_visibility"): {**QUEUE, "ReceiptHandle": "r", "VisibilityTimeout": 0},
    ("sqs", "change_message_visibility_batch"): {
        **QUEUE,
        "Entries": [{"Id": "1", "ReceiptHandle": "r", "VisibilityTimeout": 1}],
    },
    ("sqs", "get_queue_attributes"): {**QUEUE, "AttributeNames": ["All"]},
    ("s3", "put_object"): {**OBJECT, "Body": b"<p>" * 99, "ContentType": "text/html; charset=x"},
    ("s3", "get_object"): {**OBJECT, "Range": "bytes=1-", "IfMatch": '"one"'},
    ("s3", "delete_object"): OBJECT,
}
NOT_COMPARED = frozenset(
    {
        "user-agent",
        "authorization",
        "x-amz-date",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "host",
    }
)
NOT_NEEDED = frozenset({"accept-encoding", "x-amz-checksum-mode", "content-length"})
"""Headers that boto3 sends besides: it takes nothing else than identity anyway, and nobody reads a
body to the piece behind its last, where it would compare a checksum."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    give_keys(monkeypatch)


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with serving(Stub()) as there:
        yield there


@pytest.fixture
async def both(stub: Stub) -> AsyncIterator[tuple[AwsClient, AwsClient]]:
    """Calls over boto3, and over the carrier of Conveyor's own."""
    async with calling(stub.url, carrier="boto") as boto, calling(stub.url) as http:
        yield boto, http


def shown(seen: Seen) -> tuple[Any, ...]:
    """The parts of a request that count."""
    fields = {
        name: value
        for name, value in seen.fields.items()
        if name not in NOT_COMPARED and name not in NOT_NEEDED
    }
    signed = seen.fields["authorization"].partition("SignedHeaders=")[2].partition(",")[0]
    named = [name for name in signed.split(";") if name not in NOT_NEEDED]
    scope = seen.fields["authorization"].partition(",")[0]
    is_json = "x-amz-target" in seen.fields
    body = msgspec.json.decode(seen.body) if is_json else seen.body
    return seen.method, seen.target, fields, named, scope, body


def test_every_call_of_its_own_is_compared() -> None:
    assert ASKED.keys() == OWN_CALLS.keys()


@pytest.mark.slow
async def test_both_send_the_same(stub: Stub, both: tuple[AwsClient, AwsClient]) -> None:
    for (service, operation), parameters in ASKED.items():
        for aws in both:
            answer = await aws.call(service, operation, parameters)
            if "Body" in answer:
                assert await answer["Body"].read(1) == b""
        one, other = stub.seen[-2:]
        assert shown(one) == shown(other), operation
        assert "Boto" in one.fields["user-agent"], operation
        assert "Boto" not in other.fields.get("user-agent", ""), operation


async def test_parameters_that_are_not_known_go_through_boto3(stub: Stub) -> None:
    async with calling(stub.url, services=["s3"]) as http:
        await http.call("s3", "put_object", {**OBJECT, "Body": b"", "StorageClass": "GLACIER"})
    assert stub.seen[-1].fields["x-amz-storage-class"] == "GLACIER"
    assert "Boto" in stub.seen[-1].fields["user-agent"]


ROWS = {
    "Items": [{"a": {"B": "AP8="}, "BS": {"BS": ["MQ==", ""]}, "B": {"M": {"B": {"S": "B"}}}}],
    "Count": 1,
    "ScannedCount": 2,
    "LastEvaluatedKey": None,
    "Unheard": 1,
    "ConsumedCapacity": {"TableName": "B", "CapacityUnits": 0.5},
}
MESSAGES = {
    "Messages": [
        {
            "Body": TEXT,
            "Attributes": {"ApproximateReceiveCount": "1"},
            "MessageAttributes": {"a": {"DataType": "Binary", "BinaryValue": "AP8="}},
        }
    ]
}
ANSWERS: list[tuple[tuple[str, str], bytes]] = [
    (("dynamodb", "query"), summed(msgspec.json.encode(ROWS))),
    (("dynamodb", "get_item"), summed(b'{"Item":{"a":{"NULL":true},"b":{"L":[{"B":""}]}}}')),
    (("dynamodb", "get_item"), summed(b"{}")),
    (("dynamodb", "get_item"), said(b'{"Item":null}')),
    (("dynamodb", "batch_get_item"), summed(b'{"Responses":{"B":[{"a":{"S":"x"}}],"BS":[]}}')),
    (
        ("dynamodb", "batch_execute_statement"),
        summed(
            b'{"Responses":[{"Error":{"Code":"DuplicateItem","Message":"m"}},{"TableName":"t"}]}'
        ),
    ),
    (("sqs", "receive_message"), said(msgspec.json.encode(MESSAGES))),
    (("sqs", "delete_message"), said(b"")),
    (("sqs", "delete_message_batch"), said(b'{"Successful":[{"Id":"1"}],"Failed":[]}')),
    (("s3", "put_object"), said(b"", b'ETag: "1"', b"x-amz-checksum-crc32: AAAAAA==")),
    (("s3", "delete_object"), said(b"", status=204)),
    (
        ("dynamodb", "put_item"),
        summed(
            b'{"__type":"com.amazonaws.dynamodb.v20120810#ConditionalCheckFailedException",'
            b'"Item":{"a":{"B":"AP8="}},"message":"The conditional request failed"}',
            status=400,
        ),
    ),
    (
        ("dynamodb", "transact_write_items"),
        summed(
            b'{"__type":"TransactionCanceledException:http://x","Message":"why","CancellationReasons":'
            b'[{"Code":"None"},{"Code":"ConditionalCheckFailed","Item":{"B":{"B":"AP8="}}}]}',
            status=400,
        ),
    ),
    (("dynamodb", "query"), summed(b'{"__type":"ThrottlingException"}', status=400)),
    (("dynamodb", "query"), summed(b'{"other":1}', status=413)),
    (("dynamodb", "query"), said(b'{"__type":"InternalServerError","message":"m"}', status=500)),
    (("dynamodb", "query"), said(b"<html></html>", status=503)),
    (("dynamodb", "query"), said(b"", status=502)),
    (
        ("sqs", "receive_message"),
        said(
            b'{"__type":"com.amazonaws.sqs#QueueDoesNotExist","message":"m"}',
            b"x-amzn-query-error: AWS.SimpleQueueService.NonExistentQueue;Sender",
            status=400,
        ),
    ),
    (
        ("sqs", "receive_message"),
        said(b'{"__type":"a#OverLimit"}', b"x-amzn-query-error: nothing", status=400),
    ),
    (
        ("s3", "get_object"),
        said(b"<Error><Code>NoSuchKey</Code><Message>no &amp; m</Message></Error>", status=404),
    ),
    (("s3", "get_object"), said(b"<Error><Code>InvalidRange</Code></Error>", status=416)),
    (("s3", "put_object"), said(b"<Error><Code>SlowDown</Code></Error>", status=503)),
    (("s3", "put_object"), said(b"", status=500)),
    (("s3", "delete_object"), said(b"<Error><Code>AccessDenied</Code></Error>", status=403)),
]
DEEP = b'{"L":[' * 30_000
FOREIGN: list[tuple[tuple[str, str], bytes]] = [
    (("dynamodb", "query"), said(b'{"message":"\xe9"}', status=503)),
    (("dynamodb", "query"), said(b'{"message":"\xe9"}', status=400)),
    (("dynamodb", "query"), said(b'{"Items":[{"a":{"S":"\xe9"}}]}')),
    (("dynamodb", "query"), said('{"Items":[{"a":{"B":"é"}}]}'.encode())),
    (("dynamodb", "get_item"), said(b'{"Item":{"a":' + DEEP)),
    (("dynamodb", "query"), said(b'{"__type":"X","message":' + DEEP, status=500)),
    (
        ("dynamodb", "transact_write_items"),
        said(
            b'{"__type":"TransactionCanceledException","CancellationReasons":["x"]}',
            status=400,
        ),
    ),
    (("sqs", "receive_message"), said(b"[]")),
    (("sqs", "receive_message"), said(b"[]", status=400)),
    (("s3", "get_object"), said(b"12345", b'ETag: "1"').replace(b": 5", b": 5, 5")),
    (("s3", "put_object"), said(b"<Error><Code>\xff</Code>", status=403)),
]
"""Answers that are not in the form of the service."""


async def told(aws: AwsClient, asked: tuple[str, str]) -> Any:
    """Return an answer, or a refusal, as an adapter sees it."""
    try:
        answer = await aws.call(*asked, ASKED[asked])
    except AwsRefused as refused:
        seen = refused.word, refused.message, refused.status, refused.asked, refused.detail
        return *seen, refused.item, refused.reasons, refused.items, str(refused)
    except ConveyorError as error:
        return error.detail
    metadata = answer.pop("ResponseMetadata")
    return answer, metadata["HTTPStatusCode"], metadata["HTTPHeaders"]["content-length"]


async def test_both_read_the_same(stub: Stub, both: tuple[AwsClient, AwsClient]) -> None:
    for asked, answer in ANSWERS:

        async def give(_seen: Seen, answer: bytes = answer) -> bytes:
            return answer

        stub.answer = give
        boto, http = both
        assert await told(http, asked) == await told(boto, asked), (asked, answer)
        assert http.stats.calls == boto.stats.calls, (asked, answer)
        assert http.stats.throttles == boto.stats.throttles, (asked, answer)


async def test_neither_reads_what_is_foreign(stub: Stub, both: tuple[AwsClient, AwsClient]) -> None:
    for asked, answer in FOREIGN:

        async def give(_seen: Seen, answer: bytes = answer) -> bytes:
            return answer

        stub.answer = give
        for aws in both:
            words = await told(aws, asked)
            assert words == f"{asked[0]} does not answer {asked[1]}: ForeignAnswer", answer[-99:]


async def test_a_body_is_the_same(stub: Stub, both: tuple[AwsClient, AwsClient]) -> None:
    body = bytes(range(256)) * 4_096

    async def give(_seen: Seen) -> bytes:
        kind = b"Content-Type: text/x"
        return said(body, b'ETag: "1"', b"Content-Range: bytes 0-9/10", kind, status=206)

    stub.answer = give
    for aws in both:
        answer = await aws.call("s3", "get_object", OBJECT)
        assert answer["ContentLength"] == len(body)
        assert (answer["ETag"], answer["ContentType"]) == ('"1"', "text/x")
        assert answer["ContentRange"] == "bytes 0-9/10"
        pieces = []
        while piece := await answer["Body"].read(10_000):
            assert len(piece) <= 10_000
            pieces.append(piece)
        assert b"".join(pieces) == body
