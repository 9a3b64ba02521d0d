"""Remarks on an accepted list: fields that nobody reads, and bad tasks that were left out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch.models import AddTasksResponse, CreateJobInputResponse, SubmitJobResponse

from conveyor.domain.remarks import (
    CSV_FIELDS,
    INPUT_FIELDS,
    JOB_FIELDS,
    MAX_LISTED,
    MAX_WARNINGS,
    TASK_FIELDS,
)
from conveyor.http.openapi import document
from conveyor.ports.inputs import CsvSpec, InputType
from conveyor.service.submit import READ_HERE
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.large_api import rows_of, staged_rows
from tests.unit.test_http_file_submits import slot

A, B = "https://a.test/1", "https://b.test/2"
BAD = "ftp://c.test/3"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def submit(api: Api, *, padding: int = 0, **fields: Any) -> httpx.Response:
    """Submit; a padded document is checked by a child process."""
    return await api.client.post(
        "/v1/jobs",
        content=json.dumps(fields).encode() + b" " * padding,
        headers={"Content-Type": "application/json"},
    )


async def submit_lines(api: Api, *lines: str, form: InputType, **fields: Any) -> httpx.Response:
    """Submit a file of these lines."""
    content = "".join(f"{line}\n" for line in lines).encode()
    csv = CsvSpec(url=0) if form is InputType.CSV else None
    input_id = await slot(api, content, form=form, csv=csv)
    return await submit(api, file_input_id=input_id, **fields)


def told(response: httpx.Response) -> dict[str, Any]:
    """The answer to an accepted submit, which the published client must be able to read."""
    assert response.status_code in (201, 202), response.text
    SubmitJobResponse.model_validate_json(response.content)
    body: dict[str, Any] = response.json()
    return body


# -- fields that nobody reads --


def test_the_known_fields_are_those_of_the_document() -> None:
    schemas = document()["components"]["schemas"]

    assert set(schemas["SubmitJob"]["properties"]) | {"schedule"} == JOB_FIELDS
    assert set(schemas["Task"]["properties"]) == TASK_FIELDS
    assert set(schemas["CreateJobInput"]["properties"]) == INPUT_FIELDS
    assert {f"csv.{name}" for name in schemas["CsvSpec"]["properties"]} == CSV_FIELDS


@pytest.mark.parametrize("padding", [0, READ_HERE])
async def test_a_submit_names_the_nearest_field(api: Api, padding: int) -> None:
    response = await submit(
        api,
        tasks=[{"url": A, "extid": "z"}, {"url": B}, {"url": B, "extid": "y", "Meta-Data": {}}],
        max_inflite=3,
        webhook_url="https://hook.test/",
        zzz=1,
        padding=padding,
    )

    assert told(response)["warnings"] == [
        '"max_inflite" is no field of a job and was ignored: did you mean "max_inflight"?',
        '"webhook_url" is no field of a job and was ignored: did you mean "webhook"?',
        '"zzz" is no field of a job and was ignored',
        '"extid" is no field of a task and was ignored (2 times, first at index 0): did you mean '
        '"external_id"?',
        '"Meta-Data" is no field of a task and was ignored (at index 2): did you mean "metadata"?',
    ]


async def test_known_fields_give_no_warning(api: Api) -> None:
    made = await submit(api, tasks=[{"url": A, "metadata": None}], schedule=None, name=None)
    assert "warnings" not in told(made)


@pytest.mark.slow
async def test_warnings_are_few_and_short_and_repeat_no_value(api: Api) -> None:
    odd = {f"{number:03}" + "\x1b" * 5_000: "hunter2" for number in range(500)}

    warnings = told(await submit(api, tasks=[{"url": A, **odd}]))["warnings"]

    assert len(warnings) == MAX_WARNINGS + 1
    assert warnings[-1] == "more unknown fields were ignored"
    assert max(map(len, warnings)) < 200
    assert "hunter2" not in str(warnings)
    assert "\x1b" not in str(warnings)


@pytest.mark.parametrize("threshold", [2, 10_000])
async def test_a_file_of_tasks_names_the_line(tmp_path: Path, threshold: int) -> None:
    lines = [f'{{"url": "{A}"}}', "", f'{{"url": "{B}", "extid": "z"}}']
    async with open_api(tmp_path / "data", async_threshold=threshold) as api:
        response = await submit_lines(api, *lines, form=InputType.JSONL, prioriti=1)

        assert told(response)["warnings"] == [
            '"prioriti" is no field of a job and was ignored: did you mean "priority"?',
            '"extid" is no field of a task and was ignored (on line 3): did you mean '
            '"external_id"?',
        ]


async def test_an_addition_names_the_nearest_field_too(api: Api) -> None:
    job = told(await submit(api, status="open", tasks=[]))

    added = await api.client.post(
        f"/v1/jobs/{job['job_id']}/tasks", json={"tasks": [{"url": A, "URLs": 1}], "last": True}
    )

    AddTasksResponse.model_validate_json(added.content)
    assert added.json()["warnings"] == [
        '"last" is no field of an addition of tasks and was ignored',
        '"URLs" is no field of a task and was ignored (at index 0): did you mean "url"?',
    ]


async def test_a_file_input_names_the_nearest_field_too(api: Api) -> None:
    csv = {"delimeter": ";", "fields": {"url": 0}}

    made = await api.client.post("/v1/job_inputs", json={"type": "csv", "csv": csv, "scv": 1})

    CreateJobInputResponse.model_validate_json(made.content)
    assert made.json()["warnings"] == [
        '"scv" is no field of a file input and was ignored: did you mean "csv"?',
        '"csv.delimeter" is no field of a file input and was ignored: did you mean '
        '"csv.delimiter"?',
    ]


async def test_a_repeat_has_the_same_warnings(api: Api) -> None:
    body, keyed = {"tasks": [{"url": A}], "nam": "n"}, {"Idempotency-Key": "k"}
    first = await api.client.post("/v1/jobs", json=body, headers=keyed)
    again = await api.client.post("/v1/jobs", json=body, headers=keyed)

    assert "warnings" in first.json()
    assert again.content == first.content


# -- bad tasks that are left out --


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("padding", [0, READ_HERE])
@pytest.mark.parametrize("later", [False, True])
async def test_bad_tasks_are_left_out_and_told(api: Api, padding: int, later: bool) -> None:
    tasks = [{"url": A}, {"url": BAD}, {"url": B, "method": "PUT"}, {"url": B}]
    body = {"tasks": tasks, "skip_invalid": True, "async": later}

    job = told(await submit(api, **body, padding=padding))

    assert (job["accepted_tasks"], job["skipped_tasks"]) == (2, 2)
    assert job["invalid_tasks"] == [
        {"index": 1, "reason": "unsupported_scheme", "value": BAD},
        {"index": 2, "reason": "unsupported_method", "value": "PUT"},
    ]
    assert job["latest_run"]["stats"]["total"] == 2
    if later:
        assert [url for _, url in staged_rows(api, job)] == [A, B]
    else:
        assert [(row.index, row.spec.url) for row in await rows_of(api, job)] == [(0, A), (1, B)]


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    ("form", "bad", "line"),
    [
        (InputType.URLS, f"{A}, {B}", 2),
        (InputType.JSONL, "not JSON", 2),
        (InputType.CSV, BAD, 2),
    ],
)
async def test_bad_records_of_a_file_are_left_out_and_told(
    api: Api, form: InputType, bad: str, line: int
) -> None:
    good = [f'{{"url": "{url}"}}' if form is InputType.JSONL else url for url in (A, B)]

    response = await submit_lines(api, good[0], bad, "", good[1], form=form, skip_invalid=True)

    job = told(response)
    assert [(one["index"], one["line"]) for one in job["invalid_tasks"]] == [(1, line)]
    assert (job["accepted_tasks"], job["skipped_tasks"]) == (2, 1)
    assert [row.spec.url for row in await rows_of(api, job)] == [A, B]


async def test_many_left_out_are_counted_and_the_first_are_listed(api: Api) -> None:
    lines = [BAD] * 150 + [A]
    tasks = [{"url": line} for line in lines]

    for response in (
        await submit(api, tasks=tasks, skip_invalid=True),
        await submit_lines(api, *lines, form=InputType.URLS, skip_invalid=True),
    ):
        job = told(response)
        assert job["skipped_tasks"] == 150
        assert [one["index"] for one in job["invalid_tasks"]] == list(range(MAX_LISTED))
        assert [row.spec.url for row in await rows_of(api, job)] == [A]


async def test_a_list_without_one_good_task_is_refused(api: Api) -> None:
    inline = await submit(api, tasks=[{"url": BAD}], skip_invalid=True)
    filed = await submit_lines(api, BAD, form=InputType.URLS, skip_invalid=True)

    for response in (inline, filed):
        problem = problem_of(response, status=400, code="invalid_argument")
        assert [one["index"] for one in problem["invalid_tasks"]] == [0]
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}


async def test_a_fault_in_the_file_refuses_it_all_the_same(api: Api) -> None:
    response = await submit_lines(api, f'"{A}', B, form=InputType.CSV, skip_invalid=True)

    problem = problem_of(response, status=400, code="invalid_argument")
    assert "has a quote that is not closed" in problem["detail"]


async def test_an_addition_leaves_bad_tasks_out(api: Api) -> None:
    job = told(await submit(api, status="open", tasks=[{"url": A}]))
    tasks = f"/v1/jobs/{job['job_id']}/tasks"

    refused = await api.client.post(tasks, json={"tasks": [{"url": BAD}], "skip_invalid": True})
    added = await api.client.post(
        tasks, json={"tasks": [{"url": BAD}, {"url": B}], "skip_invalid": True}
    )

    problem_of(refused, status=400, code="invalid_argument")
    AddTasksResponse.model_validate_json(added.content)
    assert (added.json()["accepted_tasks"], added.json()["skipped_tasks"]) == (1, 1)
    assert added.json()["invalid_tasks"] == [
        {"index": 0, "reason": "unsupported_scheme", "value": BAD}
    ]
    assert [row.spec.url for row in await rows_of(api, job)] == [A, B]
