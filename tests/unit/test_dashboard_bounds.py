"""Texts of callers and targets on pages: a page stays small and says the truth."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES, OTHER_GROUP
from conveyor.domain.model import Problem
from conveyor.domain.result_shape import LONGEST_TYPE, MOST_TYPES
from conveyor.domain.run_waits import LaneReport, RunWaitReason, WorkerReport
from conveyor.http.pages.routes import GROUPS_SHOWN, MOST_PARAMETER
from conveyor.http.pages.session import SessionOptions
from conveyor.http.pages.viewer import Viewer
from conveyor.http.pages.views import ATTEMPTS_SHOWN, Screen, render
from conveyor.service.overview import HOSTS_SHOWN, PAGE, RUNS_SHOWN
from conveyor.service.page_schemas import RunPage, TaskDetails
from conveyor.service.schemas import FailureGroupBody, HostBody
from tests.unit.http_api import KEY, ORIGIN, Api, open_api

HTML_BOUND = 120 * 1_024
FAILING = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", sessions=SessionOptions(on_loopback=True)) as opened:
        yield opened


async def look(api: Api, path: str, **query: str) -> str:
    """Fetch a page, which is small."""
    answer = await api.bare.get(path, params=query or None)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) <= HTML_BOUND, (path, len(answer.content))
    return answer.text


async def fill(api: Api, text: str) -> dict[str, Any]:
    """Store as much of a text as callers, targets and workers can, on every page."""
    fields: dict[str, Any] = {"name": text * 100, "external_id": "x" * 128}
    fields["webhook"] = {"url": "http://127.0.0.1:9/", "events": ["run.completed"]}
    fields["metadata"] = {f"{n:02}{text * 126}": text * 1_024 for n in range(20)}
    tasks = [
        {
            "url": f"https://site.test/{number}?{text * 1_000}",
            "external_id": "y" * 128,
            "metadata": fields["metadata"],
        }
        for number in range(FAILING)
    ]
    params = {"css_extractor": text * 3_000, "custom_headers": {"X-A": "<" * 3_000}}
    schedule = {"rate": {"every": 1, "unit": "day"}}
    for _ in range(PAGE + 1):
        await api.submit(1, **fields, type="scheduled", schedule=schedule)
        job = await api.submit(1, **fields)
        await api.deliver(job)
    body = {**fields, "tasks": tasks, "zenrows_params": params}
    answer = await api.client.post("/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    job = answer.json()
    for task in await api.tasks_of(job["latest_run"]["run_id"]):
        letters = "".join(chr(97 + int(digit)) for digit in f"{task.index:02}")
        problem = Problem(
            text * 200, text * 200, 599, "https://docs.test/" + "d" * 480, letters + text * 498
        )
        await api.fail(task.run_id, task.task_id, problem)
    await report(api, job, text)
    return dict(job)


async def report(api: Api, job: dict[str, Any], text: str) -> None:
    """Let many workers say that they have many runs in hand."""
    now = api.clock.now()
    lane = LaneReport(
        run_id=job["latest_run"]["run_id"], reason=RunWaitReason.CLAIMS_HELD, since=now
    )
    for number in range(120):
        await api.binding.workers.say(
            WorkerReport(
                worker_id=f"worker-{number:03}-{text * 60}",
                version="1.0",
                started_at=now,
                said_at=now,
                heartbeat=5.0,
                slots=100,
                in_use=3,
                away=(text * 200,),
                lanes=(lane,) * 60,
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        '"',
        *(
            pytest.param(text, marks=pytest.mark.extended)
            for text in ("<", "'", "&", "\u202e", "𐍈")
        ),
    ],
)
async def test_pages_stay_small_whatever_is_stored(api: Api, text: str) -> None:
    job = await fill(api, text)
    run = f"/dashboard/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    long = text * (MOST_PARAMETER // len(text))
    for path in (
        "/dashboard",
        "/dashboard/jobs",
        "/dashboard/workers",
        "/dashboard/webhooks",
        "/dashboard/schedules",
        run,
        f"{run}?groups_from=30",
        f"{run}/results",
        f"{run}/results?status=failed",
        f"/dashboard/webhooks?job={job['job_id']}",
    ):
        await look(api, path)
    await look(api, "/dashboard/jobs", name=text * 100, external_id=long)
    await look(api, "/dashboard/jobs", name=long, external_id=long)
    for task in (await api.tasks_of(job["latest_run"]["run_id"]))[:2]:
        page = await look(api, f"{run}/tasks/{task.task_id}")
        assert "in the JSON of this page" in page
    found = (await api.client.get("/v1/webhook/deliveries")).json()["deliveries"][0]
    await look(api, f"/dashboard/jobs/{found['job_id']}/deliveries/{found['delivery_id']}")
    long_name = await api.bare.get("/dashboard/jobs", params={"name": "n" * (MOST_PARAMETER + 1)})
    assert long_name.status_code == 400
    assert len(long_name.content) <= HTML_BOUND
    for path in (f"/dashboard/nowhere?{'&' * 20_000}", f"/dashboard/jobs?{'&' * 20_000}"):
        assert len((await api.bare.get(path)).content) <= HTML_BOUND


def shown_run(page: RunPage) -> str:
    """Show the record of a run."""
    screen = Screen(
        template="run.html",
        title=page.job.name or "Job",
        section="Jobs",
        page=page,
        values={"groups_from": 0, "groups_shown": GROUPS_SHOWN},
    )
    return render(
        screen,
        viewer=Viewer(None),
        path="/r",
        query="",
        origin=f"https://{'o' * 60}.test",
        token="t" * 64,
    )


@pytest.mark.parametrize("text", ['"', "𐍈"])
async def test_a_run_of_many_groups_and_runs_stays_small(api: Api, text: str) -> None:
    job = await api.submit(1, name=text * 100, external_id="x" * 128)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    problem = Problem(text * 200, text * 200, 599, detail=text * 500)
    await api.fail(task.run_id, task.task_id, problem)
    caller = api.service.identify(KEY).caller_id
    page = await api.service.overviews.run(caller, job["job_id"], task.run_id)
    [group] = page.groups
    groups = [
        msgspec.structs.replace(group, task_ids=[task.task_id] * MOST_SAMPLES, status=400 + n)
        for n in range(MOST_GROUPS)
    ]
    types = {f"{n:02}{text * (LONGEST_TYPE - 2)}": 10**9 for n in range(MOST_TYPES + 1)}
    name = f"{'h' * 250}:65535"
    host = HostBody(host=name, pending=9, claimed=9, done=9, failed=9, detail=text * 1_000)
    full = msgspec.structs.replace(
        page,
        hosts=[host] * HOSTS_SHOWN,
        more_hosts=90,
        groups=groups,
        runs=page.runs * RUNS_SHOWN,
        shape=msgspec.structs.replace(
            page.shape, types=types, sizes=(10**9,) * len(page.shape.sizes)
        ),
        run=msgspec.structs.replace(
            page.run,
            failure_detail=text * 500,
            stats=msgspec.structs.replace(page.run.stats, successful=10**9),
        ),
    )
    html = shown_run(full)
    assert html.count("first <time") == GROUPS_SHOWN
    assert len(html.encode()) <= HTML_BOUND


async def test_the_remainder_is_no_group_of_the_reason_other(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.fail(task.run_id, task.task_id)
    caller = api.service.identify(KEY).caller_id
    page = await api.service.overviews.run(caller, job["job_id"], task.run_id)
    [group] = page.groups
    groups = [
        FailureGroupBody(group=OTHER_GROUP, count=5),
        msgspec.structs.replace(group, reason="other", count=2),
    ]
    html = shown_run(msgspec.structs.replace(page, groups=groups))
    titles = re.findall(r"<h3><a [^>]*>([^<]*)</a>", html)
    assert titles == [f"5 × other (beyond {MOST_GROUPS} groups)", "2 × other"]


async def details(api: Api, job: dict[str, Any]) -> TaskDetails:
    """Read the record of the page of the first task of a job."""
    [task, *_] = await api.tasks_of(job["latest_run"]["run_id"])
    caller = api.service.identify(KEY).caller_id
    return await api.service.overviews.task(caller, job["job_id"], task.run_id, task.task_id)


def shown(page: TaskDetails) -> str:
    """Show the record of a task."""
    screen = Screen(
        template="task.html",
        title="Task",
        section="Jobs",
        page=page,
        values={"is_image": False, "is_markup": False},
    )
    return render(screen, viewer=Viewer(None), path="/t", query="", origin=ORIGIN, token="t")


def line_of(html: str) -> list[str] | None:
    """Return the words of the line for a shell on the page of a task."""
    found = re.search(r'A line for a shell"><code><bdi>(.*?)</bdi>', html, re.DOTALL)
    return None if found is None else shlex.split(unescape(found[1]))


async def test_a_task_of_many_attempts_shows_the_last_of_them(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.fail(task.run_id, task.task_id, Problem('"' * 200, '"' * 200, 500, detail='"' * 500))
    page = await details(api, job)
    pairs = {f"{n:02}" + '"' * 126: '"' * 1_024 for n in range(20)}
    full = msgspec.structs.replace(
        page,
        attempts=page.attempts * 500,
        url='"' * 2_000,
        params=pairs,
        metadata=pairs,
        request={"tasks": [{"url": '"' * 2_700}]},
        external_id="x" * 128,
        content_type='text/html; "' + '"' * 200,
        size=1,
    )
    html = shown(full)
    assert line_of(html)
    assert len(html.encode()) <= HTML_BOUND
    assert f"{500 - ATTEMPTS_SHOWN} earlier ones are left out" in html
    assert html.count("· 1 s") == ATTEMPTS_SHOWN


@pytest.mark.slow
async def test_a_line_for_a_shell_is_whole_or_not_there(api: Api) -> None:
    page = await details(api, await api.submit(1))

    @given(st.text("a\"'<\\\u202e", max_size=40), st.sampled_from([1, 200, 1_000]))
    def holds(text: str, times: int) -> None:
        request = {"tasks": [{"url": "https://site.test/", "body": text * times}]}
        html = shown(msgspec.structs.replace(page, request=request))
        assert len(html.encode()) <= HTML_BOUND
        line = line_of(html)
        if line is None:
            assert "would be too long" in html
        else:
            assert msgspec.json.decode(line[-1]) == request

    holds()


async def test_a_line_for_a_shell_has_a_placeholder_for_a_masked_value(api: Api) -> None:
    headers = {"Authorization": "Bearer hunter2"}
    page = await details(api, await api.submit(1, zenrows_params={"custom_headers": headers}))
    html = shown(page)
    line = line_of(html)
    assert line is not None
    params = msgspec.json.decode(line[-1])["zenrows_params"]
    assert msgspec.json.decode(params["custom_headers"]) == {"Authorization": "YOUR_VALUE"}
    assert "put yours where it says YOUR_VALUE" in html
    assert "The settings of the job itself" in html


async def test_a_body_is_downloaded_under_any_of_our_names(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.succeed(job["job_id"], task.run_id, task.task_id)
    html = shown(await details(api, job))
    [address] = re.findall(r'href="([^"]*)" rel="noreferrer" download', html)
    assert address.startswith("/v1/")
    assert (await api.bare.get(unescape(address))).status_code == 200


async def test_a_reader_of_all_callers_is_told_whose_key_a_line_wants(api: Api) -> None:
    job = await api.submit(1)
    page = await look(api, f"/dashboard/jobs/{job['job_id']}")
    assert "this wants the key that made the job" in page


async def test_texts_that_turn_their_direction_keep_it_to_themselves(api: Api) -> None:
    job = await api.submit(1, name="\u202eevil")
    run = f"/dashboard/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    for path in ("/dashboard/jobs", run, f"{run}/results"):
        page = await look(api, path)
        body = page.partition("</head>")[2]
        assert body.count("\u202e") == body.count("<bdi>\u202eevil</bdi>") > 0


async def test_a_stopped_run_says_what_was_not_done(api: Api) -> None:
    job = await api.submit(2)
    run = f"/dashboard/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    live = await look(api, run)
    assert "<dt>Waiting</dt>" in live
    assert "is-pending" in await look(api, f"{run}/results")
    assert (await api.client.post(f"/v1/jobs/{job['job_id']}/stop")).status_code == 200
    ended = await look(api, run)
    assert "<dt>Not done</dt>" in ended
    assert "in work" not in ended
    rows = await look(api, f"{run}/results")
    assert "is-pending" not in rows
    assert rows.count(">not done<") == 2
    [task, _] = await api.tasks_of(job["latest_run"]["run_id"])
    assert ">not done<" in await look(api, f"{run}/tasks/{task.task_id}")


async def test_a_paused_run_says_so_in_a_sentence(api: Api) -> None:
    job = await api.submit(1)
    assert (await api.client.post(f"/v1/jobs/{job['job_id']}/pause")).status_code == 200
    page = await look(api, f"/dashboard/jobs/{job['job_id']}")
    assert "<p><bdi>The run is paused.</bdi></p>" in page
