"""Results of runs whose rows lie in many shards, over HTTP and the real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.domain import ids
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    NewTask,
    Run,
    RunStats,
    RunStatus,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.records import StoredResponse
from conveyor.ports.tasks import TaskPage
from conveyor.records.sharded_reads import all_tasks
from tests.unit.http_api import KEY, Api, open_api, problem_of

LAYOUTS = [Shards(count, scheme) for count in (2, 8, 64) for scheme in ShardScheme]
EIGHT = Shards(8)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def made(
    api: Api, shards: Shards, count: int, *, closed: bool = True, ingest: Ingest | None = None
) -> tuple[str, str]:
    """Alice's job of `count` tasks in shards: (job_id, run_id); no rows where they come later."""
    job_id, run_id, now = api.clock.new_id(), api.clock.new_id(), api.clock.now()
    job = Job(
        job_id=job_id,
        caller=api.service.identify(KEY).caller_id,
        status=JobStatus.CLOSED if closed else JobStatus.OPEN,
        created_at=now,
        updated_at=now,
        task_shard_count=shards.count,
        shard_scheme=shards.scheme.value,
        latest_run_id=run_id,
        run_count=1,
    )
    run = Run(
        run_id=run_id,
        job_id=job_id,
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        last_batch_received=closed,
        next_index=count,
        stats=RunStats(total=count),
        ingest=ingest,
    )
    written = 0 if ingest else count
    tasks = [NewTask(index, ids.task_id(run_id, index), spec(index)) for index in range(written)]
    await api.binding.jobs.create_job(job, run, tasks, answer=StoredResponse(201, b"{}"), once=None)
    return job_id, run_id


def spec(index: int) -> TaskSpec:
    return TaskSpec(url=f"https://site.test/{index}")


async def page(api: Api, job_id: str, **query: str) -> tuple[list[int], str | None]:
    """The places of a page's rows, and its cursor."""
    response = await api.client.get(f"/v1/jobs/{job_id}/results", params=query)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    rows = [int(row["url"].rpartition("/")[2]) for row in body["results"]]
    return rows, body.get("next_cursor")


async def listed(api: Api, job_id: str, **query: str) -> list[int]:
    """The places of all rows, page after page."""
    rows, cursor = await page(api, job_id, **query)
    while cursor is not None:
        more, cursor = await page(api, job_id, cursor=cursor, **query)
        assert more
        rows += more
    return rows


@pytest.mark.guarantee("G13")
@pytest.mark.slow
@pytest.mark.parametrize("shards", LAYOUTS, ids=lambda shards: f"{shards.count}-{shards.scheme}")
async def test_every_page_size_gives_each_row_once_in_order(api: Api, shards: Shards) -> None:
    job_id, run_id = await made(api, shards, 150)
    for index in range(0, 150, 3):
        await api.fail(run_id, ids.task_id(run_id, index))

    for limit in ("7", "50", "64", "149", "150", "1000"):
        assert await listed(api, job_id, limit=limit) == list(range(150))
        assert await listed(api, job_id, limit=limit, status="failed") == list(range(0, 150, 3))
        assert await listed(api, job_id, limit=limit, status="processing") == [
            index for index in range(150) if index % 3
        ]
        assert await listed(api, job_id, limit=limit, status="successful") == []


@pytest.mark.parametrize("shards", LAYOUTS, ids=lambda shards: f"{shards.count}-{shards.scheme}")
async def test_a_page_with_nothing_behind_it_has_no_cursor(api: Api, shards: Shards) -> None:
    job_id, _ = await made(api, shards, 100)

    rows, cursor = await page(api, job_id, limit="60")
    assert cursor is not None
    assert cursor.startswith("sh:")
    assert await page(api, job_id, limit="40", cursor=cursor) == (list(range(60, 100)), None)
    assert await page(api, job_id, limit="100") == ([*rows, *range(60, 100)], None)


