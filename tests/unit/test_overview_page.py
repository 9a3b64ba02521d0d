"""The overview: it says nothing false, however many runs are at work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.http.pages.session import SessionOptions
from conveyor.service import overview
from conveyor.service.overview import ENDED_SHOWN, LIVE_SHOWN
from tests.unit.http_api import Api, open_api


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", sessions=SessionOptions(on_loopback=True)) as opened:
        yield opened


async def look(api: Api) -> tuple[dict[str, Any], str]:
    """The overview as JSON, and as a page."""
    record: dict[str, Any] = (await api.bare.get("/dashboard.json")).json()
    return record, (await api.bare.get("/dashboard")).text


async def busy(api: Api, more: int) -> None:
    """So many runs that are at work, each later than all before."""
    for _ in range(more):
        await api.clock.advance(1)
        await api.submit(1)


@pytest.mark.slow
async def test_runs_that_ended_before_many_others_began_are_listed(api: Api) -> None:
    ended = [await api.submit(1) for _ in range(2)]
    for job in ended:
        await api.drain(job)
    await busy(api, LIVE_SHOWN + ENDED_SHOWN + 2)
    record, page = await look(api)
    assert {line["job_id"] for line in record["ended"]} == {job["job_id"] for job in ended}
    assert len(record["live"]) == LIVE_SHOWN
    assert record["looked"] == LIVE_SHOWN + ENDED_SHOWN + 2
    assert not record["is_cut"]
    assert f"<dd>{record['looked']}</dd>" in page
    assert f"The {LIVE_SHOWN} that changed last." in page
    assert "No run has ended yet" not in page


@pytest.mark.slow
async def test_a_run_that_fails_and_one_that_waits_are_told_of_behind_many_others(api: Api) -> None:
    still = await api.submit(1, name="Still")
    await api.client.post(f"/v1/jobs/{still['job_id']}/pause")
    failing = await api.submit(21, name="Broken shop")
    for task in (await api.tasks_of(failing["latest_run"]["run_id"]))[:20]:
        await api.fail(task.run_id, task.task_id)
    await busy(api, LIVE_SHOWN + 5)
    record, page = await look(api)
    [trouble] = record["troubles"]
    assert (trouble["kind"], trouble["name"]) == ("run_failing", "Broken shop")
    assert trouble["job_id"] == failing["job_id"]
    assert "><bdi>Broken shop</bdi></a>: <bdi>20 of 20 tasks failed</bdi>" in page
    assert record["oldest_waiting"]["job_id"] == still["job_id"]
    # A pace measured over the life of the run, though it is not among those listed.
    assert record["tasks_per_second"] >= 20 / (LIVE_SHOWN + 5) - 0.1


async def test_a_look_that_was_cut_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "LIVE_LOOKED", 2)
    await busy(api, 3)
    record, page = await look(api)
    assert (record["looked"], record["is_cut"], len(record["live"])) == (2, True, 2)
    assert "<dd>2 and more</dd>" in page
    assert "Looked for in the 2 runs at work that changed last; there are more." in page
    assert "over the last minutes, of the 2 that changed last" in page


async def test_an_overview_of_few_runs_says_nothing_of_a_cut(api: Api) -> None:
    await busy(api, 2)
    record, page = await look(api)
    assert (record["looked"], record["is_cut"]) == (2, False)
    assert "changed last" not in page
