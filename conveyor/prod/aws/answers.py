"""Reject responses that do not come from the service that was asked.

boto3 reads any response: JSON or XML that it cannot parse, or that answers something else, becomes
an empty result. A proxy that answers in place of a service would thus make it say that nothing is
there, and Conveyor gives up or removes things that are not there. So the parsers here check each
response before boto3 reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from botocore.compat import ETree
from botocore.parsers import ResponseParserFactory

Response = Mapping[str, Any]
Parsed = dict[str, Any]
_CHECKSUM = "x-amz-crc32"
"""The header with the checksum of a body: DynamoDB sends it, some emulators do not."""
_REQUEST_IDS = ("x-amzn-requestid", "x-amz-request-id")
SERVER_ERROR = 500
_OBJECT_HEADERS = ("ContentLength", "ETag")

_json_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ForeignAnswer(Exception):
    """A response is not in the form of the service that was asked, or was damaged in transit."""


class AnswerParsers:
    """The factory of response parsers for a botocore session.

    Its parsers check a response, hand it to the parser of botocore, and raise ForeignAnswer if
    either rejects it.
    """

    def __init__(self) -> None:
        self._factory = ResponseParserFactory()
        self._made: dict[str, _Parser] = {}

    def create_parser(self, protocol_name: str) -> _Parser:
        """Return the parser of a protocol. It has no state, so all calls share it."""
        made = self._made.get(protocol_name)
        if made is None:
            parse = self._factory.create_parser(protocol_name).parse
            made = _Parser(_CHECKS.get(protocol_name, _unchecked)(parse))
            self._made[protocol_name] = made
        return made


Parse = Callable[[Response, Any], Parsed]


class _Parser:
    """A parser as botocore calls it: `response` has `status_code`, `headers` and `body`; `shape`
    describes the result, and is None if the result is empty."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse

    def parse(self, response: Response, shape: Any) -> Parsed:
        """Parse a response. Raises ForeignAnswer."""
        try:
            return self._parse(response, shape)
        except Exception as error:
            if not isinstance(response["body"], bytes):
                response["body"].close()  # a stream: nobody will read it
            if isinstance(error, ForeignAnswer):
                raise
            # botocore raises whatever broke first, of any type.
            raise ForeignAnswer(f"the response cannot be parsed: {error!r}") from error


def _unchecked(parse: Parse) -> Parse:
    return parse


def _checked_json(parse: Parse) -> Parse:
    """Check that each response holds a JSON object, unless the result is empty."""

    def check(response: Response, shape: Any) -> Parsed:
        status, body, headers = response["status_code"], response["body"], response["headers"]
        if status < SERVER_ERROR:
            # Cheaper than parsing the body, and proves as much: the service wrote it.
            is_proved = check_document(status, headers, body)
            if not is_proved and (body or status != 200 or (shape is not None and shape.members)):
                _json_object.decode(body)
        return parse(response, shape)

    return check


def _checked_xml(parse: Parse) -> Parse:
    """Check responses of S3: most of a result stands in headers, the rest in an XML document."""

    def check(response: Response, shape: Any) -> Parsed:
        status = response["status_code"]
        if status >= SERVER_ERROR:
            return parse(response, shape)
        check_request_id(response["headers"])
        parsed = parse(response, shape)
        if "Error" in parsed:
            _check_refusal(response, parsed["Error"])
        elif shape is not None and status < 300:
            _check_headers(shape, parsed)
            _check_document(shape, parsed, response["body"])
        return parsed

    return check


_CHECKS: dict[str, Callable[[Parse], Parse]] = {"json": _checked_json, "rest-xml": _checked_xml}


def check_document(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Check an answer of a service that speaks JSON; return True if a checksum proves its body.

    `headers` are looked up by names in lowercase. Raises ForeignAnswer.
    """
    check_request_id(headers)
    if 200 < status < 400:
        raise ForeignAnswer(f"the service never answers with status {status}")
    checksum = headers.get(_CHECKSUM)
    if checksum is None:
        return False
    if not body.startswith(b"{") or checksum != str(zlib.crc32(body)):
        raise ForeignAnswer("the checksum of the response does not match")
    return True


def check_request_id(headers: Mapping[str, str]) -> None:
    """Each service gives each request an id, and no proxy does."""
    if not any(name in headers for name in _REQUEST_IDS):
        raise ForeignAnswer("the response has no request id")


def _check_refusal(response: Response, error: Mapping[str, str]) -> None:
    """A refusal gives an error code; one of HEAD, which has no body, gives its status only."""
    if response["body"]:
        has_reason = error["Code"] not in ("", str(response["status_code"]))
    else:
        has_reason = response["context"]["operation_name"].startswith("Head")
    if not has_reason:
        raise ForeignAnswer("the refusal has no error code")


def _check_headers(shape: Any, parsed: Parsed) -> None:
    members = shape.members
    for name in _OBJECT_HEADERS:
        is_due = name in members and members[name].serialization.get("location") == "header"
        if is_due and name not in parsed:
            raise ForeignAnswer(f"the response has no {name}")


def _check_document(shape: Any, parsed: Parsed, body: Any) -> None:
    if "payload" in shape.serialization:
        return
    names = [name for name, one in shape.members.items() if "location" not in one.serialization]
    if names and parsed.keys().isdisjoint(names) and len(ETree.fromstring(body)):
        raise ForeignAnswer("the response holds another document")
