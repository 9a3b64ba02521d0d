"""A fleet as one: what one api gives works on the other and after both were restarted, links go
straight to the store, a large job is read without waste, and a worker that is ended loses nothing.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.fleet import RoleFleet, RoleProcess
from tests.acceptance.support_bindings import hits, metrics
from tests.acceptance.support_wire import Wire, eventually, target
from tests.patient import SECONDS, fetched

LISTS = {"index.html", "manifest.jsonl"}
pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

SHARDS = 8
PAGE = 40
MOST_RECORDS = 3
"""Rows of jobs and runs that one page reads."""


@pytest.fixture(scope="module")
def wire(shared_fleet: RoleFleet) -> Iterator[Wire]:
    """Requests to whichever api has its turn."""
    with Wire(shared_fleet.api) as wire:
        yield wire


def each_api(fleet: RoleFleet, stack: ExitStack) -> list[Wire]:
    """Requests to one api for certain, of each."""
    return [stack.enter_context(Wire(process.info.api)) for process in fleet.apis]


def amount(fleet: RoleFleet, role: str, pattern: str) -> float:
    """The sum over all processes of a role of the series that match."""
    found = re.compile(rf"^{pattern} (\S+)$", re.MULTILINE)
    return sum(float(value) for page in metrics(fleet, role) for value in found.findall(page))


def queries(fleet: RoleFleet) -> float:
    """Queries of the apis that were answered; a try that was not is made again."""
    labels = r"operation=\"query\",outcome=\"ok\",[^}]*"
    return amount(fleet, "api", rf"conveyor_aws_calls_total\{{{labels}\}}")


def rows(fleet: RoleFleet, word: str) -> float:
    """Rows that the apis have read, those of jobs and runs among them, or task rows returned."""
    return amount(fleet, "api", f"conveyor_store_rows_{word}_total")


def page_of(wire: Wire, job_id: str, cursor: str | None) -> Any:
    return wire.ask("GET", f"/jobs/{job_id}/results", cursor=cursor, limit=7)


def jobs_of(wire: Wire, cursor: str | None) -> tuple[list[str], str | None]:
    """One job a page."""
    page = wire.ask("GET", "/jobs", limit=1, cursor=cursor)
    return [job["job_id"] for job in page["jobs"]], page.get("next_cursor")


def body_of(link: str) -> bytes:
    answer = fetched(link)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_what_one_api_gives_works_on_the_other_and_after_a_restart(
    shared_fleet: RoleFleet, wire: Wire
) -> None:
    urls = [target(f"two/{number}") for number in range(40)]
    job_id = wire.submit(urls)["job_id"]
    wire.ended(job_id)
    later = wire.submit([], status="open")["job_id"]
    seen: list[Any] = []
    with ExitStack() as stack:
        first, second = each_api(shared_fleet, stack)
        page = page_of(first, job_id, None)
        seen += page["results"]
        page = page_of(second, job_id, page["next_cursor"])
        seen += page["results"]
        link = moved(seen[0]["result_url"], shared_fleet.apis[1])
        assert body_of(link) == expected_body(urls[0])
        [newest], cursor = jobs_of(first, None)
        assert newest == later
        assert jobs_of(second, cursor)[0] == [job_id]

    for process in shared_fleet.apis:
        assert process.end() == 0
        shared_fleet.restart(process)

    with ExitStack() as stack:
        turns = each_api(shared_fleet, stack)
        while "next_cursor" in page:
            turns.reverse()
            page = page_of(turns[0], job_id, page["next_cursor"])
            seen += page["results"]
    assert [row["url"] for row in seen] == urls
    for row in seen:
        for process in shared_fleet.apis:
            assert body_of(moved(row["result_url"], process)) == expected_body(row["url"])


def moved(link: str, api: RoleProcess) -> str:
    """The same link at another server, as a load balancer would have it."""
    origin = httpx.URL(api.info.api)
    return str(httpx.URL(link).copy_with(host=origin.host, port=origin.port))


def test_an_export_is_downloaded_from_the_store(
    shared_fleet: RoleFleet, wire: Wire, tmp_path: Path
) -> None:
    urls = [target(f"export/{number}") for number in range(5)]
    job_id = wire.submit(urls)["job_id"]
    exports = f"/jobs/{job_id}/runs/{wire.ended(job_id)['run_id']}/exports"
    export_id = wire.ask("POST", exports)["export_id"]

    def completed() -> Any:
        export = wire.ask("GET", f"{exports}/{export_id}")
        return export if export["status"] == "completed" else None

    link = eventually(completed, "the export completes")["download_url"]

    assert httpx.URL(link).port == httpx.URL(shared_fleet.environment["CONVEYOR_S3_ENDPOINT"]).port
    answer = fetched(link)
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"].startswith("attachment")
    archive = tmp_path / "export.zip"
    archive.write_bytes(answer.content)
    with zipfile.ZipFile(archive) as opened:
        bodies = {opened.read(name) for name in opened.namelist() if name not in LISTS}
    assert bodies == {expected_body(url) for url in urls}


def test_the_store_takes_an_upload_of_its_own_type_alone(
    shared_fleet: RoleFleet, wire: Wire
) -> None:
    slot = wire.ask("POST", "/job_inputs", body={"type": "urls"})
    upload = slot["upload"]
    file = target("uploaded").encode()

    def put(headers: dict[str, str]) -> int:
        answer = httpx.put(
            upload["url"], content=file, headers=headers, timeout=SECONDS, trust_env=False
        )
        return answer.status_code

    assert (
        httpx.URL(upload["url"]).port
        == httpx.URL(shared_fleet.environment["CONVEYOR_S3_ENDPOINT"]).port
    )
    assert put({"Content-Type": "application/octet-stream"}) == 403
    early = wire.send("POST", "/jobs", body={"file_input_id": slot["file_input_id"]})
    assert early.json()["code"] == "file_input_not_uploaded"
    assert put(upload["headers"]) == 200
    job_id = wire.ask("POST", "/jobs", body={"file_input_id": slot["file_input_id"]})["job_id"]
    assert wire.ended(job_id)["stats"]["successful"] == 1


@pytest.mark.parametrize(
    "large",
    [
        2_000,
        pytest.param(100_000, marks=(pytest.mark.full, pytest.mark.timeout(3_600)), id="full"),
    ],
)
def test_a_large_job_is_read_without_waste(shared_fleet: RoleFleet, wire: Wire, large: int) -> None:
    urls = [target(f"large/{number}") for number in range(large)]
    answer = wire.send("POST", "/jobs", body={"tasks": [{"url": url} for url in urls]})
    assert answer.status_code == 202
    job_id = answer.json()["job_id"]
    wire.ask("POST", f"/jobs/{job_id}/pause")

    def written() -> bool | None:
        return wire.latest_run(job_id)["ingest_status"] == "done" or None

    eventually(written, "its rows are written", timeout=100 + large / 100)
    read, returned, made = (
        rows(shared_fleet, "read"),
        rows(shared_fleet, "returned"),
        queries(shared_fleet),
    )

    found = wire.rows(job_id)

    assert [row["url"] for row in found] == urls
    assert rows(shared_fleet, "returned") - returned == large
    pages = -(-large // 1_000)
    # With each page the rows of the job and of its run.
    assert large <= rows(shared_fleet, "read") - read <= large + MOST_RECORDS * (pages + 1)
    # With each page one for what processes have counted of the run.
    assert queries(shared_fleet) - made <= pages * (SHARDS + 1)


def test_a_page_of_a_small_job_is_one_query(shared_fleet: RoleFleet, wire: Wire) -> None:
    urls = [target(f"small/{number}") for number in range(100)]
    answer = wire.send("POST", "/jobs", body={"tasks": [{"url": url} for url in urls]})
    assert answer.status_code == 201
    job_id = answer.json()["job_id"]
    wire.ended(job_id)
    made, read = queries(shared_fleet), rows(shared_fleet, "read")

    pages = list(wire.pages(job_id, limit=PAGE))

    assert [len(page) for page in pages] == [40, 40, 20]
    assert queries(shared_fleet) - made == len(pages)
    records = rows(shared_fleet, "read") - read - len(urls)
    assert 0 <= records <= MOST_RECORDS * (len(pages) + 1)


def test_a_worker_that_is_ended_in_the_middle_loses_nothing(
    shared_fleet: RoleFleet, wire: Wire
) -> None:
    urls = [target(f"ended/{number}", delay=0.3) for number in range(200)]
    job_id = wire.submit(urls, max_inflight=40)["job_id"]
    ended, *_ = shared_fleet.workers

    def at_work() -> bool | None:
        return wire.latest_run(job_id)["stats"]["completed"] > 20 or None

    eventually(at_work, "the fleet is at work")

    assert ended.end() == 0
    run = wire.ended(job_id)
    assert run["stats"]["successful"] == run["stats"]["total"] == len(urls)
    counts = hits(shared_fleet).counts
    assert {url: counts[url] for url in urls} == dict.fromkeys(urls, 1)
    shared_fleet.restart(ended)


def test_the_environment_is_as_it_should_be(shared_fleet: RoleFleet) -> None:
    assert "ok" in shared_fleet.admin("check")
