"""The calls of AWS that this process writes and reads for itself: one table.

Each goes out as boto3 would send it, and its answer is read as boto3 would read it. A call with
parameters that are not known here goes through boto3.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypedDict
from urllib.parse import quote
from zlib import crc32

import msgspec

from conveyor.prod.aws.answers import (
    SERVER_ERROR,
    AnswerParsers,
    ForeignAnswer,
    check_document,
    check_request_id,
)
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.aws.carriers import read_refusal
from conveyor.prod.aws.signer import body_digest

_EMPTY = body_digest(b"")
_JSON = "application/x-amz-json-1.0"
_Item = dict[str, dict[str, Any]]


class _Rows(TypedDict, total=False):
    """The answers of DynamoDB."""

    Item: _Item | None
    Attributes: _Item | None
    Items: list[_Item] | None
    Count: int | None
    ScannedCount: int | None
    LastEvaluatedKey: _Item | None
    NextToken: str | None
    Responses: dict[str, list[_Item]] | list[dict[str, Any]] | None
    UnprocessedKeys: dict[str, dict[str, Any]] | None
    UnprocessedItems: dict[str, list[dict[str, Any]]] | None
    ConsumedCapacity: dict[str, Any] | list[dict[str, Any]] | None
    ItemCollectionMetrics: dict[str, Any] | None


class _Messages(TypedDict, total=False):
    """The answers of SQS."""

    Messages: list[dict[str, Any]] | None
    Attributes: dict[str, str] | None
    Successful: list[dict[str, Any]] | None
    Failed: list[dict[str, Any]] | None
    MessageId: str | None
    MD5OfMessageBody: str | None
    MD5OfMessageAttributes: str | None
    SequenceNumber: str | None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request below a place; headers are by names in lowercase, the digest is of the body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    digest: str


class Moved(Exception):
    """A bucket lies in another region."""


class JsonCall:
    """A call of a service that speaks JSON."""

    streams = False

    def __init__(self, service: str, operation: str, *, is_void: bool = False) -> None:
        prefix = "DynamoDB_20120810" if service == "dynamodb" else "AmazonSQS"
        name = "".join(word.capitalize() for word in operation.split("_"))
        self.asked = (service, operation)
        self._headers = {"content-type": _JSON, "x-amz-target": f"{prefix}.{name}"}
        if service == "sqs":
            self._headers["x-amzn-query-mode"] = "true"
        self._is_void = is_void
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            _Rows if service == "dynamodb" else _Messages
        )

    def takes(self, parameters: Parameters) -> bool:
        """Return True: parameters go out as they are."""
        return True

    def size(self, parameters: Parameters) -> int:
        """Return 0: documents are small."""
        return 0

    def write(self, parameters: Parameters) -> HttpRequest:
        """Write a call."""
        body = _encode(parameters)
        return HttpRequest("POST", "", self._headers, body, body_digest(body))

    def read(self, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
        """Read an answer. Raises AwsRefused; any error if it is none of the service."""
        if status >= SERVER_ERROR:
            raise self._refusal(status, headers, _document(body))
        check_document(status, headers, body)
        if status != HTTPStatus.OK:
            raise self._refusal(status, headers, _refusals.decode(body))
        answer: Answer = {}
        if body or not self._is_void:
            answer = self._decoder.decode(body)
            if None in answer.values():
                answer = {name: value for name, value in answer.items() if value is not None}
            if b'"B":' in body or b'"BS":' in body or b'"BinaryValue":' in body:
                _decode_binary(answer)
        return answer

    def _refusal(
        self, status: int, headers: Mapping[str, str], said: Mapping[str, Any]
    ) -> AwsRefused:
        word = str(said.get("__type") or status).partition(":")[0].rpartition("#")[2]
        name, _, fault = headers.get("x-amzn-query-error", "").partition(";")
        if name and fault:
            word = name
        message = said.get("message", said.get("Message", ""))
        response = {**said, "Error": {"Code": word, "Message": message}}
        _decode_binary(response)
        return read_refusal(response, status, self.asked)


_encode = msgspec.json.Encoder().encode
_refusals = msgspec.json.Decoder(dict[str, Any])


def _document(body: bytes) -> dict[str, Any]:
    """Return what a server says that is out of order, if it says it in the form of the service."""
    try:
        return _refusals.decode(body)
    except msgspec.DecodeError:
        return {}


def _decode_binary(value: Any) -> None:
    """Decode the binary values in an answer, in place. Names of attributes and tables may look like
    the types of such values, but what they name is no text."""
    if isinstance(value, list):
        for one in value:
            _decode_binary(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name in ("B", "BinaryValue") and isinstance(one, str):
                value[name] = b64decode(one, validate=True)
            elif name == "BS" and isinstance(one, list) and isinstance(next(iter(one), None), str):
                value[name] = [b64decode(part, validate=True) for part in one]
            else:
                _decode_binary(one)


class ObjectCall:
    """A call of S3 about one object. `fields` are the parameters that become headers."""

    def __init__(
        self,
        operation: str,
        method: str,
        *,
        fields: Mapping[str, str],
        due: tuple[str, ...] = (),
        streams: bool = False,
    ) -> None:
        self.streams = streams
        self.asked = ("s3", operation)
        self._method = method
        self._fields = fields
        self._known = {"Bucket", "Key", "Body", *fields}
        self._due = due

    def takes(self, parameters: Parameters) -> bool:
        """Return True if all parameters are known here, and the body lies in memory."""
        if not parameters.keys() <= self._known:
            return False
        return isinstance(parameters.get("Body", b""), bytes)

    def size(self, parameters: Parameters) -> int:
        """Return the bytes of the body that a call sends."""
        return len(parameters.get("Body", b""))

    def write(self, parameters: Parameters) -> HttpRequest:
        """Write a call; of a large body this takes a while."""
        headers = {
            field: " ".join(str(parameters[name]).split())
            for name, field in self._fields.items()
            if name in parameters
        }
        path = "/" + quote(parameters["Key"], safe="/~")
        body = digest = None
        if self._method == "PUT":
            body = parameters.get("Body", b"")
            # S3 compares it, keeps it, and sends it to readers.
            headers["x-amz-checksum-crc32"] = b64encode(crc32(body).to_bytes(4, "big")).decode()
            digest = body_digest(body)
        headers["x-amz-content-sha256"] = digest or _EMPTY
        return HttpRequest(self._method, path, headers, body, digest or _EMPTY)

    def read(self, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
        """Read an answer, whose body is empty if it is streamed. Raises AwsRefused; Moved; any
        error if it is none of the service."""
        if status >= 300:
            raise self._refusal(status, headers, body)
        check_request_id(headers)
        answer: Answer = {
            name: headers[field] for name, field in _OBJECT_FIELDS.items() if field in headers
        }
        if "content-length" in headers and self.streams:
            answer["ContentLength"] = int(headers["content-length"])
        for name in self._due:
            if name not in answer:
                raise ForeignAnswer(f"the response has no {name}")
        return answer

    def _refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> AwsRefused:
        if status in (HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.TEMPORARY_REDIRECT):
            check_request_id(headers)
            raise Moved
        name = "".join(word.capitalize() for word in self.asked[1].split("_"))
        context = {"operation_name": name}
        response = {"status_code": status, "headers": headers, "body": body, "context": context}
        refused = read_refusal(_refusal_parser.parse(response, None), status, self.asked)
        if refused.word == "AuthorizationHeaderMalformed":
            raise Moved
        return refused


_OBJECT_FIELDS = {
    "ETag": "etag",
    "ContentType": "content-type",
    "ContentRange": "content-range",
    "ChecksumCRC32": "x-amz-checksum-crc32",
    "VersionId": "x-amz-version-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
}
_refusal_parser = AnswerParsers().create_parser("rest-xml")

OwnCall = JsonCall | ObjectCall


def read_answer(call: OwnCall, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """Read the answer to a call. Raises AwsRefused; Moved; ForeignAnswer if it is none of the
    service."""
    try:
        return call.read(status, headers, body)
    except (AwsRefused, ForeignAnswer, Moved):
        raise
    except Exception as error:
        # Whatever broke first, of any type: text that is none, nesting without end, a list.
        raise ForeignAnswer(f"the response cannot be parsed: {type(error).__name__}") from None


_OF_DYNAMODB = (
    "get_item",
    "put_item",
    "update_item",
    "delete_item",
    "query",
    "batch_get_item",
    "batch_write_item",
    "transact_write_items",
    "execute_statement",
    "batch_execute_statement",
)
_OF_SQS = (
    "receive_message",
    "send_message",
    "send_message_batch",
    "delete_message_batch",
    "change_message_visibility_batch",
    "get_queue_attributes",
)
_VOID = ("delete_message", "change_message_visibility")
OWN_CALLS: Mapping[tuple[str, str], OwnCall] = {
    **{("dynamodb", name): JsonCall("dynamodb", name) for name in _OF_DYNAMODB},
    **{("sqs", name): JsonCall("sqs", name) for name in _OF_SQS},
    **{("sqs", name): JsonCall("sqs", name, is_void=True) for name in _VOID},
    ("s3", "put_object"): ObjectCall(
        "put_object", "PUT", fields={"ContentType": "content-type"}, due=("ETag",)
    ),
    ("s3", "get_object"): ObjectCall(
        "get_object",
        "GET",
        fields={"Range": "range", "IfMatch": "if-match"},
        due=("ContentLength", "ETag"),
        streams=True,
    ),
    ("s3", "delete_object"): ObjectCall("delete_object", "DELETE", fields={}),
}
"""The calls that do not go through boto3, by service and operation."""
