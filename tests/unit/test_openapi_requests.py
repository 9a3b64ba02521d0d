"""The OpenAPI document beside the server: what its schemas take is what the server takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zenrows.batch.errors import BatchErrorCode
from zenrows.batch.models import FailureReason, Reason

from conveyor.domain import params
from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTaskReason
from conveyor.domain.input_spec import parse_input
from conveyor.domain.model import ACCOUNT_FAILURES
from conveyor.domain.submission import Limits, parse_add, parse_job
from conveyor.http.openapi import operations
from tests.unit.http_api import DOCUMENT

PROPERTY = settings(database=None)
URL = "https://site.test/"
TASK = {"url": URL}
PUBLISHED_IDS = [
    "submitJob",
    "listJobs",
    "getJob",
    "deleteJob",
    "addTasks",
    "closeJob",
    "stopJob",
    "cancelJob",
    "pauseJob",
    "resumeJob",
    "rerunJob",
    "updateJobSchedule",
    "updateScheduleState",
    "getJobWebhook",
    "putJobWebhook",
    "deleteJobWebhook",
    "listJobRuns",
    "getJobRun",
    "deleteJobRun",
    "listLatestRunResults",
    "listRunResults",
    "getLatestRunTaskContent",
    "getRunTaskContent",
    "getLatestRunTaskHistory",
    "getRunTaskHistory",
    "listHMACKeys",
    "rotateHMACKey",
    "cancelHMACRotation",
    "finalizeHMACKey",
    "testWebhook",
    "createJobInput",
    "startResultsExport",
    "getResultsExport",
]
OWN_IDS = [
    "uploadJobInput",
    "previewSchedule",
    "listJobDeliveries",
    "listDeliveries",
    "streamJobRun",
    "streamRuns",
    "getRunFailures",
    "getRunHosts",
    "replayDeliveries",
    "getDelivery",
    "replayDelivery",
    "signDelivery",
    "getJobSchedule",
    "listFires",
    "downloadExport",
    "followLink",
    "health",
    "readiness",
    "metrics",
    "describe",
]
GENERIC = {ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.INTERNAL}


def test_operations_have_the_published_ids() -> None:
    assert sorted(operation.id for operation in operations()) == sorted(PUBLISHED_IDS + OWN_IDS)


def test_reasons_are_words_of_the_published_client() -> None:
    named = {reason.value for reason in Reason} | {code.value for code in BatchErrorCode} - GENERIC

    assert {reason.value for reason in InvalidTaskReason} <= named
    assert {cause.value for cause in ACCOUNT_FAILURES} == {cause.value for cause in FailureReason}
    answered = DOCUMENT["components"]["schemas"]["Run"]["properties"]["failure_reason"]["enum"]
    assert set(answered) == {cause.value for cause in FailureReason}


# -- as wide and as narrow as the server --


@cache
def _validator(name: str) -> Any:
    components = {"components": DOCUMENT["components"], "$ref": f"#/components/schemas/{name}"}
    return jsonschema_rs.validator_for(components)


def _taken(parse: Callable[[Any], object], document: object) -> bool:
    try:
        parse(document)
    except ConveyorError:
        return False
    return True


_scalars = (
    st.none() | st.booleans() | st.integers(-2, 40_000) | st.floats(0.25, 3) | st.text(max_size=3)
)
_words = st.sampled_from(
    ["true", "FALSE", "True", "1", "0", "01", "auto", "html", "PDF", "Markdown", "png", "post"]
    + ["GET", "PuT", "closed", "open", "regular", "weekly", "5", "30000", "30001", "00005", "5.0"]
    + ["a-b_c.9", "a b", "", "é", "x" * 101, "x" * 129, "A: b", "n\n", "01ARZ3NDEKTSV4RRFFQ69G5FAV"]
)
_values = st.recursive(
    _scalars | _words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_words, inner, max_size=2),
    max_leaves=4,
)
_free = sorted(params.KNOWN.keys() - {"custom_headers"})
_params = st.dictionaries(st.sampled_from([*_free, "custom_headers", "nope"]), _values, max_size=3)
# Headers as JSON text: a schema cannot look into it.
_params = _params.filter(lambda given: not isinstance(given.get("custom_headers"), str))


def _document(fields: dict[str, st.SearchStrategy[Any]], required: Any = None) -> Any:
    return st.fixed_dictionaries(required or {}, optional=fields) | _values


_tasks = _document(
    {
        "external_id": _values,
        "metadata": st.dictionaries(_words, _words) | _values,
        "method": _words | _values,
        "body": _values,
        "zenrows_params": st.none() | _params,
    },
    {"url": st.sampled_from([URL, "ftp://site.test/", "site.test", 5, None, "http:///x"])},
)
_lists = st.lists(_tasks | st.just(TASK), max_size=2) | _values
_jobs = _document(
    {
        "type": st.sampled_from(["regular", None, "weekly", 5]),
        "status": st.sampled_from(["open", "closed", None, "deleted", 5]),
        "tasks": _lists | st.just([TASK]),
        "zenrows_params": st.none() | _params,
        "external_id": _values,
        "name": _values,
        "metadata": _values,
        "max_inflight": _values,
        "priority": _values,
        "max_attempts": _values,
        "result_ttl_days": _values,
        "callback": st.fixed_dictionaries({"task_token": _values}) | _values,
        "schedule": _values,
        "file_input_id": st.sampled_from(["01ARZ3NDEKTSV4RRFFQ69G5FAV", None, 5]),
        "async": _values,
        "politeness": _document(
            {
                "per_host": st.sampled_from([1, 1_000, 1_001, 5.0, True]) | _values,
                "per_host_rate": st.sampled_from([0.01, 1_000, 0.009, 0, 1e300]) | _values,
                "robots": _values,
                "perhost": _values,
            }
        ),
    }
)
_columns = st.sampled_from([0, 16_383, 16_384, -1, None, True, "url", "", "x" * 1_025])
_inputs = _document(
    {
        "csv": _document(
            {
                "delimiter": st.sampled_from([",", ";", "\t", "", ",,", "\n", None, 5]),
                "quote": st.sampled_from(['"', "'", " ", "\r", None]),
                "header": st.sampled_from([True, False, None, 1]),
            },
            {"fields": _document({"external_id": _columns, "x": _columns}, {"url": _columns})},
        )
    },
    {"type": st.sampled_from(["csv", "jsonl", "urls", "xml", None])},
)


@pytest.mark.slow
@PROPERTY
@given(document=_jobs)
def test_a_submit(document: object) -> None:
    agrees("SubmitJob", lambda given: parse_job(given, Limits()), document)


@pytest.mark.slow
@PROPERTY
@given(document=_document({"tasks": _lists, "last_batch": _values}))
def test_an_add(document: object) -> None:
    agrees("AddTasks", lambda given: parse_add(given, Limits(), {}), document)


@pytest.mark.slow
@PROPERTY
@given(task=_tasks)
def test_a_task(task: object) -> None:
    agrees("AddTasks", lambda given: parse_add(given, Limits(), {}), {"tasks": [task]})


@pytest.mark.slow
@PROPERTY
@given(given_params=_params)
def test_params(given_params: object) -> None:
    document = {"status": "open", "zenrows_params": given_params}
    agrees("SubmitJob", lambda given: parse_job(given, Limits()), document)


@pytest.mark.slow
@PROPERTY
@given(document=_inputs)
def test_a_file_input(document: object) -> None:
    agrees("CreateJobInput", parse_input, document)


def agrees(schema: str, parse: Callable[[Any], object], document: object) -> None:
    """Check that the schema and the server give the same verdict on a document."""
    assert _validator(schema).is_valid(document) == _taken(parse, document)


@pytest.mark.parametrize("name", ["SubmitJob", "AddTasks", "CreateJobInput"])
def test_both_verdicts_are_met(name: str) -> None:
    good = {"type": "urls"} if name == "CreateJobInput" else {"tasks": [TASK]}

    assert _validator(name).is_valid(good)
    assert not _validator(name).is_valid({**good, "type": "weekly", "tasks": 5})


SCHEDULED = {"type": "scheduled", "schedule": {"rate": {"every": 1, "unit": "day"}}}


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({}, True),
        ({"status": None, "callback": None}, True),
        ({"schedule": {"at": "2027-01-01T09:00", "timezone": "UTC", "overlap": "wait"}}, True),
        ({"tasks": None, "file_input_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}, True),
        ({"file_input_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}, False),
        ({"tasks": []}, False),
        ({"schedule": None}, False),
        ({"schedule": "daily"}, False),
        ({"schedule": {"rate": {"every": 0, "unit": "day"}}}, False),
        ({"schedule": {"rate": {"every": 1, "unit": "day"}, "overlap": "both"}}, False),
        ({"status": "open"}, False),
        ({"callback": {"task_token": "t"}}, False),
    ],
    ids=repr,
)
def test_a_scheduled_submit(fields: dict[str, Any], is_right: bool) -> None:
    document = {"tasks": [TASK], **SCHEDULED, **fields}

    assert _taken(lambda given: parse_job(given, Limits()), document) is is_right
    assert _validator("SubmitJob").is_valid(document) is is_right
