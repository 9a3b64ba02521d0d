"""Requests for a slot for a file, and the same requests in the public client's models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from zenrows.batch.models import CreateJobInputRequest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.input_spec import (
    MAX_COLUMN,
    MAX_COLUMN_NAME,
    CsvSpec,
    InputRequest,
    InputType,
    parse_input,
)


def csv(**members: Any) -> dict[str, Any]:
    """A document for a CSV file whose URLs are in the first column, changed by `members`."""
    return {"type": "csv", "csv": {"fields": {"url": 0}, **members}}


def refusal(document: object) -> str:
    """The sentence with which a document is refused."""
    with pytest.raises(ConveyorError) as refused:
        parse_input(document)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    return refused.value.detail


def test_a_csv_file_by_default() -> None:
    assert parse_input(csv()) == InputRequest(InputType.CSV, CsvSpec(url=0))
    assert CsvSpec(url=0) == CsvSpec(
        url=0, external_id=None, delimiter=",", quote='"', header=False
    )


def test_every_member_of_a_csv_file() -> None:
    fields = {"url": "address", "external_id": MAX_COLUMN}
    document = csv(delimiter="\t", quote="'", header=True, fields=fields)

    assert parse_input(document).csv == CsvSpec(
        url="address", external_id=MAX_COLUMN, delimiter="\t", quote="'", header=True
    )


def test_null_is_absent_and_unknown_members_are_ignored() -> None:
    document = csv(
        delimiter=None, quote=None, header=None, fields={"url": 0, "external_id": None}, later=1
    )

    found = parse_input({**document, "another": []})

    assert msgspec.structs.replace(found, warnings=()) == parse_input(csv())
    assert found.warnings == (
        '"another" is no field of a file input and was ignored',
        '"csv.later" is no field of a file input and was ignored',
    )


@pytest.mark.parametrize("kind", ["jsonl", "urls"])
def test_the_other_types_take_no_spec(kind: str) -> None:
    assert parse_input({"type": kind}) == InputRequest(InputType(kind))
    assert parse_input({"type": kind, "csv": None}) == InputRequest(InputType(kind))
    assert refusal({"type": kind, **csv(), **{"type": kind}}).startswith("csv: ")


@pytest.mark.parametrize("delimiter", [" ", "|", ";", "\x1f", "é", "😀"])
def test_any_single_character_delimits(delimiter: str) -> None:
    spec = parse_input(csv(delimiter=delimiter)).csv

    assert spec is not None
    assert spec.delimiter == delimiter


@pytest.mark.parametrize("document", [None, [], "csv", 1])
def test_a_document_is_an_object(document: object) -> None:
    assert refusal(document) == "the request body must be a JSON object"


@pytest.mark.parametrize("kind", [None, "", "CSV", "xml", 1, True, ["csv"], {"csv": 1}])
def test_an_unknown_type_is_refused(kind: object) -> None:
    assert refusal({"type": kind}) == "type: must be one of csv, jsonl, urls"
    assert refusal({}) == "type: must be one of csv, jsonl, urls"


BAD_CHARACTERS: list[Any] = ["", ",,", "\r", "\n", "\x00", "\r\n", 1, True, [","], {}]
BAD_FIELDS: list[Any] = [None, [], "url", 0]
BAD_FLAGS: list[Any] = [0, 1, "true", [], {}]
BAD_COLUMNS: list[Any] = [-1, MAX_COLUMN + 1, 10**400, 0.0, True, False, "", [], {}, [0]]


@pytest.mark.parametrize(
    ("members", "named"),
    [
        *(({"delimiter": value}, "csv.delimiter") for value in BAD_CHARACTERS),
        *(({"quote": value}, "csv.quote") for value in [*BAD_CHARACTERS, " "]),
        ({"quote": ","}, "csv.quote"),
        ({"delimiter": '"'}, "csv.quote"),
        ({"delimiter": "|", "quote": "|"}, "csv.quote"),
        *(({"header": value}, "csv.header") for value in BAD_FLAGS),
        *(({"fields": value}, "csv.fields") for value in BAD_FIELDS),
        ({"fields": {}}, "csv.fields.url"),
        ({"fields": {"url": None, "external_id": 1}}, "csv.fields.url"),
        ({"fields": {"url": 0, "metadata": 1}}, "csv.fields.metadata"),
        ({"fields": {"url": 0, "Url": None}}, "csv.fields.Url"),
        ({"fields": {"url": "address"}}, "csv.fields.url"),
        ({"fields": {"url": 0, "external_id": "id"}, "header": False}, "csv.fields.external_id"),
        *(({"fields": {"url": value}, "header": True}, "csv.fields.url") for value in BAD_COLUMNS),
        ({"fields": {"url": "x" * (MAX_COLUMN_NAME + 1)}, "header": True}, "csv.fields.url"),
    ],
)
def test_what_is_wrong_is_named(members: dict[str, Any], named: str) -> None:
    assert refusal(csv(**members)).startswith(f"{named}: ")


@pytest.mark.parametrize("spec", [None, [], "a,b", 1])
def test_a_csv_file_needs_a_spec(spec: object) -> None:
    assert refusal({"type": "csv", "csv": spec}).startswith("csv: ")
    assert refusal({"type": "csv"}).startswith("csv: ")


def test_a_long_name_is_not_repeated_at_length() -> None:
    detail = refusal(csv(fields={"url": 0, "x\n" * 10_000: 1}))

    assert len(detail) < 250
    assert "\n" not in detail


CHARACTERS = st.none() | st.sampled_from([",", ";", '"', " ", "\t", "", "ab", "\n"])
COLUMNS = st.none() | st.integers(-1, 3) | st.sampled_from(["", "a", "b"])
DOCUMENTS = st.fixed_dictionaries(
    {
        "type": st.just("csv"),
        "csv": st.fixed_dictionaries(
            {
                "delimiter": CHARACTERS,
                "quote": CHARACTERS,
                "header": st.none() | st.booleans(),
                "fields": st.dictionaries(st.sampled_from(["url", "external_id", "x"]), COLUMNS),
            }
        ),
    }
)


@settings(database=None)
@given(DOCUMENTS)
def test_whatever_is_accepted_is_a_request_of_the_public_client(document: dict[str, Any]) -> None:
    try:
        CreateJobInputRequest.model_validate(document)
    except ValidationError:
        with pytest.raises(ConveyorError):
            parse_input(document)
        return
    # What its models let through and we do not are the rules that no field can tell by itself.
    spec = document["csv"]
    delimiter, quote = spec["delimiter"] or ",", spec["quote"] or '"'
    named = any(isinstance(column, str) for column in spec["fields"].values())
    sound = delimiter != quote and "\n" not in (delimiter, quote) and quote != " "
    if sound and (spec["header"] or not named):
        assert parse_input(document).csv is not None
    else:
        refusal(document)