async def test_a_stripe_page_reads_the_rows_that_it_gives_and_no_other(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, _ = await made(api, EIGHT, 1_000)
    read = spied_reads(api, monkeypatch)

    assert await listed(api, job_id, limit="100") == list(range(1_000))

    assert sum(answer.rows_read for _, answer in read) == 1_000
    assert len(read) == 10 * 8


@pytest.mark.parametrize(("limit", "bound"), [("10", 2_000), ("500", 2_000), ("1000", 4_000)])
async def test_a_filtered_page_is_bounded_in_what_it_reads(
    api: Api, monkeypatch: pytest.MonkeyPatch, limit: str, bound: int
) -> None:
    sharded, _ = await made(api, EIGHT, 20)
    plain, _ = await made(api, Shards(1), 20)
    read = spied_reads(api, monkeypatch)

    await page(api, sharded, limit=limit, status="failed")
    await page(api, plain, limit=limit, status="failed")

    assert [asked["most_read"] for asked, _ in read] == [*[bound // 8] * 8, bound]
    read.clear()
    await page(api, sharded, limit=limit)
    assert {asked["most_read"] for asked, _ in read} == {None}


def spied_reads(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], TaskPage]]:
    """Every page that is read from now on: what was asked, what was answered."""
    reads: list[tuple[dict[str, Any], TaskPage]] = []
    original = api.binding.tasks.page_tasks

    async def page_tasks(run_id: str, **asked: Any) -> TaskPage:
        answer = await original(run_id, **asked)
        reads.append((asked, answer))
        return answer

    monkeypatch.setattr(api.binding.tasks, "page_tasks", page_tasks)
    return reads


@pytest.mark.guarantee("G13")
async def test_rows_are_listed_while_they_are_still_being_written(api: Api) -> None:
    ingest = Ingest(status=IngestStatus.PENDING, end=500, chunks=(0,))
    job_id, run_id = await made(api, EIGHT, 500, ingest=ingest)

    assert await page(api, job_id) == ([], None)
    for first, count in ((0, 30), (30, 170)):
        pairs = [(ids.task_id(run_id, index), spec(index)) for index in range(first, first + count)]
        rows = StagedRows(first, count, msgspec.json.encode(pairs))
        assert await api.binding.ingestion.write_rows(run_id, rows, now=api.clock.now())
        assert await listed(api, job_id, limit="20") == list(range(first + count))


async def test_added_rows_are_found_behind_an_earlier_page(api: Api) -> None:
    job_id, _ = await made(api, EIGHT, 10, closed=False)
    rows, cursor = await page(api, job_id, limit="9")
    added = {"tasks": [{"url": f"https://site.test/{index}"} for index in range(10, 25)]}
    response = await api.client.post(f"/v1/jobs/{job_id}/tasks", json=added)
    assert response.status_code == 200, response.text

    assert cursor is not None
    more, cursor = await page(api, job_id, limit="100", cursor=cursor)

    assert [*rows, *more] == list(range(25))
    assert cursor is None


async def test_a_partial_rerun_leaves_rows_out_and_nothing_else(api: Api) -> None:
    job_id, run_id = await made(api, EIGHT, 90)
    for index in range(0, 90, 2):
        await api.fail(run_id, ids.task_id(run_id, index))
    await api.client.post(f"/v1/jobs/{job_id}/stop")
    rerun = await api.client.post(f"/v1/jobs/{job_id}/rerun", params={"status": "failed"})
    assert rerun.status_code == 201, rerun.text

    for limit in ("1", "11", "44", "1000"):
        assert await listed(api, job_id, limit=limit) == list(range(0, 90, 2))


@pytest.mark.slow
async def test_a_cursor_garbled_in_any_place_is_refused(api: Api) -> None:
    job_id, _ = await made(api, EIGHT, 20)
    _, cursor = await page(api, job_id, limit="5")
    assert cursor is not None
    path = f"/v1/jobs/{job_id}/results"

    for place, letter in enumerate(cursor):
        for other in {"A", "B", "_", ":"} - {letter}:
            garbled = cursor[:place] + other + cursor[place + 1 :]
            response = await api.client.get(path, params={"cursor": garbled})
            problem = problem_of(response, status=400, code="invalid_argument")
            assert problem["detail"] == "cursor: not a cursor of this list"
        response = await api.client.get(
            path, params={"cursor": cursor[:place] + cursor[place + 1 :]}
        )
        assert response.status_code == 400
    for text in ("sh:", "sh", f"sh:{cursor}", cursor.removeprefix("sh:"), cursor + "A"):
        response = await api.client.get(path, params={"cursor": text})
        problem_of(response, status=400, code="invalid_argument")
    assert (await page(api, job_id, cursor=cursor))[0] == list(range(5, 20))


async def test_a_cursor_of_another_list_is_refused(api: Api) -> None:
    sharded, sharded_run = await made(api, EIGHT, 20)
    same, _ = await made(api, EIGHT, 20)
    plain, plain_run = await made(api, Shards(1), 20)
    _, composite = await page(api, sharded, limit="5")
    _, single = await page(api, plain, limit="5")
    assert composite is not None
    assert single is not None
    assert not single.startswith("sh:")

    for path, query in [
        (f"{same}/results", {"cursor": composite}),
        (f"{plain}/results", {"cursor": composite}),
        (f"{sharded}/results", {"cursor": single}),
        (f"{sharded}/results", {"cursor": composite, "status": "failed"}),
        (f"{sharded}/results", {"cursor": ids.task_id(sharded_run, 3)}),
        (f"{plain}/runs/{plain_run}/results", {"cursor": composite}),
    ]:
        response = await api.client.get(f"/v1/jobs/{path}", params=query)
        problem = problem_of(response, status=400, code="invalid_argument")
        assert problem["detail"] == "cursor: not a cursor of this list"
    task_id = ids.task_id(plain_run, 3)
    assert (await page(api, plain, cursor=task_id))[0] == list(range(4, 20))


async def test_pages_of_the_latest_run_go_on_in_the_run_they_began_with(api: Api) -> None:
    job_id, run_id = await made(api, EIGHT, 20)
    _, cursor = await page(api, job_id, limit="5")
    await api.client.post(f"/v1/jobs/{job_id}/stop")
    rerun = (await api.client.post(f"/v1/jobs/{job_id}/rerun")).json()
    assert cursor is not None

    rest = await api.client.get(f"/v1/jobs/{job_id}/results", params={"cursor": cursor})
    elsewhere = await api.client.get(
        f"/v1/jobs/{job_id}/runs/{rerun['latest_run']['run_id']}/results", params={"cursor": cursor}
    )

    assert {row["run_id"] for row in rest.json()["results"]} == {run_id}
    assert len(rest.json()["results"]) == 15
    problem_of(elsewhere, status=400, code="invalid_argument")


@pytest.mark.parametrize(
    "shards", [Shards(1), *LAYOUTS], ids=lambda shards: f"{shards.count}-{shards.scheme}"
)
async def test_all_tasks_streams_a_run_in_order(
    api: Api, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run_id = await made(api, shards, 300)
    for index in range(0, 300, 30):
        await api.fail(run_id, ids.task_id(run_id, index))
    read = spied_reads(api, monkeypatch)
    tasks = api.binding.tasks

    everything = [task.index async for task in all_tasks(tasks, run_id, shards, piece=100)]
    assert everything == list(range(300))
    assert sum(answer.rows_read for _, answer in read) == 300
    failed = frozenset({TaskStatus.FAILED})
    chosen = [task.index async for task in all_tasks(tasks, run_id, shards, statuses=failed)]
    assert chosen == list(range(0, 300, 30))
