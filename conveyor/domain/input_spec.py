"""The document that asks for a slot for a file: the type of the file and how to read it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.remarks import CSV_FIELDS, INPUT_FIELDS, UnknownFields
from conveyor.domain.text_rules import shorten

MAX_COLUMN = 16_383
"""The highest index of a column, from 0."""
MAX_COLUMN_NAME = 1_024

_LINE_BREAKS = "\r\n\x00"
_COLUMNS = ("url", "external_id")


class InputType(StrEnum):
    """The content of a file: CSV under a spec, one JSON task a line, or one URL a line."""

    CSV = "csv"
    JSONL = "jsonl"
    URLS = "urls"


class CsvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The way to read a CSV file. `url` and `external_id` name columns, by header or by index from
    0."""

    url: int | str
    external_id: int | str | None = None
    delimiter: str = ","
    quote: str = '"'
    header: bool = False


class InputRequest(msgspec.Struct, frozen=True):
    """A slot to make; only CSV files have `csv`. `warnings` name the fields that were ignored."""

    type: InputType
    csv: CsvSpec | None = None
    warnings: tuple[str, ...] = ()


def parse_input(document: object) -> InputRequest:
    """Parse the request for a slot. Null counts as absent; unknown members are warned of, and
    refused in `csv.fields`.

    Raises ConveyorError(invalid_argument), naming the member.
    """
    if not isinstance(document, dict):
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the request body must be a JSON object")
    asked = document.get("type")
    if asked not in list(InputType):
        _refuse("type", f"must be one of {', '.join(InputType)}")
    input_type = InputType(asked)
    csv = document.get("csv")
    unknown = UnknownFields()
    unknown.note(document, INPUT_FIELDS, of="a file input", where="")
    if input_type is InputType.CSV:
        spec = _csv(csv)
        members = {f"csv.{name}": value for name, value in (csv or {}).items()}
        unknown.note(members, CSV_FIELDS, of="a file input", where="")
        return InputRequest(input_type, spec, unknown.warnings())
    if csv is not None:
        _refuse("csv", f"does not go with the type {input_type}")
    return InputRequest(input_type, warnings=unknown.warnings())


def _csv(raw: object) -> CsvSpec:
    if not isinstance(raw, dict):
        _refuse("csv", "must be an object that says how the file is read")
    delimiter = _character(raw, "delimiter", ",", refused=_LINE_BREAKS)
    quote = _character(raw, "quote", '"', refused=_LINE_BREAKS + " ")
    if quote == delimiter:
        _refuse("csv.quote", "must differ from csv.delimiter")
    header = raw.get("header")
    if header is not None and not isinstance(header, bool):
        _refuse("csv.header", "must be true or false")
    columns = _columns(raw.get("fields"), named=bool(header))
    if columns["url"] is None:
        _refuse("csv.fields.url", "must say which column holds the URLs")
    return CsvSpec(
        url=columns["url"],
        external_id=columns["external_id"],
        delimiter=delimiter,
        quote=quote,
        header=bool(header),
    )


def _character(raw: dict[str, Any], name: str, default: str, *, refused: str) -> str:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) != 1 or value in refused:
        others = "line break, NUL or space" if " " in refused else "line break or NUL"
        _refuse(f"csv.{name}", f"must be a single character, and no {others}")
    return value


def _columns(raw: object, *, named: bool) -> dict[str, int | str | None]:
    if not isinstance(raw, dict):
        _refuse("csv.fields", "must be an object that says which columns hold what")
    for name in raw:
        if name not in _COLUMNS:
            _refuse(f"csv.fields.{shorten(name)}", "only url and external_id can be read")
    return {name: _column(raw.get(name), f"csv.fields.{name}", named=named) for name in _COLUMNS}


def _column(value: object, member: str, *, named: bool) -> int | str | None:
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= MAX_COLUMN_NAME:
        if not named:
            _refuse(member, "a column can be named only where csv.header is true")
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COLUMN:
        return value
    _refuse(
        member,
        f"must be the index of a column, from 0 to {MAX_COLUMN:,}, or a name of 1 to "
        f"{MAX_COLUMN_NAME:,} characters",
    )


def _refuse(member: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{member}: {problem}")
