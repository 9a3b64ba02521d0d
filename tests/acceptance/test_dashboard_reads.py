"""Rows of the store that a page reads: few, and as many of a large store as of a small one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.acceptance.support_dashboard import Seeded, dashboard
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_wire import KEY, target
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1_800)]

MOST_ROWS, MOST_FILTERED, MOST_BYTES = 300, 1_050, 120 * 1_024
MOST_CALLS = 15
"""Calls of DynamoDB for one page of a run of eight shards."""
SMALL = 1_000
FEW_JOBS, MANY_JOBS = 60, 1_100


def fill(seeded: Seeded, label: str, count: int) -> None:
    """Make a job of so many tasks, one in five of which fails, in two ways."""
    urls = [
        target(f"{label}/{n}", status=404 if n % 2 else 403) if n % 5 == 0 else target(f"{n}")
        for n in range(count)
    ]
    seeded.submit(label, urls, name=label, max_inflight=1_000)


def pages_of(seeded: Seeded, label: str) -> dict[str, str]:
    """Pages of a run, by what they show."""
    run = seeded.run_of(label)
    [task, *_] = seeded.tasks(label, limit="1")
    found = httpx.get(f"{seeded.origin}{run}.json", trust_env=False, timeout=SECONDS).json()
    group = found["groups"][-1]["group"]
    return {
        "run": run,
        "all": f"{run}/results",
        "failed": f"{run}/results?status=failed",
        "successful": f"{run}/results?status=successful",
        "processing": f"{run}/results?status=processing",
        "group": f"{run}/results?status=failed&group={group}",
        "task": f"{run}/tasks/{task['task_id']}",
    }


LISTS = {
    "overview": "/dashboard",
    "jobs": "/dashboard/jobs",
    "workers": "/dashboard/workers",
    "schedules": "/dashboard/schedules",
    "webhooks": "/dashboard/webhooks",
}


def counted(origin: str, metric: str) -> float:
    """The sum of a metric over its labels."""
    text = httpx.get(f"{origin}/metrics", trust_env=False, timeout=SECONDS).text
    found = re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def costs(
    origin: str, pages: dict[str, str], metric: str, *, metrics: str | None = None
) -> dict[str, float]:
    """Return by how much each page raises a metric, at least: others may read beside it. `metrics`
    is the address of the metrics, if not the origin."""
    told = metrics or origin
    spent = {}
    with httpx.Client(base_url=origin, trust_env=False, timeout=60) as client:
        for name, path in pages.items():
            looks = []
            for _ in range(3):
                before = counted(told, metric)
                answer = client.get(path)
                assert answer.status_code == 200, answer.text
                assert len(answer.content) <= MOST_BYTES, name
                looks.append(counted(told, metric) - before)
            spent[name] = min(looks)
    return spent


def rows(origin: str, pages: dict[str, str]) -> dict[str, float]:
    return costs(origin, pages, "conveyor_store_rows_read_total")


@pytest.mark.parametrize(
    "large",
    [
        1_000,
        pytest.param(4_000, marks=pytest.mark.extended),
        pytest.param(20_000, marks=pytest.mark.extended),
        pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.extended]),
    ],
)
def test_a_page_of_a_large_run_reads_no_more_than_one_of_a_small(
    tmp_path: Path, large: int
) -> None:
    # A run of many shards reads some rows more for a page, of any size: one shard each.
    settings = {
        "max_inline_tasks": large,
        "max_request_bytes": 256 << 20,
        "task_shard_count": 1,
    }
    with dashboard(tmp_path / "data", workers=200, **settings) as seeded:
        fill(seeded, "small", SMALL)
        seeded.ended("small")
        before = rows(seeded.origin, LISTS)
        fill(seeded, "large", large)
        seeded.until("large", lambda run: run["status"] == "completed", timeout=1_200)
        assert rows(seeded.origin, LISTS) == {
            name: count + {"overview": 1, "jobs": 1, "webhooks": 1}.get(name, 0)
            for name, count in before.items()
        }
        small = rows(seeded.origin, pages_of(seeded, "small"))
        assert rows(seeded.origin, pages_of(seeded, "large")) == small
        assert max(*small.values(), *before.values()) <= MOST_ROWS


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Seeded, dict[str, float]]]:
    """A server of many jobs, and what its lists read when they were few."""
    with dashboard(tmp_path_factory.mktemp("crowded") / "data") as seeded:
        for number in range(MANY_JOBS):
            seeded.submit(f"job {number}", [target("page")], name=f"job {number}")
            if number == FEW_JOBS - 1:
                seeded.ended(f"job {number}")
                few = rows(seeded.origin, LISTS)
        seeded.ended(f"job {MANY_JOBS - 1}")
        yield seeded, few


@pytest.mark.extended
def test_lists_of_many_jobs_read_no_more_than_those_of_few(
    crowded: tuple[Seeded, dict[str, float]],
) -> None:
    seeded, few = crowded
    many = rows(seeded.origin, LISTS)
    assert {name: many[name] for name in ("overview", "jobs", "schedules")} == {
        name: few[name] for name in ("overview", "jobs", "schedules")
    }
    assert max(many.values()) <= MOST_ROWS
    filtered = {
        "nothing": "/dashboard/jobs?name=none",
        "one state": "/dashboard/jobs?state=completed",
        "one job": "/dashboard/jobs?name=job+1050",
    }
    assert max(rows(seeded.origin, filtered).values()) <= MOST_FILTERED
    page = httpx.get(
        f"{seeded.origin}/dashboard/jobs?name=none", trust_env=False, timeout=SECONDS
    ).text
    assert "0 found, 1,000 looked through; there are more to look through" in page


@pytest.mark.extended
def test_a_page_over_dynamodb_makes_as_many_calls_for_a_large_run(tmp_path: Path) -> None:
    with (
        fleet(tmp_path, apis=1, dashboard="true", task_shard_count=8) as running,
        httpx.Client(
            base_url=running.api, headers={"X-API-Key": KEY}, timeout=60, trust_env=False
        ) as calls,
    ):
        seeded = Seeded(running.api, calls)
        fill(seeded, "small", 200)
        fill(seeded, "large", 2_000)
        for label in ("small", "large"):
            seeded.until(label, lambda run: run["status"] == "completed", timeout=300)
        [api] = [process for process in running.processes if process.role == "api"]
        small, large = (
            costs(
                seeded.origin,
                pages_of(seeded, label),
                "conveyor_aws_calls_total",
                metrics=api.info.metrics,
            )
            for label in ("small", "large")
        )
        # One call more may be the server's own.
        assert all(large[name] <= small[name] + 1 for name in small)
        assert 0 < max(*small.values(), *large.values()) <= MOST_CALLS
