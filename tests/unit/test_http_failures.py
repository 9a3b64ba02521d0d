"""Failure groups over HTTP: the failed tasks of a run by kind, their rows, and their rerun."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch.models import RerunJobResponse

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import MOST_GROUPS, OTHER_GROUP
from conveyor.domain.model import Problem
from conveyor.service.failures import known_groups
from tests.unit.http_api import PAGE, Api, open_api, problem_of

KINDS = [
    Problem("RESP001", "No content", 422, "urn:a"),
    Problem("timeout", "Timeout", 504, "urn:b", "no answer within 30 s"),
    Problem("blocked", "Blocked", 403, "urn:c", "the target refused"),
    Problem("blocked", "Blocked", 403, "urn:c", "the target wants a captcha"),
    Problem("bad_target", "Not found", 404, "urn:d", "the target answered 404"),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def failed_job(api: Api, *kinds: Problem, successes: int = 0) -> dict[str, Any]:
    """Make a job whose first tasks fail, one of each kind, and whose others succeed."""
    job = await api.submit(len(kinds) + successes)
    run_id = job["latest_run"]["run_id"]
    for task in await api.tasks_of(run_id):
        if task.index < len(kinds):
            await api.fail(run_id, task.task_id, kinds[task.index])
        else:
            await api.succeed(job["job_id"], run_id, task.task_id)
    return job


async def failures(api: Api, job: dict[str, Any], *, run_id: str | None = None) -> dict[str, Any]:
    """Read the failure groups of a run, by default of the first."""
    run_id = run_id or job["latest_run"]["run_id"]
    answer = await api.client.get(f"/v1/jobs/{job['job_id']}/runs/{run_id}/failures")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert sum(group["count"] for group in body["groups"]) == body["failed"]
    return body


async def rows(api: Api, job: dict[str, Any], **params: Any) -> list[dict[str, Any]]:
    """Read all rows of the latest run, page by page."""
    found: list[dict[str, Any]] = []
    while True:
        answer = await api.client.get(f"/v1/jobs/{job['job_id']}/results", params=params)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += page["results"]
        if "next_cursor" not in page:
            return found
        params["cursor"] = page["next_cursor"]


async def rerun(api: Api, job: dict[str, Any], **params: str) -> httpx.Response:
    return await api.client.post(f"/v1/jobs/{job['job_id']}/rerun", params=params)


async def test_failed_tasks_are_shown_by_kind_the_largest_group_first(api: Api) -> None:
    job = await failed_job(api, KINDS[0], KINDS[1], KINDS[1], KINDS[1], KINDS[2], KINDS[2])
    body = await failures(api, job)

    assert (body["run_id"], body["failed"]) == (job["latest_run"]["run_id"], 6)
    assert [group["count"] for group in body["groups"]] == [3, 2, 1]
    first = body["groups"][0]
    assert (first["reason"], first["code"], first["status"]) == ("blocked", "timeout", 504)
    assert first["detail"] == "no answer within 30 s"
    assert first["first_at"] <= first["last_at"]
    listed = await rows(api, job, status="failed")
    of_group = [row["task_id"] for row in listed if row["failure_group"] == first["group"]]
    assert sorted(first["task_ids"]) == sorted(of_group)


async def test_a_run_without_failures_has_no_group(api: Api) -> None:
    job = await failed_job(api, successes=1)
    assert (await failures(api, job))["groups"] == []
    assert "failure_group" not in (await rows(api, job))[0]


async def test_details_that_differ_by_numbers_and_addresses_alone_are_one_group(api: Api) -> None:
    kinds = [
        Problem("timeout", "Timeout", 504, "urn:b", f"no answer of http://{n}.test/ in {n} s")
        for n in range(3)
    ]
    body = await failures(api, await failed_job(api, *kinds))
    assert [group["count"] for group in body["groups"]] == [3]


async def test_what_is_of_too_many_kinds_is_one_more_group(api: Api) -> None:
    kinds = [Problem(f"odd_{n}", "Odd", 500, "urn:o") for n in range(MOST_GROUPS + 3)]
    kinds = [*kinds[:1], *kinds]
    job = await failed_job(api, *kinds)
    body = await failures(api, job)

    assert len(body["groups"]) == MOST_GROUPS + 1
    assert body["groups"][0] == {"group": OTHER_GROUP, "count": 3}
    assert [group["count"] for group in body["groups"][1:3]] == [2, 1]
    others = await rows(api, job, status="failed", group=OTHER_GROUP)
    assert len(others) == 3
    answer = await rerun(api, job, status="failed", group=OTHER_GROUP)
    assert (answer.status_code, answer.json()["retried_tasks"]) == (201, 3)


async def test_results_show_the_rows_of_some_groups_page_by_page(api: Api) -> None:
    job = await failed_job(api, *KINDS, *KINDS, *KINDS, successes=3)
    groups = [group["group"] for group in (await failures(api, job))["groups"]]

    found = await rows(api, job, status="failed", group=f"{groups[1]},{groups[3]}", limit=2)

    assert len(found) == 6
    assert {row["failure_group"] for row in found} == {groups[1], groups[3]}
    assert found == sorted(found, key=lambda row: row["task_id"])


async def test_a_cursor_of_another_group_is_refused(api: Api) -> None:
    job = await failed_job(api, *KINDS, *KINDS)
    groups = [group["group"] for group in (await failures(api, job))["groups"]]
    path = f"/v1/jobs/{job['job_id']}/results"
    page = await api.client.get(path, params={"status": "failed", "group": groups[0], "limit": 1})
    cursor = page.json()["next_cursor"]

    for other in ({"group": groups[1]}, {"group": f"{groups[0]},{groups[1]}"}, {}):
        answer = await api.client.get(path, params={"status": "failed", "cursor": cursor, **other})
        problem_of(answer, status=400, code="invalid_argument")
    again = {"status": "failed", "group": f" {groups[0]} ", "cursor": cursor}
    assert (await api.client.get(path, params=again)).status_code == 200


async def test_a_rerun_of_two_groups_of_five_takes_over_all_other_ended_rows(api: Api) -> None:
    job = await failed_job(api, *KINDS, *KINDS[:2], successes=4)
    body = await failures(api, job)
    two = [group for group in body["groups"] if group["code"] in ("timeout", "bad_target")]
    assert [group["count"] for group in two] == [2, 1]

    response = await rerun(
        api, job, status="failed", group=",".join(group["group"] for group in two)
    )

    assert response.status_code == 201
    answer = RerunJobResponse.model_validate(response.json())
    assert (answer.retried_tasks, answer.inherited_tasks) == (3, 8)
    assert response.json()["latest_run"]["stats"]["inherited"] == 8
    for row in await rows(api, job, status="successful"):
        body_path = f"/v1/jobs/{job['job_id']}/tasks/{row['task_id']}/content"
        assert (await api.client.get(body_path)).content == PAGE
    # The gateway is well by now.
    second = answer.latest_run.run_id
    for task in await api.tasks_of(second):
        if task.status == "pending":
            await api.succeed(job["job_id"], second, task.task_id)
    after = await failures(api, job, run_id=second)
    kept = {group["group"] for group in body["groups"]} - {group["group"] for group in two}
    assert {group["group"] for group in after["groups"]} == kept
    assert after["failed"] == 4


async def test_an_unknown_group_matches_no_task(api: Api) -> None:
    job = await failed_job(api, KINDS[0], successes=1)
    known = (await failures(api, job))["groups"][0]["group"]
    path = f"/v1/jobs/{job['job_id']}/results"

    for group in ("aaaaaaaaaaaa", "no such group", OTHER_GROUP, f"{known},aaaaaaaaaaaa"):
        refused = await rerun(api, job, status="failed", group=group)
        problem_of(refused, status=409, code="no_matching_tasks")
        listed = await api.client.get(path, params={"status": "failed", "group": group})
        problem_of(listed, status=409, code="no_matching_tasks")
    assert (await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).json()["runs"][1:] == []


async def test_a_group_goes_with_the_status_failed_alone(api: Api) -> None:
    job = await failed_job(api, KINDS[0], successes=1)
    known = (await failures(api, job))["groups"][0]["group"]
    path = f"/v1/jobs/{job['job_id']}/results"

    for status in ({}, {"status": "failed,pending"}, {"status": "successful"}):
        refused = await rerun(api, job, group=known, **status)
        problem_of(refused, status=400, code="invalid_argument")
    for status in ({}, {"status": "all"}, {"status": "processing"}):
        listed = await api.client.get(path, params={"group": known, **status})
        problem_of(listed, status=400, code="invalid_argument")
    for group in ("", ",", f"{known},", ",".join(["x" * 12 + str(n) for n in range(300)])):
        refused = await rerun(api, job, status="failed", group=group)
        problem_of(refused, status=400, code="invalid_argument")


async def test_the_failures_of_a_run_are_its_owners_alone(api: Api) -> None:
    job = await failed_job(api, KINDS[0])
    run_id = job["latest_run"]["run_id"]
    path = f"/v1/jobs/{job['job_id']}/runs/{run_id}/failures"

    problem_of(await api.foreign.get(path), status=404, code="not_found")
    problem_of(await api.bare.get(path), status=401, code="unauthenticated")
    missing = path.replace(run_id, "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    problem_of(await api.client.get(missing), status=404, code="not_found")
    known = (await failures(api, job))["groups"][0]["group"]
    foreign = await api.foreign.post(
        f"/v1/jobs/{job['job_id']}/rerun", params={"status": "failed", "group": known}
    )
    problem_of(foreign, status=404, code="not_found")


async def test_a_run_shows_the_shape_of_its_results(api: Api) -> None:
    job = await failed_job(api, KINDS[0], successes=2)
    run = await api.client.get(f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}")
    stats = run.json()["stats"]

    assert "inherited" not in stats
    sizes = {one["least"]: one["count"] for one in stats["shape"]["sizes"]}
    assert len(sizes) == 8
    assert sizes[1] == 2
    assert sum(sizes.values()) == 2
    assert stats["shape"]["types"] == {"text/html": 2}
    assert "shape" not in job["latest_run"]["stats"]


async def test_groups_of_a_run_that_went_meanwhile_are_not_found(api: Api) -> None:
    """A purge may come between the look at a run and that at its groups."""
    with pytest.raises(ConveyorError) as caught:
        await known_groups(api.binding.tasks, "01ARZ3NDEKTSV4RRFFQ69G5FAV", frozenset({"g"}))
    assert caught.value.code is ErrorCode.NOT_FOUND
