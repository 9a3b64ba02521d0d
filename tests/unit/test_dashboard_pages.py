"""Pages of the dashboard over HTTP: headers, JSON, bounds, and errors in words."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from msgspec import UNSET, structs

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.hosts import HostPattern, HostPolicies, HostRules
from conveyor.domain.model import Problem, Task
from conveyor.domain.run_waits import LaneReport, WorkerReport
from conveyor.http.pages.bodies import MOST_SHOWN
from conveyor.http.pages.routes import PAGE_HEADERS, PAGES, PREVIEW_HEADERS
from conveyor.http.pages.session import SessionOptions
from conveyor.http.pages.views import duration, pace, percent, size
from conveyor.records.blob_keys import result_key
from conveyor.service.exports import EXPORTS_SHOWN
from conveyor.service.overview import MOST_IMAGE, MOST_PREVIEWED, PAGE
from tests.unit.http_api import KEY, ORIGIN, Api, open_api, problem_of

ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
HTML_BOUND = 120 * 1_024
HOSTILE = "<script>alert('a')</script>\"'`{{7*7}}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", sessions=SessionOptions(on_loopback=True)) as opened:
        yield opened


async def look(api: Api, path: str, *, status: int = 200) -> httpx.Response:
    """Fetch a page, which is small and has the headers of all pages."""
    answer = await api.bare.get(path)
    assert answer.status_code == status, answer.text
    assert len(answer.content) <= HTML_BOUND
    headers = {name: answer.headers[name] for name in PAGE_HEADERS}
    assert headers == PAGE_HEADERS
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    return answer


def task_path(job: dict[str, Any], task_id: str) -> str:
    run = job["latest_run"]
    return f"/dashboard/jobs/{run['job_id']}/runs/{run['run_id']}/tasks/{task_id}"


async def finished(api: Api, body: bytes, content_type: str) -> str:
    """Make a task that brought back a body; the address of its page."""
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.succeed(
        job["job_id"], task.run_id, task.task_id, body=body, content_type=content_type
    )
    return task_path(job, task.task_id)


# -- headers and addresses --


def test_the_policy_of_pages_lets_nothing_run_but_ours() -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in PAGE_HEADERS["Content-Security-Policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "form-action": "'self'",
        "frame-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert PREVIEW_HEADERS["Content-Security-Policy"] == (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    )


async def test_each_page_is_there_as_json_too(api: Api) -> None:
    job = await api.submit(2, webhook=None)
    run = job["latest_run"]
    [task, _] = await api.tasks_of(run["run_id"])
    values = {"job_id": job["job_id"], "run_id": run["run_id"], "task_id": task.task_id}
    seen = 0
    for path in PAGES:
        if "delivery_id" in path or "export_id" in path or path.endswith("/schedule"):
            continue
        address = path.format(**values)
        page = await look(api, address)
        assert "<h1" in page.text
        assert f'href="{address}.json"' in page.text
        twin = await api.bare.get(f"{address}.json")
        assert twin.status_code == 200
        assert twin.headers["Content-Type"] == "application/json"
        assert isinstance(twin.json(), dict)
        seen += 1
    assert seen == len(PAGES) - 3


async def test_a_browser_at_the_root_is_sent_to_the_dashboard(api: Api) -> None:
    answer = await api.bare.get("/", headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/dashboard")
    assert f"{ORIGIN}/dashboard     what runs" in (await api.bare.get("/")).text


async def test_without_a_dashboard_there_are_no_pages(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as plain:
        for path in ("/dashboard", "/dashboard/jobs", "/dashboard/static/dashboard.css"):
            problem_of(await plain.bare.get(path), status=404, code="not_found")


async def test_files_of_ours_are_kept_until_they_change(api: Api) -> None:
    for name in ("dashboard.css", "dashboard.js", "keys.js", "live.js", "stream.js", "times.js"):
        found = await api.bare.get(f"/dashboard/static/{name}")
        assert found.status_code == 200
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        known = {"If-None-Match": found.headers["ETag"]}
        again = await api.bare.get(f"/dashboard/static/{name}", headers=known)
        assert (again.status_code, again.content) == (304, b"")
    missing = await api.bare.get("/dashboard/static/nothing.js")
    assert missing.status_code == 404


def test_our_scripts_are_short() -> None:
    scripts = Path("conveyor/http/pages/static").glob("*.js")
    assert sum(len(script.read_text().splitlines()) for script in scripts) <= 600


async def test_a_slash_at_the_end_leads_to_the_page(api: Api) -> None:
    for path, page in (
        ("/dashboard/", "/dashboard"),
        ("/dashboard/jobs/?state=paused", "/dashboard/jobs?state=paused"),
        ("/dashboard//", "/dashboard"),
    ):
        answer = await api.bare.get(path)
        assert (answer.status_code, answer.headers["Location"]) == (307, page)


async def test_an_unknown_page_of_json_is_a_problem_of_the_api(api: Api) -> None:
    problem_of(await api.bare.get("/dashboard/nowhere.json"), status=404, code="not_found")


async def test_jobs_with_webhooks_are_found_behind_many_runs(api: Api) -> None:
    hooked = await api.submit(1, name="Told", webhook={"url": "http://127.0.0.1:9/a"})
    for _ in range(101):
        await api.clock.advance(0.01)
        await api.submit(1)
    first = await look(api, "/dashboard/webhooks")
    assert hooked["job_id"] not in first.text
    assert 'name="job"' in first.text
    found = re.search(r'<a rel="next" href="([^"]+)">', first.text)
    assert found
    further = await look(api, html.unescape(found[1]))
    assert f"<code>{hooked['job_id']}</code>" in further.text
    assert "Back to the first page" in further.text
    assert 'rel="next"' not in further.text
    own = await look(api, f"/dashboard/webhooks?job={hooked['job_id']}")
    assert "No event was sent." in own.text


async def test_a_stream_takes_the_names_of_runs_alone(api: Api) -> None:
    for query in ("run=a", "run=../x", "&".join(["run=" + "/".join([ULID, ULID])] * 17)):
        answer = await api.bare.get(f"/dashboard/events?{query}")
        problem_of(answer, status=400, code="invalid_argument")


# -- errors --


@pytest.mark.parametrize(
    ("path", "status", "back"),
    [
        ("/dashboard/nowhere", 404, "/dashboard"),
        ("/dashboard/jobs/nothing", 404, "/dashboard/jobs"),
        ("/dashboard/jobs?state=odd", 400, "/dashboard"),
        ("/dashboard/jobs?cursor=bad", 400, "/dashboard"),
        ("/dashboard/schedules?cursor=bad", 400, "/dashboard"),
    ],
)
async def test_an_error_is_a_page_with_a_way_back(
    api: Api, path: str, status: int, back: str
) -> None:
    page = await look(api, path, status=status)
    assert f'<a href="{back}">Go back</a>' in page.text
    base, _, query = path.partition("?")
    if path != "/dashboard/nowhere":
        twin = await api.bare.get(f"{base}.json?{query}")
        assert twin.status_code == status
        assert twin.headers["Content-Type"] == "application/problem+json"


async def test_a_cursor_of_another_list_is_refused_in_words(api: Api) -> None:
    for _ in range(2):
        await api.submit(PAGE + 1)
    jobs = (await api.client.get("/v1/jobs")).json()["jobs"]
    addresses = [
        f"/dashboard/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/results"
        for job in jobs
    ]
    cursor = (await api.bare.get(f"{addresses[0]}.json")).json()["next_cursor"]
    assert len((await look(api, f"{addresses[0]}?cursor={cursor}")).text.split("data-row")) == 2
    page = await look(api, f"{addresses[1]}?cursor={cursor}", status=400)
    assert "not a cursor of this list" in page.text
    await look(api, f"{addresses[0]}?group=abc", status=400)
    await look(api, f"{addresses[0]}?status=failed&group=aaaaaaaaaaaa", status=409)


# -- lists --


async def test_a_filter_looks_through_a_bounded_number_of_jobs_and_says_so(api: Api) -> None:
    for number in range(5):
        await api.submit(1, name=f"shop {number}", external_id=f"id-{number}")
    await api.submit(1, name="other")
    found = (await api.bare.get("/dashboard/jobs.json?name=shop")).json()
    assert [job["name"] for job in found["jobs"]] == [f"shop {n}" for n in (4, 3, 2, 1, 0)]
    assert found["looked"] == 6
    one = await look(api, "/dashboard/jobs?external_id=id-3&state=running&type=regular")
    assert "1 found, 6 looked through, which is all" in one.text
    assert "shop 3" in one.text
    none = await look(api, "/dashboard/jobs?state=paused")
    assert "0 found, 6 looked through" in none.text


async def test_the_request_that_a_task_shows_makes_the_same_task_again(api: Api) -> None:
    url = "https://shop.test/"
    tasks: list[dict[str, Any]] = [
        {"url": url},
        {"url": url, "external_id": "a-1", "metadata": {"sku": "7"}},
        {"url": url, "method": "POST", "body": {"q": [1, "x"]}},
        {"url": url, "method": "POST", "body": "q=1"},
        {"url": url, "zenrows_params": {"js_render": True}},
    ]
    caller = api.service.identify(KEY).caller_id

    async def made(document: dict[str, Any]) -> tuple[str, Task]:
        answer = await api.client.post("/v1/jobs", json=document)
        assert answer.status_code == 201, answer.text
        job = answer.json()
        [task] = await api.tasks_of(job["latest_run"]["run_id"])
        return job["job_id"], task

    for given in tasks:
        job_id, task = await made({"tasks": [given]})
        page = await api.service.overviews.task(caller, job_id, task.run_id, task.task_id)
        _, again = await made(page.request)
        assert structs.replace(again.spec, params=None) == structs.replace(task.spec, params=None)
        assert ("zenrows_params" in page.request) == ("zenrows_params" in given)


@pytest.mark.slow
@pytest.mark.parametrize("of_all", [True, False])
async def test_schedules_are_listed_page_by_page(api: Api, of_all: bool) -> None:
    caller = None if of_all else api.service.identify(KEY).caller_id
    schedule = {"rate": {"every": 1, "unit": "day"}}
    made = [
        (await api.submit(1, type="scheduled", schedule=schedule))["job_id"]
        for _ in range(PAGE + 2)
    ]
    first = await api.service.overviews.schedules(caller, cursor=None)
    assert isinstance(first.next_cursor, str)
    second = await api.service.overviews.schedules(caller, cursor=first.next_cursor)

    assert [len(first.schedules), len(second.schedules)] == [PAGE, 2]
    assert second.next_cursor is UNSET
    found = [line.job.job_id for line in (*first.schedules, *second.schedules)]
    assert sorted(found) == sorted(made)


@pytest.mark.slow
async def test_pages_of_jobs_go_on_where_the_last_one_ended(api: Api) -> None:
    names = [f"job {number}" for number in range(PAGE + 7)]
    for name in names:
        await api.submit(1, name=name)
    first = (await api.bare.get("/dashboard/jobs.json")).json()
    second = (await api.bare.get(f"/dashboard/jobs.json?cursor={first['next_cursor']}")).json()
    shown = [job["name"] for job in [*first["jobs"], *second["jobs"]]]
    assert shown == list(reversed(names))
    assert "next_cursor" not in second
    await look(api, "/dashboard/jobs")


@pytest.mark.slow
async def test_scheduled_jobs_that_never_ran_stand_behind_all_that_ran(api: Api) -> None:
    plan = {"type": "scheduled", "schedule": {"rate": {"every": 15, "unit": "minute"}}}
    never = [await api.submit(1, name=f"never {number}", **plan) for number in range(PAGE)]
    once = await api.submit(1, name="once", **plan)
    await api.client.post(f"/v1/jobs/{once['job_id']}/rerun")
    for number in range(3):
        await api.submit(1, name=f"job {number}")

    first = (await api.bare.get("/dashboard/jobs.json")).json()
    second = (await api.bare.get(f"/dashboard/jobs.json?cursor={first['next_cursor']}")).json()
    names = [job["name"] for job in [*first["jobs"], *second["jobs"]]]
    assert names[:4] == ["job 2", "job 1", "job 0", "once"]
    assert names[4:] == [f"never {number}" for number in range(PAGE)]
    assert "next_cursor" not in second
    found = (await api.bare.get("/dashboard/jobs.json?name=never+7")).json()["jobs"]
    assert [job["job_id"] for job in found] == [never[7]["job_id"]]
    assert "no run yet" in (await look(api, "/dashboard/jobs?name=never+7")).text


# -- tasks --


async def test_a_run_lists_its_last_exports(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/exports"
    page = f"/dashboard/jobs/{job['job_id']}"
    assert "Exports of this run" not in (await look(api, page)).text
    asked = []
    for kind in ("zip", "csv", *["jsonl"] * (EXPORTS_SHOWN - 1)):
        answer = await api.client.post(path, params={"format": kind})
        asked.append(answer.json()["export_id"])
        await api.clock.advance(1)
    shown = (await look(api, page)).text
    assert re.findall(r'/exports/(\w+)">(\w+)<', shown) == [
        *((export_id, "jsonl") for export_id in asked[:1:-1]),
        (asked[1], "csv"),
    ]
    await api.clock.advance(api.service.options.export_ttl)
    assert (await api.bare.get(f"{page}.json")).json()["exports"] == []


async def test_a_run_shows_the_hosts_whose_limits_hold_it_back(tmp_path: Path) -> None:
    rules = HostRules(limit=1, patterns={"free.test": HostPattern(limit=0)})
    options = SessionOptions(on_loopback=True)
    async with open_api(
        tmp_path / "data", sessions=options, policies=HostPolicies(lambda: rules)
    ) as api:
        urls = [
            *(f"https://h{n}.test/" for n in range(12)),
            "https://h0.test/2",
            "https://free.test/",
        ]
        body = {"tasks": [{"url": url} for url in urls]}
        job = (await api.client.post("/v1/jobs", json=body)).json()
        page = f"/dashboard/jobs/{job['job_id']}"
        shown = (await look(api, page)).text
        assert "Its hosts hold it back" in shown
        first = (
            r"<strong><bdi>h0.test:443</bdi></strong>: 2 tasks wait, 0 claimed; <bdi>at most 1 call"
        )
        assert re.search(first, shown), shown
        assert shown.count("at most 1 call at a time, set by the server") == 10
        assert "and 2 more" in shown
        assert "free.test" not in shown
        await api.client.post(f"/v1/jobs/{job['job_id']}/pause")
        assert (await api.bare.get(f"{page}.json")).json()["hosts"] == []


async def test_a_run_is_shown_while_the_ledger_says_nothing_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SessionOptions(on_loopback=True)
    policies = HostPolicies(lambda: HostRules(limit=1))
    async with open_api(tmp_path / "data", sessions=options, policies=policies) as api:
        job = await api.submit(1)

        async def away(_hosts: object) -> NoReturn:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the ledger does not answer")

        monkeypatch.setattr(api.binding.pacing, "state", away)
        shown = await look(api, f"/dashboard/jobs/{job['job_id']}")
        assert "hold it back" not in shown.text


async def test_workers_name_the_jobs_that_they_have_in_hand(api: Api) -> None:
    named, other = await api.submit(1, name="<b>shop"), await api.submit(1)
    runs = [job["latest_run"]["run_id"] for job in (named, other)]
    now = api.clock.now()
    report = WorkerReport(
        worker_id="W",
        version="1.0",
        started_at=now,
        said_at=now,
        heartbeat=5.0,
        slots=4,
        in_use=1,
        lanes=tuple(LaneReport(run_id=run_id) for run_id in (*runs, ULID)),
    )
    await api.binding.workers.say(report)
    shown = (await look(api, "/dashboard/workers")).text
    assert shown.count("&lt;b&gt;shop") == 1
    [worker] = (await api.bare.get("/dashboard/workers.json")).json()["workers"]
    lanes = [(lane["run_id"], lane.get("job_id"), lane.get("name")) for lane in worker["lanes"]]
    assert lanes == [
        (runs[0], named["job_id"], "<b>shop"),
        (runs[1], other["job_id"], None),
        (ULID, None, None),
    ]


async def test_custom_headers_are_masked(api: Api) -> None:
    headers = {"Authorization": "Bearer hunter2", "X-Trace": "17"}
    job = await api.submit(1, zenrows_params={"custom_headers": headers, "wait": 50})
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    address = task_path(job, task.task_id)
    page = (await look(api, address)).text
    twin = (await api.bare.get(f"{address}.json")).text
    for text in (page, twin):
        assert "hunter2" not in text
        assert "Authorization" in text
    assert "X-API-Key: " in page
    assert "key-of-alice" not in page


async def test_texts_of_others_are_escaped(api: Api) -> None:
    job = await api.submit(1, name=HOSTILE, metadata={HOSTILE: HOSTILE})
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.fail(task.run_id, task.task_id, Problem("c", HOSTILE, 404, detail=HOSTILE))
    address = f"/dashboard/jobs/{job['job_id']}"
    for path in (
        "/dashboard",
        "/dashboard/jobs",
        f"/dashboard/jobs?{httpx.QueryParams({'name': HOSTILE})}",
        address,
        f"{address}/runs/{task.run_id}/results",
        task_path(job, task.task_id),
    ):
        page = await look(api, path)
        assert "<script>alert" not in page.text
        assert "{{7*7}}" in page.text


async def preview(api: Api, address: str, form: str = "text", *, status: int = 200) -> str:
    """Fetch a preview, which has the headers of previews and never redirects."""
    answer = await api.bare.get(f"{address}/preview?as={form}")
    assert answer.status_code == status
    assert {name: answer.headers[name] for name in PREVIEW_HEADERS} == PREVIEW_HEADERS
    return answer.text


@pytest.mark.parametrize(
    ("body", "content_type", "shown"),
    [
        ("Grüße".encode("windows-1252"), "text/plain; charset=windows-1252", "Grüße"),
        (b'{"a":[1,2]}', "application/json", '  "a": ['),
        (b'{"a":', "application/json", '<pre>\n{"a":</pre>'),
        (b"\x89PNG\0\xff", "application/octet-stream", "00000000  89 50 4e 47 00 ff"),
        (b"a\0b", "text/plain; charset=no-such", "00000000  61 00 62"),
        (b"<b>&", "text/html", "&lt;b&gt;&amp;"),
        (b"", "text/plain", "The body is empty"),
    ],
)
async def test_a_body_is_shown_as_text(
    api: Api, body: bytes, content_type: str, shown: str
) -> None:
    address = await finished(api, body, content_type)
    assert shown in await preview(api, address)


@pytest.mark.slow
async def test_a_large_body_is_cut_and_its_page_stays_small(api: Api) -> None:
    address = await finished(api, "ü<".encode() * 7_000_000, "text/html; charset=utf-8")
    page = (await look(api, address)).text
    assert "20.0 MB" in page
    text = await preview(api, address)
    assert text.count("ü") == MOST_SHOWN // len("ü&lt;".encode())
    assert "Cut here" in text
    rendered = await api.bare.get(f"{address}/preview?as=html")
    assert len(rendered.content) == MOST_PREVIEWED
    assert rendered.headers["Content-Type"] == "text/html; charset=utf-8"


async def test_images_are_shown_up_to_a_mebibyte(api: Api) -> None:
    small = await finished(api, b"\x89PNG" + b"0" * 100, "image/png")
    assert f'src="{small}/preview?as=image"' in (await look(api, small)).text
    shown = await api.bare.get(f"{small}/preview?as=image")
    assert (shown.headers["Content-Type"], len(shown.content)) == ("image/png", 104)
    large = await finished(api, b"0" * (MOST_IMAGE + 1), "image/png")
    assert "as=image" not in (await look(api, large)).text
    await preview(api, large, "image", status=404)
    drawn = await finished(api, b"<svg/>", "image/svg+xml")
    assert "as=image" not in (await look(api, drawn)).text
    await preview(api, drawn, "image", status=404)


async def test_a_body_that_is_not_there_is_told_in_words(api: Api) -> None:
    job = await api.submit(2)
    [first, second] = await api.tasks_of(job["latest_run"]["run_id"])
    assert "has not ended" in await preview(api, task_path(job, first.task_id), status=409)
    await api.fail(second.run_id, second.task_id)
    assert "the task failed" in await preview(api, task_path(job, second.task_id), status=404)
    await api.succeed(job["job_id"], first.run_id, first.task_id)
    [first, _] = await api.tasks_of(first.run_id)
    await api.binding.blobs.delete(
        result_key(job["job_id"], first.run_id, first.task_id, first.claim_number, 30)
    )
    await preview(api, task_path(job, first.task_id), status=410)


# -- numbers --


def test_shares_never_round_the_first_or_the_last_away() -> None:
    assert [percent(part, 1_000_000) for part in (0, 1, 500_000, 999_999, 1_000_000)] == [
        "0%",
        "0.1%",
        "50%",
        "99.9%",
        "100%",
    ]
    assert (percent(5, 8), percent(0, 0)) == ("63%", "0%")


def test_sizes_stretches_of_time_and_paces_are_short() -> None:
    assert [size(number) for number in (0, 1_023, 1_536, 20 << 20)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KB",
        "20.0 MB",
    ]
    assert [duration(seconds) for seconds in (0, 0.4, 59, 61, 3_600, 90_061)] == [
        "0 s",
        "under 1 s",
        "59 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 1 h",
    ]
    assert [pace(rate) for rate in (0, 0.5, 12.34)] == ["none", "30.0/min", "12.3/s"]
