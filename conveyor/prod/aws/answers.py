"""Answers that are not the service's count as none.

boto3 takes whatever comes for an answer: JSON or XML that it cannot read, or that is something else
than was asked for, is one that holds nothing. So a proxy that speaks for a service would make it
say that nothing is there, and what is not there is given up or removed. Here each answer is looked
at before boto3 reads it.
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
"""The header in which DynamoDB tells the checksum of a body; some that stand in for it do not."""
_REQUEST_IDS = ("x-amzn-requestid", "x-amz-request-id")
_OUT_OF_ORDER = 500
_TOLD_OF_AN_OBJECT = ("ContentLength", "ETag")

_json_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ForeignAnswer(Exception):
    """An answer is not in the form of the service that was asked, or was damaged on its way."""


class AnswerParsers:
    """What a session of botocore makes its parsers of answers by: its own, which raise
    ForeignAnswer for what they cannot take, and look first at whose answer it is."""

    def __init__(self) -> None:
        self._factory = ResponseParserFactory()
        self._made: dict[str, _Parser] = {}

    def create_parser(self, protocol_name: str) -> _Parser:
        """The parser of a protocol, the same for all calls: it keeps nothing of them."""
        made = self._made.get(protocol_name)
        if made is None:
            parse = self._factory.create_parser(protocol_name).parse
            made = _Parser(_LOOKS.get(protocol_name, _any)(parse))
            self._made[protocol_name] = made
        return made


Parse = Callable[[Response, Any], Parsed]


class _Parser:
    """As botocore calls one: `response` has `status_code`, `headers` and `body`; `shape` is that
    of the answer, None where there is nothing in it."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse

    def parse(self, response: Response, shape: Any) -> Parsed:
        """The answer. Raises ForeignAnswer."""
        try:
            return self._parse(response, shape)
        except Exception as error:
            if not isinstance(response["body"], bytes):
                response["body"].close()  # a stream that nobody gets to read
            if isinstance(error, ForeignAnswer):
                raise
            # What botocore raises for an answer in another form is whatever broke first.
            raise ForeignAnswer(f"it cannot be read: {error!r}") from error


def _any(parse: Parse) -> Parse:
    return parse


def _json(parse: Parse) -> Parse:
    """A document in each answer, but where there is nothing to say."""

    def look(response: Response, shape: Any) -> Parsed:
        status, body, headers = response["status_code"], response["body"], response["headers"]
        if status < _OUT_OF_ORDER:
            _check_request_id(headers)
            if 200 < status < 400:
                raise ForeignAnswer(f"no answer has the status {status}")
            told = headers.get(_CHECKSUM)
            if told is not None:
                # Cheaper than to read it, and says as much: it is what the service wrote.
                if not body.startswith(b"{") or told != str(zlib.crc32(body)):
                    raise ForeignAnswer("its checksum is another")
            elif body or status != 200 or (shape is not None and shape.members):
                _json_object.decode(body)
        return parse(response, shape)

    return look


def _xml(parse: Parse) -> Parse:
    """S3: most of what it says is told in headers, and the rest in a document."""

    def look(response: Response, shape: Any) -> Parsed:
        status = response["status_code"]
        if status >= _OUT_OF_ORDER:
            return parse(response, shape)
        _check_request_id(response["headers"])
        parsed = parse(response, shape)
        if "Error" in parsed:
            _check_refusal(response, parsed["Error"])
        elif shape is not None and status < 300:
            _check_headers(shape, parsed)
            _check_document(shape, parsed, response["body"])
        return parsed

    return look


_LOOKS: dict[str, Callable[[Parse], Parse]] = {"json": _json, "rest-xml": _xml}


def _check_request_id(headers: Mapping[str, str]) -> None:
    """Every service gives each request an id, and nobody on the way does."""
    if not any(name in headers for name in _REQUEST_IDS):
        raise ForeignAnswer("it names no request")


def _check_refusal(response: Response, error: Mapping[str, str]) -> None:
    """A refusal says why; one of HEAD by its status alone, which has no body."""
    if response["body"]:
        has_reason = error["Code"] not in ("", str(response["status_code"]))
    else:
        has_reason = response["context"]["operation_name"].startswith("Head")
    if not has_reason:
        raise ForeignAnswer("it refuses, and says not why")


def _check_headers(shape: Any, parsed: Parsed) -> None:
    members = shape.members
    for name in _TOLD_OF_AN_OBJECT:
        is_told = name in members and members[name].serialization.get("location") == "header"
        if is_told and name not in parsed:
            raise ForeignAnswer(f"it has no {name}")


def _check_document(shape: Any, parsed: Parsed, body: Any) -> None:
    if "payload" in shape.serialization:
        return
    names = [name for name, one in shape.members.items() if "location" not in one.serialization]
    if names and parsed.keys().isdisjoint(names) and len(ETree.fromstring(body)):
        raise ForeignAnswer("its document is another")
